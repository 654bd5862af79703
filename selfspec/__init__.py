"""selfspec: lossless self-speculative decoding with early exits."""

from pathlib import Path

# a wheel carries kernels/, training/ and eval/ inside the package; in a checkout they lie beside it
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file():
    __path__.append(str(_checkout))

from selfspec.model import EarlyExitModel, GenerateOutput  # noqa: E402
from selfspec.stats import DecodeStats  # noqa: E402

__all__ = ["DecodeStats", "EarlyExitModel", "GenerateOutput"]
__version__ = "0.1.0"
