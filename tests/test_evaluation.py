"""The harness: planted faults of methods are caught, runs resume, questions of every format are read."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from selfspec import costs
from selfspec.cli import app
from selfspec.eval import methods as registry
from selfspec.eval import run as eval_run
from selfspec.eval.compare import first_divergence, gap_in_ulp
from selfspec.eval.config import EvalConfig, load_eval_config
from selfspec.eval.engine import Engine, ar
from selfspec.eval.journal import Journal
from selfspec.eval.measure import CountError, Meter, Phases, Request, SkippedMethodError
from selfspec.eval.peers import StaticCompiled, Transformers, assistant_early_exit, assistant_model, prompt_lookup
from selfspec.eval.run import build_methods, evaluate, method_specs
from selfspec.eval.runner import Runner
from selfspec.eval.summary import summarise
from selfspec.eval.tasks import Question, load_questions
from selfspec.model import EarlyExitModel
from tests.conftest import build_model, prompt_of

CPU = torch.device("cpu")
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
QUESTIONS = [Question("t", str(i), "odd" if i % 2 else "even", (f"question {i}",)) for i in range(4)]


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    """A tiny random Llama with a byte tokenizer, a chat template and an untrained exit."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(["<s>", "</s>", *alphabet])}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    hf_model = build_model("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    return EarlyExitModel.from_target(hf_model, exits=[2], tokenizer=tokenizer)


