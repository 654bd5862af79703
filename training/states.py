"""One teacher pass over the training rows: the states that exits are trained on.

Shapes: B rows of a batch, S positions that predict a token (all of a row but its last), D hidden, n recalled layers, V
vocabulary, V_d drafted vocabulary, A positions that carry the loss (their next token is in the answer).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from selfspec.exit_module import ExitConfig
from selfspec.exits import slice_output
from selfspec.head import Head
from selfspec.passes import passes
from selfspec.target import Target
from selfspec.training.data import Row
from selfspec.training.on_disk import Held, load

HEAD_CHUNK = 512  # rows of full-vocabulary logits held at once


@dataclass(frozen=True)
class RowStates:
    """What the teacher knows about one row; states in bfloat16 unless said otherwise, in memory or on disk."""

    taps: Held  # [S, D], after the exit layer
    recalled: tuple[Held, ...]  # n of [S, D], after the recalled layers
    wanted: Held  # [S, D], input of the borrowed layers: what the closed-form bridge aims at
    finals: Held  # [A, D] in float32, after the last layer, before the final norm
    answer_start: int
    log_sums: Tensor  # [A], log of the sum of exp(logits) over the whole vocabulary
    argmaxes: Tensor  # [A], the target's most probable tokens
    temperature: float
    tokens: Tensor  # [A], what stands at the positions that carry the loss

    @property
    def num_tokens(self) -> int:
        """Positions S."""
        return self.taps.shape[0]

    @property
    def recalls(self) -> Tensor | None:
        """The recalled states side by side, [S, n D]."""
        return torch.cat([load(held) for held in self.recalled], dim=-1) if self.recalled else None


@dataclass(frozen=True)
class Batch:
    """Rows padded to one length, or packed into one sequence, one behind another."""

    taps: Tensor  # [B, S, D]
    recalls: Tensor | None  # [B, S, n D], at their own positions
    lengths: Tensor  # of each row
    is_scored: Tensor  # [B, S], position carries the loss
    finals: Tensor  # [A, D]
    log_sums: Tensor  # [A]
    argmaxes: Tensor  # [A]
    tokens: Tensor  # [A], at the scored positions
    is_packed: bool = False

    @property
    def positions(self) -> Tensor:
        """Where each state stands in its own row, [S]."""
        device = self.taps.device
        if not self.is_packed:
            return torch.arange(self.taps.shape[1], device=device)
        return torch.cat([torch.arange(length, device=device) for length in self.lengths.tolist()])

    @property
    def parents(self) -> list[int] | None:
        """Packed rows as trees of one branch: what each state stands behind, -1 where a row begins; None: chains."""
        if not self.is_packed:
            return None
        return [index - 1 if position else -1 for index, position in enumerate(self.positions.tolist())]


def choose_vocab(rows: Sequence[Row], size: int | None, num_tokens: int, vocab_size: int) -> tuple[int, ...] | None:
    """The ``size`` most frequent tokens of the rows, sorted; ids of the tokenizer (< ``num_tokens``) only.

    None where all of the target's ``vocab_size`` ids are wanted and are tokens.
    """
    if size is None or size >= num_tokens:
        return None if num_tokens >= vocab_size else tuple(range(num_tokens))
    counts: Counter[int] = Counter()
    for row in rows:
        counts.update(row.ids[1:].tolist())
        counts.update(row.ids[row.answer_start :].tolist() * 3)  # answers are what is drafted
    ranked = sorted((i for i in counts if i < num_tokens), key=lambda i: (-counts[i], i))[:size]
    chosen = set(ranked)
    ranked += [i for i in range(num_tokens) if i not in chosen][: size - len(ranked)]  # low ids are common pieces
    return tuple(sorted(ranked))


@dataclass(frozen=True)
class TeacherStates:
    """What the target makes of one row, whatever exits learn from it."""

    by_depth: dict[int, Held]  # [S, D] in bfloat16, by the number of layers behind them
    finals: Held | None = None  # as in `RowStates`; None, and the others too, where the last layers were not run
    log_sums: Tensor | None = None
    argmaxes: Tensor | None = None

    @classmethod
    def of(
        cls, row: Row, held: Mapping[int, Tensor], log_sums: Tensor | None = None, argmaxes: Tensor | None = None
    ) -> "TeacherStates":
        """Copies, off the device, of states ``held`` [S, D]; the deepest are the last layer's if there are sums."""
        by_depth: dict[int, Held] = {depth: state.bfloat16().cpu() for depth, state in held.items()}
        if log_sums is None or argmaxes is None:
            return cls(by_depth)
        finals = held[max(held)][row.answer_start - 1 :].float().clone().cpu()
        return cls(by_depth, finals, log_sums.clone().cpu(), argmaxes.clone().cpu())

    def joined(self, other: "TeacherStates") -> "TeacherStates":
        """What both know."""
        with_answers = self if other.finals is None else other
        return replace(with_answers, by_depth=self.by_depth | other.by_depth)

    def for_exit(self, config: ExitConfig, row: Row) -> "RowStates":
        """What an exit of ``config`` learns from it."""
        assert self.finals is not None and self.log_sums is not None and self.argmaxes is not None  # noqa: PT018
        return RowStates(
            taps=self.by_depth[config.exit_layer],
            recalled=tuple(self.by_depth[depth] for depth in config.recall_layers),
            wanted=self.by_depth[max(self.by_depth) - config.num_blocks],
            finals=self.finals,
            answer_start=row.answer_start,
            log_sums=self.log_sums,
            argmaxes=self.argmaxes,
            temperature=row.temperature,
            tokens=scored_tokens(row),
        )


