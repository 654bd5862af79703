"""The probe: its scores and predictions where the truth is known, and the command around it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from selfspec.cli import app
from selfspec.eval import probe, probe_report, probe_run, probe_text
from selfspec.eval.probe_text import Sample
from selfspec.pretrained import default_model_path
from tests.conftest import build_model, mutate, prompt_of, shallow_target_of, target_of


def quiet(*_: Any) -> None:
    pass


def samples_of(*lengths: int, start: int = 2) -> list[Sample]:
    return [Sample(torch.tensor(prompt_of(length, seed)), start) for seed, length in enumerate(lengths)]


def identity(target: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.eye(target.hidden_size), torch.zeros(target.hidden_size)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_exits_that_are_the_target_agree_with_it_everywhere(family):
    """The lens behind the last layer and the identity as bridge in front of it are the target: both scores are 1."""
    target, samples = target_of(family), samples_of(20, 31, 9)
    last = target.num_layers
    at_end = probe.score_exits(target, samples, {last: identity(target)}, None, quiet)["lens", last]
    bridged = probe.score_exits(target, samples, {last - 1: identity(target)}, None, quiet)["bridge", last - 1]
    assert at_end.agreement == bridged.agreement == 1
    assert at_end.overlap == pytest.approx(1, abs=1e-5)
    assert bridged.overlap == pytest.approx(1, abs=1e-5)


@torch.no_grad()
def test_scores_are_those_of_a_plain_forward_pass():
    """Agreement and sum min(p, q) of the lens, position by position, from transformers' hidden states."""
    target, samples = shallow_target_of("llama"), samples_of(24, 17, start=5)
    agree, overlaps = [], []
    for sample in samples:
        out = target.base(sample.ids[None], output_hidden_states=True)
        lens = target.output(target.norm(out.hidden_states[2]))[0]
        for position in range(sample.start - 1, len(sample.ids) - 1):
            p, q = out.logits[0, position], lens[position]
            agree.append(float(p.argmax() == q.argmax()))
            overlaps.append(float(torch.minimum(p.softmax(-1), q.softmax(-1)).sum()))
    score = probe.score_exits(target, samples, {2: identity(target)}, None, quiet)["lens", 2]
    assert 0.2 < score.agreement < 0.95
    assert score.agreement == pytest.approx(sum(agree) / len(agree))
    assert score.overlap == pytest.approx(sum(overlaps) / len(overlaps), abs=1e-5)


@pytest.mark.parametrize("has_bug", [False, True], ids=["as it is", "padding judged"])
def test_scores_do_not_depend_on_batches(monkeypatch, has_bug):
    """Texts alone, padded together, and logits in chunks of any size: one score; a mask that takes padding shows."""
    target, samples = shallow_target_of("llama"), samples_of(40, 12, 23, 7)
    if has_bug:
        mutate(monkeypatch, probe._passes, "len(sample.ids) - 1] = True", "] = True")
    bridges = {1: identity(target), 3: identity(target)}
    found = []
    for batch_tokens, chunk in ((1, 128), (1000, 128), (1000, 3)):
        monkeypatch.setattr(probe, "BATCH_TOKENS", batch_tokens)
        monkeypatch.setattr(probe, "CHUNK", chunk)
        scores = probe.score_exits(target, samples, bridges, None, quiet)
        found.append([v for score in scores.values() for v in (score.agreement, score.overlap)])
    is_same = all(one == pytest.approx(found[0], abs=1e-5) for one in found[1:])
    assert is_same is not has_bug


def test_the_bridge_finds_a_planted_linear_map(monkeypatch):
    """Where the last layer's input is a linear map of the tap, ridge regression gives that map back."""
    target, samples = target_of("llama"), samples_of(*[60] * 20)
    planted = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    true_passes = probe.passes

    def passes(*arguments: Any) -> Any:
        for found in true_passes(*arguments):
            found.states[target.num_layers - 1] = found.states[2] @ planted.T + 0.5
            yield found

    monkeypatch.setattr(probe, "passes", passes)
    monkeypatch.setattr(probe, "RIDGE", 1e-6)
    weight, bias = probe.fit_bridges(target, samples, [2], quiet)[2]
    torch.testing.assert_close(weight, planted, atol=2e-3, rtol=0)
    torch.testing.assert_close(bias, torch.full((32,), 0.5), atol=2e-3, rtol=0)


def test_the_bridge_beats_the_lens_where_layers_say_something():
    target, samples = shallow_target_of("llama"), samples_of(*[60] * 40)
    bridges = probe.fit_bridges(target, samples[10:], [1], quiet)
    scores = probe.score_exits(target, samples[:10], bridges, None, quiet)
    assert scores["bridge", 1].overlap > scores["lens", 1].overlap


