"""The trained parts of an exit head, as PEFT sees them.

The head lives outside the base model and strictly behind the tap, so nothing it learns can change the target. It is an
ordinary PEFT adapter: LoRA on the borrowed block (by default one, the target's last layer), and bridge, norm and
confidence saved whole. Without a block it is a tuned lens (Belrose et al. 2023).

Shapes: B batch, R rows, D hidden, V vocabulary, V_d drafted vocabulary, n recalled layers.
"""

import copy
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.constants import DUMMY_TARGET_MODULES
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from selfspec.bridge import Bridge, Correction, StateCorrection
from selfspec.clones import dense_clone, detached_clone
from selfspec.linears import with_dispatched_linears
from selfspec.target import Target

TRAINED_WHOLE = ["bridge", "exit_norm", "confidence"]
Form = Literal["chain", "recursive", "parallel"]
FORMS = get_args(Form)


class ExitConfig(BaseModel):
    """Shape of one exit head; stored in its sidecar."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    exit_layer: int  # N: drafting runs layers [0, N)
    recall_layers: tuple[int, ...] = ()  # depths whose states of earlier positions the bridge also reads
    form: Form = "chain"  # through the trunk a token, on the exit's own output, or all from one pass
    num_steps: int = Field(default=1, ge=1)  # draft steps that it is trained for
    correction: Literal["bias", "state"] = "bias"  # by the token drafted before: on the logits, or on the state
    correction_rank: int = Field(default=0, ge=0)  # 0: none
    draft_vocab: tuple[int, ...] | None = None  # token ids that the head scores; None: all
    num_blocks: int = Field(default=1, ge=0)  # the target's last layers, borrowed
    has_mlp: bool = True  # false: of the blocks only the attention (Kangaroo's adapter)
    lora_rank: int = Field(default=32, ge=0)  # 0: the blocks are trained whole
    lora_alpha: int = Field(default=64, ge=1)
    draft_len: int = Field(default=2, ge=0)  # k, chosen from measured costs
    min_confidence: float = Field(default=0.0, ge=0.0, le=1.0)
    draft_width: int = Field(default=1, ge=1)  # candidates a step where a row more costs little: the draft is a tree
    min_branch: float | None = Field(default=None, ge=0.0, le=1.0)  # chance that is worth a row; None: by machine
    noise_scale: float = Field(
        default=1.0, gt=0.0, le=1.0
    )  # of the target's noise, that its drawn tokens are guessed with
    min_accepted: float = Field(default=0.05, ge=0.0)  # accepted drafts a cycle below which drafting pauses

    @field_validator("draft_vocab")
    @classmethod
    def _is_sorted_set(cls, ids: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if ids is not None and (not ids or ids[0] < 0 or any(a >= b for a, b in pairwise(ids))):
            raise ValueError("token ids must be given once each, in rising order, from 0 on")
        return ids

    @property
    def num_maps(self) -> int:
        """Bridge maps: one a step, where steps read different things of the target."""
        if self.form == "recursive":
            return 1
        return self.num_steps if self.recall_layers or self.form == "parallel" else 1

    def check(self, num_layers: int, vocab_size: int | None = None) -> None:
        """Raise ValueError unless the exit fits a target of ``num_layers`` layers (and so many token ids)."""
        lowest = 0 if self.recall_layers else 1
        if not lowest <= self.exit_layer < num_layers:
            raise ValueError(f"exit layer {self.exit_layer} is not in {lowest}..{num_layers - 1}")
        if self.num_blocks > num_layers:
            raise ValueError(f"{self.num_blocks} blocks cannot be borrowed from {num_layers} layers")
        if any(not self.exit_layer <= layer <= num_layers for layer in self.recall_layers):
            raise ValueError(f"recalled layers {self.recall_layers} are not in {self.exit_layer}..{num_layers}")
        if vocab_size is not None and self.draft_vocab is not None and self.draft_vocab[-1] >= vocab_size:
            raise ValueError(f"drafted token {self.draft_vocab[-1]} is beyond the vocabulary of {vocab_size}")


class ExitModule(nn.Module):
    """The trainable parts and the borrowed block, as PEFT sees them. Never registered inside the base model."""

    def __init__(self, target: Target, config: ExitConfig) -> None:
        super().__init__()
        config.check(target.num_layers)
        self.name_or_path = target.name  # PEFT records it
        size = target.hidden_size
        self.bridge = Bridge(size, len(config.recall_layers), config.num_maps, config.form == "recursive")
        self.correction: Correction | StateCorrection | None = None
        if config.correction_rank and config.correction == "state":
            self.correction = StateCorrection(size, config.correction_rank)
        elif config.correction_rank:
            num_drafted = target.vocab_size if config.draft_vocab is None else len(config.draft_vocab)
            self.correction = Correction(num_drafted, config.correction_rank)
        first = target.num_layers - config.num_blocks
        self.blocks = nn.Sequential(
            *(_borrowed(target, first + i, target.num_layers + i, config.has_mlp) for i in range(config.num_blocks))
        )
        self.exit_config = config
        self.exit_norm = copy.deepcopy(target.norm)
        self.confidence = nn.Linear(size, 1)
        nn.init.zeros_(self.confidence.weight)
        nn.init.constant_(self.confidence.bias, 4.0)  # untrained: go on drafting
        self.to(target.device)
        for name in [*TRAINED_WHOLE, *(["correction"] if self.correction is not None else [])]:
            getattr(self, name).to(target.dtype)

    @property
    def trained_whole(self) -> list[str]:
        """Parts that are trained and saved as they are; the blocks usually have LoRA."""
        has_whole_blocks = self.exit_config.lora_rank == 0 and len(self.blocks) > 0
        return (
            TRAINED_WHOLE
            + (["correction"] if self.correction is not None else [])
            + (["blocks"] if has_whole_blocks else [])
        )

    def forward(self, target: Target, inputs: Tensor, parents: Sequence[int] | None = None) -> Tensor:
        """Normed states [B, R, D] of bridge outputs ``inputs`` [B, R, D] (training): whole sequences, or trees."""
        blocks = list(active(self.blocks))
        slots = range(target.num_layers, target.num_layers + len(blocks))
        return self.exit_norm(target.run_uncached(blocks, inputs, slots, parents=parents))


def _borrowed(target: Target, layer: int, slot: int, has_mlp: bool) -> nn.Module:
    """A clone of the target's ``layer`` whose keys and values live in cache layer ``slot``; weights are shared."""
    clone = dense_clone(target.layers[layer], target.dtype)
    child: Any
    for child in clone.modules():
        if hasattr(child, "layer_idx"):
            child.layer_idx = slot
    if not has_mlp:
        if "mlp" not in clone._modules:
            raise ValueError(f"{target.family}: its layers have no mlp that could be left out")
        clone._modules["mlp"] = _Nothing()
    return clone