def collect(target: Target, config: ExitConfig, rows: Sequence[Row], batch_tokens: int = 2048) -> list[RowStates]:
    """The teacher pass over ``rows`` for one exit; their order is kept."""
    made = teach(target, kept_depths(target.num_layers, config), rows, batch_tokens)
    return [states.for_exit(config, row) for states, row in zip(made, rows, strict=True)]


@torch.no_grad()
def teach(target: Target, depths: Sequence[int], rows: Sequence[Row], batch_tokens: int = 2048) -> list[TeacherStates]:
    """The target's states of ``rows`` at ``depths``, no further than the deepest; their order is kept."""
    states: dict[int, TeacherStates] = {}
    texts = [torch.from_numpy(row.ids[:-1]) for row in rows]
    for batch in passes(target, texts, depths, batch_tokens):
        for b, index in enumerate(batch.indices):
            row = rows[index]
            held = {depth: state[b, : len(row.ids) - 1] for depth, state in batch.states.items()}
            finals = held.get(target.num_layers)
            sums = (None, None) if finals is None else _teacher(target, finals[row.answer_start - 1 :])
            states[index] = TeacherStates.of(row, held, *sums)
    return [states[i] for i in range(len(rows))]


def kept_depths(num_layers: int, config: ExitConfig) -> list[int]:
    """The depths (layers behind them) whose states an exit is trained on."""
    return sorted({config.exit_layer, *config.recall_layers, num_layers - config.num_blocks, num_layers})


def scored_tokens(row: Row) -> Tensor:
    """The tokens [A] at the positions that carry the loss: from the prompt's last one on."""
    return torch.from_numpy(row.ids[row.answer_start - 1 : -1]).long()


def _teacher(target: Target, finals: Tensor) -> tuple[Tensor, Tensor]:
    log_sums, argmaxes = [], []
    for part in finals.split(HEAD_CHUNK):
        logits = target.logits(part[None])[0]
        argmaxes.append(logits.argmax(-1))
        log_sums.append(logits.logsumexp(-1))
    return torch.cat(log_sums), torch.cat(argmaxes)


def recall_back(recalls: Tensor, steps: Tensor, positions: Tensor) -> Tensor:
    """Deep states [B, S, nD] of ``steps`` [B, S] positions earlier; zeros before a row's beginning.

    ``positions`` [S] are those in the rows.
    """
    source = torch.arange(recalls.shape[1], device=recalls.device) - steps  # [B, S]
    rows = torch.arange(recalls.shape[0], device=recalls.device)[:, None]
    return recalls[rows, source.clamp(min=0)] * (positions >= steps)[..., None]


def make_batch(rows: Sequence[RowStates], device: torch.device, dtype: torch.dtype, is_packed: bool = False) -> Batch:
    """Pad rows to one length, or pack them into one sequence."""

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))[None] if is_packed else pad_sequence(list(parts), batch_first=True)

    held = [recalls for row in rows if (recalls := row.recalls) is not None]
    scored = [torch.arange(row.num_tokens) >= row.answer_start - 1 for row in rows]
    return Batch(
        taps=joined([load(row.taps) for row in rows]).to(device, dtype),
        recalls=joined(held).to(device, dtype) if held else None,
        lengths=torch.tensor([row.num_tokens for row in rows], device=device),
        is_scored=joined(scored).to(device),
        finals=torch.cat([load(row.finals) for row in rows]).to(device, dtype),
        log_sums=torch.cat([row.log_sums for row in rows]).to(device),
        argmaxes=torch.cat([row.argmaxes for row in rows]).to(device),
        tokens=torch.cat([row.tokens for row in rows]).to(device),
        is_packed=is_packed,
    )


class Teacher:
    """The target's distribution over the drafted vocabulary, made anew from kept states."""

    def __init__(self, target: Target, vocab_ids: Tensor | None) -> None:
        self.head, self.dtype = Head(target, None, slice_output(target.output, vocab_ids)), target.dtype

    @torch.no_grad()
    def probs(self, batch: Batch, places: Tensor | None = None) -> Tensor:
        """p [A, V_d] at the scored positions, or ``places`` among them; less than 1 where tokens are not drafted."""
        finals, log_sums = batch.finals, batch.log_sums
        if places is not None:
            finals, log_sums = finals[places], log_sums[places]
        return (self.head(finals[None].to(self.dtype))[0].float() - log_sums[:, None]).exp_()


class StudentHead:
    """The family's way from normed exit states to logits over the drafted vocabulary."""

    def __init__(self, target: Target, vocab_ids: Tensor | None) -> None:
        self.head = Head(target, nn.Identity(), slice_output(target.output, vocab_ids))

    def __call__(self, normed: Tensor) -> Tensor:
        """Logits [A, V_d] in float32 of normed states [A, D]."""
        return self.head(normed[None])[0].float()


def draw_steps(lengths: Sequence[int], size: int, num_steps: int, generator: torch.Generator) -> Tensor:
    """A draft step for every position, [B, S]: runs 1, 2, .., m of random length m <= num_steps, like cycles."""
    rows = [list(_runs(size, num_steps, generator)) for _ in lengths]
    return torch.tensor(rows)


def _runs(size: int, num_steps: int, generator: torch.Generator) -> Iterator[int]:
    ends = torch.randint(1, num_steps + 1, (size,), generator=generator).tolist()
    made = 0
    for end in ends:
        for step in range(1, end + 1):
            if made == size:
                return
            made += 1
            yield step
