"""LayerSkip's recipe (Elhoushi et al. 2024), for comparison: the whole model learns to be cut short.

Every layer is trained to be read by the model's own norm and output layer, later layers are dropped more often than
early ones. That changes what the model says. So it is done to a copy, by LoRA on all of its linear maps, which is then
merged: the result is another model, a target of its own, and says so in its config. Its exits need no head of theirs:
`selfspec generate --model OUTPUT/model --exits 4`.

Shapes: B rows, S positions, A of them carry the loss, L layers, D hidden, V vocabulary.
"""

import copy
import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments

from selfspec.passes import batches_of
from selfspec.target import Target
from selfspec.training.config import TrainConfig
from selfspec.training.data import Row

logger = logging.getLogger(__name__)

MODEL_FOLDER, MARK = "model", "selfspec_trained_copy_of"


def layer_weights(num_layers: int, scale: float) -> list[float]:
    """Weight of the loss behind each layer, the last one's included: with the layer's number squared, and one in all.

    ``scale`` is that of the layers before the last.
    """
    raw = [scale * layer * (layer + 1) / 2 for layer in range(num_layers - 1)]
    raw.append(num_layers - 1 + scale * sum(range(num_layers - 1)))
    return [weight / sum(raw) for weight in raw]


def drop_rates(num_layers: int, most: float) -> list[float]:
    """Chance that each layer is skipped: none for the first, growing exponentially to ``most`` for the last."""
    return [most * (math.exp(layer * math.log(2) / max(num_layers - 1, 1)) - 1) for layer in range(num_layers)]


def train_copy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], config: TrainConfig, folder: Path
) -> Path:
    """Train a copy of ``model`` on ``rows``; returns its folder. ``model`` itself stays as it is."""
    settings = config.layerskip
    assert settings is not None
    changed = copy.deepcopy(model)
    target = Target(changed, check=False)
    lora = LoraConfig(r=config.lora_rank or 8, lora_alpha=config.lora_alpha, target_modules="all-linear")
    adapted = get_peft_model(changed, lora, autocast_adapter_dtype=False).train()
    groups = batches_of([len(row.ids) for row in rows], config.batch_tokens)
    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"), max_steps=config.max_steps or math.ceil(config.epochs * len(groups)),
        per_device_train_batch_size=1, learning_rate=config.learning_rate, lr_scheduler_type="cosine",
        warmup_steps=config.warmup_ratio, max_grad_norm=1.0, seed=config.seed, use_cpu=model.device.type == "cpu",
        logging_steps=10, save_strategy="no", report_to=["tensorboard"], remove_unused_columns=False, label_names=[],
    )  # fmt: skip
    trainer = _Trainer(adapted, target, arguments, [[rows[i] for i in g] for g in groups], config)
    trainer.train()
    merged = adapted.merge_and_unload().eval()
    setattr(merged.config, MARK, {"model": Path(str(model.config.name_or_path)).name, **settings.model_dump()})
    merged.save_pretrained(folder / MODEL_FOLDER)
    tokenizer.save_pretrained(folder / MODEL_FOLDER)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    (folder / "metrics.json").write_text(json.dumps({"log": log, "num_rows": len(rows)}, indent=1) + "\n")
    logger.warning("%s is another model than the one it was made of: its text differs", folder / MODEL_FOLDER)
    return folder / MODEL_FOLDER


class _Rows(Dataset[list[Row]]):
    def __init__(self, groups: list[list[Row]]) -> None:
        self.groups = groups

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> list[Row]:
        return self.groups[index]


class _Trainer(Trainer):
    """Cross-entropy to what stands in the rows, behind every layer whose turn it is and behind the last one."""

    def __init__(
        self,
        model: nn.Module,
        target: Target,
        arguments: TrainingArguments,
        groups: list[list[Row]],
        config: TrainConfig,
    ) -> None:
        super().__init__(model=model, args=arguments, train_dataset=_Rows(groups), data_collator=_collate)
        assert config.layerskip is not None
        self.settings, self.layers = config.layerskip, target.base_layers
        self.norm, self.output = target.norm, target.base.get_output_embeddings()
        self.weights = layer_weights(len(self.layers), self.settings.exit_scale)
        self.rates = drop_rates(len(self.layers), self.settings.layer_dropout)
        self.generator = torch.Generator().manual_seed(config.seed)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:
        """The weighted sum over this step's layers."""
        last, period = len(self.layers) - 1, self.settings.curriculum
        chosen = {layer for layer in range(last) if layer % period == self.state.global_step % period} | {last}
        with _watched(self.layers, chosen) as states, _dropped(self.layers, self.rates, self.generator):
            model(input_ids=inputs["ids"], use_cache=False)
        wanted, is_scored = inputs["wanted"], inputs["is_scored"]
        losses = [self.weights[layer] * self._loss(state[is_scored], wanted) for layer, state in states.items()]
        return torch.stack(losses).sum() / sum(self.weights[layer] for layer in chosen)

    def _loss(self, states: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.output(self.norm(states)).float(), wanted)


def _collate(items: list[list[Row]]) -> dict[str, Tensor]:
    """Rows padded on the right: ids [B, S], the tokens [A] that answers go on with, and where they are predicted."""
    rows = items[0]
    ids = pad_sequence([torch.from_numpy(row.ids) for row in rows], batch_first=True)
    is_scored = torch.zeros(ids.shape, dtype=torch.bool)
    for line, row in zip(is_scored, rows, strict=True):
        line[row.answer_start - 1 : len(row.ids) - 1] = True
    wanted = torch.cat([torch.from_numpy(row.ids[row.answer_start :]) for row in rows])
    return {"ids": ids, "wanted": wanted, "is_scored": is_scored}


@contextmanager
def _watched(layers: Sequence[nn.Module], chosen: set[int]) -> Iterator[dict[int, Tensor]]:
    """The states behind the ``chosen`` layers of the passes made meanwhile."""
    held: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        return lambda _module, _args, output: held.__setitem__(
            layer, output[0] if isinstance(output, tuple) else output
        )

    with ExitStack() as stack:
        for layer in sorted(chosen):
            stack.callback(layers[layer].register_forward_hook(keep(layer)).remove)
        yield held


@contextmanager
def _dropped(layers: Sequence[nn.Module], rates: Sequence[float], generator: torch.Generator) -> Iterator[None]:
    """Layers that are drawn hand on what they were given."""

    def skip(_module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        return (arguments[0], *output[1:]) if isinstance(output, tuple) else arguments[0]

    drawn = torch.rand(len(layers), generator=generator).tolist()
    with ExitStack() as stack:
        for layer, rate, chance in zip(layers, rates, drawn, strict=True):
            if chance < rate:
                stack.callback(layer.register_forward_hook(skip, prepend=True).remove)
        yield