class _Nothing(nn.Module):
    """Adds nothing to the residual."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.zeros_like(hidden)


def build_adapter(target: Target, config: ExitConfig, dtype: torch.dtype | None = None) -> PeftModel:
    """A fresh `ExitModule` wrapped by PEFT: LoRA on every linear map of the blocks, the rest trained whole.

    ``dtype`` is that of what is trained (None: the target's).
    """
    module = ExitModule(target, config)
    maps = [] if "blocks" in module.trained_whole else [
        name for name, child in module.blocks.named_modules() if isinstance(child, nn.Linear | Conv1D)
    ]  # fmt: skip
    lora = LoraConfig(
        r=config.lora_rank or 1,
        lora_alpha=config.lora_alpha,
        # full paths: on a bare target nothing matches, and loading there fails instead of adapting the wrong layers
        target_modules=rf"blocks\.({'|'.join(map(re.escape, maps))})" if maps else DUMMY_TARGET_MODULES,
        modules_to_save=module.trained_whole,
    )
    adapter = get_peft_model(module, lora, autocast_adapter_dtype=False)
    for layer in adapter.modules():
        if isinstance(layer, LoraLayer):
            layer.merge = _refuse_merging
    for parameter in adapter.parameters():
        if parameter.requires_grad and dtype is not None:
            parameter.data = parameter.data.to(dtype)
    return adapter.to(target.device)


def _refuse_merging(*_: Any, **__: Any) -> None:
    raise NotImplementedError("merging an exit adapter would write into the target's own weights: it is refused")


def unwrap(adapter: PeftModel) -> ExitModule:
    """The `ExitModule` inside a PEFT model."""
    return adapter.base_model.model


def active(module: nn.Module) -> Any:
    """What PEFT trains in the place of ``module``."""
    return module.modules_to_save["default"] if isinstance(module, ModulesToSaveWrapper) else module


def fold(block: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of ``block`` with LoRA added to its linear maps, in weights of its own; the target keeps its own."""
    clone = detached_clone(block)
    for path, module in block.named_modules():
        if isinstance(module, LoraLayer):
            plain: Any = detached_clone(module.get_base_layer())
            with torch.no_grad():
                delta = module.get_delta_weight("default").to(plain.weight.dtype)
                plain.weight = nn.Parameter((plain.weight + delta).to(dtype), requires_grad=False)
            clone.get_submodule(path.rpartition(".")[0])._modules[path.rpartition(".")[2]] = plain
    return with_dispatched_linears(clone)