class Clock:
    """Seconds that pass only where a method says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Fake:
    """Says what plain decoding says, at its own pace, with one planted fault."""

    reference, is_promised = "ar", False

    def __init__(self, model: EarlyExitModel, clock: Clock, step: float, is_ar: bool = False, fault: str = "") -> None:
        self.engine, self.clock, self.step, self.is_ar, self.fault = ar(model), clock, step, is_ar, fault

    def prepare(self, ids: Any, request: Request) -> None: ...

    def run(self, ids: Any, request: Request, meter: Meter, phases: Phases) -> list[int]:
        tokens = self.engine.run(ids, request, Meter(ids.device), Phases())
        if self.fault == "wrong bonus token":
            tokens[3] = (tokens[3] + 1) % 97
        if self.fault == "fails":
            raise RuntimeError("<script>no luck</script>")
        for token in tokens:
            self.clock.seconds += self.step
            meter.emit([token, token] if self.fault == "counted twice" else [token])
        return tokens


def measured(model: EarlyExitModel, clock: Clock, **methods: Any) -> dict[str, Any]:
    """Summary of the fakes on four questions of two categories."""
    config = EvalConfig(max_new_tokens=8)
    runner = Runner(model, methods, config, clock)
    rows = [row for question in QUESTIONS for row in runner.ask(question)]
    return summarise(rows, {name: method.is_ar for name, method in methods.items()}, config)


def test_a_wrong_bonus_token_is_no_lossless_method(model):
    clock = Clock()
    found = measured(
        model, clock, ar=Fake(model, clock, 1.0, True), good=Fake(model, clock, 0.5),
        bad=Fake(model, clock, 0.5, fault="wrong bonus token"),
    )  # fmt: skip
    assert found["summary"]["good"]["lossless"] is True
    assert found["summary"]["bad"]["lossless"] is False
    assert found["summary"]["bad"]["num_identical"] == 0
    assert any("bad is not lossless: 4 of 4" in note for note in found["notes"])


def test_tokens_counted_twice_are_a_failure_and_no_speed(model):
    clock = Clock()
    found = measured(
        model, clock, ar=Fake(model, clock, 1.0, True), double=Fake(model, clock, 1.0, fault="counted twice")
    )
    figures = found["summary"]["double"]
    assert figures["num_failures"] == 4
    assert figures["speedup"] is None
    assert figures["tokens_per_second"] == 0
    assert found["notes"][0].startswith("4 runs failed")
    assert "emitted" in found["failures"][0]["error"]


def test_a_slowed_baseline_is_named_and_not_what_counts(model):
    """Against an ``ar`` that was slowed to half, everything looks twice as fast; the best plain decoding tells."""
    clock = Clock()
    found = measured(
        model, clock, ar=Fake(model, clock, 2.0, True), other=Fake(model, clock, 1.0, True),
        drafting=Fake(model, clock, 1.0),
    )  # fmt: skip
    figures = found["summary"]["drafting"]
    assert figures["speedup"] == pytest.approx(2.0)
    assert figures["best_ar"] == "other"
    assert figures["speedup_over_best_ar"] == pytest.approx(1.0)
    assert any("other is 2.00 times as fast as ar" in note for note in found["notes"])
    honest = measured(model, clock, ar=Fake(model, clock, 1.0, True), other=Fake(model, clock, 1.0, True))
    assert honest["notes"] == []


def test_a_failure_is_left_out_of_both_sides_of_a_ratio(model):
    """Failing on the slow prompts must not make a method look fast."""
    clock = Clock()
    plain, lucky = Fake(model, clock, 1.0, True), Fake(model, clock, 1.0)
    config = EvalConfig(max_new_tokens=8)
    runner = Runner(model, {"ar": plain, "lucky": lucky}, config, clock)
    rows = []
    for question in QUESTIONS:
        is_slow = question.category == "odd"
        plain.step, lucky.fault = (10.0 if is_slow else 1.0), ("fails" if is_slow else "")
        rows += runner.ask(question)
    found = summarise(rows, {"ar": True, "lucky": False}, config)
    assert found["summary"]["lucky"]["speedup"] == pytest.approx(1.0)
    assert found["summary"]["lucky"]["num_failures"] == 2
    assert found["by_category"]["odd"]["lucky"]["speedup"] is None


def test_prefill_ends_with_the_first_token():
    """Three tokens at 5, 6 and 8 seconds: five seconds of prefill, two tokens in three seconds."""
    clock = Clock()

    def run(meter: Meter) -> list[int]:
        for token, moment in ((7, 5.0), (8, 6.0), (9, 8.0)):
            clock.seconds = moment
            meter.emit([token])
        return [7, 8, 9]

    found = Meter(CPU, clock).measure(run)
    assert (found.prefill_seconds, found.decode_seconds, found.num_decoded, found.num_cycles) == (5.0, 3.0, 2, 2)
    with pytest.raises(CountError, match="no token"):
        Meter(CPU, clock).measure(lambda _: [])


def test_counts_are_those_of_the_engine(model):
    """tau, drafted and accepted as the harness counts them equal DecodeStats of the same request."""
    ids = torch.tensor([[5, 17, 40]])
    engine, phases = Engine(model, draft_len=3), Phases()
    request = Request(24)
    run = Meter(CPU).measure(lambda meter: engine.run(ids, request, meter, phases), phases)
    stats = model.generate(ids, max_new_tokens=24, draft_len=3).stats
    assert run.num_decoded / run.num_cycles == stats.tau
    assert (sum(phases.num_drafted), sum(phases.num_accepted)) == (stats.num_drafted, stats.num_accepted)
    assert 0 < phases.draft_seconds < run.decode_seconds
    assert phases.draft_seconds + phases.verify_seconds < run.decode_seconds


def test_acceptance_by_position_is_conditional():
    """Of three cycles that drafted two, two accepted the first and one the second as well."""
    row = {
        "task": "t", "question": "0", "category": "c", "turn": 0, "temperature": 0.0, "num_cycles": 3, "num_decoded": 6,
        "prefill_seconds": 1.0, "peak_bytes": None,
    }  # fmt: skip
    plain = {**row, "method": "ar", "decode_seconds": 6.0, "num_cycles": 6, "emissions": [1] * 6}
    spec = {
        **row, "method": "s", "decode_seconds": 4.0, "draft_seconds": 1.0, "verify_seconds": 2.5,
        "num_drafted": [2, 2, 2], "num_accepted": [0, 1, 2],
    }  # fmt: skip
    figures = summarise([plain, spec], {"ar": True, "s": False}, EvalConfig())["summary"]["s"]
    assert figures["acceptance_by_position"] == [2 / 3, 1 / 2]
    assert figures["accepted_histogram"] == [1, 1, 1]
    assert (figures["tau"], figures["acceptance_rate"]) == (2.0, 0.5)
    assert figures["speedup"] == pytest.approx(1.5)
    assert figures["speedup_ci"] == pytest.approx([1.5, 1.5])
    assert figures["breakdown"] == pytest.approx({"draft": 1 / 3, "verify": 2.5 / 3, "overhead": 0.5 / 3})


def test_an_interval_holds_its_ratio_and_narrows_with_agreement():
    rows = []
    for i, seconds in enumerate((2.0, 4.0, 6.0, 8.0, 5.0)):
        row = {
            "task": "t", "question": str(i), "category": "c", "turn": 0, "temperature": 0.0, "num_cycles": 10,
            "num_decoded": 10, "prefill_seconds": 1.0, "peak_bytes": None, "emissions": [1] * 10,
        }  # fmt: skip
        rows += [{**row, "method": "ar", "decode_seconds": 10.0}, {**row, "method": "s", "decode_seconds": seconds}]
    figures = summarise(rows, {"ar": True, "s": False}, EvalConfig())["summary"]["s"]
    low, high = figures["speedup_ci"]
    assert figures["speedup"] == pytest.approx(50 / 25)
    assert 1.2 < low < 1.8 < 2.2 < high < 5.0


def test_gaps_are_counted_in_units_in_the_last_place():
    logits = torch.tensor([5.0, 4.96875, 1.0])  # in [4, 8) a unit of bfloat16 is 2 ** -5
    assert gap_in_ulp(logits, 0, 1, torch.bfloat16) == 1.0
    assert gap_in_ulp(logits, 0, 2, torch.bfloat16) == 128.0


def test_the_first_divergence_is_where_texts_part(model):
    prompt = [5, 6, 7]
    text = model.generate(torch.tensor([prompt]), max_new_tokens=6, draft="off").sequences[0, 3:].tolist()
    assert first_divergence(model.target, prompt, text, list(text)) is None
    found = first_divergence(model.target, prompt, text, [*text[:2], (text[2] + 1) % 97, *text[3:]])
    assert found.position == 2
    assert found.gap_ulp > 4
    shorter = first_divergence(model.target, prompt, text, text[:4])
    assert (shorter.position, shorter.is_near_tie) == (4, False)


def test_peers_say_the_same_and_leave_the_model_alone(model, tmp_path):
    """In float32 every way of generating gives plain decoding's text; a failing peer leaves the configuration whole."""
    draft = build_model("llama", vocab_size=model.target.vocab_size, num_hidden_layers=1, seed=3)
    draft.save_pretrained(tmp_path / "draft")
    model.tokenizer.save_pretrained(tmp_path / "draft")
    before = model.base.config.to_dict()
    ids, request = torch.tensor([[5, 17, 40, 5, 17, 40, 5]]), Request(12)
    peers = [
        Transformers(model), assistant_early_exit(model), prompt_lookup(model),
        assistant_model(model, str(tmp_path / "draft")),
    ]  # fmt: skip
    expected = ar(model).run(ids, request, Meter(CPU), Phases())
    for peer in peers:
        found = Meter(CPU).measure(lambda meter, peer=peer: peer.run(ids, request, meter, Phases()))
        assert found.tokens == expected
    assert model.base.config.to_dict() == before
    with pytest.raises(SkippedMethodError, match="no draft model"):
        assistant_model(model)
    with pytest.raises(ValueError, match=r"1\.\.5"):
        assistant_early_exit(model, 6)


