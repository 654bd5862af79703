"""Training on a tiny random model: one graph with inference, a base that stays as it is, a loss that falls."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from selfspec.cache import KVCache
from selfspec.decode import DecodeState, decode
from selfspec.drafter import DRAFTERS, Guess
from selfspec.exit_module import ExitConfig, build_adapter
from selfspec.exits import ExitHead
from selfspec.files import locked
from selfspec.model import EarlyExitModel
from selfspec.target import Target
from selfspec.training.closed_form import STRENGTHS, Fit, fit_feedback, fit_maps
from selfspec.training.config import TrainConfig
from selfspec.training.data import Row
from selfspec.training.keep_best import BEST_FILE, KeepBest
from selfspec.training.run import claim, halve, record, split, train_on_rows
from selfspec.training.states import Batch, collect, draw_steps
from selfspec.training.student import Student
from selfspec.training.trainer import ExitTrainer

VOCAB = 97


def build(family: str = "llama", **overrides: object) -> PreTrainedModel:
    config = AutoConfig.for_model(
        family, vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2, **overrides,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
    return model.eval()


def written_rows(model: PreTrainedModel, count: int, length: int = 24) -> list[Row]:
    """Rows that the model wrote greedily behind random prompts of 4 tokens."""
    ids = torch.randint(3, VOCAB, (count, 4), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for _ in range(length - 4):
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return [Row(row.numpy().astype(np.int64), 4, 0.0) for row in ids]


def base_hash(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def hook_counts(model: PreTrainedModel) -> list[int]:
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]


def settings(folder: Path, **overrides: object) -> TrainConfig:
    values = {
        "exit_layer": 1, "recall_layers": (2, 4), "num_steps": 2, "draft_vocab_size": 64, "lora_rank": 4,
        "lora_alpha": 8, "epochs": 6, "batch_tokens": 96, "learning_rate": 5e-3, "bridge_learning_rate": 5e-3,
        "output": str(folder), "eval_fraction": 0.15, "draft_len": 2,
    }  # fmt: skip
    return TrainConfig(**{**values, **overrides})


@pytest.mark.parametrize("form", ["chain", "recursive", "parallel", "parallel-state"])
@pytest.mark.parametrize("family", ["llama", "granite", "gemma2"])
def test_decoding_computes_the_training_graph(family: str, form: str) -> None:
    """Every logit drawn from in a real decode equals the training graph's, for the draft steps that decode took.

    Drafts are the greedy text with errors planted, so that cycles accept none, some and all.
    """
    extra = {"logits_scaling": 4.0, "attention_multiplier": 0.3} if family == "granite" else {}
    target = Target(build(family, **extra))
    form, _, correction = form.partition("-")
    config = ExitConfig(
        exit_layer=1, recall_layers=(2, 4), form=form, num_steps=3, correction_rank=8 * (form == "parallel"),
        correction=correction or "bias",
        draft_vocab=tuple(range(3, 60)), lora_rank=4,
    )  # fmt: skip
    adapter = build_adapter(target, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if parameter.requires_grad and any(part in name for part in ("lora", "bridge", "correction")):
                parameter.normal_(0.0, 0.1, generator=generator)
    head = ExitHead(target, "exit", config, adapter)
    prompt = [1, 5, 9, 17, 33]
    text = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(30):
            text = torch.cat([text, target.base(input_ids=text, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    ids = text[0].tolist()
    is_wrong = {12, 17, 19}  # positions whose drafts are wrong
    seen: list[tuple[int, int, torch.Tensor]] = []  # position, step, logits

    class Scripted(DRAFTERS[form]):  # type: ignore[misc]
        is_stepwise = True

        def guess(self, normed: torch.Tensor, state: DecodeState, drafted: list[int]) -> Guess:
            before = torch.tensor(drafted[-1:]) if drafted else None
            position, logits = len(state.tokens) + len(drafted), self.exit_head.logits(target, normed, before)
            if not is_wrong & set(range(len(state.tokens), position)):
                seen.append((position - 1, len(drafted) + 1, logits))
            return Guess((ids[position] + (position in is_wrong)) % VOCAB, logits, None)

    state = DecodeState(
        tokens=list(prompt), cache=KVCache(target.num_layers + 1, 64), max_length=30,
        vocab_size=target.vocab_size, device=target.device, seed=0,
    )  # fmt: skip
    list(decode(target, Scripted(target, head, 3), state))
    assert state.tokens == ids[:30]
    assert all(state.stats.accepted_histogram[n] for n in (0, 1, 2, 3))

    student = Student(target, adapter, config)
    batch = _whole_batch(target, ids, 1, (2, 4))
    steps = torch.ones(1, len(ids), dtype=torch.long)  # whose map last wrote a position's keys and values
    for position, step, logits in seen:
        steps[0, position:] = 1
        steps[0, position] = step
        with torch.no_grad():
            guesses = student(batch, steps)
            which = (guesses.places == position) & (guesses.steps == step)
            expected = student.logits(guesses, batch)[which]
        torch.testing.assert_close(logits[None], expected, atol=1e-4, rtol=1e-4)
    assert {step for _, step, _ in seen} == {1, 2, 3}


def _whole_batch(target: Target, ids: list[int], exit_layer: int, recalled: tuple[int, ...]) -> Batch:
    """A text as one row whose every position is scored."""
    recalls, none = torch.cat([_states(target, ids, n) for n in recalled], dim=-1)[None], torch.empty(0)
    is_scored = torch.ones(1, len(ids), dtype=torch.bool)
    taps = _states(target, ids, exit_layer)[None]
    return Batch(taps, recalls, torch.tensor([len(ids)]), is_scored, none, none, none, torch.tensor(ids))


def _states(target: Target, ids: list[int], layer: int) -> torch.Tensor:
    """Float32 states [S, D] after ``layer`` layers, by the model's own forward."""
    held: list[torch.Tensor] = []
    layers = target.base.get_submodule(".".join(target._path))
    hook = layers[layer - 1].register_forward_hook(lambda _m, _i, out: held.append(out))
    with torch.no_grad():
        target.base(input_ids=torch.tensor([ids]), use_cache=False)
    hook.remove()
    return held[0][0]


