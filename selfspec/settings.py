"""From transformers' generation arguments to what the decoding loop needs, every value checked."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from selfspec.sampling import Sampling
from selfspec.target import Target

OURS = (  # processors that `Sampling` and `DecodeState` apply themselves, to draft and target alike
    MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper,
)  # fmt: skip
OTHERS = (  # settings that transformers' own processors implement; they run on the target's rows
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
    "forced_bos_token_id", "forced_eos_token_id", "sequence_bias", "exponential_decay_length_penalty", "typical_p",
    "epsilon_cutoff", "eta_cutoff", "top_h", "remove_invalid_values", "renormalize_logits",
)  # fmt: skip


@dataclass(frozen=True)
class DecodeOptions:
    """What `EarlyExitModel.generate` takes beyond transformers' own arguments."""

    draft: str | None = None
    exit: str | None = None
    exit_layer: int | None = None
    draft_len: int | None = None
    exact: bool | None = None
    acceptance: str = "coupled"
    seed: int | None = None
    generator: torch.Generator | None = None

    @classmethod
    def from_kwargs(cls, kwargs: dict[str, Any]) -> "DecodeOptions":
        """Take the known names out of ``kwargs``."""
        return cls(**{f.name: kwargs.pop(f.name) for f in fields(cls) if f.name in kwargs})

    def draw_seed(self) -> int:
        """The given seed, or one from the generator (torch's global one by default)."""
        if self.seed is not None:
            return int(self.seed)
        return int(
            torch.randint(0, 2**62, (1,), generator=self.generator, device=getattr(self.generator, "device", None))
        )


def prompt_tokens(input_ids: Tensor, attention_mask: Tensor | None) -> list[int]:
    """The one prompt in ``input_ids`` [1, S], its left padding removed."""
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must be [batch, length], got shape {tuple(input_ids.shape)}")
    if input_ids.shape[0] != 1:
        raise NotImplementedError(f"one sequence at a time for now, got a batch of {input_ids.shape[0]}")
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise ValueError(f"attention_mask {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}")
        if input_ids.shape[1] and attention_mask[0, -1] == 0:
            raise ValueError("the prompt is padded on the right; pad on the left (tokenizer.padding_side = 'left')")
        input_ids = input_ids[:, attention_mask[0].bool()]
    if input_ids.shape[1] == 0:
        raise ValueError("the prompt is empty; give at least one token, such as the BOS token")
    return [int(token) for token in input_ids[0].tolist()]


def resolve_generation(
    base: PreTrainedModel, config: GenerationConfig | None, kwargs: dict[str, Any], prompt_length: int
) -> GenerationConfig:
    """The GenerationConfig of a call: the model's own, or the given one, with ``kwargs`` on top."""
    del prompt_length
    generation = copy.deepcopy(base.generation_config if config is None else config)
    if generation.eos_token_id is None and config is not None:
        generation.eos_token_id = base.generation_config.eos_token_id
    if kwargs.get("do_sample") is None:
        kwargs.pop("do_sample", None)
        if kwargs.get("temperature") is not None:
            kwargs["do_sample"] = kwargs["temperature"] > 0
    unknown = sorted(name for name in kwargs if not hasattr(generation, name))
    if unknown:
        raise TypeError(f"generate() got unknown arguments: {', '.join(unknown)}")
    for name, value in kwargs.items():
        setattr(generation, name, value)
    if (generation.num_beams or 1) > 1:
        raise NotImplementedError("beam search is not supported: speculative decoding verifies one sequence")
    if (generation.num_return_sequences or 1) > 1:
        raise NotImplementedError("num_return_sequences > 1 is not supported; call generate with several seeds")
    return generation


