"""Several texts decoded at once: each by the loop of `decode`, their passes of the target run together.

A batch reads the target's weights once for all its texts, and a text comes out as it would alone. A pass takes a few
rows for next to nothing; texts fill them themselves, and what they leave goes to tokens that are looked up. The exit
drafts again where a text is left alone: beside a single other one its drafts cost what they bring (docs/LOG.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from selfspec.cache import KVCache
from selfspec.decode import DecodeState, judge, read, rows_of, scored_of, start
from selfspec.drafter import Drafter
from selfspec.kernels import dispatch
from selfspec.rows import finish_together, num_shared
from selfspec.target import Target

MOST_TOGETHER = 32  # texts under way; the next one begins where one ends
LEAST_SHARED = 8  # tokens that all prompts must begin with to be run once
CHEAP_ROWS = 6  # of a pass of the CPU's kernels, which the texts under way share


@dataclass(frozen=True, eq=False)
class Text:
    """One of several."""

    number: int
    drafter: Drafter
    state: DecodeState


@torch.no_grad()
def decode_together(target: Target, texts: Sequence[tuple[Drafter, DecodeState]]) -> Iterator[tuple[int, list[int]]]:
    """Decode all; yields a text's number and the tokens that a cycle emits of it, its prompt's pass first."""
    waiting = [Text(number, drafter, state) for number, (drafter, state) in enumerate(texts)][::-1]
    alive, shared = list[Text](), _Shared.of(target, waiting[::-1])
    while waiting or alive:
        while waiting and len(alive) < MOST_TOGETHER:
            text = waiting.pop()
            if shared is not None:
                shared.begin(text.state)
            yield text.number, start(target, text.drafter, text.state)
            alive += _under_way([text], shared)
        yield from _cycle(target, alive)
        alive = _under_way(alive, shared)


@dataclass(frozen=True)
class _Shared:
    """What all prompts begin with, run once: its rows in a cache, and the deep states that the next row recalls."""

    cache: KVCache
    length: int
    recall: Tensor | None

    @classmethod
    def of(cls, target: Target, texts: Sequence[Text]) -> "_Shared | None":
        """Runs it; None where it is short, or where a prompt's bits depend on how it is divided."""
        prompts = [text.state.tokens for text in texts]
        length = num_shared(prompts) if len(prompts) > 1 else 0
        like = torch.empty(0, dtype=target.dtype, device=target.device)
        is_one_exit = len({text.drafter.exit_head for text in texts}) == 1
        is_divisible = all(not t.state.cache.is_float8 and t.state.cache.width in (None, 1) for t in texts)
        if length < LEAST_SHARED or not is_one_exit or not is_divisible:
            return None
        if not dispatch.takes_prompts(like) or not target.fused.is_in_use:
            return None
        head, state = texts[0].drafter.exit_head, replace(texts[0].state, backlog=[])
        read(target, texts[0].drafter, state, length)
        if head is not None:
            head.catch_up(target, state)
        return cls(state.cache, length, state.recall)

    def begin(self, state: DecodeState) -> None:
        """Have a text that was not begun go on behind it."""
        if state.cache is not self.cache:
            state.cache.begin_like(self.cache, self.length)
        state.recall = self.recall


def _under_way(texts: Sequence[Text], shared: _Shared | None) -> list[Text]:
    """Those that have not ended; the others give their memory back, except for what is copied from."""
    for text in texts:
        if text.state.done and (shared is None or text.state.cache is not shared.cache):
            text.state.cache.release()
    return [text for text in texts if not text.state.done]


def _cycle(target: Target, texts: Sequence[Text]) -> Iterator[tuple[int, list[int]]]:
    """One cycle of each."""
    for text in texts:
        text.state.room = max(CHEAP_ROWS // len(texts) - 1, 0) if len(texts) > 1 else None
    drafts = [text.drafter.propose(text.state) for text in texts]
    rows = [
        rows_of(target, text.state, draft, text.drafter.exit_head) for text, draft in zip(texts, drafts, strict=True)
    ]
    made = finish_together(target, rows)
    for text, draft, entered, (logits, states) in zip(texts, drafts, rows, made, strict=True):
        state = text.state
        scored = scored_of(target, entered, logits, states, draft, text.drafter.exit_head)
        verdict = judge(state, draft, scored)
        emitted = state.commit(draft, verdict, scored)
        state.stats.record(draft.num_drafted, int(verdict.num_accepted[0]), len(emitted))
        yield text.number, emitted
