"""Exit heads: from the state after layer N (the tap) to a guess at the next token.

    tap -> bridge -> one decoder block borrowed from the target -> exit norm -> rows of the target's output layer

The head lives outside the base model and strictly behind the tap, so nothing it learns can change the target. It is an
ordinary PEFT adapter: LoRA on the borrowed block, and bridge, norm and confidence saved whole. An untrained exit is the
target's own norm and output layer on the tap (the logit lens).

Shapes: B batch, R rows, D hidden, V vocabulary, V_d drafted vocabulary, n recalled layers.
"""

import copy
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from selfspec.bridge import Bridge, Correction
from selfspec.clones import detached_clone
from selfspec.head import Head
from selfspec.linears import with_dispatched_linears
from selfspec.target import Target

if TYPE_CHECKING:
    from selfspec.decode import DecodeState

TRAINED_WHOLE = ["bridge", "exit_norm", "confidence"]
Form = Literal["chain", "recursive", "parallel"]
FORMS = get_args(Form)


class ExitConfig(BaseModel):
    """Shape of one exit head; stored in its sidecar."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    exit_layer: int  # N: drafting runs layers [0, N)
    recall_layers: tuple[int, ...] = ()  # depths whose states of earlier positions the bridge also reads
    form: Form = "chain"  # through the trunk a token, on the exit's own output, or all from one pass
    num_steps: int = Field(default=1, ge=1)  # draft steps that it is trained for
    correction_rank: int = Field(default=0, ge=0)  # of the bias on logits by the token drafted before; 0: none
    draft_vocab: tuple[int, ...] | None = None  # token ids that the head scores; None: all
    lora_rank: int = Field(default=32, ge=1)
    lora_alpha: int = Field(default=64, ge=1)
    draft_len: int = Field(default=2, ge=0)  # k, chosen from measured costs
    min_confidence: float = Field(default=0.0, ge=0.0, le=1.0)
    min_accepted: float = Field(default=0.05, ge=0.0)  # accepted drafts a cycle below which drafting pauses

    @field_validator("draft_vocab")
    @classmethod
    def _is_sorted_set(cls, ids: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if ids is not None and (not ids or ids[0] < 0 or any(a >= b for a, b in pairwise(ids))):
            raise ValueError("token ids must be given once each, in rising order, from 0 on")
        return ids

    @property
    def num_maps(self) -> int:
        """Bridge maps: one a step, where steps read different things of the target."""
        if self.form == "recursive":
            return 1
        return self.num_steps if self.recall_layers or self.form == "parallel" else 1

    def check(self, num_layers: int, vocab_size: int | None = None) -> None:
        """Raise ValueError unless the exit fits a target of ``num_layers`` layers (and so many token ids)."""
        lowest = 0 if self.recall_layers else 1
        if not lowest <= self.exit_layer < num_layers:
            raise ValueError(f"exit layer {self.exit_layer} is not in {lowest}..{num_layers - 1}")
        if any(not self.exit_layer <= layer <= num_layers for layer in self.recall_layers):
            raise ValueError(f"recalled layers {self.recall_layers} are not in {self.exit_layer}..{num_layers}")
        if vocab_size is not None and self.draft_vocab is not None and self.draft_vocab[-1] >= vocab_size:
            raise ValueError(f"drafted token {self.draft_vocab[-1]} is beyond the vocabulary of {vocab_size}")


class ExitModule(nn.Module):
    """The trainable parts and the borrowed block, as PEFT sees them. Never registered inside the base model."""

    def __init__(self, target: Target, config: ExitConfig) -> None:
        super().__init__()
        config.check(target.num_layers)
        self.name_or_path = target.name  # PEFT records it
        size = target.hidden_size
        self.bridge = Bridge(size, len(config.recall_layers), config.num_maps, config.form == "recursive")
        self.correction: Correction | None = None
        if config.correction_rank:
            num_drafted = target.vocab_size if config.draft_vocab is None else len(config.draft_vocab)
            self.correction = Correction(num_drafted, config.correction_rank)
        self.block = detached_clone(target.layers[-1])  # frozen weights are shared, LoRA goes on top
        child: Any
        for child in self.block.modules():
            if hasattr(child, "layer_idx"):
                child.layer_idx = target.num_layers  # its keys and values get a cache layer of their own
        self.exit_norm = copy.deepcopy(target.norm)
        self.confidence = nn.Linear(size, 1)
        nn.init.zeros_(self.confidence.weight)
        nn.init.constant_(self.confidence.bias, 4.0)  # untrained: go on drafting
        self.to(target.device)
        for name in self.trained_whole:
            getattr(self, name).to(target.dtype)

    @property
    def trained_whole(self) -> list[str]:
        """Parts that are trained and saved as they are; the block has LoRA."""
        return TRAINED_WHOLE + (["correction"] if self.correction is not None else [])

    def forward(self, target: Target, inputs: Tensor, parents: Sequence[int] | None = None) -> Tensor:
        """Normed states [B, R, D] of bridge outputs ``inputs`` [B, R, D] (training): whole sequences, or trees."""
        slots = range(target.num_layers, target.num_layers + 1)
        return self.exit_norm(target.run_uncached([self.block], inputs, slots, parents=parents))


def build_adapter(target: Target, config: ExitConfig, dtype: torch.dtype | None = None) -> PeftModel:
    """A fresh `ExitModule` wrapped by PEFT: LoRA on every linear map of the block, the rest trained whole.

    ``dtype`` is that of what is trained (None: the target's).
    """
    module = ExitModule(target, config)
    maps = [n for n, m in module.block.named_modules() if isinstance(m, nn.Linear | Conv1D)]
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        # full paths: on a bare target nothing matches, and loading there fails instead of adapting the wrong layers
        target_modules=rf"block\.({'|'.join(n.replace('.', chr(92) + '.') for n in maps)})",
        modules_to_save=module.trained_whole,
    )
    adapter = get_peft_model(module, lora, autocast_adapter_dtype=False)
    for layer in adapter.modules():
        if isinstance(layer, LoraLayer):
            layer.merge = _refuse_merging
    for parameter in adapter.parameters():
        if parameter.requires_grad and dtype is not None:
            parameter.data = parameter.data.to(dtype)
    return adapter.to(target.device)


def _refuse_merging(*_: Any, **__: Any) -> None:
    raise NotImplementedError("merging an exit adapter would write into the target's own weights: it is refused")


def unwrap(adapter: PeftModel) -> ExitModule:
    """The `ExitModule` inside a PEFT model."""
    return adapter.base_model.model


def active(module: nn.Module) -> Any:
    """What PEFT trains in the place of ``module``."""
    return module.modules_to_save["default"] if isinstance(module, ModulesToSaveWrapper) else module


def fold(block: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of ``block`` with LoRA added to its linear maps, in weights of its own; the target keeps its own."""
    clone = detached_clone(block)
    for path, module in block.named_modules():
        if isinstance(module, LoraLayer):
            plain: Any = detached_clone(module.get_base_layer())
            with torch.no_grad():
                delta = module.get_delta_weight("default").to(plain.weight.dtype)
                plain.weight = nn.Parameter((plain.weight + delta).to(dtype), requires_grad=False)
            clone.get_submodule(path.rpartition(".")[0])._modules[path.rpartition(".")[2]] = plain
    return with_dispatched_linears(clone)


class ExitHead:
    """An exit ready to draft. Build with `untrained` or from a trained adapter.

    ``adapter`` is the PEFT model (None for an untrained exit), ``metadata`` the sidecar it came with.
    """

    def __init__(
        self,
        target: Target,
        name: str,
        config: ExitConfig,
        adapter: PeftModel | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        config.check(target.num_layers, target.vocab_size)
        self.name, self.config, self.adapter, self.metadata = name, config, adapter, metadata or {}
        ids = config.draft_vocab
        self.vocab_ids = None if ids is None else torch.tensor(ids, device=target.device)
        norm = target.norm
        self.correction: Any = None
        if adapter is not None:
            module = unwrap(adapter)
            self.bridge: Any = with_dispatched_linears(active(module.bridge))
            self.confidence = active(module.confidence)
            self.correction = None if module.correction is None else active(module.correction)
            self.block = fold(module.block, target.dtype)
            norm = active(module.exit_norm)
        self.norm = norm
        with torch.no_grad():
            self.head = Head(target, nn.Identity(), slice_output(target.output, self.vocab_ids))

    @classmethod
    def untrained(cls, target: Target, exit_layer: int, num_tokens: int | None = None) -> "ExitHead":
        """The target's own norm and output layer on the state after ``exit_layer`` layers, named layer-N.

        ``num_tokens`` is the tokenizer's size: ids from there on only pad the vocabulary and are never drafted.
        """
        is_padded = num_tokens is not None and num_tokens < target.vocab_size
        vocab = tuple(range(num_tokens)) if is_padded and num_tokens is not None else None
        return cls(target, f"layer-{exit_layer}", ExitConfig(exit_layer=exit_layer, draft_len=2, draft_vocab=vocab))

    @property
    def exit_layer(self) -> int:
        return self.config.exit_layer

    @property
    def recall_layers(self) -> tuple[int, ...]:
        return self.config.recall_layers

    def catch_up(self, target: Target, state: "DecodeState") -> None:
        """Let the block see the positions that it has not seen: behind a prompt, all of it."""
        held, state.backlog = state.backlog, []
        if self.adapter is None or not held:
            return
        recalls = [r for _, r in held if r is not None]
        inputs = self.bridge(
            torch.cat([taps for taps, _ in held], dim=1), torch.cat(recalls, dim=1) if recalls else None
        )
        slots = range(target.num_layers, target.num_layers + 1)
        target.run_modules([self.block], inputs, slots, state.cache)

    def states(self, target: Target, state: "DecodeState", tap: Tensor, steps: range) -> Tensor:
        """Normed states [1, K, D] of the K draft ``steps``, counted from 1, of ``tap`` [1, 1, D]: bridge, block, norm.

        A chain asks for one step, with the tap of its own token; a parallel draft for all, with the last token's.
        """
        held, state.backlog = state.backlog, []  # positions accepted since the block last ran: it has no keys for them
        if self.adapter is None:
            return self.norm(tap)
        taps = torch.cat([*(taps for taps, _ in held), tap], dim=1)
        recalls = state.recall
        if recalls is not None:
            recalls = torch.cat([*(r for _, r in held if r is not None), recalls], dim=1)
        inputs = [self.bridge(taps, recalls, steps.start)]
        inputs += [self.bridge(tap, state.recall, step) for step in steps[1:]]
        slots = range(target.num_layers, target.num_layers + 1)
        made = target.run_modules([self.block], torch.cat(inputs, dim=1), slots, state.cache)
        if len(steps) > 1:
            state.cache.rollback(len(state.tokens))  # rows that knew no token of their own must not stay
        return self.norm(made[:, -len(steps) :])

    def next_state(self, target: Target, state: "DecodeState", embedded: Tensor, normed: Tensor) -> Tensor:
        """The normed state [1, 1, D] of a recursive draft's next step: of its last token's input state ``embedded``
        [1, 1, D] and its own ``normed`` one before.
        """
        if self.adapter is None:
            return self.norm(embedded)
        slots = range(target.num_layers, target.num_layers + 1)
        return self.norm(target.run_modules([self.block], self.bridge.again(embedded, normed), slots, state.cache))

    def chance(self, normed: Tensor) -> float:
        """Probability that the draft from ``normed`` [1, 1, D] will be accepted; 1 where nothing was trained."""
        if self.adapter is None:
            return 1.0
        return 1 / (1 + math.exp(-float(self.confidence(normed)[0, 0, 0])))

    def logits(self, normed: Tensor, before: int | None = None) -> Tensor:
        """Logits [V_d] in float32 from ``normed`` [1, 1, D], behind the drafted token ``before`` if there is one."""
        logits = self.head(normed)[0, -1].float()
        if before is None or self.correction is None:
            return logits
        token = torch.tensor([before], device=logits.device)
        return logits + self.correction(places_among(self.vocab_ids, token))[0].float()

    def token_ids(self, target: Target) -> Tensor:
        """Token id of every logit, [V_d]."""
        if self.vocab_ids is not None:
            return self.vocab_ids
        return torch.arange(target.vocab_size, device=target.device)

    def token_at(self, place: int) -> int:
        """Token id of the logit at ``place``."""
        return place if self.config.draft_vocab is None else self.config.draft_vocab[place]

    def narrow(self, mask: Tensor | None) -> Tensor | None:
        """A mask over the vocabulary [V] as one over the drafted vocabulary [V_d]."""
        return mask if mask is None or self.vocab_ids is None else mask[self.vocab_ids]

    def positions_of(self, tokens: Tensor) -> Tensor:
        """Where ``tokens`` [S] stand in the drafted vocabulary; those outside are left out."""
        if self.vocab_ids is None:
            return tokens
        return (self.vocab_ids[None, :] == tokens.unique()[:, None]).nonzero()[:, 1]

    def widen(self, probs: Tensor, vocab_size: int) -> Tensor:
        """A distribution over the drafted vocabulary [V_d] as one over the whole [V]."""
        if self.vocab_ids is None:
            return probs
        return probs.new_zeros(vocab_size).scatter_(0, self.vocab_ids, probs)


def places_among(vocab_ids: Tensor | None, tokens: Tensor) -> Tensor:
    """Where ``tokens`` [A] stand in a drafted vocabulary [V_d] (None: all ids), -1 for those outside."""
    if vocab_ids is None:
        return tokens
    found = torch.searchsorted(vocab_ids, tokens).clamp(max=len(vocab_ids) - 1)
    return torch.where(vocab_ids[found] == tokens, found, -1)


def slice_output(output: Any, ids: Tensor | None) -> nn.Module:
    """The rows ``ids`` of an output layer, as a linear layer of their own."""
    if ids is None:
        return output
    weight, bias = output.weight, getattr(output, "bias", None)
    small = nn.Linear(weight.shape[1], len(ids), bias=bias is not None, device="meta")
    small.weight = nn.Parameter(weight.detach()[ids], requires_grad=False)
    if bias is not None:
        small.bias = nn.Parameter(bias.detach()[ids], requires_grad=False)
    return small
