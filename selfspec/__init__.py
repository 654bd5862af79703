"""selfspec: lossless self-speculative decoding with early exits."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

# a wheel carries kernels/, training/ and eval/ inside the package; in a checkout they lie beside it
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file():
    __path__.append(str(_checkout))

if TYPE_CHECKING:
    from selfspec.model import EarlyExitModel, GenerateOutput
    from selfspec.stats import DecodeStats

__all__ = ["DecodeStats", "EarlyExitModel", "GenerateOutput"]
__version__ = "0.1.0"

_HOME = {"DecodeStats": "selfspec.stats", "EarlyExitModel": "selfspec.model", "GenerateOutput": "selfspec.model"}


def __getattr__(name: str) -> Any:
    """Import torch and transformers with the first class asked for, so that `selfspec --help` need not wait."""
    if name not in _HOME:
        raise AttributeError(f"module 'selfspec' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
