"""How far to draft on this machine: from what cycles take on it, and from what an exit's sidecar says it gets right.

A cycle of k drafts emits tau(k) = 1 + a_1 + a_1 a_2 + ... tokens, where a_j is how often draft j stands where all
before it do, recorded on held-out text. What it takes is timed as decoding would run it, in units of a cycle without
drafts; k is the one with the largest S(k) = tau(k) / cycle(k), or 0 where none of them is above 1. When a confidence is
known the draft step has been made, and stopping saves a row of the verify pass: drafting stops where the chance that
all drafts stand is less than S x that row's cost.

Text does not depend on any of this, but the row width of exact mode does: times are kept on disk, so that k is the same
in later runs, and a text without drafts has the width of one with them.
"""

import hashlib
import json
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from selfspec.cache import KVCache
from selfspec.costs import at_one_place, device_cycle, interleave, random_prompt, time_pass, timed
from selfspec.decode import DecodeState, exact_width, judge, score, start
from selfspec.device_steps import Kind
from selfspec.drafter import DRAFTERS, Drafter, NoDrafter
from selfspec.engine import Engine, capture, mode_for
from selfspec.exits import ExitHead
from selfspec.files import cache_folder, write_atomically
from selfspec.kernels import dispatch
from selfspec.provenance import device_name, versions
from selfspec.storage import fingerprint
from selfspec.target import Target

logger = logging.getLogger(__name__)

CONTEXT = 64  # tokens behind which cycles are timed
ROUNDS = range(3, 10)  # repetitions, as many as fit into
SECONDS = 1.5


@dataclass(frozen=True)
class CycleCosts:
    """Times in units of a cycle without drafts."""

    cycles: tuple[float, ...]  # of cycles of 0, 1, 2, ... drafts; the first is 1
    row: float = 0.0  # of another row of a verify pass, 0 where a draft that is not drawn saves none


@dataclass(frozen=True)
class Policy:
    """Settings of drafting, and the speed over plain decoding that they promise."""

    draft_len: int  # 0: drafting does not pay
    min_confidence: float
    speedup: float


def choose(acceptance: Sequence[float], costs: CycleCosts) -> Policy:
    """The fastest for ``acceptance``, a_1, a_2, ...; the shortest of equals."""
    tau = reached = 1.0
    found = [Policy(0, 0.0, 1.0)]
    for draft_len, (chance, cost) in enumerate(zip(acceptance, costs.cycles[1:], strict=True), start=1):
        reached *= chance
        tau += reached
        found.append(Policy(draft_len, round(min(tau / cost * costs.row, 1.0), 2), tau / cost))
    return max(found, key=lambda policy: round(policy.speedup, 2))


def acceptance_of(head: ExitHead) -> list[float]:
    """What the sidecar says of each draft step, a_1, a_2, ...; nothing where it says nothing."""
    metrics, found = head.metadata.get("metrics", {}), list[float]()
    while f"acceptance_{len(found) + 1}" in metrics:
        found.append(float(metrics[f"acceptance_{len(found) + 1}"]))
    return found


class Policies:
    """The policies of a target's exits, each timed once."""

    def __init__(self, target: Target, engine: Engine) -> None:
        self.target, self.engine = target, engine
        self._found: dict[tuple[ExitHead, bool], Policy] = {}

    def known(self, head: ExitHead, is_exact: bool) -> Policy | None:
        """The policy of ``head``, if it was asked for before."""
        return self._found.get((head, is_exact))

    def find(self, head: ExitHead, is_exact: bool) -> Policy:
        """The policy of ``head`` in or out of exact mode; its own settings where no acceptance is recorded."""
        acceptance = acceptance_of(head)
        if acceptance:
            key = self._key(head, is_exact)
            costs = _kept(key) or _keep(key, measure(self.target, self.engine, head, len(acceptance), is_exact))
            found = choose(acceptance, costs)
            logger.info(
                "%s: at most %d drafts, stop at %.2f (modelled %.2f of plain decoding; cycles of 0, 1, ... drafts: %s)",
                head.name, found.draft_len, found.min_confidence, found.speedup,
                ", ".join(f"{cycle:.2f}" for cycle in costs.cycles),
            )  # fmt: skip
        else:
            logger.warning("draft_len=auto: exit %s has no recorded acceptance; its own settings are used", head.name)
            found = Policy(head.config.draft_len, head.config.min_confidence, 1.0)
        return self._found.setdefault((head, is_exact), found)

    def _key(self, head: ExitHead, is_exact: bool) -> dict[str, Any]:
        """All that times depend on."""
        target = self.target
        held = {name: str(versions()[name]) for name in ("selfspec", "torch")}
        return {
            "model": fingerprint(target.base), "exit": head.name, "head": _digest(head.config.model_dump_json()),
            "steps": len(acceptance_of(head)), "device": device_name(target.device), "dtype": str(target.dtype),
            "threads": torch.get_num_threads(), "kernels": dispatch.implementation(target.device),
            "cycles": self.engine.mode or mode_for(target.device), "exact": is_exact, **held,
        }  # fmt: skip


