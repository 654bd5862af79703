"""The public face: a frozen target with its exits, and `generate` with transformers' names."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from selfspec import settings
from selfspec.cache import KVCache
from selfspec.decode import EXACT_WIDTHS, DecodeState, exact_width, is_exact_by_default
from selfspec.drafter import Drafter
from selfspec.drafting import drafter_for
from selfspec.engine import Engine
from selfspec.exits import ExitHead
from selfspec.kernels import dispatch
from selfspec.policy import Policies
from selfspec.pretrained import load_target_model
from selfspec.stats import DecodeStats
from selfspec.storage import check_name, fits, load_exits, save_exit, upload
from selfspec.stream import Stream, run_together
from selfspec.target import Target

SHIPPED_EXITS = Path(__file__).parent / "exits_data" / "smollm2-135m"


@dataclass(frozen=True)
class GenerateOutput:
    """What `generate` returns."""

    sequences: Tensor  # [B, prompt + new tokens]
    stats: DecodeStats  # of all sequences together


class EarlyExitModel:
    """A causal language model that drafts with its own first layers and verifies with the rest.

    Attributes: ``base`` the untouched transformers model, ``tokenizer`` its tokenizer or None, ``exits`` a dict of
    `ExitHead` by name, ``target`` the layer-wise view of the base.
    """

    def __init__(
        self,
        target: Target,
        exits: dict[str, ExitHead] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.target, self.tokenizer = target, tokenizer
        self.exits: dict[str, ExitHead] = exits or {}
        self.engine = Engine(target)
        self.policies = Policies(target, self.engine)
        self._row_exact: set[tuple[int, int, bool]] = set()  # widths, numbers of rows, caches seen to be
        self._lock = threading.Lock()

    @property
    def base(self) -> PreTrainedModel:
        return self.target.base

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str] | None = None,
        exits: str | os.PathLike[str] | Sequence[int] | None = None,
        revision: str | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        allow_base_mismatch: bool = False,
        **kwargs: Any,
    ) -> "EarlyExitModel":
        """Load a model and its exits.

        Without arguments: the default model with the exits shipped inside the package. ``exits`` is a folder, a hub id
        or a list of layers for untrained exits; None means the shipped ones for the default model, wherever it comes
        from, none for others.
        ``kwargs`` go to transformers. Raises ValueError or OSError, in one line, for anything that does not fit.
        """
        hf_model, tokenizer = load_target_model(model, revision, dtype, device, **kwargs)
        wrapped = cls.from_target(hf_model, exits, tokenizer, allow_base_mismatch)
        if exits is None and SHIPPED_EXITS.is_dir() and fits(wrapped.target, SHIPPED_EXITS):
            wrapped.exits = load_exits(wrapped.target, SHIPPED_EXITS, tokenizer, allow_base_mismatch)
        return wrapped

    @classmethod
    def from_target(
        cls,
        hf_model: PreTrainedModel,
        exits: str | os.PathLike[str] | Sequence[int] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        allow_base_mismatch: bool = False,
    ) -> "EarlyExitModel":
        """Wrap a loaded transformers model; ``exits`` as in `from_pretrained`, [2, 6] gives untrained ones."""
        target = Target(hf_model)
        if exits is None:
            heads = {}
        elif isinstance(exits, str | os.PathLike):
            heads = load_exits(target, exits, tokenizer, allow_base_mismatch)
        else:
            num_tokens = None if tokenizer is None else len(tokenizer)
            heads = {f"layer-{layer}": ExitHead.untrained(target, layer, num_tokens) for layer in exits}
        return cls(target, heads, tokenizer)

    @property
    def default_exit(self) -> ExitHead | None:
        """The exit with the best recorded speedup; the first one where none is recorded."""
        heads = list(self.exits.values())
        return max(heads, key=lambda h: h.metadata.get("metrics", {}).get("speedup") or 0.0) if heads else None

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the trained exits, one folder each, into ``folder``; never the base."""
        trained = [h for h in self.exits.values() if h.adapter is not None]
        if not trained:
            raise ValueError("no trained exit to save; untrained exits are rebuilt with exits=[layers]")
        for name in self.exits:
            check_name(name)
        for head in trained:
            save_exit(head, self.target, Path(folder) / head.name, self.tokenizer)

    def push_to_hub(self, repo_id: str, private: bool | None = None, revision: str | None = None) -> None:
        """Upload the trained exits (never the base) to the Hugging Face hub."""
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            upload(folder, repo_id, private, revision)

    # ---- generating ----------------------------------------------------------------------------------------------

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        streamer: BaseStreamer | None = None,
        **kwargs: Any,
    ) -> GenerateOutput:
        """Generate as ``transformers.generate`` does, with the same text and in less time.

        input_ids [B, S], padded on the left; every sequence gets the text it would get alone. Where the CPU's kernels
        run their passes are run together, else they are decoded one after another.
        ``kwargs`` are fields of a GenerationConfig (max_new_tokens, temperature, top_p, stop_strings, ...; a
        temperature > 0 samples without do_sample) and: ``draft`` (the exit's form, "lookup" or "off"); ``exit`` (name)
        or ``exit_layer``; ``cascade``, the name of an earlier exit that guesses ahead for it; ``draft_len``, the
        largest number of drafts, or "auto" to time cycles on this machine once and choose; ``min_confidence``: no
        further token is drawn where all drafts and it stand with a smaller chance; ``draft_width``, candidates a step,
        of which the first goes on; ``prompt_lookup_num_tokens``, up to how many tokens a draft is filled up with what
        followed in the text before (0: not at all); ``exact``, bit-exact mode (default: on in bf16 and fp16);
        ``acceptance`` "coupled" or "rejection"; ``seed`` (row i of a batch has seed + i) or ``generator``;
        ``kv_cache_dtype`` "float8": keys and values in eight bits, and ``exact`` on by default. Raises ValueError for
        settings out of range,
        NotImplementedError for beams and several sequences a prompt, RuntimeError when another generation is running
        on this model, NonFiniteLogitsError when the target's logits are NaN or infinite, MemoryError where there is no
        room.
        """
        options = settings.DecodeOptions.from_kwargs(kwargs)
        prompts = settings.read_prompts(input_ids, attention_mask)
        generation = settings.resolve_generation(self.base, generation_config, kwargs, prompts[0])
        processors = settings.processors(self.base, generation, logits_processor, prompts[0])
        criteria = settings.criteria(generation, stopping_criteria, self.tokenizer)
        return self._generate(input_ids, prompts, generation, processors, criteria, options, streamer)

    def _generate(
        self,
        input_ids: Tensor,
        prompts: "Sequence[settings.Prompt]",
        generation: GenerationConfig,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        options: "settings.DecodeOptions",
        streamer: BaseStreamer | None = None,
    ) -> GenerateOutput:
        """All prompts, from resolved settings; rows that end early are padded on the right."""
        if streamer is not None and len(prompts) > 1:
            raise ValueError(f"a streamer shows one sequence, got a batch of {len(prompts)}")
        each = [
            self._prepare(prompt, generation, processors, criteria, options.of_row(row))
            for row, prompt in enumerate(prompts)
        ]  # all are checked before the first is decoded
        if streamer is not None:
            streamer.put(input_ids.cpu())
        stats, rows = DecodeStats(), list[list[int]]()
        # criteria of the user's own may count on seeing one text after another
        is_plain = all(type(criterion).__module__.startswith("transformers.") for criterion in criteria)
        if len(each) > 1 and is_plain and all(self._goes_together(*one) for one in each):
            rows = run_together(self, each, stats)
            each = []
        while each:  # a row's cache goes with it
            stream, tokens = Stream(self, *each.pop(0)), list[int]()
            for emission in stream:
                tokens += emission.tokens
                if streamer is not None:
                    streamer.put(torch.tensor(emission.tokens))
            rows.append(tokens)
            stats.add(stream.stats)
        if streamer is not None:
            streamer.end()
        new = [torch.tensor(row) for row in rows]
        made = pad_sequence(new, batch_first=True, padding_value=settings.pad_id(generation)).to(input_ids)
        return GenerateOutput(torch.cat([input_ids, made], dim=1), stats)

    def _goes_together(self, drafter: Drafter, state: DecodeState) -> bool:
        """Whether a text's passes may run with others': as plain calls, bit for bit what they are alone."""
        fused = self.target.fused
        is_kernel = fused.is_in_use and fused.has_head and state.cache.width in (None, 1) and not state.cache.is_float8
        # drafts are fewer then, which under `rejection` makes another text; processors may remember what they saw
        is_alike = (state.rule == "coupled" or state.sampling.is_greedy) and not state.processors
        return is_kernel and is_alike and not self.engine.takes(drafter, state)

    def stream(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> "Stream":
        """`generate` of one sequence as an iterator of `Emission`s, one a cycle; settings are checked here, work starts
        with `next`.
        """
        return Stream(self, *self.prepare(input_ids, *args, **kwargs))

    def prepare(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        **kwargs: Any,
    ) -> tuple[Drafter, DecodeState]:
        """The drafter and the state that `generate` would decode one sequence with; arguments as there, all checked.

        For research: wrap or replace either, and run them with `Stream` or `decode`.
        """
        options = settings.DecodeOptions.from_kwargs(kwargs)
        if input_ids.dim() == 2 and input_ids.shape[0] != 1:
            raise ValueError(f"one sequence at a time, got {input_ids.shape[0]}; generate takes batches")
        (prompt,) = settings.read_prompts(input_ids, attention_mask)
        generation = settings.resolve_generation(self.base, generation_config, kwargs, prompt)
        processors = settings.processors(self.base, generation, logits_processor, prompt)
        criteria = settings.criteria(generation, stopping_criteria, self.tokenizer)
        return self._prepare(prompt, generation, processors, criteria, options)

    def _prepare(
        self,
        prompt: "settings.Prompt",
        generation: GenerationConfig,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        options: "settings.DecodeOptions",
    ) -> tuple[Drafter, DecodeState]:
        """From resolved settings; ``processors`` and ``criteria`` are all there are, transformers' own too."""
        exact = options.exact
        if exact is None:  # with float8 keys too: what rounds to another one of 256 numbers is no near-tie
            exact = options.is_float8 or is_exact_by_default(self.target.dtype)
        self.target.notice_changes()
        dispatch.load(self.target.device)
        drafter, num_drafts = drafter_for(self, options, exact)
        width = self._exact_width(num_drafts, options.is_float8) if exact else None
        max_length = settings.max_length(self.target, generation, prompt)
        sampling, before = settings.divide(generation, processors)
        head = drafter.exit_head
        num_slots = 1 if head is None else max(1, head.num_slots)
        state = DecodeState(
            tokens=list(prompt.tokens),
            cache=KVCache(
                self.target.num_layers + num_slots,
                max_length + max(width or 1, num_drafts + 1),
                width,
                is_float8=options.is_float8,
            ),
            max_length=max_length,
            vocab_size=self.target.vocab_size,
            device=self.target.device,
            sampling=sampling,
            rule=options.acceptance,
            seed=self.target.agreed(options.draw_seed()),
            eos_ids=settings.eos_ids(generation),
            min_length=settings.min_length(generation, prompt),
            processors=before,
            is_stopped=settings.stop_rule(criteria, prompt, self.target.device),
            engine=self.engine,
        )
        state.cache.keeps_logits = False  # the loop is done with them before the next pass
        return drafter, state

    def custom_generate(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        generation_config: GenerationConfig | None = None,
        draft: str | None = None,
        exit: str | None = None,
        exit_layer: int | None = None,
        cascade: str | None = None,
        draft_len: int | str | None = None,
        min_confidence: float | None = None,
        draft_width: int | None = None,
        prompt_lookup_num_tokens: int | None = None,
        exact: bool | None = None,
        acceptance: str = "coupled",
        seed: int | None = None,
        kv_cache_dtype: str | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """For ``hf_model.generate(..., custom_generate=model.custom_generate)``; returns sequences [B, S]."""
        if model is not self.base:
            raise ValueError("custom_generate belongs to another model than the one generating")
        if generation_config is None:
            raise ValueError("custom_generate is what hf_model.generate calls; call generate instead")
        options = settings.DecodeOptions(
            draft,
            exit,
            exit_layer,
            cascade,
            draft_len,
            min_confidence,
            draft_width,
            prompt_lookup_num_tokens,
            exact,
            acceptance,
            seed,
            kv_cache_dtype=kv_cache_dtype,
        )
        # not an argument by name: transformers would take it from the user's call as well as make it
        prompts = settings.read_prompts(input_ids, model_kwargs.get("attention_mask"))
        processors, criteria = logits_processor or LogitsProcessorList(), stopping_criteria or StoppingCriteriaList()
        return self._generate(input_ids, prompts, generation_config, processors, criteria, options).sequences

    def _exact_width(self, draft_len: int, is_float8: bool) -> int:
        """The row width of exact mode: 1 where rows are exact as they come, else one that holds them all.

        Raises ValueError where this model's rows depend on their neighbours or on their index.
        """
        smallest = EXACT_WIDTHS.index(exact_width(draft_len))
        # by construction, at any number of rows
        unpadded = [1] if self.target.fused.is_in_use and not is_float8 else []
        for width in (*unpadded, *EXACT_WIDTHS[smallest : smallest + 2]):
            key = (width, max(width, draft_len + 1), is_float8)
            if key in self._row_exact:
                return width
            with self.alone():
                is_exact = self.target.is_row_exact(*key)
            if is_exact:
                self._row_exact.add(key)
                return width
        raise ValueError(
            f"{self.target.family}: a row's logits depend on the rows beside it in {self.target.dtype}: exact mode "
            "cannot hold; pass exact=False (--no-exact)"
        )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the model, or raise RuntimeError where another generation does."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("another generation is running on this model; end it, or load one EarlyExitModel each")
        try:
            yield
        finally:
            self._lock.release()