@torch.no_grad()
def test_a_reduced_vocabulary_bounds_what_can_be_guessed():
    """The last layer's lens over a few ids agrees exactly where the target's token is one of them."""
    target, samples = target_of("llama"), samples_of(50, 50)
    vocab = probe.draft_vocab(samples, 20, 97, 97)
    logits = [target.base(s.ids[None]).logits[0, 1:-1].softmax(-1) for s in samples]
    p = torch.cat(logits)
    inside = torch.isin(p.argmax(-1), torch.tensor(vocab)).float().mean()
    score = probe.score_exits(target, samples, {6: identity(target)}, vocab, quiet)["lens", 6]
    assert 0 < score.agreement < 1
    assert score.agreement == pytest.approx(float(inside))
    assert score.overlap == pytest.approx(float(p[:, list(vocab)].sum(-1).mean()), abs=1e-5)


def test_drafted_ids_are_the_most_frequent_then_the_lowest():
    samples = [Sample(torch.tensor([9, 9, 7, 7, 7, 50]), 1)]
    assert probe.draft_vocab(samples, 2, 97, 97) == (7, 9)
    assert probe.draft_vocab(samples, 5, 97, 97) == (0, 1, 7, 9, 50)
    assert probe.draft_vocab(samples, None, 97, 97) is None
    assert probe.draft_vocab(samples, None, 90, 97) == tuple(range(90))  # ids that only pad are never drafted


def test_prediction_is_the_hand_calculation():
    """a = .5, c = .1, passes of 1, 1.1, 1.3 rows: 1.5 / (.1 + 1.1) = 1.25 at k = 1, 1.75 / (.2 + 1.3) at k = 2."""
    best = probe.predict(0.5, 0.1, [1.0, 1.1, 1.3])
    assert (best.draft_len, best.speedup) == (1, pytest.approx(1.25))
    best = probe.predict(0.5, 0.1, [2.0, 2.2, 2.2])  # rows are in their own unit: 1.75 / (.2 + 1.1)
    assert (best.draft_len, best.speedup) == (2, pytest.approx(1.75 / 1.3))
    best = probe.predict(1.0, 0.5, [1.0] * 6)
    assert (best.draft_len, best.speedup) == (5, pytest.approx(6 / 3.5))
    assert probe.predict(0.0, 0.1, [1.0, 1.0, 1.0]).speedup == pytest.approx(1 / 1.1)


@pytest.mark.parametrize("num_layers", [2, 6, 13, 30, 80])
def test_layers_judged_by_default_are_a_few_from_the_first_to_the_last(num_layers):
    layers = probe.default_layers(num_layers)
    assert layers == sorted(set(layers))
    assert (layers[0], layers[-1]) == (1, num_layers - 1)
    assert min(num_layers - 1, 8) <= len(layers) <= 12


def test_the_verdict_says_when_not_to_draft():
    best = {"layer": 3, "exit": "bridge", "best": {"draft_len": 2, "speedup": 1.07}}
    expected = "best: layer 3 with the closed-form bridge, k=2, predicted 1.07x of plain decoding"
    assert probe_report.verdict({"best": best}) == expected
    best["best"]["speedup"] = 0.93
    assert probe_report.verdict({"best": best}).endswith("do not draft without training")


# ---- texts and the command ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with the default model's tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = AutoTokenizer.from_pretrained(default_model_path())
    model = build_model("llama", vocab_size=len(tokenizer), max_position_embeddings=256)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_probe(checkpoint: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["probe", "--model", str(checkpoint), *arguments], catch_exceptions=False)


def test_the_target_writes_the_sample_and_results_are_written(checkpoint, tmp_path, monkeypatch):
    """Files, one JSON object, a row a layer; the same seed gives the same scores."""
    monkeypatch.setattr(probe_text, "TURN_TOKENS", 6)
    monkeypatch.setattr(probe_text, "ANSWER_TOKENS", 14)
    arguments = ("--num-tokens", "96", "--layers", "1,5", "--json", "--dtype", "float32", "--draft-vocab", "64")
    run = run_probe(checkpoint, *arguments, "--output", str(tmp_path / "a" / "b"))
    assert run.exit_code == 0, run.stderr
    found = json.loads(run.stdout)
    assert found == json.loads((tmp_path / "a" / "b" / "probe.json").read_text())
    assert (tmp_path / "a" / "b" / "probe.png").read_bytes().startswith(b"\x89PNG")
    assert [(c["layer"], c["exit"]) for c in found["exits"]] == [
        (1, "lens"), (1, "bridge"), (5, "lens"), (5, "bridge"),
    ]  # fmt: skip
    assert found["judged_tokens"] + found["fitted_tokens"] == 96
    assert found["row_costs"][0] == 1
    assert found["best"]["best"]["speedup"] == max(c["best"]["speedup"] for c in found["exits"])
    assert found["provenance"]["versions"]["torch"]
    again = json.loads(run_probe(checkpoint, *arguments, "--output", str(tmp_path)).stdout)
    assert [c["score"] for c in again["exits"]] == [c["score"] for c in found["exits"]]


