"""The decoding loop. Ordinary autoregressive decoding is the same loop with a drafter that drafts nothing.

Shapes: B = 1, K drafted tokens, D hidden, V vocabulary. Position s is the last emitted token t_0, known but not yet run
through the model; rows 0 .. K of a pass are t_0 .. t_K at positions s .. s + K.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from selfspec.cache import KVCache
from selfspec.drafter import Drafter, empty_draft
from selfspec.exits import ExitHead
from selfspec.rows import Rows
from selfspec.sampling import (
    ACCEPT_STREAM,
    RECOVER_STREAM,
    TARGET_STREAM,
    Sampling,
    draw_token,
    logits_to_probs,
    processed,
    require_finite,
    uniform,
)
from selfspec.stats import DecodeStats
from selfspec.target import Target
from selfspec.verify import Draft, Verdict, verify_coupled, verify_rejection

if TYPE_CHECKING:
    from selfspec.engine import Engine

RowScores = Callable[[int, list[int]], Tensor]  # (row, accepted rows before it) -> scores [V]
RULES = ("coupled", "rejection")
EXACT_WIDTHS = (2, 4, 8, 16, 32, 64)


def exact_width(draft_len: int) -> int:
    """Row width W of exact mode: the smallest of 2, 4, 8, 16, 32, 64 that holds draft_len + 1 rows."""
    for width in EXACT_WIDTHS:
        if width > draft_len:
            return width
    raise ValueError(f"draft_len must be at most {EXACT_WIDTHS[-1] - 1}, got {draft_len}")


def is_exact_by_default(dtype: torch.dtype) -> bool:
    """Whether exact mode is on unless switched off: in half precision, where rounding depends on the row width."""
    return dtype in (torch.bfloat16, torch.float16)


@dataclass
class DecodeState:
    """One sequence being decoded: its tokens, the shared cache, and what the next cycle needs."""

    tokens: list[int]  # prompt and emitted tokens
    cache: KVCache
    max_length: int  # of prompt and new tokens together
    vocab_size: int
    device: torch.device
    sampling: Sampling = field(default_factory=Sampling)
    rule: str = "coupled"
    seed: int = field(default_factory=lambda: secrets.randbits(63))
    eos_ids: frozenset[int] = frozenset()
    min_length: int = 0  # no EOS before this many tokens in all
    processors: LogitsProcessorList | None = None
    is_stopped: Callable[[list[int]], bool] = lambda _: False  # user's criteria, on all tokens so far
    stats: DecodeStats = field(default_factory=DecodeStats)
    done: bool = False
    engine: "Engine | None" = None  # None: plain calls
    room: int | None = None  # tokens that a draft may have where the pass is shared with other texts; None: alone
    recall: Tensor | None = None  # [1, 1, nD], deep states of position s - 1
    backlog: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)  # taps, recalls the block has not seen

    @property
    def num_remaining(self) -> int:
        """How many tokens may still be emitted."""
        return self.max_length - len(self.tokens)

    @property
    def most_drafted(self) -> int:
        """How many tokens a draft may have; the target's own follows behind the last of them."""
        return self.num_remaining - 1 if self.room is None else min(self.num_remaining - 1, self.room)

    def prefix(self, drafted: Sequence[int]) -> Tensor:
        """All token ids up to and including ``drafted`` ones, [S]."""
        return torch.tensor([*self.tokens, *drafted], dtype=torch.long, device=self.device)

    def forbidden(self, position: int) -> Tensor | None:
        """Mask [V] of ids that may not stand at ``position`` (end of text before the minimal length)."""
        if position >= self.min_length or not self.eos_ids:
            return None
        mask = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
        mask[list(self.eos_ids)] = True
        return mask

    def scores(self, logits: Tensor, draft: Draft) -> RowScores:
        """What the target draws from at a row, before temperature and filters, [V]; ``logits`` are [K + 1, V].

        To be asked for accepted rows only, in order: the user's processors run on no others.
        """

        def row_scores(row: int, path: list[int]) -> Tensor:
            drafted = [int(draft.tokens[0, r - 1]) for r in path]
            prefix, process = self.prefix(drafted), self.processors or None
            scores, mask = logits[row : row + 1], self.forbidden(len(prefix))
            return processed(scores, self.sampling, [prefix], mask, process)[0]

        has_history = bool(self.processors) or self.sampling.repetition_penalty != 1
        is_changed = has_history or len(self.tokens) < self.min_length
        return row_scores if is_changed else lambda row, _: logits[row]

    def draw(self, scores: Tensor, depth: int) -> int:
        """The token drawn from ``scores`` [V] behind ``depth`` accepted drafts."""
        stream = TARGET_STREAM if self.rule == "coupled" else RECOVER_STREAM
        return draw_token(scores, self.sampling, self.seed, stream, len(self.tokens) + depth)

    def commit(self, draft: Draft, verdict: Verdict, scored: "Scored") -> list[int]:
        """Emit the accepted tokens and the next one, cut at the first stop; roll the cache back to what stands."""
        path = verdict.path[0, : int(verdict.num_accepted[0])].tolist()
        for i, row in enumerate([0, *path]):  # rejected rows are none of plain decoding's business
            require_finite(scored.logits[row : row + 1], scored.first + i)
        emitted = self.emit([*(int(draft.tokens[0, row - 1]) for row in path), int(verdict.next_token[0])])
        self._keep(scored, [0, *path][: len(emitted)])  # the last emitted token has no row yet
        return emitted

    def emit(self, tokens: Sequence[int]) -> list[int]:
        """Put ``tokens`` to the text, up to the first that ends it; returns those that were."""
        emitted: list[int] = []
        for token in tokens:
            emitted.append(token)
            self.tokens.append(token)
            self.done = self.is_stopped(self.tokens) or token in self.eos_ids or self.num_remaining == 0
            if self.done:
                break
        self.stats.num_tokens += len(emitted)
        return emitted

    def _keep(self, scored: "Scored", rows: list[int]) -> None:
        """Keep the pass's accepted ``rows``, in the cache and as input for the exit's block."""
        first = scored.first
        # the block has run over the chain, of which what stands of a tree is the beginning
        num_alike = next((i for i, row in enumerate(rows) if row != i), len(rows))
        self.cache.rollback(first + num_alike, scored.head_slots)
        self.cache.compact(first, rows, range(len(self.cache.lengths)))
        self.cache.rollback(first + len(rows))
        if scored.taps is None:
            return
        seen = max(self.cache.lengths[-1] - first, 0)  # rows whose keys and values drafting has written already
        taps = scored.taps[:, rows]
        recalls = None
        if scored.recalls is not None:
            assert self.recall is not None
            recalls = torch.cat([self.recall, scored.recalls[:, rows]], dim=1)  # recalls[i] lies before row i
            self.recall, recalls = recalls[:, -1:], recalls[:, :-1]
        self.backlog.append((taps[:, seen:], None if recalls is None else recalls[:, seen:]))


