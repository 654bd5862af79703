"""The best state of a run: measured on held-out rows every few minutes, kept in memory and on disk."""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import TrainerCallback

from selfspec.files import write_atomically
from selfspec.training.config import TrainConfig
from selfspec.training.metrics import Metrics
from selfspec.training.plan import Costs, choose
from selfspec.training.ranks import any_says, is_main, wait
from selfspec.training.scores import drafted_text, score_rows
from selfspec.training.states import RowStates
from selfspec.training.student import Student
from selfspec.training.trainer import ExitTrainer

logger = logging.getLogger(__name__)

BEST_FILE = "best_state.safetensors"


class KeepBest(TrainerCallback):
    """Measures the held-out rows every few minutes, keeps the best state, stops at the time limit.

    The best state lies in the run's folder too, so that a run that goes on does not fall behind what it had.
    """

    def __init__(
        self,
        student: Student,
        held_out: Sequence[RowStates],
        config: TrainConfig,
        folder: Path,
        write: Callable[[Metrics], None],
        costs: Costs | None = None,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        self.student, self.held_out, self.config, self.write = student, held_out, config, write
        self.costs, self.decode = costs, decode
        self.path = folder / BEST_FILE
        self.best_tau = 0.0
        self.best_state: dict[str, Tensor] = {}
        self.began = self.last = time.monotonic()
        self.trainer: ExitTrainer | None = None

    def begin(self) -> None:
        """Take up the best state of an interrupted run, or measure the closed-form start."""
        is_found = self._take_up()
        wait()  # until all processes have looked: one of them writes it now
        if not is_found:
            self.measure(0)

    def _take_up(self) -> bool:
        try:
            with safe_open(self.path, "pt") as file:
                self.best_tau = float(file.metadata()["tau"])
                self.best_state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except FileNotFoundError:
            return False
        except SafetensorError as error:
            logger.warning("%s is broken (%s): the best state is looked for anew", self.path, error)
            return False
        return True

    def measure(self, step: int) -> None:
        """Evaluate now; keep and write the state if it is the best one so far."""
        with self.trainer.whole() if self.trainer else contextlib.nullcontext():
            scores = score_rows(self.student, self.held_out, self.config)
            text = self.decode and drafted_text(self.student, self.held_out[0], self.config, self.decode)
        metrics = scores.metrics()
        if self.costs is not None:
            metrics = replace(metrics, speedup=choose(scores.greedy_rows, self.costs).speedup)
        logger.info("step %d: held-out %s", step, metrics.flat())
        if self.trainer is not None:
            self.trainer.log({f"eval_{k}": v for k, v in metrics.flat().items()})
            if text is not None:
                self.trainer.log_text("held-out answer, accepted drafts in bold", text)
        if metrics.tau[-1] > self.best_tau:
            self.best_tau, self.best_state = metrics.tau[-1], self.student.trained_state()
            state = {name: value.contiguous().cpu() for name, value in self.best_state.items()}
            if is_main():
                write_atomically(self.path, save(state, metadata={"tau": str(self.best_tau)}))
            self.write(metrics)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Measure or stop when the clock says so."""
        del args, kwargs
        now = time.monotonic()
        if self.config.max_minutes and now - self.began > 60 * self.config.max_minutes:
            control.should_training_stop = True
        elif any_says(now - self.last > 60 * self.config.eval_minutes):
            self.measure(state.global_step)
            self.last = time.monotonic()
        return control