@pytest.mark.slow
def test_the_compiled_peer_says_the_same_at_every_cache_length(model):
    """A prompt that needs a longer cache than the one before compiles anew, before its clock starts."""
    try:
        peer = StaticCompiled(model)
    except SkippedMethodError as error:
        pytest.skip(str(error))
    before = model.base.config.to_dict()
    for length in (20, 150, 30):
        ids, request = torch.tensor([prompt_of(length)]), Request(8)
        peer.prepare(ids, request)
        found = Meter(CPU).measure(lambda meter, ids=ids: peer.run(ids, request, meter, Phases()))  # noqa: B023
        assert found.tokens == ar(model).run(ids, request, Meter(CPU), Phases())
    assert list(peer._caches) == [128, 256]
    assert model.base.config.to_dict() == before


def test_methods_take_turns_in_rotating_order():
    order: list[str] = []
    runs = costs.interleave({name: (lambda name=name: order.append(name)) for name in "abc"}, rounds=3)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert {len(values) for values in runs.values()} == {3}


def test_prompts_turn_the_order_of_methods(model):
    """Whoever goes first warms the caches for the others: each method is first equally often."""
    order, clock = [], Clock()
    fakes = {name: Fake(model, clock, 1.0, name == "ar") for name in ("ar", "b", "c")}
    for name, fake in fakes.items():
        fake.prepare = lambda *_, name=name: order.append(name)
    runner = Runner(model, fakes, EvalConfig(max_new_tokens=4), clock)
    for question in QUESTIONS[:3]:
        runner.ask(question)
    assert order == ["ar", "b", "c", "b", "c", "ar", "c", "ar", "b"]


