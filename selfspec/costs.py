"""What the parts of a cycle cost on this machine: timed in place, methods in turn, medians."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfspec.cache import KVCache
from selfspec.decode import DecodeState, decode
from selfspec.device_cycle import DeviceCycle
from selfspec.device_steps import Held, Kind
from selfspec.drafter import DRAFTERS, NoDrafter
from selfspec.exits import ExitHead
from selfspec.target import Target

if TYPE_CHECKING:
    from selfspec.model import EarlyExitModel

CONTEXTS = (64, 256, 1000)
NUM_ROWS = (1, 2, 3, 4, 5, 6)  # of the passes that are timed


def interleave(methods: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Results of every method, run in turn ``rounds`` times after a warm-up, each time in another order.

    Not rotated: what a method finds in the processor's caches would then always be the same one's leavings.
    """
    results: dict[str, list[Any]] = {name: [] for name in methods}
    for method in methods.values():
        method()
    names, chance = list(methods), random.Random(0)
    for _ in range(rounds):
        chance.shuffle(names)
        for name in names:
            results[name].append(methods[name]())
    return results


def clocked(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that ``call`` takes, and what it makes, which is on the host."""
    began = time.perf_counter()
    made = call()
    return time.perf_counter() - began, made


def timed(call: Callable[[], Any]) -> float:
    """Seconds that ``call`` takes, what it left running on a GPU included."""
    _wait()
    began = time.perf_counter()
    call()
    _wait()
    return time.perf_counter() - began


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def random_prompt(target: Target, length: int) -> Tensor:
    """Ids [1, length] of the first tokens, special ones left out where there are that many."""
    high = min(target.vocab_size, 40_000)
    ids = torch.randint(min(100, high // 2), high, (1, length), generator=torch.Generator().manual_seed(length))
    return ids.to(target.device)


@torch.no_grad()
def prefilled(target: Target, ids: Tensor, num_slots: int = 1) -> DecodeState:
    """A state behind the prompt ``ids`` [1, S], all layers run, with room for the rows of one pass.

    ``num_slots`` are the cache's layers for an exit's blocks.
    """
    context = ids.shape[1]
    cache = KVCache(target.num_layers + num_slots, context + 16)
    target.run_layers(target.embed(ids), 0, target.num_layers, cache)
    cache.lengths = [context] * len(cache.lengths)
    return DecodeState(ids[0].tolist(), cache, context + 16, target.vocab_size, target.device)


@torch.no_grad()
def time_pass(target: Target, state: DecodeState, tokens: Tensor) -> float:
    """Milliseconds of a whole pass over ``tokens`` [1, R] behind ``state``, which is left as it was."""
    first = len(state.tokens)

    def run() -> None:
        target.finish(target.embed(tokens, first), 0, state.cache)

    seconds = timed(run)
    state.cache.rollback(first)
    return seconds * 1e3


@torch.no_grad()
def time_draft_step(target: Target, state: DecodeState, head: ExitHead, exit_layer: int, token: Tensor) -> float:
    """Milliseconds of a draft step for ``token`` [1, 1], as the drafter runs it, ``head`` at ``exit_layer``."""
    first = len(state.tokens)

    def run() -> None:
        tap = target.run_layers(target.embed(token, first), 0, exit_layer, state.cache)
        head.logits(target, head.states(target, state, tap, range(1, 2))).argmax()

    seconds = timed(run)
    state.cache.rollback(first)
    return seconds * 1e3


@torch.no_grad()
def time_draft(target: Target, state: DecodeState, head: ExitHead, draft_len: int) -> float:
    """Milliseconds of a whole draft of ``draft_len`` tokens behind ``state``, which is left as it was."""
    cache, drafter = state.cache, DRAFTERS[head.config.form](target, head, draft_len, 0.0)
    held = list(cache.lengths)
    cache.rollback(len(state.tokens) - 1)  # the last token is known, but has not been run
    seconds = timed(lambda: drafter.propose(state))
    cache.lengths = held
    return seconds * 1e3


def device_cycle(target: Target, kind: Kind, context: int, width: int | None = None) -> DeviceCycle:
    """A cycle of the engine behind ``context`` tokens over a cache of its own; keys and values are zeros, which costs
    the same.
    """
    num_slots = 1 if kind.head is None else max(1, len(kind.head.blocks))
    held = Held.of(target, kind)
    for place in (held.first, held.seen, held.end):
        place.fill_(context)
    return DeviceCycle(target, kind, KVCache(target.num_layers + num_slots, context + 256, width), held)


def at_one_place(cycle: DeviceCycle) -> Callable[[], None]:
    """``cycle``, again and again where it is now."""
    held = cycle.held
    place, token = held.first.clone(), held.token.clone()

    def run() -> None:
        cycle()
        for moved in (held.first, held.seen):
            moved.copy_(place)
        held.token.copy_(token)

    return run


@torch.no_grad()
def pass_costs(
    model: "EarlyExitModel", rounds: int, contexts: Sequence[int] = CONTEXTS, num_rows: Sequence[int] = NUM_ROWS
) -> dict[str, Any]:
    """Milliseconds of a whole pass over each of ``num_rows``, of a cycle without drafts, of a draft step and its parts.

    By context; ratios beside them: ``verify_5_over_1``, ``loop_overhead`` over a bare pass, the draft step over the
    sum of its parts run bare and over its share of the weights.
    """
    target, head = model.target, model.default_exit
    found = {}
    for context in contexts:
        ids = random_prompt(target, context + max(8, *num_rows))
        state = prefilled(target, ids[:, :context], 1 if head is None else max(1, len(head.blocks)))
        methods: dict[str, Callable[[], float]] = {
            f"pass_{n}": partial(time_pass, target, state, ids[:, context : context + n]) for n in num_rows
        }
        methods["loop_step"] = _loop_step(model, ids[0, :context].tolist(), rounds)
        if head is not None:
            methods |= _draft_parts(model, state, ids, context)
        runs = interleave(methods, rounds)
        costs = {f"{name}_ms": statistics.median(values) for name, values in runs.items()}
        costs["verify_5_over_1"] = costs["pass_5_ms"] / costs["pass_1_ms"]
        costs["loop_overhead"] = costs["loop_step_ms"] / costs["pass_1_ms"] - 1
        if head is not None:
            costs["draft_step_over_weights"] = costs["draft_step_ms"] / costs["pass_1_ms"] / weight_share(model, head)
            costs["draft_step_over_parts"] = costs["draft_step_ms"] / costs["draft_parts_ms"]
            costs["draft_step_over_pass"] = costs["draft_step_ms"] / costs["pass_1_ms"]
        found[str(context)] = costs
    return found


def _loop_step(model: "EarlyExitModel", prompt: list[int], rounds: int) -> Callable[[], float]:
    """A cycle of the decoding loop without drafts, at positions that go on: what a pass costs with all around it."""
    target, max_length = model.target, len(prompt) + rounds + 3
    cache = KVCache(target.num_layers + 1, max_length + 1)
    state = DecodeState(list(prompt), cache, max_length, target.vocab_size, target.device)
    cycles = decode(target, NoDrafter(), state)
    next(cycles)  # the prompt
    return lambda: timed(lambda: next(cycles)) * 1e3


def weight_share(model: "EarlyExitModel", head: ExitHead) -> float:
    """Weights that a draft step reads over those of a whole pass: its cost where memory bandwidth is the limit."""

    def count(*modules: nn.Module) -> int:
        return sum(p.numel() for module in modules for p in module.parameters())

    target = model.target
    drafting = [*target.layers[: head.exit_layer], head.head.output]
    if head.adapter is not None:
        drafting += [*head.blocks, head.bridge.maps[0]]
    return count(*drafting) / count(*target.layers, target.output)


def _draft_parts(
    model: "EarlyExitModel", state: DecodeState, ids: Tensor, context: int
) -> dict[str, Callable[[], float]]:
    """A draft step as the drafter runs it, and the sum of its parts called bare: what it must cost at least.

    Of an exit that is no chain also whole drafts of 1, 2, ... tokens.
    """
    target, head, cache = model.target, model.default_exit, state.cache
    assert head is not None
    token = ids[:, context : context + 1]
    width = target.hidden_size * len(head.recall_layers)
    state.recall = torch.zeros(1, 1, width, dtype=target.dtype, device=target.device) if width else None

    tap = target.embed(token, context)

    def parts() -> float:
        began = time.perf_counter()
        target.run_layers(tap, 0, head.exit_layer, cache)
        if head.adapter is not None:
            hidden = head.bridge(tap, state.recall, 1)
            if head.blocks:
                target.run_modules(head.blocks, hidden, head.slots(target), cache)
        head.head(tap)
        seconds = time.perf_counter() - began
        cache.rollback(context)
        return seconds * 1e3

    step = partial(time_draft_step, target, state, head, head.exit_layer, token)
    lengths = range(1, head.config.num_steps + 1) if head.config.form != "chain" else ()
    drafts = {f"draft_{k}": partial(time_draft, target, state, head, k) for k in lengths}
    return {"draft_step": step, "draft_parts": parts, **drafts}
