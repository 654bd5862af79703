"""Where a figure comes from: versions, commit, machine, command."""

import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("selfspec", "torch", "transformers", "peft", "triton", "safetensors")


def versions() -> dict[str, str]:
    """Versions of this package and of those its results depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def device_name(device: str | torch.device = "cpu") -> str:
    """What the device calls itself; on a CPU with its instruction set as torch sees it."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{model} ({torch.backends.cpu.get_cpu_capability()})"


def commit() -> dict[str, Any]:
    """Commit and dirty state of the checkout; None where there is none."""
    here = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str | None:
        try:
            run = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=False)
        except OSError:
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    head = git("rev-parse", "HEAD")
    return {"commit": head, "dirty": bool(git("status", "--porcelain", "--untracked-files=no")) if head else None}


def provenance(device: str | torch.device = "cpu") -> dict[str, Any]:
    """All of it, for a results file."""
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {
        **commit(),
        "versions": versions(),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "command": shlex.join(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
