"""Training data written by steps that ask the host nothing: on a GPU one graph, here the same steps called."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from selfspec.target import Target
from selfspec.training import batch
from selfspec.training.batch import Written, write_batch
from tests.conftest import build_model, prompt_of

LENGTHS = (12, 5, 9, 30, 7, 12)


def written(model: Any, num_tokens: int = 14, eos: tuple[int, ...] = (), temperature: float = 0.0) -> list[Written]:
    prompts = [[5, 6, 7, *prompt_of(length, length)] for length in LENGTHS]
    temperatures, generator = torch.full((len(prompts),), temperature), torch.Generator().manual_seed(1)
    return write_batch(Target(model), prompts, temperatures, num_tokens, generator, eos, (0, 2, 6))


class NoQuestions(TorchDispatchMode):
    """Refuses what needs to know a tensor's numbers: such a step cannot be captured."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), function
        return function(*args, **(kwargs or {}))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps are called as if captured; how many sequences each has."""
    monkeypatch.setenv("SELFSPEC_ENGINE", "calls")
    sizes, call = list[int](), batch._Replayed.__call__
    prepare = batch._Replayed._prepare

    def spy(self: Any, ids: torch.Tensor, *args: Any) -> Any:
        sizes.append(len(ids))
        return call(self, ids, *args)

    def guarded(self: Any, *args: Any) -> None:
        prepare(self, *args)
        step = self._step

        def quiet() -> None:
            with NoQuestions():
                step()

        self._step = quiet

    monkeypatch.setattr(batch._Replayed, "__call__", spy)
    monkeypatch.setattr(batch._Replayed, "_prepare", guarded)
    return sizes


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gpt_neox", "gemma2"])
def test_answers_states_and_sums_are_those_of_plain_steps(family, replays, monkeypatch):
    """Ragged prompts behind common tokens; answers that end early stay in the batch until half of it has ended."""
    model = build_model(family)
    eos = tuple(range(30, 45))
    ours = written(model, eos=eos)
    monkeypatch.setenv("SELFSPEC_ENGINE", "off")
    theirs = written(model, eos=eos)
    assert [w.answer for w in ours] == [w.answer for w in theirs]
    assert len({len(w.answer) for w in ours}) > 2
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.log_sums, other.log_sums)
        assert torch.equal(mine.argmaxes, other.argmaxes)
        assert all(torch.allclose(mine.states[d], other.states[d], atol=1e-4) for d in (0, 2, 6))
    if family not in ("gemma2",):  # whose embedding is scaled by the family's own forward
        assert replays
        assert all(later == size or later <= size // 2 for size, later in pairwise(replays))
        assert replays[0] == len(LENGTHS)


def test_steps_of_which_no_states_are_kept(replays, monkeypatch):
    """As a comparison of speeds writes them."""
    model, prompts = Target(build_model("llama")), [prompt_of(length, length) for length in LENGTHS]
    ours = write_batch(model, prompts, torch.zeros(len(prompts)), 6, torch.Generator(), ())
    assert replays
    monkeypatch.setenv("SELFSPEC_ENGINE", "off")
    theirs = write_batch(model, prompts, torch.zeros(len(prompts)), 6, torch.Generator(), ())
    assert [w.answer for w in ours] == [w.answer for w in theirs]


def test_sampled_answers_are_the_same_while_nobody_leaves(replays, monkeypatch):
    model = build_model("llama")
    ours = written(model, temperature=1.0)
    assert replays == [len(LENGTHS)] * 13
    monkeypatch.setenv("SELFSPEC_ENGINE", "off")
    assert [w.answer for w in ours] == [w.answer for w in written(model, temperature=1.0)]


def test_a_step_that_cannot_be_captured_is_called_and_named_once(replays, monkeypatch, caplog):
    def refuse(step: Any) -> Any:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    model = build_model("llama")
    monkeypatch.setattr(batch, "mode_for", lambda _: "graphs")
    monkeypatch.setattr(batch, "capture", refuse)
    eos = tuple(range(30, 45))
    ours = written(model, eos=eos)
    assert replays
    assert sum("steps run as plain calls" in record.message for record in caplog.records) == 1
    monkeypatch.undo()
    assert [w.answer for w in ours] == [w.answer for w in written(model, eos=eos)]


def test_a_target_with_hooks_takes_plain_steps(replays):
    model = build_model("llama")
    seen = list[int]()
    handle = model.model.layers[3].register_forward_hook(lambda *_: seen.append(1))
    written(model, num_tokens=4)
    handle.remove()
    assert not replays
    assert seen
