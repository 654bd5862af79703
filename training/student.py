"""The training graph of an exit: the same parts that decode, over whole rows.

Shapes: B rows, S positions, A of them carry the loss, J draft steps, G guesses, D hidden, V_d drafted vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from selfspec.exit_module import ExitConfig, active, unwrap
from selfspec.exits import places_among
from selfspec.kernels.head_loss import head_loss
from selfspec.target import Target
from selfspec.training.states import Batch, StudentHead, Teacher, draw_steps, recall_back


@dataclass(frozen=True)
class Guesses:
    """What an exit makes of a batch."""

    normed: Tensor  # [G, D]
    steps: Tensor  # [G], the draft step of each, from 1
    places: Tensor  # [G], which of the A positions each is for

    def at(self, step: int) -> "Guesses":
        """Those of one draft step."""
        return self[self.steps == step]

    def __getitem__(self, chosen: slice | Tensor) -> "Guesses":
        return Guesses(self.normed[chosen], self.steps[chosen], self.places[chosen])


class Student(nn.Module):
    """The training graph of an exit: bridge maps chosen by draft step, block, exit norm."""

    target: Target
    head: StudentHead
    teacher: Teacher
    vocab_ids: Tensor | None

    def __init__(self, target: Target, adapter: PeftModel, config: ExitConfig) -> None:
        super().__init__()
        active(unwrap(adapter).confidence).requires_grad_(False)  # fitted when the rest has been trained
        self.adapter, self.config = adapter, config
        ids = config.draft_vocab
        vocab_ids = None if ids is None else torch.tensor(ids, device=target.device)
        self.__dict__["target"] = target  # not a submodule: nothing of it is trained or saved
        self.__dict__["head"] = StudentHead(target, vocab_ids)
        self.__dict__["vocab_ids"] = vocab_ids
        self.__dict__["teacher"] = Teacher(target, vocab_ids)

    def forward(self, batch: Batch, steps: Tensor | None = None) -> Guesses:
        """A chain guesses once at each position, at the draft ``steps`` [B, S]; other drafts at all their steps."""
        with self.target_precision():
            return self._guesses(batch, steps)

    def _guesses(self, batch: Batch, steps: Tensor | None) -> Guesses:
        if not self.is_chain:
            made = self._parallel(batch) if self.config.form == "parallel" else self._recursive(batch)
            normed = made[:, batch.is_scored]  # [J, A, D]
            numbers = torch.arange(1, len(normed) + 1, device=normed.device)
            places = torch.arange(normed.shape[1], device=normed.device)
            return Guesses(normed.flatten(0, 1), numbers.repeat_interleave(len(places)), places.repeat(len(normed)))
        assert steps is not None
        normed = self._chain(batch, steps)[batch.is_scored]
        return Guesses(normed, steps[batch.is_scored], torch.arange(len(normed), device=normed.device))

    def target_precision(self) -> Any:
        """Products in the target's half precision, if it has one, over weights trained in float32."""
        target = self.target
        return torch.autocast(target.device.type, target.dtype, enabled=target.dtype != torch.float32)

    def each_step(self, batch: Batch, num_steps: int) -> Iterator[Guesses]:
        """The guesses of draft step 1, of step 2, ... at every position."""
        if not self.is_chain:
            whole = self(batch)
            for step in range(1, num_steps + 1):
                yield whole.at(min(step, self.config.num_steps))
        else:
            for step in range(1, num_steps + 1):
                yield self(batch, torch.full(batch.taps.shape[:2], step, device=batch.taps.device))

    def draw_steps(self, batch: Batch, generator: torch.Generator) -> Tensor | None:
        """Draft steps [B, S] for `forward`, runs 1, 2, ... of random length, as cycles are; None if not a chain."""
        if not self.is_chain:
            return None
        lengths = batch.lengths.tolist()
        drawn = draw_steps(lengths, max(lengths), self.config.num_maps, generator)
        if batch.is_packed:  # the same of each row
            drawn = torch.cat([row[:length] for row, length in zip(drawn, lengths, strict=True)])[None]
        return drawn.to(batch.taps.device)

    @property
    def is_chain(self) -> bool:
        return self.config.form == "chain"

    def logits(self, guesses: Guesses, batch: Batch) -> Tensor:
        """Logits [G, V_d] in float32, each behind the token that stands before it."""
        correction = unwrap(self.adapter).correction
        is_behind = guesses.steps > 1  # step 1 follows no draft
        with self.target_precision():
            if correction is None:
                return self.head(guesses.normed)
            which, tokens = is_behind.nonzero()[:, 0], batch.tokens[guesses.places[is_behind]]
            if self.config.correction == "state":
                embedded = self.target.embed(tokens[None])[0].to(guesses.normed.dtype)
                corrected = active(correction)(guesses.normed[is_behind], embedded)
                return self.head(guesses.normed.index_put((which,), corrected.to(guesses.normed.dtype)))
            logits = self.head(guesses.normed)
            biases = active(correction)(places_among(self.vocab_ids, tokens))
        return logits.index_add(0, which, biases.to(logits.dtype))

    def head_parameters(self) -> list[nn.Parameter]:
        """What is trained of the way from normed states to logits."""
        correction = unwrap(self.adapter).correction
        return [] if correction is None else [p for p in active(correction).parameters() if p.requires_grad]

    def guess(self, logits: Tensor) -> Tensor:
        """The exit's most probable token ids [G], from logits [G, V_d]."""
        return self.ids_at(logits.argmax(-1))

    def ids_at(self, places: Tensor) -> Tensor:
        """The token ids at ``places`` of the drafted vocabulary."""
        return places if self.vocab_ids is None else self.vocab_ids[places]

    def trained_state(self) -> dict[str, Tensor]:
        """Copies of all weights that training changes, by name."""
        return {n: _gathered(p.detach()).clone() for n, p in self.adapter.named_parameters() if p.requires_grad}

    def load_trained_state(self, state: dict[str, Tensor]) -> None:
        """Put back what `trained_state` gave."""
        own = {n: p for n, p in self.adapter.named_parameters() if p.requires_grad}
        if own.keys() != state.keys():
            raise ValueError(f"state has other weights: {sorted(own.keys() ^ state.keys())[:4]}")
        with torch.no_grad():
            for name, value in state.items():
                held = own[name]
                if isinstance(held, DTensor):
                    value = distribute_tensor(value.to(held.device), held.device_mesh, held.placements)
                held.copy_(value)

    def _chain(self, batch: Batch, steps: Tensor) -> Tensor:
        """Normed states [B, S, D]; ``steps`` [B, S] from 1."""
        module, taps = unwrap(self.adapter), batch.taps
        maps = active(module.bridge).maps
        if batch.recalls is None:
            return module(self.target, maps[0](taps), batch.parents)
        inputs = _inputs(batch, steps)
        which = steps.clamp(max=len(maps))
        bridged = taps.new_zeros(taps.shape)
        for j, linear in enumerate(maps, start=1):
            chosen = which == j
            bridged = bridged.index_put(chosen.nonzero(as_tuple=True), linear(inputs[chosen]).to(bridged.dtype))
        return module(self.target, bridged, batch.parents)

    def _parallel(self, batch: Batch) -> Tensor:
        """Normed states [J, B, S, D] of every step j at the position that it guesses from, j - 1 behind its tap."""
        inputs = _inputs(batch)
        return self._run_tree([linear(inputs) for linear in active(unwrap(self.adapter).bridge).maps], batch)

    def _recursive(self, batch: Batch) -> Tensor:
        """The same of steps that are fed with their token and the normed state of the step before."""
        bridge, size = active(unwrap(self.adapter).bridge), batch.taps.shape[1]
        ids = torch.zeros(batch.taps.shape[:2], dtype=torch.long, device=batch.taps.device)
        ids[batch.is_scored] = batch.tokens  # others are never drafted
        embedded = self.target.embed(ids, depths=batch.positions.tolist()).to(batch.taps.dtype)
        rows = [bridge.maps[0](_inputs(batch))]
        states = self._run_tree(rows, batch)
        taps = torch.arange(size, device=ids.device)
        for step in range(1, self.config.num_steps):
            place = (taps + step).clamp(max=size - 1)  # of the token that is fed; the state before lies one before it
            rows.append(bridge.again(embedded[:, place], states[-1][:, (place - 1).clamp(min=0)]))
            states = self._run_tree(rows, batch)
        return states

    def _run_tree(self, rows: Sequence[Tensor], batch: Batch) -> Tensor:
        """Normed states [J, B, S, D] of bridged ``rows`` [B, S, D] of every step j, ordered by tap; moved to where they
        guess from, j - 1 behind it.

        The rows form a tree: step 1 of all positions a chain, step j behind step j - 1 of the same tap, so that each
        sees the text up to its tap and the rows of its own draft, as decoding has it.
        """
        size = rows[0].shape[1]
        parents = [*(batch.parents or [0, *range(size - 1)]), *range((len(rows) - 1) * size)]
        normed = unwrap(self.adapter)(self.target, torch.cat(list(rows), dim=1), parents).unflatten(
            1, (len(rows), size)
        )
        places, positions = torch.arange(size, device=normed.device), batch.positions
        return torch.stack([normed[:, j, places - positions.clamp(max=j)] for j in range(len(rows))])


