"""What is compared, by name; a new method is one entry.

A method hands new tokens to `Meter.emit` as they come out, so all are timed and counted by the same code.
"""

from collections.abc import Callable

from selfspec.eval.engine import AR, Engine, ar
from selfspec.eval.measure import Method
from selfspec.eval.peers import PEER, StaticCompiled, Transformers, assistant_early_exit, assistant_model, prompt_lookup

METHODS: dict[str, Callable[..., Method]] = {
    AR: ar,
    "selfspec": Engine,
    PEER: Transformers,
    "transformers-static": StaticCompiled,
    "assistant_early_exit": assistant_early_exit,
    "prompt_lookup": prompt_lookup,
    "assistant_model": assistant_model,
}
DEFAULT = ("ar", "selfspec", "transformers", "prompt_lookup")