@dataclass(frozen=True)
class Scored:
    """A pass of the target over all rows of a draft."""

    logits: Tensor  # [K + 1, V]; of a prompt the last row alone
    first: int  # position of row 0
    taps: Tensor | None  # [1, K + 1, D] (2 D of a cascade), states at the exit layer
    recalls: Tensor | None  # [1, K + 1, nD], deep states that a later draft recalls
    head_slots: range = range(0)  # layers of the cache that belong to the exit's blocks


def score(target: Target, state: DecodeState, draft: Draft, exit_head: ExitHead | None) -> Scored:
    """Run the rest of the stack on the last token and the draft: from the taps if there are any, else from layer 0."""
    rows = rows_of(target, state, draft, exit_head)
    return scored_of(target, rows, *rows.finish(target), draft, exit_head)


def rows_of(target: Target, state: DecodeState, draft: Draft, exit_head: ExitHead | None) -> Rows:
    """What `score` runs."""
    parents = None if draft.is_chain else [0, *draft.parents[0].tolist()]
    if draft.taps is not None:
        assert exit_head is not None
        hidden, start = draft.taps[..., -target.hidden_size :], exit_head.exit_layer  # taps may be of several layers
    else:
        root = torch.tensor([[state.tokens[-1]]], device=state.device)
        first = state.cache.lengths[target.num_layers - 1]
        hidden, start = _embed(target, torch.cat([root, draft.tokens], dim=1), first, parents), 0
    return Rows(hidden, start, state.cache, _depths(exit_head), parents)


def scored_of(
    target: Target, rows: Rows, logits: Tensor, states: dict[int, Tensor], draft: Draft, exit_head: ExitHead | None
) -> Scored:
    """What a pass has made of ``rows``: logits [1, R, V] and states [1, R, D] by depth."""
    first = rows.cache.lengths[target.num_layers - 1] - rows.hidden.shape[1]
    if exit_head is None:
        return Scored(logits[0], first, None, None)
    taps = draft.taps
    if taps is None:
        taps = torch.cat([states[layer] for layer in exit_head.tap_layers], dim=-1)
    recalls = [states[layer] for layer in exit_head.recall_layers]
    recalled = torch.cat(recalls, dim=-1) if recalls else None
    return Scored(logits[0], first, taps, recalled, exit_head.slots(target))


