"""What drafting from a layer costs here: draft steps and passes, timed in turn with the engine's own parts."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from selfspec.costs import NUM_ROWS, interleave, prefilled, random_prompt, time_draft_step, time_pass
from selfspec.eval.probe_text import Report
from selfspec.exit_module import ExitConfig, build_adapter
from selfspec.exits import ExitHead
from selfspec.target import Target

CONTEXT = 256  # tokens already in the cache
ROUNDS = 9


@dataclass(frozen=True)
class Costs:
    """Medians of interleaved runs."""

    step_ms: float  # a plain decoding step: a pass over one row
    rows: tuple[float, ...]  # passes over 1, 2, ... rows in plain decoding steps; the first is 1
    context: int  # tokens in the cache
    drafts: dict[tuple[str, int], float]  # by exit and layer, a draft step in plain decoding steps


def measure_costs(
    target: Target, layers: Sequence[int], vocab: tuple[int, ...] | None, report: Report, rounds: int = ROUNDS
) -> Costs:
    """Time passes over 1 to 6 rows and a draft step of both exits at all ``layers``.

    What follows a layer is the same for all of them, so each exit is built once and moved.
    """
    context = min(CONTEXT, (target.context_length or CONTEXT) // 2)
    ids = random_prompt(target, context + max(NUM_ROWS))
    state = prefilled(target, ids[:, :context])
    config = ExitConfig(exit_layer=layers[0], draft_vocab=vocab, lora_rank=1)
    heads = {
        "lens": ExitHead(target, "lens", config),
        "bridge": ExitHead(target, "bridge", config, build_adapter(target, config)),
    }
    methods: dict[str, Callable[[], float]] = {
        f"pass {n}": partial(time_pass, target, state, ids[:, context : context + n]) for n in NUM_ROWS
    }
    for layer in layers:
        for name, head in heads.items():
            methods[f"{name} {layer}"] = partial(
                time_draft_step, target, state, head, layer, ids[:, context : context + 1]
            )
    report("timing", 0, 1)
    medians = {name: statistics.median(runs) for name, runs in interleave(methods, rounds).items()}
    report("timing", 1, 1)
    step = medians["pass 1"]
    return Costs(
        step_ms=step,
        context=context,
        rows=tuple(medians[f"pass {n}"] / step for n in NUM_ROWS),
        drafts={(name, layer): medians[f"{name} {layer}"] / step for layer in layers for name in heads},
    )
