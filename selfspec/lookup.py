"""Prompt lookup: what followed the last tokens where the text had them before, drafted again.

The method is Saxena's (2023, prompt lookup decoding) and of Yang et al. (2023, inference with reference). It costs no
pass of any layer, and where a text copies, from a document or from itself, it guesses further than an exit.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from selfspec.exits import ExitHead
from selfspec.verify import Draft

if TYPE_CHECKING:
    from selfspec.decode import DecodeState

MOST = 6  # rows of a draft up to which looked-up tokens join it, unless told
NGRAM = 4  # tokens that are looked up at most; how far two places agree beyond is counted, up to
LONGEST = 16
LEAST = 0.16  # chance below which a token is no longer worth its row
SURE = 0.7  # of the first token: an exit would cost more than it adds


@dataclass(frozen=True)
class Found:
    """What followed before, and the chance that the first of it stands."""

    tokens: tuple[int, ...] = ()
    chance: float = 0.0

    @property
    def is_sure(self) -> bool:
        return self.chance >= SURE and bool(self.tokens)

    def cut(self, num_tokens: int) -> "Found":
        """No more than ``num_tokens`` of it."""
        return replace(self, tokens=self.tokens[:num_tokens])


class PromptLookup:
    """The n-grams of one text, and where each was last followed by something.

    At most ``num_tokens`` are found; up to so many tokens of a draft they join it. Unless it ``joins``, what is found
    stands alone or not at all: where only chains are exact.
    """

    def __init__(self, num_tokens: int, joins: bool = True) -> None:
        self.num_tokens, self.joins = num_tokens, joins
        self._text: list[int] = []
        self._followed: dict[tuple[int, ...], int] = {}  # n-gram -> where the token behind it stands

    def find(self, text: Sequence[int], end_ids: Collection[int] = ()) -> Found:
        """What may follow ``text``, which begins with the text of the last call; nothing behind one of ``end_ids``."""
        known = self._text
        for token in text[len(known) :]:
            for n in range(1, min(NGRAM, len(known)) + 1):
                self._followed[tuple(known[-n:])] = len(known)
            known.append(token)
        for n in range(min(NGRAM, len(known)), 0, -1):
            place = self._followed.get(tuple(known[-n:]))
            if place is not None:
                return self._read(place, self._agreement(place, n), end_ids)
        return Found()

    def _agreement(self, place: int, length: int) -> int:
        """How many tokens before ``place`` are the text's last ones, of which ``length`` are known to be."""
        known = self._text
        if length == NGRAM:
            while length < min(LONGEST, place) and known[place - length - 1] == known[-length - 1]:
                length += 1
        return length

    def _read(self, place: int, length: int, end_ids: Collection[int]) -> Found:
        """The tokens from ``place`` on, as far as they are worth a row; a text that repeats itself goes on doing so."""
        known, tokens = self._text, list[int]()
        stands = 1.0
        while len(tokens) < self.num_tokens and not (tokens and tokens[-1] in end_ids):
            stands *= chance(length + len(tokens))
            if stands < LEAST:
                break
            at = place + len(tokens)
            tokens.append(known[at] if at < len(known) else tokens[at - len(known)])
        return Found(tuple(tokens), chance(length))


def chance(length: int) -> float:
    """That the next token is the one of an earlier place that agrees in ``length`` tokens before it.

    One in four behind a single token, and so on: what was counted on text of the default model (docs/LOG.md).
    """
    return 1 - 3 / (3 * length + 1)


def joined(
    tokens: Sequence[int], parents: Sequence[int], found: Sequence[int], most: int
) -> tuple[list[int], list[int]]:
    """A tree and the chain ``found`` from its root in one tree, up to ``most`` tokens; what both have stands once."""
    tokens, parents, row = list(tokens), list(parents), 0
    for token in found:
        twins = [j + 1 for j, parent in enumerate(parents) if parent == row and tokens[j] == token]
        if not twins and len(tokens) >= most:
            break
        if not twins:
            tokens.append(token)
            parents.append(row)
        row = twins[0] if twins else len(tokens)
    return tokens, parents


def chain(found: Sequence[int], device: torch.device) -> Draft:
    """A draft of nothing but ``found``; the verify pass runs its rows from the first layer on."""
    tokens = torch.tensor([list(found)], dtype=torch.long, device=device)
    return Draft(tokens=tokens, parents=torch.arange(len(found), device=device)[None])


class LookupDrafter:
    """Drafts by prompt lookup alone: without an exit, for any model. Takes any drafter's arguments."""

    exit_head: ExitHead | None = None

    def __init__(self, *arguments: Any) -> None:
        self.lookup: PromptLookup = arguments[-1]

    def propose(self, state: "DecodeState") -> Draft:
        """What followed before; an empty draft where nothing did."""
        found = self.lookup.find(state.tokens, state.eos_ids)
        return chain(found.tokens[: max(0, state.most_drafted)], state.device)
