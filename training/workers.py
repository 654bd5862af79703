"""Processes that each hold the target: on a CPU several with one thread each do more than one with several threads."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from transformers import PreTrainedModel

from selfspec.clones import is_split
from selfspec.pretrained import load_target_model

Result = TypeVar("Result")
COPIES = 3  # times the weights that a process needs: weights, activations, what torch holds back

_held: PreTrainedModel | None = None  # the target of a worker process


def num_workers_for(model: PreTrainedModel, wanted: int | None) -> int:
    """How many processes may hold ``model``; None wants as many as torch has threads.

    One where it is not on a CPU, came from no folder that another process could load it from, or is one of several
    that run it together.
    """
    source = str(model.config.name_or_path)
    if is_split(model) or model.device.type != "cpu" or not source or not (Path(source) / "config.json").is_file():
        return 1
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    fitting = int(psutil.virtual_memory().available // (COPIES * size))
    return max(1, min(torch.get_num_threads() if wanted is None else wanted, fitting))


def in_order(
    model: PreTrainedModel, function: Callable[..., Result], tasks: Iterable[tuple[Any, ...]], num_workers: int = 1
) -> Generator[Result]:
    """``function(model, *task)`` of every task, in their order; ``function`` is a module's own.

    With several workers a few tasks run ahead of what is asked for; closing the iterator stops them.
    """
    if num_workers == 1:
        for task in tasks:
            yield function(model, *task)
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), _load, (str(model.config.name_or_path), model.dtype)
    )
    pending: deque[Future[Result]] = deque()
    try:
        for task in tasks:
            pending.append(pool.submit(_call, function, task))
            if len(pending) > num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        if pending:
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()


def _load(path: str, dtype: torch.dtype) -> None:
    global _held
    leave_with_parent()
    with contextlib.suppress(ValueError):  # not in a main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    torch.set_num_threads(1)
    _held, _ = load_target_model(path, dtype=dtype, device="cpu")


def leave_with_parent() -> None:
    """End this process when the one that started it ends, however that comes: a killed parent cannot say so."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _call(function: Callable[..., Result], task: tuple[Any, ...]) -> Result:
    assert _held is not None
    return function(_held, *task)