def _inputs(batch: Batch, steps: Tensor | None = None) -> Tensor:
    """What the bridge reads, [B, S, (1 + n) D], at draft ``steps`` [B, S] (None: at the first)."""
    if batch.recalls is None:
        return batch.taps
    if steps is None:
        steps = torch.ones(batch.taps.shape[:2], dtype=torch.long, device=batch.taps.device)
    return torch.cat([batch.taps, recall_back(batch.recalls, steps, batch.positions)], dim=-1)


def _gathered(tensor: Tensor) -> Tensor:
    """All of a tensor of which each process holds a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Objective(nn.Module):
    """What training minimises: the loss ``name`` of a student's guesses, later draft steps counting for less.

    Logits of at most ``num_held`` guesses are held at once.
    """

    def __init__(self, student: Student, name: str, step_decay: float, num_held: int) -> None:
        super().__init__()
        self.student, self.name, self.step_decay, self.num_held = student, name, step_decay, num_held

    def forward(self, batch: Batch, steps: Tensor | None) -> tuple[Tensor, Guesses]:
        """The loss, a weighted mean, and the guesses without their gradients; ``steps`` as `Student` takes them."""
        student, guesses = self.student, self.student(batch, steps)
        weights = self.step_decay ** (guesses.steps - 1.0)
        loss = head_loss(
            guesses.normed,
            lambda normed, rows: student.logits(replace(guesses[rows], normed=normed), batch),
            lambda rows: student.teacher.probs(batch, guesses.places[rows]),
            weights / weights.sum(), self.name, self.num_held, student.head_parameters(),
        )  # fmt: skip
        return loss, replace(guesses, normed=guesses.normed.detach())
