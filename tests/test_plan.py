"""How far to draft, from costs and confidence; and the settings of a run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from selfspec.config import config_names
from selfspec.target import Target
from selfspec.training.confidence import fit_logistic
from selfspec.training.config import load_train_config
from selfspec.training.data import Row
from selfspec.training.metrics import RowScores, calibration_error, walk_cycles
from selfspec.training.noise_scale import SCALES, agreements
from selfspec.training.plan import Costs, choose, predict
from selfspec.training.run import train_on_rows
from selfspec.training.scores import score_rows
from selfspec.training.states import collect
from selfspec.training.student import Student
from tests.conftest import autoregressive, prompt_of, shallow_target_of
from tests.test_training import VOCAB, build, settings, written_rows
from tests.test_trees import NUM_NEW, head_of, text_with


def test_cycles_are_walked_as_decoding_goes() -> None:
    """All right: three tokens a cycle; all wrong: one; a low confidence stops a cycle before it draws."""

    def row(is_right: bool, *confidence: float) -> RowScores:
        return RowScores([[is_right] * 9] * 2, [[c] * 9 for c in confidence])

    assert walk_cycles(row(True, 0.9, 0.9), 2).num_cycles == 3
    wrong = walk_cycles(row(False, 0.9, 0.9), 2)
    assert (wrong.num_cycles, wrong.num_drafted, wrong.tried) == (9, [2] * 7 + [1, 0], [8, 0])
    stopped = walk_cycles(row(True, 0.9, 0.5), 2, min_confidence=0.6)
    assert (stopped.num_drafted, stopped.num_steps) == ([1] * 4 + [0], [2] * 4 + [0])
    assert walk_cycles(row(True, 0.2, 0.9), 2, min_confidence=0.6).num_steps == [1] * 8 + [0]


def test_accepted_drafts_are_marked() -> None:
    """Drafts of two while right: of nine tokens every third is the target's own, and what follows a wrong one."""
    right = RowScores([[True] * 9] * 2, [[0.9] * 9] * 2)
    assert walk_cycles(right, 2).is_drafted == [True, True, False] * 3
    first_wrong = RowScores([[False] + [True] * 8, [True] * 9], [[0.9] * 9] * 2)
    assert walk_cycles(first_wrong, 2).is_drafted == [False] + [True, True, False] * 2 + [True, False]


def test_calibration_error_is_how_far_confidence_lies_from_truth() -> None:
    """Sure and right: 0. Sure of .8 where half are right: .3. Bins are weighted by what falls into them."""
    assert calibration_error([RowScores([[True] * 4], [[1.0] * 4])]) == 0
    halves = RowScores([[True, False] * 10], [[0.8] * 20])
    assert calibration_error([halves]) == pytest.approx(0.3)
    assert calibration_error([halves, RowScores([[True] * 20], [[1.0] * 20])]) == pytest.approx(0.15)


def test_drafting_is_planned_from_costs_and_confidence() -> None:
    """Cheap and right: far. Dear: one token. Wrong where confidence is low: stop there. Speed is the formula."""
    sure = RowScores([[True] * 30] * 3, [[0.95] * 30] * 3)
    cheap, dear = Costs(0.05, (1, 1.02, 1.05, 1.1)), Costs(0.8, (1, 1.1, 2.5, 4.0))
    assert choose([sure], cheap).draft_len == 3
    assert choose([sure], dear).draft_len == 1
    assert choose([RowScores(sure.is_right[:1], sure.confidence[:1])], cheap).draft_len == 1  # no step 2 was scored
    assert predict([sure], cheap, 2, 0.0) == pytest.approx(30 / (10 * (2 * 0.05 + 1.05)))
    padded = Costs(0.05, (1, 1.02, 1.05, 1.1), is_padded=True)  # exact mode passes 2 or 4 rows
    assert padded.draft_lens() == [1, 2, 3]
    assert Costs(0.05, (1, 1.02, 1.05), is_padded=True).draft_lens() == [1]
    assert predict([sure], padded, 2, 0.0) == pytest.approx(30 / (10 * (2 * 0.05 + 1.1)))
    half = RowScores([[True, False, False] * 10] * 3, [[0.9, 0.1, 0.1] * 10] * 3)
    plan = choose([half], cheap)
    assert plan.min_confidence > 0.05
    assert plan.speedup > predict([half], cheap, plan.draft_len, 0.0)


def test_siblings_are_walked_where_their_chance_is_worth_a_row() -> None:
    """Always the second guess: it stands where it was drafted, which ends a cycle; without a chance it is not."""
    second = RowScores([[False] * 9] * 2, [[0.9] * 9] * 2, [[[0.5, 0.3, 0.1]] * 9] * 2, [[1] * 9] * 2)
    assert walk_cycles(second, 1, 0.0, 2, 0.2).num_drafted == [2] * 4 + [0]
    assert walk_cycles(second, 1, 0.0, 2, 0.2).is_drafted == [True, False] * 4 + [False]
    assert walk_cycles(second, 1, 0.0, 2, 0.35).num_drafted == [1] * 8 + [0]
    assert walk_cycles(second, 2, 0.0, 3, 0.2).num_drafted[0] == 3  # .5 and .3, then .5 x .5
    assert walk_cycles(second, 2, 0.0, 3, 0.3).num_drafted[0] == 2  # .5 x .5 is too little for a second token
    third = RowScores(second.is_right, second.confidence, second.shares, [[2] * 9] * 2)
    assert walk_cycles(third, 1, 0.0, 2, 0.0).num_cycles == 9
    assert walk_cycles(third, 1, 0.0, 3, 0.0).num_cycles == 5


