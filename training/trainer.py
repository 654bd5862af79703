"""Training of one exit head on the teacher's states, kept or fresh; the base model stays as it is."""

import contextlib
import logging
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback

from selfspec.files import write_atomically
from selfspec.passes import batches_of, packs_of
from selfspec.training.checkpoints import check_facts, newest_whole, seal
from selfspec.training.config import TrainConfig
from selfspec.training.fresh_states import num_positions, take
from selfspec.training.losses import overlap
from selfspec.training.ranks import any_says, is_main, num_processes, rank, share, wait
from selfspec.training.states import Batch, RowStates, make_batch
from selfspec.training.stopping import StopRequests
from selfspec.training.student import Guesses, Objective, Student

logger = logging.getLogger(__name__)

STATE_FILE = "trained_state.safetensors"
SHARED_OPTIMIZER_FILE = "shared_optimizer.pt"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # one file, whatever the number of processes


class _Batches(Dataset[list[int]]):
    """Ready-made groups of rows."""

    def __init__(self, groups: list[list[int]]) -> None:
        self.groups = groups

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> list[int]:
        return self.groups[index]


class _Turns(Sampler[int]):
    """A new order each epoch, the same in every process; each of them takes every n-th item."""

    def __init__(self, size: int, seed: int, rank: int, num_ranks: int) -> None:
        self.size, self.rank, self.num_ranks = size, rank, num_ranks
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self.size // self.num_ranks

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.size, generator=self.generator).tolist()
        yield from order[self.rank : len(self) * self.num_ranks : self.num_ranks]


class NonFiniteLossError(FloatingPointError):
    """The loss is NaN or infinite; no step was made with it."""