def test_each_engines_drafting_is_held_against_its_own_plain_decoding(model):
    assert (registry.METHODS["transformers"](model).reference, registry.METHODS["transformers"](model).is_ar) == (
        "ar",
        True,
    )
    for name in ("prompt_lookup", "assistant_early_exit"):
        assert (registry.METHODS[name](model).reference, registry.METHODS[name](model).is_ar) == ("transformers", False)


def test_every_method_has_its_reference(model):
    specs = method_specs(load_eval_config(None, ["methods=[selfspec, {method: selfspec, name: e, exact: true}]"]))
    methods, skipped = build_methods(model, specs)
    assert list(methods) == ["ar", "selfspec", "e", "ar-wide-4"]  # an untrained exit drafts two: four rows
    assert {m.reference for m in methods.values()} <= set(methods)
    assert (methods["selfspec"].reference, methods["e"].reference) == ("ar", "ar-wide-4")
    assert not skipped
    with pytest.raises(ValueError, match=r"unknown method magic; choose of ar, selfspec"):
        method_specs(load_eval_config(None, ["methods=[magic]"]))
    with pytest.raises(ValueError, match="two methods are named selfspec"):
        load_eval_config(None, ["methods=[selfspec, selfspec]"])
    with pytest.raises((ValueError, TypeError), match="draft_lenn"):
        build_methods(model, method_specs(load_eval_config(None, ["methods=[{method: selfspec, draft_lenn: 2}]"])))


def test_later_turns_follow_the_plain_answer(model, monkeypatch):
    runner = Runner(model, {"ar": ar(model)}, EvalConfig(max_new_tokens=4), Clock())
    chats = []
    monkeypatch.setattr(runner, "_encode", lambda chat: chats.append(list(chat)) or torch.tensor([[5, 6, 7]]))
    rows = runner.ask(Question("t", "1", "c", ("first", "second")))
    assert [row["turn"] for row in rows] == [0, 1]
    assert [m["role"] for m in chats[1]] == ["user", "assistant", "user"]
    answer = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, draft="off").sequences[0, 3:]
    assert chats[1][1]["content"] == model.tokenizer.decode(answer, skip_special_tokens=True)


# ---- whole runs --------------------------------------------------------------------------------------------------


@pytest.fixture
def questions(tmp_path, model, monkeypatch) -> Path:
    """A file of three questions, and `EarlyExitModel.from_pretrained` giving the tiny model."""
    monkeypatch.setattr(EarlyExitModel, "from_pretrained", staticmethod(lambda *_: model))
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"category": f"c{i % 2}", "turns": [f"say {i}"]}) + "\n" for i in range(3)))
    return path


def config_of(questions: Path, *overrides: str) -> EvalConfig:
    output = questions.parent / "out"
    settings = [f"tasks={questions}", f"output={output}", "methods=[selfspec]", "max_new_tokens=6", "threads=1"]
    return load_eval_config(None, [*settings, *overrides])


