"""What tests of the engine share: exits that are right now and then, and a generation done twice."""

from typing import Any

import pytest
import torch

from selfspec import EarlyExitModel
from selfspec.exit_module import ExitConfig, build_adapter
from selfspec.exits import ExitHead
from selfspec.target import Target
from tests.conftest import OUTPUTS, build_model, prompt_of

PROMPT = torch.tensor([prompt_of(12)])


def trained_exit(target: Target, **shape: Any) -> ExitHead:
    """An exit with bridge, recall and block that all have a say in what is drafted, most of it the state at the tap."""
    made = {"exit_layer": 2, "recall_layers": (3, 6), "num_steps": 3, "lora_rank": 4, "draft_len": 3, "min_accepted": 0,
            "min_branch": 0, "noise_scale": 0.8}  # fmt: skip
    config = ExitConfig(**made | shape)
    adapter, generator = build_adapter(target, config), torch.Generator().manual_seed(3)
    size = target.hidden_size
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if "lora" in name or "confidence" in name:
                parameter.normal_(0, 0.1, generator=generator)
            elif "bridge" in name:
                parameter.normal_(0, 0.02, generator=generator)
                if parameter.dim() == 2:
                    parameter[:, :size] += torch.eye(size)
    return ExitHead(target, "trained", config, adapter)


def quiet_model(family: str, dtype: torch.dtype = torch.float32, **shapes: dict[str, Any]) -> EarlyExitModel:
    """A model whose layers say little, so that an exit at any of them is right now and then; exits by name."""
    model = EarlyExitModel.from_target(build_model(family, dtype))
    with torch.no_grad():
        for name, parameter in model.base.named_parameters():
            if name.endswith(tuple(f"{n}.weight" for n in OUTPUTS)):
                parameter.mul_(0.15)
    for name, shape in shapes.items():
        head = model.exits[name] = trained_exit(model.target, **shape)
        if head.correction is not None:
            with torch.no_grad():
                for parameter in head.correction.parameters():
                    parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(4))
    return model


def both(model: EarlyExitModel, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[Any, Any]:
    """The same generation with and without the engine."""
    ours = model.generate(PROMPT, **{"max_new_tokens": 30, **settings})
    with monkeypatch.context() as patch:
        patch.setenv("SELFSPEC_ENGINE", "off")
        theirs = model.generate(PROMPT, **{"max_new_tokens": 30, **settings})
    return ours, theirs