def sampling(generation: GenerationConfig) -> Sampling:
    """The `Sampling` of a GenerationConfig; filters that are None are off."""
    penalty = generation.repetition_penalty
    penalty = 1.0 if penalty is None else penalty

    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    checked = Sampling(
        temperature=given(generation.temperature, 1.0),
        top_k=given(generation.top_k, 0),
        top_p=given(generation.top_p, 1.0),
        min_p=given(generation.min_p, 0.0),
        repetition_penalty=penalty,
    )
    return checked if generation.do_sample else Sampling(repetition_penalty=penalty)


def max_length(target: Target, generation: GenerationConfig, prompt_length: int) -> int:
    """Largest number of tokens in all; raises ValueError beyond the model's context."""
    if generation.max_new_tokens is not None:
        if generation.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {generation.max_new_tokens}")
        longest = prompt_length + generation.max_new_tokens
    else:
        longest = generation.max_length if generation.max_length is not None else prompt_length + 20
    if longest <= prompt_length:
        raise ValueError(f"the prompt has {prompt_length} tokens, max_length is {longest}; raise max_new_tokens")
    context = getattr(target.config, "max_position_embeddings", None)
    if context is not None and longest > context:
        raise ValueError(
            f"{prompt_length} prompt tokens + {longest - prompt_length} new ones exceed the context of {context}; "
            "shorten the prompt (--truncate) or max_new_tokens"
        )
    return int(longest)


def min_length(generation: GenerationConfig, prompt_length: int) -> int:
    """Number of tokens in all before which no EOS may come."""
    return max(generation.min_length or 0, prompt_length + (generation.min_new_tokens or 0))


def eos_ids(generation: GenerationConfig) -> frozenset[int]:
    """All ids that end the text."""
    ids = generation.eos_token_id
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else [int(i) for i in ids])


def own_processors(processors: LogitsProcessorList | None) -> LogitsProcessorList:
    """``processors`` without those that this package applies itself."""
    return LogitsProcessorList(p for p in processors or [] if not isinstance(p, OURS))


def processors(
    base: PreTrainedModel, generation: GenerationConfig, given: LogitsProcessorList | None, prompt_length: int
) -> LogitsProcessorList:
    """The user's processors, and transformers' own for settings that `Sampling` does not cover."""
    built = LogitsProcessorList()
    neutral = GenerationConfig()
    asked = {n: getattr(generation, n, None) for n in OTHERS}
    asked = {n: v for n, v in asked.items() if v is not None and v != getattr(neutral, n, None)}
    if asked:
        config = GenerationConfig(**asked, do_sample=bool(generation.do_sample), eos_token_id=generation.eos_token_id)
        base._prepare_special_tokens(config, device=base.device)
        built = own_processors(
            base._get_logits_processor(
                generation_config=config, input_ids_seq_length=prompt_length, encoder_input_ids=None,
                prefix_allowed_tokens_fn=None, logits_processor=LogitsProcessorList(), device=base.device,
                model_kwargs={},
            )
        )  # fmt: skip
    return LogitsProcessorList([*built, *(given or [])])


def stop_rule(
    generation: GenerationConfig,
    given: StoppingCriteriaList | None,
    tokenizer: PreTrainedTokenizerBase | None,
    device: torch.device,
) -> Callable[[list[int]], bool]:
    """A function of all tokens so far that says whether stop strings, a time limit or user criteria end the text."""
    criteria = StoppingCriteriaList(c for c in given or [] if not isinstance(c, EosTokenCriteria | MaxLengthCriteria))
    if generation.stop_strings:
        if tokenizer is None:
            raise ValueError("stop_strings needs the tokenizer: load with from_pretrained or pass tokenizer=")
        criteria.append(StopStringCriteria(tokenizer, generation.stop_strings))
    if generation.max_time is not None:
        criteria.append(MaxTimeCriteria(generation.max_time))

    def is_stopped(tokens: list[int]) -> bool:
        if not criteria:
            return False
        ids = torch.tensor([tokens], device=device)
        return any(bool(torch.as_tensor(c(ids, None)).all()) for c in list(criteria))

    return is_stopped