def test_the_table_has_a_row_a_layer_and_a_verdict(checkpoint, tmp_path):
    (tmp_path / "text.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 12)
    arguments = ("--text", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out"))
    run = run_probe(checkpoint, *arguments, "--layers", "2,3")
    assert run.exit_code == 0, run.stderr
    assert "best: layer " in run.stdout
    assert "probe.png" in run.stdout
    assert len([line for line in run.stdout.splitlines() if line.startswith("\u2502")]) == 2


def test_texts_answers_and_prompts_of_a_file(checkpoint, tmp_path, monkeypatch):
    """Given answers are judged by the answer, prompts are answered by the target, plain text is judged throughout."""
    monkeypatch.setattr(probe_text, "ANSWER_TOKENS", 8)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    path = tmp_path / "mixed.jsonl"
    chat = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Good morning to you."}]
    lines = [{"messages": chat}, {"prompt": "Name a colour."}, {"text": "Plain words in a row, nothing else."}]
    path.write_text("\n".join(map(json.dumps, lines)))
    model = build_model("llama", vocab_size=len(tokenizer))
    samples = probe_text.make_samples(probe_text.read_file(path), model, tokenizer, 500, 0, quiet)
    judged = {tokenizer.decode(s.ids[: s.start]): tokenizer.decode(s.ids[s.start :]) for s in samples}
    given = next(text for before, text in judged.items() if "Hi?" in before)
    assert given.startswith("Good morning to you.")
    assert any("Name a colour." in before and before.endswith("assistant\n") for before in judged)
    assert len(samples) == 3


def test_without_a_chat_template_the_target_writes_from_the_start_of_a_text(checkpoint, monkeypatch):
    """Sampled, so that no two texts are one; the same seed writes them again."""
    monkeypatch.setattr(probe_text, "ANSWER_TOKENS", 8)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = None
    model = build_model("llama", vocab_size=len(tokenizer))
    first, again = (probe_text.make_samples([], model, tokenizer, 64, 3, quiet) for _ in range(2))
    texts = [tuple(sample.ids.tolist()) for sample in first]
    assert texts == [tuple(sample.ids.tolist()) for sample in again]
    assert len(set(texts)) == len(texts) >= 8
    assert all(sample.start == 1 for sample in first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--text", "{tmp}/empty.txt"], "empty.txt: no text in it"),
        (["--text", "{tmp}/latin.txt"], "latin.txt: not UTF-8 text"),
        (["--text", "{tmp}/bad.jsonl"], "bad.jsonl:2: needs a `text`, a `prompt` or `messages`"),
        (["--text", "{tmp}/short.txt"], "too little text"),
        (["--layers", "1,6"], "layer 6 is not in 1..5"),
        (["--layers", "0"], "layer 0 is not in 1..5"),
        (["--layers", "first"], "--layers 'first' is not a list of numbers"),
        (["--output", "{tmp}/empty.txt"], "empty.txt"),
        (["--num-tokens", "3"], "num_tokens must be at least 64, got 3"),
        (["--draft-vocab", "0"], "draft_vocab must be at least 1, got 0"),
        (["--dtype", "float8"], "unknown dtype 'float8'"),
        (["--device", "abacus"], "device 'abacus'"),
    ],
)
def test_mistakes_are_one_line_before_any_work(checkpoint, tmp_path, monkeypatch, arguments, message):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "short.txt").write_text("Too short.")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"story": "not fine"}\n')
    monkeypatch.setattr(probe, "fit_bridges", lambda *_: pytest.fail("work began"))
    monkeypatch.setattr(probe_text, "write", lambda *_: pytest.fail("work began"))
    filled = [a.format(tmp=tmp_path) for a in arguments]
    run = run_probe(checkpoint, "--output", str(tmp_path / "out"), *filled)
    assert run.exit_code == 2
    assert message in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
    assert run.stdout == ""


def test_too_few_texts_to_fit_and_judge_are_refused():
    with pytest.raises(ValueError, match="100 tokens in 1 texts"):
        probe_run.divide([Sample(torch.arange(102), 2)])
