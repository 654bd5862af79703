"""Several processes of one run, as torchrun starts them: rank 0 writes, all of them train."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from accelerate import PartialState
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

PATIENCE = timedelta(days=7)  # that others wait while rank 0 writes data


def num_processes() -> int:
    """How many processes the run has."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """Which of them this one is."""
    return int(os.environ.get("RANK", 0))


def is_main() -> bool:
    """Whether this process is the one that writes."""
    return rank() == 0


def join(is_cpu: bool) -> None:
    """Let the processes find each other, where there are several."""
    if num_processes() > 1:
        PartialState(cpu=is_cpu, timeout=PATIENCE)


def wait() -> None:
    """Go on when all processes are here."""
    if num_processes() > 1:
        distributed.barrier()


@contextmanager
def main_first(is_together: bool = False) -> Iterator[None]:
    """Rank 0 enters first, the others when it has left; or all ``is_together``, and leave so."""
    if not is_main() and not is_together:
        wait()
    yield
    if is_main() or is_together:
        wait()


def any_says(flag: bool) -> bool:
    """Whether ``flag`` is set in any process; all of them have to ask."""
    if num_processes() == 1:
        return flag
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    flags = torch.tensor([int(flag)], device=device)
    distributed.all_reduce(flags, distributed.ReduceOp.MAX)
    return bool(flags.item())


def share(module: nn.Module) -> None:
    """Let each process hold a part of the weights of ``module`` and of what is kept for them (FSDP2)."""
    fully_shard(module, reshard_after_forward=False)
