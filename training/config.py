"""Settings of one training run: a YAML file (by path, or by bare name from configs/train) and dotted overrides."""

import os
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from selfspec.config import load_config
from selfspec.exit_module import ExitConfig, Form
from selfspec.storage import NAME


class DataConfig(BaseModel):
    """Where the training rows come from: written by the target itself (default), or a jsonl with answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str | None = None  # shards of self-written rows; None: OUTPUT/data
    num_tokens: int = Field(default=300_000, ge=1)  # answer tokens
    prompts: str | None = None  # jsonl or hub data set of prompts to answer; None: the target writes those too
    temperatures: tuple[float, ...] = (0.0, 0.8)
    max_turns: int = Field(default=1, ge=1)  # of a conversation, whose user the target plays as well
    batch_size: int = Field(default=64, ge=1)  # prompts answered at once
    max_new_tokens: int = Field(default=160, ge=1)  # of an answer
    max_prompt_tokens: int = Field(default=512, ge=1)  # longer prompts are left out
    jsonl: str | None = None  # jsonl or hub data set of rows that already have answers
    avoid: tuple[str, ...] = ()  # files or data sets of evaluation text: what shares a run of words is left out
    max_row_tokens: int = Field(default=512, ge=2)  # longer rows are left out
    own_task_tokens: int = Field(default=0, ge=0)  # answer tokens to tasks made of the answers that the target wrote
    own_task_prompt_tokens: int = Field(default=1024, ge=1)  # longer tasks are left out; their rows may be this long


class LayerSkipConfig(BaseModel):
    """A copy of the whole model is trained instead of an exit; see `layerskip`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    exit_scale: float = Field(default=0.2, gt=0)  # weight of the layers before the last in the loss
    layer_dropout: float = Field(default=0.1, ge=0, lt=1)  # chance that the last layer is skipped
    curriculum: int = Field(default=5, ge=1)  # every so many layers have a loss in a step, in turn


SHARED = {
    "model", "revision", "dtype", "load", "also", "data", "output", "states", "keep_states", "state_dtype", "fsdp",
    "workers", "seed", "force", "layerskip",
}  # fmt: skip