def _depths(exit_head: ExitHead | None) -> tuple[int, ...]:
    return () if exit_head is None else (*exit_head.tap_layers, *exit_head.recall_layers)


def prefill(target: Target, state: DecodeState, exit_head: ExitHead | None, stop: int | None = None) -> Scored:
    """Run the prompt, or its tokens before ``stop``, through the whole stack; logits of the last position.

    What the cache holds of it is not run again.
    """
    first = state.cache.lengths[target.num_layers - 1]
    ids = torch.tensor([state.tokens[first:stop]], device=state.device)
    rows = Rows(target.embed(ids, first), 0, state.cache, _depths(exit_head))
    made = target.finish(rows.hidden, 0, state.cache, rows.depths, num_logits=1)
    return scored_of(target, rows, *made, empty_draft(state.device), exit_head)


def _embed(target: Target, tokens: Tensor, first: int, parents: list[int] | None) -> Tensor:
    depths = [0]
    for parent in (parents or [])[1:]:
        depths.append(depths[parent] + 1)
    return target.embed(tokens, first, depths if parents else None)


def judge(state: DecodeState, draft: Draft, scored: Scored) -> Verdict:
    """Apply the state's acceptance rule with noise keyed by its seed and the rows' positions."""
    scores = state.scores(scored.logits, draft)
    if state.rule == "coupled":
        return verify_coupled(lambda row, path: state.draw(scores(row, path), len(path)), draft)
    depths = [0]
    for parent in draft.parents[0].tolist():
        depths.append(depths[parent] + 1)
    positions = [len(state.tokens) + depth for depth in depths]  # of the token that each row predicts
    ids = torch.arange(state.vocab_size, device=state.device)

    def probs(row: int, path: list[int]) -> Tensor:
        return logits_to_probs(scores(row, path)[None], state.sampling)[0]

    def noise(row: int) -> Tensor:
        return uniform(state.seed, RECOVER_STREAM, positions[row : row + 1], ids)[0]

    accept = uniform(state.seed, ACCEPT_STREAM, positions[:1], torch.arange(draft.num_drafted, device=state.device))
    return verify_rejection(probs, draft, accept, noise)


def start(target: Target, drafter: Drafter, state: DecodeState) -> list[int]:
    """Run the prompt and emit the first token; returns it."""
    head, num_prompt = drafter.exit_head, len(state.tokens)
    scored = read(target, drafter, state)
    require_finite(scored.logits, num_prompt - 1)
    scores = state.scores(scored.logits, empty_draft(state.device))
    token = state.draw(scores(0, []), depth=0)
    state.emit([token])
    if head is not None and not state.done:
        head.catch_up(target, state)
    return [token]


def read(target: Target, drafter: Drafter, state: DecodeState, stop: int | None = None) -> Scored:
    """Run the prompt as `prefill` does, and keep what it leaves."""
    head = drafter.exit_head
    if head is not None and head.recall_layers and state.recall is None:
        width = target.hidden_size * len(head.recall_layers)
        state.recall = torch.zeros(1, 1, width, dtype=target.dtype, device=state.device)  # position 0 recalls nothing
    scored = prefill(target, state, head, stop)
    state._keep(scored, list(range(len(state.tokens[scored.first : stop]))))
    return scored


@torch.no_grad()
def decode(target: Target, drafter: Drafter, state: DecodeState) -> Iterator[list[int]]:
    """Decode until done; yields the tokens that each cycle emits, the prompt's pass first."""
    replayed = None if state.engine is None else state.engine.cycles(drafter, state)  # the same cycles, a launch each
    if replayed is not None:
        yield from replayed.text(lambda: start(target, drafter, state), drafter, state)
        return
    yield start(target, drafter, state)
    while not state.done:
        draft = drafter.propose(state)  # layers [0, N)
        scored = score(target, state, draft, drafter.exit_head)  # layers [N, L), same cache
        verdict = judge(state, draft, scored)
        emitted = state.commit(draft, verdict, scored)  # emit, roll the cache back
        state.stats.record(draft.num_drafted, int(verdict.num_accepted[0]), len(emitted))
        yield emitted