def test_training_lowers_the_loss_and_leaves_the_base(tmp_path: Path) -> None:
    model = build()
    rows = written_rows(model, 40)
    before, config, hooks = base_hash(model), model.config.to_dict(), hook_counts(model)
    saved = []
    done = train_on_rows(Target(model), rows, settings(tmp_path), tmp_path, VOCAB, lambda *saving: saved.append(saving))
    assert (base_hash(model), model.config.to_dict(), hook_counts(model)) == (before, config, hooks)
    assert done.metrics.loss < done.at_start.loss - 0.05
    assert done.metrics.tau[len(done.at_start.tau) - 1] >= done.at_start.tau[-1]
    assert len(done.at_start.tau) < len(done.metrics.acceptance) == len(done.metrics.tau) == 4  # it may draft further
    assert saved
    assert (tmp_path / "metrics.json").is_file()


def test_tensorboard_shows_what_the_run_is_worth(tmp_path: Path) -> None:
    """By draft step, with the speed that measured costs promise, throughput, and an answer with its drafts."""
    config = settings(tmp_path, max_steps=12, draft_len=None)
    done = train_on_rows(Target(build()), written_rows(build(), 12), config, tmp_path, VOCAB, decode=str)
    boards = [EventAccumulator(str(path)) for path in (tmp_path / "checkpoints").rglob("events*")]
    tags = [board.Reload().Tags() for board in boards]
    shown = {name for held in tags for name in held["scalars"]}
    assert {f"eval/{name}_{j}" for name in ("agreement", "accepted_mass", "acceptance", "tau") for j in (1, 2)} <= shown
    assert {"eval/speedup", "train/loss", "train/tokens_per_second", "train/accepted_mass"} <= shown
    assert any("accepted drafts in bold" in name for held in tags for name in held["tensors"])
    assert done.metrics.calibration_error is not None
    assert 0 <= done.metrics.calibration_error <= 1


@pytest.mark.parametrize("form", ["chain", "recursive", "parallel"])
def test_a_target_in_half_precision_trains_an_exit_in_single(tmp_path: Path, form: str) -> None:
    """The loss falls as it does over the same target in float32; what is saved drafts in bfloat16."""
    rows, found = written_rows(build(), 40), []
    for dtype in (torch.float32, torch.bfloat16):
        folder, target = tmp_path / str(dtype), Target(build().to(dtype))
        folder.mkdir()
        config = settings(folder, form=form, correction_rank=4 * (form == "parallel"))
        done = train_on_rows(target, rows, config, folder, VOCAB)
        found.append(done.metrics.loss)
        assert done.metrics.loss < done.at_start.loss - 0.05
        assert {p.dtype for p in done.exit_head.adapter.parameters()} == {dtype}
        state = load_file(folder / BEST_FILE)
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}
        model = EarlyExitModel(target, {"exit": done.exit_head})
        assert model.generate(torch.tensor([[1, 5, 9]]), max_new_tokens=8).sequences.shape == (1, 11)
    assert found[0] == pytest.approx(found[1], abs=0.05)


