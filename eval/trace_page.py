"""A `Trace` as one HTML page that needs nothing else: no script, no other file, all model text escaped."""

import re
from dataclasses import dataclass
from itertools import accumulate
from itertools import count as count_from
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from selfspec.detokenizer import Detokenizer
from selfspec.eval.trace import FATES, Cycle, Proposal, Token, Trace
from selfspec.provenance import versions

TEMPLATE = Path(__file__).with_name("trace.html")
MEANINGS = {
    "accepted": "drafted by the first layers, and the target agreed",
    "recovered": "the target's own, where it rejected the draft",
    "bonus": "the target's own, behind drafts that all stood",
    "plain": "the target's own, where nothing was drafted",
}
# characters that a browser would swallow, replace, or turn the line around with
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufffd]")
SUBSTITUTE = "\u25af"  # an empty box
BLANKS = str.maketrans({" ": "\u2423", "\n": "\u21b5", "\t": "\u21e5"})


@dataclass(frozen=True)
class Shown:
    """A token on the page: its piece of the text and all that its card tells."""

    token: Token
    number: int  # in the text
    text: str  # what it completes; empty where it only begins a character
    cycle: Cycle
    cycle_number: int  # 0: the prompt's pass
    place: int  # in the cycle

    @property
    def position(self) -> int:
        return self.cycle.position + self.place

    @property
    def proposal(self) -> Proposal | None:
        """What the draft proposed for this place."""
        proposals = self.cycle.proposals
        return proposals[self.place] if self.place < len(proposals) else None

    @property
    def unread(self) -> list[Proposal]:
        """Proposals behind the rejected one, which nobody judged."""
        return self.cycle.proposals[self.place + 1 :] if self.token.fate == "recovered" else []


def render(trace: Trace, prompt: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The page of ``trace``; ``prompt`` is shown as it was asked."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(prob=_prob, seen=_seen, label=lambda token: _label(tokenizer, token))
    shown = _shown(trace, tokenizer)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        trace=trace,
        prompt=prompt,
        settings=[f"{name.replace('_', ' ')} {_value(value)}" for name, value in trace.settings.items()],
        shown=shown,
        fates=FATES,
        meanings=MEANINGS,
        by_cycle=[[s for s in shown if s.cycle is cycle] for cycle in trace.cycles],
        chart=tau_chart([len(cycle.tokens) for cycle in trace.cycles]),
        versions=versions(),
    )


def tau_chart(emitted: list[int]) -> dict[str, Any]:
    """Geometry of tau over time from the tokens ``emitted`` by each cycle, in SVG units: bars, running mean, ticks."""
    left, right, top, bottom = 34, 412, 10, 160
    high, count = max(emitted, default=1), max(len(emitted), 1)
    step = (right - left) / count

    def y(value: float) -> float:
        return round(bottom - (bottom - top) * value / high, 2)

    means = [total / number for number, total in enumerate(accumulate(emitted), 1)]
    every = next(size * 10**power for power in count_from(0) for size in (1, 2, 5) if count <= 7 * size * 10**power)
    return {
        "left": left, "right": right, "top": top, "bottom": bottom,
        "bars": [(round(left + i * step, 2), y(n), round(0.8 * step, 2), bottom - y(n)) for i, n in enumerate(emitted)],
        "line": [(round(left + (i + 0.4) * step, 2), y(mean)) for i, mean in enumerate(means)],
        "x": [(round(left + (mark - 0.6) * step, 2), mark) for mark in range(every, count + 1, every)],
        "y": [(y(mark), mark) for mark in range(0, high + 1, -(-high // 6))],
    }  # fmt: skip


def _shown(trace: Trace, tokenizer: PreTrainedTokenizerBase) -> list[Shown]:
    pieces = Detokenizer(tokenizer, skip_special_tokens=False)
    shown: list[Shown] = []
    for number, cycle in enumerate([trace.prefill, *trace.cycles]):
        for place, token in enumerate(cycle.tokens):
            shown.append(Shown(token, len(shown), _seen(pieces.put(token.id)), cycle, number, place))
    return shown


def _seen(text: str) -> str:
    """The text with something to see in the place of control characters and broken ones."""
    return UNSEEN.sub(lambda found: chr(0x2400 + ord(found[0])) if found[0] < " " else SUBSTITUTE, text)


def _label(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token on its own, blanks visible."""
    text = str(tokenizer.decode([token], skip_special_tokens=False))
    return f"bytes, id {token}" if "\ufffd" in text else _seen(text).translate(BLANKS) or f"id {token}"


def _prob(value: float) -> str:
    return "<0.01" if 0 < value < 0.005 else f"{value:.2f}"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