def test_an_interrupted_run_goes_on_where_it_stopped(questions, monkeypatch):
    config, asked = config_of(questions), []
    ask = Runner.ask

    def stop_at_the_third(self: Runner, question: Question) -> Any:
        asked.append(question.id)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return ask(self, question)

    monkeypatch.setattr(Runner, "ask", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        evaluate(config)
    with pytest.raises(ValueError, match=r"unfinished run of other settings \(max_new_tokens: 6 -> 7\)"):
        evaluate(config_of(questions, "max_new_tokens=7"))
    journal = Path(config.output) / "journal.jsonl"
    journal.write_text(journal.read_text() + '{"key": "torn')  # killed while writing
    results = evaluate(config)
    assert asked == ["1", "2", "3", "3"]
    assert results["num_prompts"] == 3
    assert [row["question"] for row in results["rows"] if row["method"] == "ar"] == ["1", "2", "3"]
    assert json.loads((Path(config.output) / "results.json").read_text()) == json.loads(json.dumps(results))
    assert not journal.exists()
    with pytest.raises(ValueError, match="finished run"):
        evaluate(config)


def test_results_hold_what_a_reader_needs(questions):
    results = evaluate(config_of(questions, "temperatures=[0, 1]"))
    figures = results["summary"]["selfspec"]
    assert {"speedup", "tau", "acceptance_rate", "tokens_per_second", "lossless", "breakdown"} <= figures.keys()
    assert figures["lossless"] is True
    assert set(results["by_temperature"]) == {"0.0", "1.0"}
    assert results["by_temperature"]["1.0"]["selfspec"]["num_compared_texts"] == 3  # coupled, float32: promised
    assert set(results["by_category"]) == {"c0", "c1"}
    assert {"commit", "dirty", "versions", "device", "command"} <= results["provenance"].keys()
    assert "say 0" not in json.dumps(results)  # results, not the questions' text


def test_a_full_disk_loses_nothing_that_was_measured(questions, monkeypatch):
    config, write = config_of(questions), Journal._append

    def full(self: Journal, entry: dict[str, Any]) -> None:
        if entry.get("key", "").endswith("/3"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, entry)

    monkeypatch.setattr(Journal, "_append", full)
    with pytest.raises(OSError, match="No space"):
        evaluate(config)
    monkeypatch.undo()
    journal = Journal(Path(config.output), json.loads((Path(config.output) / "journal.jsonl").open().readline()))
    assert len(journal.done) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no questions"),
        ('{"turns": ["x"]}\n{"turns"', r"q\.jsonl:2: bad JSON"),
        ('{"category": "a"}', r"q\.jsonl:1: needs `turns`.*its fields: category"),
        ('{"turns": []}', r"q\.jsonl:1: empty"),
        ('{"messages": "x"}', r"q\.jsonl:1: `messages`"),
        ("[1]", r"q\.jsonl:1: expected an object"),
    ],
)
def test_bad_questions_are_named(tmp_path, text, message):
    path = tmp_path / "q.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_questions(str(path))


def test_every_format_is_read(tmp_path):
    path = tmp_path / "q.jsonl"
    records = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        {"question": "c", "answer": "#### 4"},
        {"task_id": "HumanEval/0", "prompt": "def f():"},
        {"prompt": ["d", "e"], "prompt_id": 7, "category": "stem"},
        {"messages": [{"role": "user", "content": "g"}, {"role": "assistant", "content": "h"}]},
        {"text": "i"},
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    found = load_questions(str(path), max_turns=2)
    assert [q.turns for q in found] == [("a", "b"), ("c",), ("def f():",), ("d", "e"), ("g",), ("i",)]
    assert [q.id for q in found] == ["81", "2", "HumanEval/0", "7", "5", "6"]
    assert [q.category for q in found] == ["writing", "q", "q", "stem", "q", "q"]
    coded = load_questions(f"humaneval:{path}", limit=1)
    assert coded[1].turns == ("Complete this Python function:\n\nc",)
    with pytest.raises(ValueError, match=r"unknown task 'nope'; choose one of quick, spec-bench"):
        load_questions("nope")
    with pytest.raises(FileNotFoundError, match=r"missing\.jsonl"):
        load_questions("missing.jsonl")
    with pytest.raises(ValueError, match=r"spec-bench needs its file"):
        load_questions("spec-bench")


def test_the_shipped_questions_are_sixty_of_six_kinds():
    questions = load_questions("quick", max_turns=2)
    assert len(questions) == 60
    kinds = [q.category for q in questions]
    assert {kinds.count(kind) for kind in kinds} == {10}
    assert len({q.turns[0] for q in questions}) == 60
    assert len(load_questions("quick", limit=2)) == 12


def test_shipped_configs_are_valid():
    for name in ("quick", "spec-bench"):
        specs = method_specs(load_eval_config(name))
        assert {spec.method for spec in specs} <= registry.METHODS.keys()


def test_a_mistake_is_one_line(tmp_path, capsys, monkeypatch):
    from typer.testing import CliRunner

    monkeypatch.setattr(eval_run.EarlyExitModel, "from_pretrained", lambda *_: pytest.fail("worked before checking"))
    file = tmp_path / "file"
    file.write_text("")
    for arguments, message in (
        (["methods=[magic]"], "unknown method magic"),
        (["tasks=[nope]"], "unknown task 'nope'"),
        (["tassks=[quick]"], "did you mean 'tasks'"),
        ([f"tasks={file}"], "no questions"),
        ([f"output={file}/x"], "Not a directory"),
        (["temperatures=[-1]"], "temperatures must be >= 0"),
    ):
        result = CliRunner().invoke(app, ["eval", *arguments])
        assert result.exit_code == 2, arguments
        assert message in result.stderr, arguments
        assert result.stderr.count("\n") == 1, arguments
