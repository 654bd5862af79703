"""How Triton kernels are tested: on a GPU, else in Triton's interpreter; and compiled ahead of time.

The interpreter is chosen in conftest.py, before anything imports triton. It cannot be left within a process, so what is
compiled is compiled in another one, which this file is when it is run.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SM_80, SM_90, GFX942 = ("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)


def kernels(name: str) -> Any:
    """The module of Triton kernels ``name``; where triton is missing the test module that asks is skipped."""
    pytest.importorskip("triton", reason="Triton kernels need triton, which there is for Linux alone")
    return importlib.import_module(f"selfspec.kernels.{name}_triton")


@dataclass(frozen=True)
class Job:
    """A kernel to compile: ``types`` of its arguments, values of its constants (dtypes by their name in triton)."""

    module: str
    kernel: str
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    target: tuple[str, int | str, int] = SM_90
    options: dict[str, Any] = field(default_factory=dict)
    divisible: tuple[str, ...] = ()  # integers that are multiples of 16, as a vocabulary is


def compiled(jobs: list[Job]) -> list[dict[str, int]]:
    """For each job ``registers`` a thread, ``spills`` and, of NVIDIA's, ``wide_loads`` (of 16 bytes a thread).

    Compiled by a process without the interpreter.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__],
            input=json.dumps([asdict(job) for job in jobs]),
            capture_output=True,
            text=True,
            env={**environment, "TRITON_CACHE_DIR": cache},
        )
    assert done.returncode == 0, done.stderr
    made: list[dict[str, int]] = json.loads(done.stdout)
    return made


def error(found: Tensor, truth: Tensor) -> float:
    """Largest distance from ``truth``, which is float64."""
    assert found.shape == truth.shape
    return float((found.double() - truth).abs().max())


def assert_as_near(found: Tensor, plain: Tensor, truth: Tensor) -> None:
    """``found`` is at most twice as far from the float64 ``truth`` as ``plain`` torch of its dtype is.

    Plain torch may be nearer than its dtype resolves, by luck; it counts as half a unit in the last place away.
    """
    assert found.dtype == plain.dtype
    resolution = torch.finfo(plain.dtype).eps * float(truth.abs().max())
    assert error(found, truth) <= max(2 * error(plain, truth), resolution), (error(found, truth), error(plain, truth))


def _compile(job: dict[str, Any]) -> dict[str, int]:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(job["module"]), job["kernel"])
    names = list(kernel.arg_names)
    constants = {k: getattr(tl, v) if isinstance(v, str) else v for k, v in job["constants"].items()}
    signature = {name: "constexpr" if name in constants else job["types"].get(name, "i32") for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in job["divisible"]]
    source = ASTSource(
        kernel, signature, constexprs=constants, attrs={(i,): [["tt.divisibility", 16]] for i in aligned}
    )
    made = triton.compile(
        source, target=GPUTarget(*job["target"]), options={"num_warps": job["num_warps"]} | job["options"]
    )
    return _amd_usage(made.asm["amdgcn"]) if "amdgcn" in made.asm else _nvidia_usage(made.asm["cubin"])


def _amd_usage(assembly: str) -> dict[str, int]:
    (registers,) = re.findall(r"\.vgpr_count:\s+(\d+)", assembly)
    spills = re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", assembly)
    assert len(spills) == 2
    return {"registers": int(registers), "spills": sum(map(int, spills))}


def _nvidia_usage(cubin: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([tool, flag, file.name], check=True, capture_output=True, text=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    (registers,) = re.findall(r"REG:(\d+)", usage)
    assert "EXIT" in code  # the listing is one of instructions
    return {
        "registers": int(registers),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "wide_loads": len(re.findall(r"\bLDG\.[\w.]*128\b", code)),
    }


if __name__ == "__main__":
    json.dump([_compile(job) for job in json.load(sys.stdin)], sys.stdout)