@pytest.mark.parametrize("form", ["chain", "parallel"])
def test_what_is_walked_is_what_decoding_does(form: str, tmp_path: Path) -> None:
    """Cycles, and where what is drafted does not hang on what was drafted wrongly before, their rows, too."""
    torch.manual_seed(0)
    target = shallow_target_of("llama")
    head = head_of(target, form)
    student = Student(target, head.adapter, head.config)
    text = autoregressive(target, prompt_of(9), NUM_NEW)
    (row,) = collect(target, head.config, [Row(np.array(text), 10, 0.0)])  # the first new token is the prompt's
    (scores,) = score_rows(student, [row], settings(tmp_path)).greedy_rows
    for draft_len, width in ((1, 1), (1, 3), (2, 2), (2, 4)):
        with torch.no_grad():
            stats = text_with(target, head, draft_len, width).stats
        walk = walk_cycles(scores, draft_len, 0.0, width, head.config.min_branch)
        assert walk.num_cycles == stats.num_cycles
        if form == "parallel":
            assert sum(walk.num_drafted) == stats.num_drafted


def test_siblings_are_planned_where_rows_are_cheap_enough() -> None:
    """Two tokens of three are the second guess, and none is the third."""
    shares = [[[0.5, 0.45, 0.3, 0.01]] * 30] * 2
    third = RowScores([[True, False, False] * 10] * 2, [[0.5] * 30] * 2, shares, [[0, 1, 1] * 10] * 2)
    rows = tuple(1 + 0.02 * i for i in range(9))
    cheap = Costs(0.05, rows, min_branch=0.1)
    assert choose([third], cheap).draft_width == 2
    assert choose([third], cheap).speedup > choose([third], replace(cheap, min_branch=None)).speedup
    assert choose([third], replace(cheap, min_branch=None)).draft_width == 1
    assert choose([third], replace(cheap, rows=(1.0, 1.02, 2.0, 3.0, 4.0))).draft_width == 1
    assert [cheap.draft_widths(k) for k in (1, 2, 3, 5)] == [[2, 3, 4], [2, 3, 4], [2], []]


def test_confidence_is_calibrated_and_drafting_planned(tmp_path: Path) -> None:
    """On rows never seen, the mean confidence is the share of right drafts; the saved settings come from the plan."""
    config = settings(tmp_path, draft_len=None, batch_tokens=384, eval_fraction=0.3)
    done = train_on_rows(Target(build()), written_rows(build(), 200), config, tmp_path, VOCAB)
    assert 1 <= done.exit_head.config.draft_len <= 5
    assert done.metrics.speedup is not None
    assert done.exit_head.config.noise_scale in SCALES
    assert done.exit_head.adapter is not None
    target = Target(build())
    student = Student(target, done.exit_head.adapter, done.exit_head.config)
    fresh = collect(target, done.exit_head.config, written_rows(target.base, 260)[200:])
    scores = score_rows(student, fresh, config).greedy_rows
    confidence = np.array([row.confidence[0] for row in scores]).mean()
    share = np.array([row.is_right[0] for row in scores]).mean()
    assert abs(confidence - share) < 0.05  # 3.5 standard deviations of a share of 1,200 tokens
    assert 0.05 < share < 0.95


def test_drawn_tokens_are_guessed_with_as_much_noise_as_an_exit_is_sharp() -> None:
    """All of the noise where it knows what the target knows; half where it is half as sharp; others are never right."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 50, generator=generator)
    for sharpness in (1, 2):
        found = agreements((sharpness * logits).softmax(-1), logits, generator)
        assert max(found, key=lambda scale: found[scale]) == 1 / sharpness
        assert found[1 / sharpness] == 4000  # the same noise over the same scores
    never = agreements(torch.zeros(4000, 50), logits, generator)
    assert set(never.values()) == {0}


def test_confidence_finds_a_signal_that_is_there() -> None:
    """Logistic regression reaches the cross-entropy of the true chances, well below that of the mean."""
    x = torch.randn(4000, 8, generator=torch.Generator().manual_seed(0))
    chance = (3 * x[:, 0] - 1).sigmoid()
    y = (torch.rand(4000, generator=torch.Generator().manual_seed(1)) < chance).float()
    entropy = torch.nn.functional.binary_cross_entropy
    best, blind = entropy(chance, y).item(), entropy(y.mean().expand_as(y), y).item()
    assert fit_logistic(torch.nn.Linear(8, 1), x, y) < best + 0.1 * (blind - best)


def test_every_packaged_config_loads() -> None:
    assert {"smollm2-135m", "tiny"} <= set(config_names("train"))
    for name in config_names("train"):
        load_train_config(name)


def test_overrides_reach_into_groups() -> None:
    config = load_train_config("tiny", ["data.num_tokens=5", "learning_rate=1e-3", "recall_layers=[1, 2]"])
    assert (config.data.num_tokens, config.learning_rate, config.recall_layers) == (5, 1e-3, (1, 2))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lora_rnk=4", "did you mean 'lora_rank'"),
        ("data.num_token=4", "did you mean 'num_tokens'"),
        ("lora_rank=none", "lora_rank"),
        ("lora_rank", "key=value"),
    ],
)
def test_a_wrong_setting_is_named(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_train_config("tiny", [override])


def test_an_unknown_config_lists_those_there_are() -> None:
    with pytest.raises(FileNotFoundError, match="smollm2-135m"):
        load_train_config("no-such-config")
