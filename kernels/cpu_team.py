"""Compiled functions run by a team of threads, and the barrier between their steps."""

import ctypes
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding
import torch
from numba import cfunc, njit, types

_barrier = types.ExternalFunction("GOMP_barrier", types.void())
thread_number = types.ExternalFunction("omp_get_thread_num", types.int32())


@njit
def wait(team: int) -> None:
    """Go on when every thread of the team is here."""
    if team > 1:
        _barrier()


def _load_team() -> Any:
    """Starts a team of threads, by GNU OpenMP as torch brought it, so that torch's own threads do the work.

    None where torch runs on another library: then one thread works, and the names only stand for it.
    """
    for path in sorted(Path(torch.__file__).parent.glob("lib/libgomp*")):
        llvmlite.binding.load_library_permanently(str(path))
        return ctypes.CDLL(str(path)).GOMP_parallel
    nothing = ctypes.cast(ctypes.pythonapi.Py_GetVersion, ctypes.c_void_p).value  # never called: any address will do
    for name in ("GOMP_barrier", "omp_get_thread_num"):
        llvmlite.binding.add_symbol(name, nothing)
    return None


_start_team = _load_team()


def compiled(function: Callable[[int], None]) -> Any:
    """``function`` as machine code; kept on disk, under a name that changes with the sources, where that can be."""
    sources = sorted(Path(__file__).parent.glob("cpu_*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    function.__qualname__ = f"{function.__name__}_{digest}"
    try:
        return cfunc(types.void(types.int64), cache=True)(function)
    except RuntimeError:  # nowhere to keep it
        return cfunc(types.void(types.int64))(function)


def num_threads() -> int:
    """How many threads share a call: torch's setting, where they can be had."""
    return 1 if _start_team is None else torch.get_num_threads()


def call(function: Any, record: int, threads: int) -> None:
    """Run compiled ``function`` on the words at the address ``record``, by so many threads."""
    if threads > 1:
        _start_team(ctypes.c_void_p(function.address), ctypes.c_void_p(record), threads, 0)
    else:
        function.ctypes(record)
