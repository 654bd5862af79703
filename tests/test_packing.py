"""Rows packed into one sequence train as they do side by side, and nothing of one row reaches another."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from selfspec import layer_calls
from selfspec.exit_module import ExitConfig, build_adapter
from selfspec.masks import tree_shape
from selfspec.passes import packs_of
from selfspec.target import Target
from selfspec.training import student as student_module
from selfspec.training.data import Row
from selfspec.training.run import train_on_rows
from selfspec.training.states import Batch, RowStates, collect, make_batch, recall_back
from selfspec.training.student import Objective, Student
from tests.conftest import mutate, target_of
from tests.test_training import VOCAB, build, settings, written_rows

LENGTHS, STARTS = (19, 4, 33, 12), (5, 1, 2, 1)  # of rows, and where their answers begin


def prepared(family: str, form: str) -> tuple[Student, list[RowStates]]:
    """A student with random weights in all that is trained, and rows of uneven lengths."""
    target = target_of(family)
    config = ExitConfig(
        exit_layer=1, recall_layers=(2, 6), form=form, num_steps=3, correction_rank=4 * (form == "parallel"),
        draft_vocab=tuple(range(3, 60)), lora_rank=2,
    )  # fmt: skip
    student = Student(target, build_adapter(target, config), config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in student.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.normal_(0.0, 0.05, generator=generator)
    rng = np.random.default_rng(0)
    rows = [Row(rng.integers(3, 97, n + 1), start) for n, start in zip(LENGTHS, STARTS, strict=True)]
    return student, collect(target, config, rows)


def loss_and_gradients(student: Student, states: list[RowStates], is_packed: bool) -> tuple[Tensor, dict[str, Tensor]]:
    batch = make_batch(states, torch.device("cpu"), torch.float32, is_packed)
    steps = student.draw_steps(batch, torch.Generator().manual_seed(5))
    student.zero_grad()
    loss, _ = Objective(student, "cross_entropy", 0.8, 64)(batch, steps)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("form", ["chain", "recursive", "parallel"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])  # rotary, windows of 8, learned positions
def test_packed_rows_have_the_loss_and_gradients_of_padded_ones(family: str, form: str) -> None:
    """In float32, for rows of uneven lengths, one shorter than a draft, scored from their first position on."""
    student, states = prepared(family, form)
    loss, gradients = loss_and_gradients(student, states, is_packed=False)
    found, packed = loss_and_gradients(student, states, is_packed=True)
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=1e-6)
    assert gradients.keys() == packed.keys()
    assert {part for name in packed for part in ("bridge", "lora", "exit_norm") if part in name} >= {"bridge", "lora"}
    for name, gradient in gradients.items():
        assert (packed[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name


@pytest.mark.parametrize(
    ("function", "user", "old", "new", "form"),  # its user is the module that imported it by name
    [
        (
            tree_shape,
            layer_calls,
            "ancestors[parent] & (parent >= 0)",
            "ancestors[row - 1]",
            "chain",
        ),  # a row sees the one before
        (Batch.parents.fget, None, "if position else -1", "if index else -1", "chain"),  # one long row
        (recall_back, student_module, "positions >= steps", "source >= 0", "chain"),  # recalls the row before
        (Student._run_tree, None, "places - positions.clamp(max=j)", "(places - j).clamp(min=0)", "parallel"),
    ],
    ids=["mask", "positions", "recall", "shift"],
)
def test_a_leak_between_rows_is_seen(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], user: Any, old: str, new: str, form: str
) -> None:
    """Each way for one row to reach another, planted, changes the loss of packed rows."""
    student, states = prepared("llama", form)
    expected, _ = loss_and_gradients(student, states, is_packed=True)
    mutate(monkeypatch, function, old, new)
    monkeypatch.setattr(student.target.calls, "_last", None)  # the masks of the pass before
    if user is not None:
        monkeypatch.setattr(user, function.__name__, getattr(sys.modules[function.__module__], function.__name__))
    found, _ = loss_and_gradients(student, states, is_packed=True)
    assert abs(found - expected) > 1e-5


def test_packs_hold_every_row_once() -> None:
    """Within the budget, unless a row alone is beyond it, and not in the order that they came in."""
    lengths = [30, 5, 200, 64, 64, 1, 99, 40]
    packs = packs_of(lengths, 100, seed=1)
    assert sorted(i for pack in packs for i in pack) == list(range(8))
    assert all(sum(lengths[i] for i in pack) <= 100 or pack == [2] for pack in packs)
    assert packs != packs_of(lengths, 100, seed=2)


def test_a_packed_run_trains(tmp_path: Path) -> None:
    done = train_on_rows(Target(build()), written_rows(build(), 40), settings(tmp_path, pack=True), tmp_path, VOCAB)
    assert done.metrics.loss < done.at_start.loss - 0.05
