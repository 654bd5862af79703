"""A generation under way: what it says where there is no room for it."""

from typing import Any

import pytest
import torch

from selfspec import EarlyExitModel
from selfspec.cache import KVCache
from selfspec.kernels import dispatch
from tests.conftest import prompt_of, shallow_target_of, target_of

PROMPT = torch.tensor([prompt_of(12)])


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    return EarlyExitModel.from_target(shallow_target_of("llama").base, [2, 4])


@pytest.mark.parametrize("message", ["DefaultCPUAllocator: can't allocate memory", None])
def test_no_room_is_said_in_one_line_and_leaves_the_model_usable(model, monkeypatch, message):
    """Batch, length and a remedy; other errors of torch stay what they are."""
    before = model.generate(PROMPT, max_new_tokens=24).sequences
    error = torch.OutOfMemoryError("CUDA out of memory\n at length") if message is None else RuntimeError(message)

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "tensors", fail)
        with pytest.raises(MemoryError, match=r"batch of 1 and 12 of 20 tokens.*lower max_new_tokens") as caught:
            model.generate(PROMPT, max_new_tokens=8)
        assert "\n" not in str(caught.value)
        error = RuntimeError("something else")
        with pytest.raises(RuntimeError, match="something else"):
            model.generate(PROMPT, max_new_tokens=8)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=24).sequences, before)


def test_kernels_are_compiled_before_the_clock_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a user's first text would be slow for a reason that has nothing to do with decoding."""
    model, loaded = EarlyExitModel.from_target(target_of("llama").base, [2]), list[str]()
    for name in ("cpu_kernels", "cpu_draft", "cpu_sample"):
        monkeypatch.setattr(dispatch, name, lambda _, name=name: loaded.append(name))
    dispatch.load(model.target.device)
    assert loaded == ["cpu_kernels", "cpu_draft", "cpu_sample"]
    monkeypatch.setattr(dispatch, "load", lambda device: loaded.append(str(device)))
    model.prepare(torch.tensor([prompt_of(4)]), max_new_tokens=2)
    assert loaded[3:].count("cpu") == 1
