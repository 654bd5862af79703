"""From transformers' generation arguments to what the decoding loop needs, every value checked."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
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

# what `Sampling` and `DecodeState` apply themselves, to draft and target alike: the processor's value, the setting's
OURS = {
    MinLengthLogitsProcessor: ("min_length", "min_length"),
    MinNewTokensLengthLogitsProcessor: ("min_new_tokens", "min_new_tokens"),
    MinPLogitsWarper: ("min_p", "min_p"),
    RepetitionPenaltyLogitsProcessor: ("penalty", "repetition_penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
}
FILTERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
REFUSED = {
    "num_beams": "beam search keeps several sequences, verification one",
    "num_return_sequences": "call generate with several seeds",
    "guidance_scale": "it runs a second model",
    "watermarking_config": "it is not applied to drafts",
    "penalty_alpha": "contrastive search is another decoding method",
    "dola_layers": "DoLa is another decoding method",
    "token_healing": "it rewrites the prompt",
    "use_mtp": "use a drafter of this package",
    "constraints": "constrained beam search keeps several sequences",
    "force_words_ids": "constrained beam search keeps several sequences",
}


@dataclass(frozen=True)
class DecodeOptions:
    """What `EarlyExitModel.generate` takes beyond transformers' own arguments."""

    draft: str | None = None
    exit: str | None = None
    exit_layer: int | None = None
    cascade: str | None = None
    draft_len: int | str | None = None
    min_confidence: float | None = None
    draft_width: int | None = None
    prompt_lookup_num_tokens: int | None = None
    exact: bool | None = None
    acceptance: str = "coupled"
    seed: int | None = None
    generator: torch.Generator | None = None
    kv_cache_dtype: str | None = None

    @property
    def is_float8(self) -> bool:
        """Whether keys and values are kept in eight bits. Raises ValueError for a dtype that is not to be had."""
        if self.kv_cache_dtype not in (None, "float8"):
            raise ValueError(f"kv_cache_dtype={self.kv_cache_dtype!r}; choose float8, or None for the model's own")
        return self.kv_cache_dtype is not None

    @classmethod
    def from_kwargs(cls, kwargs: dict[str, Any]) -> "DecodeOptions":
        """Take the known names out of ``kwargs``."""
        return cls(**{f.name: kwargs.pop(f.name) for f in fields(cls) if f.name in kwargs})

    def of_row(self, row: int) -> "DecodeOptions":
        """Those of one row of a batch: noise of its own under one seed."""
        return self if self.seed is None or row == 0 else replace(self, seed=(int(self.seed) + row) % 2**63)

    def draw_seed(self) -> int:
        """The given seed, or one from the generator (torch's global one by default)."""
        if self.seed is not None:
            return int(self.seed)
        return int(
            torch.randint(0, 2**62, (1,), generator=self.generator, device=getattr(self.generator, "device", None))
        )


@dataclass(frozen=True)
class Prompt:
    """One prompt, its left padding apart: lengths of transformers' arguments count it."""

    tokens: list[int]
    padding: list[int]

    @property
    def padded_length(self) -> int:
        return len(self.padding) + len(self.tokens)


def read_prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[Prompt]:
    """The prompts in ``input_ids`` [B, S], their left padding set apart."""
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must be [batch, length], got shape {tuple(input_ids.shape)}")
    is_real = torch.ones(input_ids.shape, dtype=torch.bool)
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise ValueError(f"attention_mask {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}")
        is_real = attention_mask.bool().cpu()
    if not len(is_real) or not is_real.any(dim=1).all():
        raise ValueError("the prompt is empty; give at least one token, such as the BOS token")
    if not is_real[:, -1].all():
        raise ValueError("the prompt is padded on the right; pad on the left (tokenizer.padding_side = 'left')")
    return [Prompt(ids[real].tolist(), ids[~real].tolist()) for ids, real in zip(input_ids.cpu(), is_real, strict=True)]


def resolve_generation(
    base: PreTrainedModel, config: GenerationConfig | None, kwargs: dict[str, Any], prompt: Prompt
) -> GenerationConfig:
    """The GenerationConfig of a call, as transformers resolves it, with ``kwargs`` on top; ``max_length`` is set.

    A temperature without do_sample decides: 0 is greedy, others sample.
    """
    kwargs = {n: value for n, value in kwargs.items() if value is not None or n not in ("do_sample", "temperature")}
    if "do_sample" not in kwargs and "temperature" in kwargs:
        kwargs["do_sample"] = kwargs["temperature"] != 0
    if kwargs.get("temperature") == 0:
        kwargs["do_sample"] = bool(kwargs.pop("temperature"))
    asked = [kwargs.get("max_length"), config and config.max_length, base.generation_config.max_length]
    given = {**(base.generation_config if config is None else config).to_dict(), **kwargs}
    _check(given)  # before transformers does, whose messages are of several lines
    if kwargs.get("do_sample") is False:  # transformers would warn of filters that have nothing to filter
        kwargs = {n: value for n, value in kwargs.items() if n not in ("temperature", "top_k", "top_p", "min_p")}
    generation, unknown = base._prepare_generation_config(config, **kwargs)
    if unknown:
        raise TypeError(f"generate() got unknown arguments: {', '.join(sorted(unknown))}")
    if generation.max_new_tokens is not None:
        generation.max_length = prompt.padded_length + generation.max_new_tokens
    elif not any(asked):
        generation.max_length += prompt.padded_length  # transformers' default counts new tokens
    return generation


