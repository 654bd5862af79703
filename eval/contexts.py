"""Plain decoding of this engine against transformers' generate, by tokens of context."""

import statistics
from functools import partial
from typing import Any

from selfspec.costs import CONTEXTS, interleave, random_prompt
from selfspec.eval.engine import ar
from selfspec.eval.measure import Meter, Method, Phases, Request
from selfspec.eval.peers import Transformers
from selfspec.model import EarlyExitModel


def plain_decoding(model: EarlyExitModel, rounds: int, num_tokens: int) -> dict[str, Any]:
    """Tokens per second of both, medians of interleaved runs behind random prompts, and their ratio."""
    methods: dict[str, Method] = {"ar": ar(model), "transformers": Transformers(model)}
    found = {}
    for context in CONTEXTS:
        ids = random_prompt(model.target, context)

        def speed(name: str, ids: Any = ids) -> float:
            request = Request(num_tokens)
            run = Meter(ids.device).measure(lambda meter: methods[name].run(ids, request, meter, Phases()))
            return run.num_decoded / run.decode_seconds

        runs = interleave({name: partial(speed, name) for name in methods}, rounds)
        speeds = {name: statistics.median(values) for name, values in runs.items()}
        found[str(context)] = {**speeds, "ratio": speeds["ar"] / speeds["transformers"]}
    return found