class ExitTrainer(Trainer):
    """Hugging Face's loop over kept states; checkpoints hold the trained weights, never the base.

    ``facts`` say what the run is fed: a checkpoint of other facts is not gone on with.
    """

    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        student: Student,
        states: Sequence[RowStates],
        config: TrainConfig,
        folder: Path,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        lengths, most = num_positions(states), config.batch_tokens
        groups = packs_of(lengths, most, config.seed) if config.pack else batches_of(lengths, most)
        self.states, self.config, self.facts = states, config, facts or {}
        self.generator = torch.Generator().manual_seed(config.seed)
        self.began = time.monotonic()
        if config.max_minutes and num_processes() > 1:
            raise ValueError("max_minutes goes by one clock; several processes take max_steps or epochs")
        # processes that hold one target together take the same rows, others each their own
        self.rank, self.num_ranks = (0, 1) if student.target.is_split else (rank(), num_processes())
        limit = config.max_steps or math.ceil(config.epochs * (len(groups) // self.num_ranks))
        self.num_steps_planned = limit
        arguments = TrainingArguments(
            output_dir=str(folder / "checkpoints"),
            max_steps=limit,
            per_device_train_batch_size=1,
            learning_rate=config.learning_rate,
            max_grad_norm=1.0,
            seed=config.seed,
            use_cpu=student.target.device.type == "cpu",
            logging_steps=10,
            save_strategy="steps",
            save_steps=config.save_steps,
            save_total_limit=2,
            report_to=["tensorboard"],
            remove_unused_columns=False,
            label_names=[],
            dataloader_pin_memory=False,
            ddp_find_unused_parameters=False,
        )
        self.student = student
        self.is_shared = config.fsdp and num_processes() > 1
        num_held = config.loss_positions or (
            256 if student.target.device.type == "cpu" else 4096
        )  # what its cache holds
        objective = Objective(student, config.loss, config.step_decay, num_held)
        super().__init__(model=objective, args=arguments, train_dataset=_Batches(groups))
        if self.is_shared:
            share(objective)
            self.is_distributed_loading_by_transformers = True  # the Trainer's word for a model to be left as it is
        self.can_return_loss = True
        self.log_extra: dict[str, float] = {}
        self.num_positions, self.last_log = 0, time.monotonic()  # since then

    def get_train_dataloader(self) -> DataLoader[Any]:
        """One group of rows a step and process, in an order drawn anew each epoch."""
        order = _Turns(len(self.train_dataset), self.config.seed, self.rank, self.num_ranks)
        return DataLoader(self.train_dataset, batch_size=1, sampler=order, collate_fn=self._collate)

    def _collate(self, items: list[list[int]]) -> dict[str, Any]:
        rows = take(self.states, items[0])
        return {"batch": make_batch(rows, self.args.device, torch.float32, self.config.pack)}

    def _prepare_input(self, data: Any) -> Any:
        return data

    def create_optimizer(self, *_: Any, **__: Any) -> torch.optim.Optimizer:
        """AdamW with a learning rate of its own for the bridge."""
        if self.optimizer is None:
            named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
            bridge = [p for n, p in named if ".bridge." in n]
            rest = [p for n, p in named if ".bridge." not in n]
            groups = [
                {"params": rest, "lr": self.config.learning_rate},
                {"params": bridge, "lr": self.config.bridge_learning_rate},
            ]
            self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0, betas=(0.9, 0.98))
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Warm-up, then cosine to zero over the planned steps, or over the minutes given, whichever end comes first."""

        def factor(step: int) -> float:
            done = step / num_training_steps
            if self.config.max_minutes:
                done = max(done, (time.monotonic() - self.began) / (60 * self.config.max_minutes))
            warm = min(1.0, (step + 1) / max(1.0, self.config.warmup_ratio * num_training_steps))
            return warm * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
        """The `Objective` on one batch."""
        batch: Batch = inputs["batch"]
        loss, guesses = model(batch, self.student.draw_steps(batch, self.generator))
        self.num_positions += int(batch.lengths.sum())
        if self.state.global_step % self.args.logging_steps == 0:
            self._note(guesses.at(1), batch)
        return loss

    @torch.no_grad()
    def _note(self, first: Guesses, batch: Batch) -> None:
        """What the guesses of the first draft step are worth, for the log."""
        logits = self.student.logits(first, batch)
        agreement = (self.student.guess(logits) == batch.argmaxes[first.places]).float().mean().item()
        accepted = overlap(logits, self.student.teacher.probs(batch, first.places)).mean().item()
        tau = sum(agreement**n for n in range(self.config.num_steps + 1))
        self.log_extra = {"agreement": agreement, "accepted_mass": accepted, "predicted_tau": tau}

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Loss comes with agreement, sum min(p, q) and predicted tau of the last batch."""
        if "loss" in logs:
            logs |= {k: round(v, 4) for k, v in self.log_extra.items()}
            now = time.monotonic()
            logs["minutes"] = round((now - self.began) / 60, 2)
            logs["tokens_per_second"] = round(self.num_positions / (now - self.last_log), 1)
            self.num_positions, self.last_log = 0, now
        super().log(logs, *args, **kwargs)

    def log_text(self, name: str, text: str) -> None:
        """Show ``text`` in TensorBoard, where it runs."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
                callback.tb_writer.add_text(name, text, self.state.global_step)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        del state_dict  # the default writes the frozen base as well
        folder = Path(output_dir or self.args.output_dir)
        state = self.student.trained_state()
        if not is_main():
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / STATE_FILE, save({k: v.contiguous().cpu() for k, v in state.items()}))

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        try:
            super()._save_checkpoint(*args, **kwargs)
            wait()  # every process leaves something in the folder
            if is_main():
                seal(folder, self.facts)
            wait()
        except Exception as error:
            if is_main():
                shutil.rmtree(folder, ignore_errors=True)
            reason = " ".join(str(error).split())
            raise OSError(f"{folder} could not be written ({reason}); the checkpoint before it is whole") from error

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """One step's loss and gradients; NonFiniteLossError instead of a step that would spoil the weights."""
        loss = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss):
            remedy = f"lower learning_rate ({self.config.learning_rate}); the best state so far is kept"
            raise NonFiniteLossError(f"the loss is {loss.item()} at step {self.state.global_step}: {remedy}")
        return loss

    def go_on(self) -> None:
        """Train, from the newest whole checkpoint of the run's folder where there is one.

        A first SIGINT or SIGTERM saves a checkpoint after the step at hand and then ends the program.
        """
        found = newest_whole(Path(self.args.output_dir))
        if found is not None and not self.config.force:
            check_facts(found[0], found[1], self.facts)
        with StopRequests() as requests:
            self.add_callback(_StopWhenAsked(requests))
            self.train(resume_from_checkpoint=None if found is None else str(found[0]))
        requests.leave()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """While it is entered, all weights are here, though the processes share them otherwise."""
        if self.is_shared:
            self.model.unshard()
        yield
        if self.is_shared:
            self.model.reshard()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_shared:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = get_optimizer_state_dict(self.model, self.optimizer, options=WHOLE)
        if is_main():
            torch.save(state, Path(output_dir) / SHARED_OPTIMIZER_FILE)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.is_shared:
            super()._load_optimizer_and_scheduler(checkpoint)
        elif checkpoint is not None:
            state = torch.load(Path(checkpoint) / SHARED_OPTIMIZER_FILE)
            set_optimizer_state_dict(self.model, self.optimizer, state, options=WHOLE)
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / "scheduler.pt"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        del model
        self.student.load_trained_state(load_file(Path(resume_from_checkpoint) / STATE_FILE))


class _StopWhenAsked(TrainerCallback):
    """Saves and stops after the step in which a signal came."""

    def __init__(self, requests: StopRequests) -> None:
        self.requests = requests

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called by the Trainer."""
        del args, state, kwargs
        if any_says(self.requests.signal is not None):
            control.should_save = control.should_training_stop = True
        return control