def _check(given: dict[str, Any]) -> None:
    for name, reason in REFUSED.items():
        value = given.get(name)
        if value is True or value not in (None, False, 1):
            raise NotImplementedError(f"{name}={value!r} is not supported: {reason}")
    if given.get("max_new_tokens") is not None and given["max_new_tokens"] < 1:
        raise ValueError(f"max_new_tokens must be >= 1, got {given['max_new_tokens']}")
    _sampling(given)


def _sampling(given: dict[str, Any]) -> Sampling:
    """The filters in ``given``; those that are missing or None are off."""
    names = [f.name for f in fields(Sampling)]
    return Sampling(**{"temperature": 1.0} | {n: given[n] for n in names if given.get(n) is not None})


def processors(
    base: PreTrainedModel, generation: GenerationConfig, given: LogitsProcessorList | None, prompt: Prompt
) -> LogitsProcessorList:
    """All of transformers' processors for ``generation``, in its order, with the user's among them."""
    config = copy.deepcopy(generation)
    base._prepare_special_tokens(config, device=base.device)
    return base._get_logits_processor(
        generation_config=config, input_ids_seq_length=prompt.padded_length, encoder_input_ids=None,
        prefix_allowed_tokens_fn=None, logits_processor=LogitsProcessorList(given or []), device=base.device,
        model_kwargs={},
    )  # fmt: skip


def divide(generation: GenerationConfig, everything: LogitsProcessorList) -> tuple[Sampling, LogitsProcessorList]:
    """Split transformers' processors into a `Sampling`, which drafts go through too, and those that run inside it.

    `Sampling` runs them between penalty and temperature. Where one stands elsewhere in transformers' order, all of them
    are left to transformers: drafts are then made without filters, and fewer are accepted.
    """
    kinds = [type(p) for p in everything]
    first = kinds.index(RepetitionPenaltyLogitsProcessor) if RepetitionPenaltyLogitsProcessor in kinds else 0
    last = next((i for i, kind in enumerate(kinds) if kind in FILTERS), len(kinds))
    others = [i for i, p in enumerate(everything) if not _is_ours(p, generation)]
    if any(i < first or i > last for i in others):
        return Sampling(temperature=1.0 if generation.do_sample else 0.0), everything
    sampling = _sampling(generation.to_dict())
    if not generation.do_sample:
        sampling = Sampling(repetition_penalty=sampling.repetition_penalty)
    return sampling, LogitsProcessorList(everything[i] for i in others)


def _is_ours(processor: Any, generation: GenerationConfig) -> bool:
    """Whether ``processor`` stands for a setting, rather than being the user's own of the same kind."""
    names = OURS.get(type(processor))
    return names is not None and getattr(processor, names[0]) == getattr(generation, names[1])


def max_length(target: Target, generation: GenerationConfig, prompt: Prompt) -> int:
    """Largest number of tokens in all, padding apart; raises ValueError beyond the model's context."""
    longest, length = generation.max_length - len(prompt.padding), len(prompt.tokens)
    if longest <= length:
        raise ValueError(
            f"the prompt has {prompt.padded_length} tokens, max_length is {generation.max_length}; raise max_new_tokens"
        )
    context = target.context_length
    if context is not None and longest > context:
        raise ValueError(
            f"{length} prompt tokens + {longest - length} new ones exceed the context of {context}; "
            "shorten the prompt (--truncate) or max_new_tokens"
        )
    return int(longest)


def min_length(generation: GenerationConfig, prompt: Prompt) -> int:
    """Number of tokens in all, padding apart, before which no EOS may come."""
    least = (generation.min_length or 0) - len(prompt.padding)
    return max(least, len(prompt.tokens) + (generation.min_new_tokens or 0))


def eos_ids(generation: GenerationConfig) -> frozenset[int]:
    """All ids that end the text."""
    ids = generation.eos_token_id
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else [int(i) for i in ids])


def pad_id(generation: GenerationConfig) -> int:
    """What stands behind a text that ends before others of its batch."""
    if generation.pad_token_id is not None:
        return int(generation.pad_token_id)
    eos = generation.eos_token_id
    return 0 if eos is None else int(eos) if isinstance(eos, int) else int(eos[0])


def criteria(
    generation: GenerationConfig, given: StoppingCriteriaList | None, tokenizer: PreTrainedTokenizerBase | None
) -> StoppingCriteriaList:
    """Stop strings and time limit of ``generation``, and the user's criteria."""
    found = StoppingCriteriaList(given or [])
    if generation.stop_strings:
        if tokenizer is None:
            raise ValueError("stop_strings needs the tokenizer: load with from_pretrained or pass tokenizer=")
        found.append(StopStringCriteria(tokenizer, generation.stop_strings))
    if generation.max_time is not None:
        found.append(MaxTimeCriteria(generation.max_time))
    return found


def stop_rule(found: StoppingCriteriaList, prompt: Prompt, device: torch.device) -> Callable[[list[int]], bool]:
    """Criteria as a function of all tokens so far; every criterion is asked at every token."""

    def is_stopped(tokens: list[int]) -> bool:
        if not found:
            return False
        ids = torch.tensor([prompt.padding + tokens], device=device)
        answers = [bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in found]
        return any(answers)

    return is_stopped
