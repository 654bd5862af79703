"""A generation under way: what it says where there is no room for it."""

from typing import Any

import pytest
import torch

from selfspec import EarlyExitModel
from selfspec.cache import KVCache
from tests.conftest import prompt_of, shallow_target_of

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