@torch.no_grad()
def measure(target: Target, engine: Engine, head: ExitHead, num_lengths: int, is_exact: bool) -> CycleCosts:
    """Time greedy cycles of 0 .. ``num_lengths`` drafts as decoding would run them: by the engine, or by the loop."""
    logger.info("draft_len=auto: timing cycles of exit %s on %s (once)", head.name, target.device)
    target.notice_changes()
    is_padded = is_exact and not target.fused.is_in_use
    methods, saves_rows = dict[str, Callable[[], float]](), not is_padded and head.adapter is not None
    for draft_len in range(num_lengths + 1):
        width = (exact_width(draft_len) if is_padded else 1) if is_exact else None
        drafter: Drafter = DRAFTERS[head.config.form](target, head, draft_len, 0.0) if draft_len else NoDrafter()
        state = _state(target, head, num_lengths, width)
        cycle = _engines_cycle(engine, drafter, state, Kind(drafter.exit_head, draft_len))
        saves_rows &= cycle is None  # the engine's cycles take what they take, whatever counts of them
        cycle = cycle or _loops_cycle(target, drafter, state)
        methods[f"cycle {draft_len}"] = partial(timed, cycle)
    ids, behind = random_prompt(target, num_lengths + 1), _state(target, head, num_lengths, 1 if is_exact else None)
    behind.tokens.pop()  # the one that no layer has seen
    methods |= {f"rows {n}": partial(time_pass, target, behind, ids[:, :n]) for n in (1, num_lengths + 1)}
    runs = {name: statistics.median(times) for name, times in interleave(methods, _rounds(methods)).items()}
    plain = runs["cycle 0"]
    row = max(0.0, runs[f"rows {num_lengths + 1}"] - runs["rows 1"]) / 1e3 / num_lengths / plain
    cycles = tuple(round(runs[f"cycle {draft_len}"] / plain, 3) for draft_len in range(num_lengths + 1))
    return CycleCosts(cycles, round(row, 3) if saves_rows else 0.0)


def _rounds(methods: dict[str, Callable[[], float]]) -> int:
    """How often all of them fit into the time there is, once they are warm."""
    for method in methods.values():
        method()
    seconds = timed(lambda: [method() for method in methods.values()])
    return min(max(int(SECONDS / seconds), ROUNDS.start), ROUNDS.stop - 1)


def _state(target: Target, head: ExitHead, num_lengths: int, width: int | None) -> DecodeState:
    """A text behind its prompt, with room for a cycle."""
    room = CONTEXT + 2 * num_lengths + 4
    cache = KVCache(target.num_layers + max(1, len(head.blocks)), room + (width or num_lengths + 1), width)
    tokens = random_prompt(target, CONTEXT)[0].tolist()
    state = DecodeState(tokens, cache, room, target.vocab_size, target.device, seed=0)
    start(target, DRAFTERS[head.config.form](target, head, 1, 0.0), state)
    return state


def _loops_cycle(target: Target, drafter: Drafter, state: DecodeState) -> Callable[[], None]:
    """One cycle of the loop, again and again: all but what is kept of it."""
    lengths = list(state.cache.lengths)

    def run() -> None:
        draft = drafter.propose(state)
        scored = score(target, state, draft, drafter.exit_head)
        judge(state, draft, scored)
        state.cache.lengths = list(lengths)

    return run


def _engines_cycle(engine: Engine, drafter: Drafter, state: DecodeState, kind: Kind) -> Callable[[], Any] | None:
    """One of the engine's, likewise; None where it would leave the text to the loop."""
    if not engine.takes(drafter, state):
        return None
    try:
        step = at_one_place(device_cycle(engine.target, kind, CONTEXT, state.cache.width))
        return capture(step) if (engine.mode or mode_for(engine.target.device)) == "graphs" else step
    except RuntimeError:  # it cannot be captured, as the engine will say
        return None


def _file(key: dict[str, Any]) -> Path:
    return cache_folder() / "costs" / f"{_digest(json.dumps(key, sort_keys=True))}.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _kept(key: dict[str, Any]) -> CycleCosts | None:
    """What was timed before under ``key``."""
    try:
        held = json.loads(_file(key).read_text(encoding="utf-8"))["costs"]
        return CycleCosts(tuple(map(float, held["cycles"])), float(held["row"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(key: dict[str, Any], costs: CycleCosts) -> CycleCosts:
    """Write them for later runs, where that can be done."""
    path = _file(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"costs": asdict(costs), "key": key}, indent=1).encode() + b"\n")
    except OSError as error:
        logger.warning("cannot keep what cycles take: %s; later runs time them again", error)
    return costs
