"""A tree's accepted rows are moved by one launch for all layers, and what comes of it is the reference's."""

import pytest
import torch

from selfspec.cache import KVCache
from selfspec.decode import DecodeState
from selfspec.kernels import dispatch
from selfspec.target import Target
from tests.conftest import ScriptedDrafter, autoregressive, build_model, every_outcome, generate, prompt_of
from tests.kernel_tools import kernels

compact_triton = kernels("compact")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Trees are compacted by Triton, everything else is the reference's; the tensors moved by each launch."""
    if not torch.cuda.is_available() and dispatch._missing_for_triton("cpu"):
        pytest.skip("triton was imported before TRITON_INTERPRET was set")
    seen: list[int] = []
    compact, launch = KVCache.compact, compact_triton.compact

    def by_triton(*arguments: object) -> None:
        with monkeypatch.context() as patch:
            patch.setenv("SELFSPEC_KERNELS", "triton")
            compact(*arguments)  # type: ignore[arg-type]

    def spy(held: object, *arguments: object) -> None:
        seen.append(len(held.tensors))  # type: ignore[attr-defined]
        launch(held, *arguments)

    monkeypatch.setenv("SELFSPEC_KERNELS", "reference")
    monkeypatch.setattr(KVCache, "compact", by_triton)
    monkeypatch.setattr(compact_triton, "compact", spy)
    return seen


def test_a_generation_of_trees_leaves_the_references_cache(monkeypatch, launches):
    """Bit for bit in every slot ever written, over cycles that accept none, some and all; and the same text."""
    target, prompt = Target(build_model("llama", num_hidden_layers=3)), prompt_of(6)
    text = autoregressive(target, prompt, 20)

    def tree() -> DecodeState:
        drafter = ScriptedDrafter(text, 3, every_outcome(6, 20, 3), has_decoys=True)
        return generate(target, drafter, prompt, 20)

    found = tree()
    assert set(launches) == {2 * 3}
    moved = launches.copy()
    monkeypatch.setattr(compact_triton, "compact", lambda *_: None)  # the planted bug: nothing moves
    assert tree().tokens != text
    monkeypatch.undo()
    monkeypatch.setenv("SELFSPEC_KERNELS", "reference")
    expected = tree()
    assert len(moved) > 2
    assert found.tokens == expected.tokens == text
    assert found.cache.lengths == expected.cache.lengths
    for ours, theirs in ((found.cache._keys, expected.cache._keys), (found.cache._values, expected.cache._values)):
        assert all(torch.equal(a, b) for a, b in zip(ours[:3], theirs[:3], strict=True))


def test_layers_that_come_later_and_sequences_that_go_are_noticed(launches):
    """The addresses that a launch goes by are those of the cache as it is."""
    cache, rows = KVCache(2, 8), torch.arange(24.0).view(2, 1, 12, 1)  # of the second sequence 12, 13, ...
    for layer in (0, 1):
        cache.open(0, 6, 6)
        keys, _ = cache.update(rows[:, :, :6], rows[:, :, 6:], layer)
        cache.compact(1, [0, 2, 4], range(2))
    assert keys[1].flatten().tolist() == [12, 13, 15, 17, 16, 17]
    cache.select(torch.tensor([1]))
    cache.compact(0, [0, 3], range(2))
    assert cache._keys[1][:, :, :6].flatten().tolist() == [12, 17, 15, 17, 16, 17]
    assert launches == [2, 4, 4]