class TrainConfig(BaseModel):
    """One run of `train_exits`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None  # hub id or folder; None: the default model
    revision: str | None = None
    dtype: str | None = None  # of the target; None: float32 on a CPU, bfloat16 elsewhere; what is trained is float32
    load: dict[str, Any] = {}  # further keywords for transformers' from_pretrained, for instance device_map
    exit: str = Field(default="exit", pattern=f"^{NAME.pattern}$")  # its name, and its folder's
    also: dict[str, dict[str, Any]] = {}  # further exits from the same data, by name: the settings that they change
    exit_layer: int = Field(default=1, ge=0)
    recall_layers: tuple[int, ...] | None = None  # None: a third, two thirds and all of the layers
    form: Form = "chain"  # of the draft: each token fed with the one before, or all from one pass
    num_steps: int = Field(default=3, ge=1)
    correction: Literal["bias", "state"] = "bias"  # by the token drafted before: on the logits, or on the state
    correction_rank: int = Field(default=0, ge=0)  # 0: none
    draft_vocab_size: int | None = Field(default=8192, ge=1)  # None: the whole vocabulary
    draft_len: int | None = Field(default=None, ge=1)  # None: chosen with min_confidence from costs measured at the end
    min_confidence: float | None = Field(default=None, ge=0, le=1)
    draft_width: int | None = Field(default=None, ge=1)  # candidates a draft step; None: chosen with draft_len, or 1
    min_branch: float | None = Field(default=None, ge=0, le=1)  # chance that is worth a row; None: by machine
    num_blocks: int = Field(default=1, ge=0)  # of the target's last layers, borrowed; 0: a linear map alone
    has_mlp: bool = True  # of the blocks; false: attention alone
    start: str = "borrowed"  # of blocks and bridge; "random": trained whole; or a trained exit, as folder or hub id
    lora_rank: int = Field(default=64, ge=0)  # 0: the blocks are trained whole
    lora_alpha: int = Field(default=64, ge=1)
    layerskip: LayerSkipConfig | None = None  # train a copy of the whole model in the place of an exit
    data: DataConfig = DataConfig()
    output: str = "runs/exit"
    max_steps: int | None = Field(default=None, ge=0)  # 0: stop after the closed-form start
    max_minutes: float | None = Field(default=None, gt=0)  # of training; the schedule then follows the clock
    epochs: float = Field(default=8.0, gt=0)
    batch_tokens: int = Field(default=2048, ge=1)
    pack: bool = False  # rows of a batch one behind another in one sequence, drawn at random; false: alike ones, padded
    learning_rate: float = Field(default=1e-3, gt=0)  # LoRA and norm
    bridge_learning_rate: float = Field(default=5e-4, gt=0)
    warmup_ratio: float = Field(default=0.02, ge=0, lt=1)
    loss: Literal["cross_entropy", "kl", "reverse_kl", "tv", "lk"] = "cross_entropy"
    loss_positions: int | None = Field(default=None, ge=1)  # guesses whose logits are held at once; None: by device
    step_decay: float = Field(default=0.8, gt=0, le=1)  # loss weight of draft step j is step_decay ** (j - 1)
    seed: int = 0
    eval_fraction: float = Field(default=0.05, gt=0, lt=1)
    eval_tokens: int = Field(default=4000, ge=1)  # held-out answer tokens that choose the best state; others judge it
    eval_minutes: float = Field(default=2.0, gt=0)  # how often the held-out rows are measured and the best state saved
    save_steps: int = Field(default=100, ge=1)  # checkpoints, from which the same run goes on
    ridge: float | None = Field(default=None, gt=0)  # of the closed-form start; None: chosen on held-out rows
    ridge_tokens: int = Field(default=100_000, ge=1)  # that the closed-form start is fitted on
    fsdp: bool = False  # several processes share what is trained (FSDP2) instead of each holding all of it
    workers: int | None = Field(default=1, ge=1)  # processes that write data and run the teacher; None: one a thread
    force: bool = False  # go on with a run although its settings or its data have changed
    keep_states: bool = True  # false: the target runs over each batch again, and no states take room
    state_dtype: Literal["bfloat16", "float8"] = "bfloat16"  # of kept states
    states: str | None = None  # folder of kept teacher states, to be shared by runs; None: OUTPUT/states

    @model_validator(mode="after")
    def _knows_its_exits(self) -> "TrainConfig":
        """The settings of further exits are checked before anything is written."""
        if self.start == "random" and self.lora_rank and self.num_blocks:
            raise ValueError("start: random blocks are trained whole; set lora_rank=0")
        self.each_exit()
        return self

    def each_exit(self) -> "list[TrainConfig]":
        """The run of every exit, one after another; what concerns all of them is the first one's."""
        shared = sorted({field for changes in self.also.values() for field in {*changes} & SHARED})
        if shared or self.exit in self.also:
            raise ValueError(f"also: {', '.join(shared) or self.exit} is for the whole run, not for a further exit")
        own = self.model_dump(exclude={"also", "exit"})
        return [self, *(TrainConfig(**{**own, **changes, "exit": name}) for name, changes in self.also.items())]

    @property
    def trained_start(self) -> str | None:
        """The trained exit that this run starts from."""
        return None if self.start in ("borrowed", "random") else self.start

    def exit_config(self, num_layers: int, draft_vocab: tuple[int, ...] | None) -> ExitConfig:
        """The head that this run trains, for a target of ``num_layers`` layers."""
        recall = self.recall_layers
        if recall is None:
            recall = tuple(sorted({max(1, round(num_layers * i / 3)) for i in (1, 2, 3)} | {num_layers}))
            recall = tuple(layer for layer in recall if layer >= self.exit_layer)
        return ExitConfig(
            exit_layer=self.exit_layer, recall_layers=recall, form=self.form, num_steps=self.num_steps,
            correction=self.correction, correction_rank=self.correction_rank, draft_vocab=draft_vocab,
            num_blocks=self.num_blocks, has_mlp=self.has_mlp,
            lora_rank=self.lora_rank, lora_alpha=self.lora_alpha, draft_len=self.draft_len or 2,
            min_confidence=self.min_confidence or 0.0, draft_width=self.draft_width or 1, min_branch=self.min_branch,
        )  # fmt: skip


def load_train_config(source: str | os.PathLike[str] | None = None, overrides: list[str] | None = None) -> TrainConfig:
    """The settings of a training run; see `load_config`."""
    return load_config(TrainConfig, "train", source, overrides or [])