def test_states_need_not_be_kept(tmp_path: Path) -> None:
    """Fresh states train the same exit, in a folder that holds none."""
    rows, losses = written_rows(build(), 24), []
    for keep in (True, False):
        folder = tmp_path / str(keep)
        folder.mkdir()
        done = train_on_rows(Target(build()), rows, settings(folder, max_steps=6, keep_states=keep), folder, VOCAB)
        losses.append((done.at_start.loss, done.metrics.loss))
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)  # kept in bfloat16, in batches of their own
    held, fresh = (sum(p.stat().st_size for p in (tmp_path / str(keep) / "states").iterdir()) for keep in (True, False))
    assert fresh < held / 2  # those of held-out rows


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    rows = written_rows(build(), 40)
    train_on_rows(Target(build()), rows, settings(tmp_path, max_steps=4, save_steps=2), tmp_path, VOCAB)
    checkpoint = tmp_path / "checkpoints" / "checkpoint-4"
    held = {p.name: p.stat().st_size for p in checkpoint.iterdir()}
    assert held["trained_state.safetensors"] < 200_000
    assert not {"model.safetensors", "pytorch_model.bin"} & set(held)
    steps = []
    original = ExitTrainer.compute_loss

    def counted(self: ExitTrainer, *args: object, **kwargs: object) -> torch.Tensor:
        steps.append(self.state.global_step)
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExitTrainer, "compute_loss", counted)
        train_on_rows(Target(build()), rows, settings(tmp_path, max_steps=6, save_steps=2), tmp_path, VOCAB)
    assert steps == [4, 5]


def test_going_on_keeps_the_best_state_of_before(tmp_path: Path) -> None:
    """A second run takes up the best state that the first wrote, and writes nothing worse over it."""
    target, rows = Target(build()), written_rows(build(), 8)
    config = settings(tmp_path)
    exit_config = config.exit_config(target.num_layers, None)
    states, written = collect(target, exit_config, rows), []

    def begin() -> KeepBest:
        student = Student(target, build_adapter(target, exit_config), exit_config)
        keeper = KeepBest(student, states, config, tmp_path, written.append)
        keeper.begin()
        return keeper

    first = begin()
    assert len(written) == 1
    second = begin()
    assert len(written) == 1
    assert second.best_tau == first.best_tau > 0
    assert all(torch.equal(second.best_state[name], value) for name, value in first.best_state.items())
    path = tmp_path / BEST_FILE
    path.write_bytes(path.read_bytes()[:-7])
    assert begin().best_tau == first.best_tau  # broken: measured anew
    assert len(written) == 2


def test_closed_form_start_stops_before_training(tmp_path: Path) -> None:
    done = train_on_rows(Target(build()), written_rows(build(), 12), settings(tmp_path, max_steps=0), tmp_path, VOCAB)
    assert done.metrics.agreement == done.at_start.agreement


def test_ridge_recovers_a_linear_map() -> None:
    target = Target(build())
    config = ExitConfig(exit_layer=1, recall_layers=(2,), num_steps=2)
    states = collect(target, config, written_rows(target.base, 30))
    (weight, bias), (weight_2, _) = fit_maps(config, Fit(states, strength=1e-4))
    inputs = torch.cat([torch.cat([s.taps[2:], s.recalls[1:-1]], -1) for s in states if s.recalls is not None]).float()
    wanted = torch.cat([s.wanted[2:] for s in states]).float()
    explained = 1 - (inputs @ weight.T + bias - wanted).var() / wanted.var()
    assert explained > 0.3
    assert not torch.allclose(weight, weight_2)


def test_the_closed_form_of_a_parallel_step_reads_an_earlier_tap() -> None:
    """Step 2 aims at the state behind the last token, from that token's tap and what lies before it."""
    target = Target(build())
    config = ExitConfig(exit_layer=1, recall_layers=(2,), num_steps=2, form="parallel")
    states = collect(target, config, written_rows(target.base, 30))
    weight, bias = fit_maps(config, Fit(states, strength=1e-4))[1]
    inputs = torch.cat([torch.cat([s.taps[2:-1], s.recalls[1:-2]], -1) for s in states if s.recalls is not None])
    wanted = torch.cat([s.wanted[3:] for s in states]).float()
    residual = inputs.float() @ weight.T + bias - wanted
    torch.testing.assert_close(residual.mean(0), torch.zeros(residual.shape[1]), atol=1e-4, rtol=0)
    centred = inputs.float() - inputs.float().mean(0)
    left = 1e-4 * centred.var(0, unbiased=False).mean() * weight.T  # by ridge regression, of what the inputs explain
    torch.testing.assert_close(centred.T @ residual / -len(residual), left, atol=1e-5, rtol=0.05)


