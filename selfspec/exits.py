"""Exit heads: from the state after layer N (the tap) to a guess at the next token.

    tap -> bridge -> decoder blocks borrowed from the target -> exit norm -> rows of the target's output layer

`ExitModule` has the trained parts. An untrained exit is the target's own norm and output layer on the tap (the logit
lens).

Shapes: B batch, R rows, D hidden, V vocabulary, V_d drafted vocabulary, n recalled layers.
"""

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from selfspec.clones import detached_clone, present
from selfspec.exit_module import ExitConfig, active, fold, unwrap
from selfspec.head import Head
from selfspec.linears import with_dispatched_linears
from selfspec.target import Target

if TYPE_CHECKING:
    from selfspec.decode import DecodeState


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
        self._compressed: dict[int, tuple[Tensor, int, int, Any]] = {}
        ids = config.draft_vocab
        self.vocab_ids = None if ids is None else torch.tensor(ids, device=target.device)
        norm = target.norm
        self.blocks: list[nn.Module] = []
        self.first_slot = 0  # of its layers in the cache, behind the target's
        self.correction: Any = None
        if adapter is not None:
            module = unwrap(adapter)
            self.bridge: Any = with_dispatched_linears(active(module.bridge))
            self.confidence = active(module.confidence)
            self.correction = None if module.correction is None else active(module.correction)
            self.blocks = [fold(block, target.dtype) for block in active(module.blocks)]
            target.packed.take(self.blocks)
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

    @property
    def modules(self) -> list[nn.Module]:
        """All that it runs behind the tap."""
        trained = [] if self.adapter is None else [self.bridge, self.confidence]
        corrections = [] if self.correction is None else [self.correction]
        return [self.norm, self.head.output, *self.blocks, *trained, *corrections]

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Depths whose states its taps are made of, the last one where verification goes on from."""
        return (self.exit_layer,)

    @property
    def num_slots(self) -> int:
        """Layers of the cache that it takes behind the target's."""
        return len(self.blocks)

    def moved(self, num_slots: int) -> "ExitHead":
        """The same exit, its keys and values ``num_slots`` layers further back in the cache."""
        made = copy.copy(self)
        made.first_slot, made.blocks = self.first_slot + num_slots, [detached_clone(block) for block in self.blocks]
        child: Any
        for child in (c for block in made.blocks for c in block.modules() if hasattr(c, "layer_idx")):
            child.layer_idx += num_slots
        return made

    def catch_up(self, target: Target, state: "DecodeState") -> None:
        """Let the block see the positions that it has not seen: behind a prompt, all of it."""
        held, state.backlog = state.backlog, []
        if not self.blocks or not held:
            return
        recalls = [r for _, r in held if r is not None]
        inputs = self.bridge(
            torch.cat([taps for taps, _ in held], dim=1), torch.cat(recalls, dim=1) if recalls else None
        )
        self.run_blocks(target, state, inputs)

    def states(self, target: Target, state: "DecodeState", tap: Tensor, steps: range) -> Tensor:
        """Normed states [1, K, D] of the K draft ``steps``, counted from 1, of ``tap`` [1, 1, D]: bridge, block, norm.

        A chain asks for one step, with the tap of its own token; a parallel draft for all, with the last token's.
        """
        held, state.backlog = state.backlog, []  # positions accepted since the block last ran: it has no keys for them
        if self.adapter is None:
            return self.norm(tap)
        held = held if self.blocks else []
        taps = torch.cat([*(taps for taps, _ in held), tap], dim=1)
        recalls = state.recall
        if recalls is not None:
            recalls = torch.cat([*(r for _, r in held if r is not None), recalls], dim=1)
        inputs = [self.bridge(taps, recalls, steps.start)]
        inputs += [self.bridge(tap, state.recall, step) for step in steps[1:]]
        made = self.run_blocks(target, state, torch.cat(inputs, dim=1))
        if len(steps) > 1:
            state.cache.rollback(len(state.tokens))  # rows that knew no token of their own must not stay
        return self.norm(made[:, -len(steps) :])

    def next_state(self, target: Target, state: "DecodeState", embedded: Tensor, normed: Tensor) -> Tensor:
        """The normed state [1, 1, D] of a recursive draft's next step: of its last token's input state ``embedded``
        [1, 1, D] and its own ``normed`` one before.
        """
        return self.norm(self.run_blocks(target, state, self.bridge.again(embedded, normed)))

    def slots(self, target: Target) -> range:
        """Where its blocks keep keys and values: layers of the cache behind the target's."""
        first = target.num_layers + self.first_slot
        return range(first, first + len(self.blocks))

    def run_blocks(self, target: Target, state: "DecodeState", inputs: Tensor) -> Tensor:
        """Its blocks over bridged rows [1, R, D]; their keys and values stay in the cache."""
        return target.run_modules(self.blocks, inputs, self.slots(target), state.cache) if self.blocks else inputs

    def chance(self, normed: Tensor) -> float:
        """Probability that the draft from ``normed`` [1, 1, D] will be accepted; 1 where nothing was trained."""
        if self.adapter is None:
            return 1.0
        return 1 / (1 + math.exp(-float(self.confidence(normed)[0, 0, 0])))

    def logits(self, target: Target, normed: Tensor, before: Tensor | None = None) -> Tensor:
        """Logits [V_d] in float32 from ``normed`` [1, 1, D], behind the drafted token ``before`` [1] if any."""
        if before is None or self.correction is None:
            return self.head(normed)[0, -1].float()
        if self.config.correction == "state":
            return self.head(self.correction(normed, target.embed(before[None])))[0, -1].float()
        return self.head(normed)[0, -1].float() + self.correction(places_among(self.vocab_ids, before))[0].float()

    def compressed(self, weight: Tensor, compress: Callable[[Tensor], Any]) -> Any:
        """What ``compress`` makes of one of its weights, kept until that is changed."""
        version = -1 if weight.is_inference() else weight._version
        held = self._compressed.get(id(weight))
        if held is None or held[0] is not weight or held[1:3] != (weight.data_ptr(), version):
            held = self._compressed[id(weight)] = (weight, weight.data_ptr(), version, compress(weight.detach()))
        return held[3]

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
    weight = present(output, "weight")
    bias = None if getattr(output, "bias", None) is None else present(output, "bias")
    small = nn.Linear(weight.shape[1], len(ids), bias=bias is not None, device="meta")
    small.weight = nn.Parameter(weight[ids], requires_grad=False)
    if bias is not None:
        small.bias = nn.Parameter(bias[ids], requires_grad=False)
    return small