def test_the_strength_of_the_ridge_is_the_one_that_serves_held_out_rows() -> None:
    """Measured anew, by predicting; with few rows to fit it is not the weakest."""
    target, config = Target(build()), ExitConfig(exit_layer=1, recall_layers=(2,))
    states = collect(target, config, written_rows(target.base, 30))
    few, held = states[:2], states[10:]

    def error(solution: tuple[torch.Tensor, torch.Tensor]) -> float:
        inputs = torch.cat([torch.cat([s.taps[2:], s.recalls[1:-1]], -1) for s in held if s.recalls is not None])
        wanted = torch.cat([s.wanted[2:] for s in held]).float()
        return float((inputs.float() @ solution[0].T + solution[1] - wanted).square().sum(-1).mean())

    errors = {strength: error(fit_maps(config, Fit(few, strength=strength))[0]) for strength in STRENGTHS}
    (chosen,) = fit_maps(config, Fit(few, held))
    assert error(chosen) == pytest.approx(min(errors.values()), rel=1e-3)
    assert min(errors, key=errors.__getitem__) > min(STRENGTHS)


def test_the_closed_form_of_the_feedback_reads_a_token_and_the_state_before_it() -> None:
    """Against least squares on those inputs, put together by hand from whole passes."""
    target, config = Target(build()), ExitConfig(exit_layer=1, recall_layers=(2,), form="recursive")
    rows = written_rows(target.base, 40)
    weight, bias = fit_feedback(target, Fit(collect(target, config, rows), strength=1e-6))
    inputs, wanted = [], []
    for row in rows:
        ids = row.ids[:-1].tolist()
        before = target.norm(_states(target, ids, target.num_layers)[:-1])
        inputs.append(torch.cat([target.embed(torch.tensor([ids]))[0, 1:], before], dim=-1)[row.answer_start - 1 :])
        wanted.append(_states(target, ids, target.num_layers - 1)[row.answer_start :])
    x, y = torch.cat(inputs).detach().double(), torch.cat(wanted).double()
    best = torch.linalg.lstsq(torch.cat([x, torch.ones(len(x), 1)], dim=1), y).solution
    torch.testing.assert_close(x @ weight.T.double() + bias, x @ best[:-1] + best[-1], atol=0.05, rtol=0.05)


def test_row_states_do_not_depend_on_their_batch() -> None:
    target = Target(build())
    config = ExitConfig(exit_layer=1, recall_layers=(2, 4))
    rows = [Row(np.arange(3, 3 + n), 2) for n in (5, 20, 9)]
    together, alone = collect(target, config, rows), [collect(target, config, [row])[0] for row in rows]
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a.finals, b.finals, atol=1e-4, rtol=1e-4)
        assert a.recalls is not None
        torch.testing.assert_close(a.recalls[:, 32:][b.answer_start - 1 :].float(), a.finals, atol=0.05, rtol=0.01)


def test_steps_are_runs_from_one() -> None:
    steps = draw_steps([50] * 4, 50, 3, torch.Generator().manual_seed(0))
    assert steps.shape == (4, 50)
    assert set(steps.unique().tolist()) == {1, 2, 3}
    change = steps[:, 1:] - steps[:, :-1]
    assert ((change == 1) | (steps[:, 1:] == 1)).all()


def test_a_folder_with_other_content_is_refused(tmp_path: Path) -> None:
    config = settings(tmp_path / "run")
    claim(config)
    assert not (tmp_path / "run").exists()
    with locked(tmp_path / "run"):
        record(config, tmp_path / "run")
    claim(settings(tmp_path / "run", epochs=9))
    with pytest.raises(FileExistsError, match="lora_rank"):
        claim(settings(tmp_path / "run", lora_rank=5))
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="no training run"):
        claim(settings(tmp_path))


def test_split_is_by_prompt_and_stable() -> None:
    rows = [Row(np.array([i, i, 7, 8]), 2) for i in range(300) for _ in range(2)]
    config = TrainConfig(eval_fraction=0.2)
    train, held = split(rows, config)
    assert not {r.ids[0] for r in train} & {r.ids[0] for r in held}
    assert 0.1 < len(held) / len(rows) < 0.3
    assert [r.ids[0] for r in split(rows[:200], config)[1]] == [r.ids[0] for r in held if r.ids[0] < 100]


def test_rows_that_choose_the_state_do_not_judge_it():
    """At most half of the held-out rows choose, and no more than the tokens asked for; a lone row does both."""
    target, rows = Target(build()), written_rows(build(), 9)
    states = collect(target, ExitConfig(exit_layer=1), rows)
    choosing, judging = halve(states, 10_000)
    assert (len(choosing), len(judging)) == (4, 5)
    assert not {id(s) for s in choosing} & {id(s) for s in judging}
    assert [len(part) for part in halve(states, 21)] == [2, 7]
    assert halve(states[:1], 10) == (states[:1], states[:1])
