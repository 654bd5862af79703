"""The harness: planted faults of methods are caught, methods take turns, peers say the same."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from selfspec import costs
from selfspec.compare import first_divergence, gap_in_ulp
from selfspec.eval import methods as registry
from selfspec.eval.config import EvalConfig, load_eval_config
from selfspec.eval.engine import Engine, ar
from selfspec.eval.measure import CountError, Meter, Phases, Request, SkippedMethodError
from selfspec.eval.peers import StaticCompiled, Transformers, assistant_early_exit, assistant_model, prompt_lookup
from selfspec.eval.run import build_methods, method_specs
from selfspec.eval.runner import Runner
from selfspec.eval.summary import summarise
from selfspec.eval.tasks import Question
from selfspec.model import EarlyExitModel
from tests.conftest import build_model, chat_model, prompt_of

CPU = torch.device("cpu")
QUESTIONS = [Question("t", str(i), "odd" if i % 2 else "even", (f"question {i}",)) for i in range(4)]


@pytest.fixture
def model() -> EarlyExitModel:
    return chat_model()


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


def test_counts_of_cycles_that_are_one_launch(model, monkeypatch):
    """The same from outside the cycles; nothing is said of their parts."""
    monkeypatch.setenv("SELFSPEC_ENGINE", "calls")
    ids = torch.tensor([[5, 17, 40]])
    engine, phases = Engine(model, draft_len=3), Phases()
    run = Meter(CPU).measure(lambda meter: engine.run(ids, Request(24), meter, phases), phases)
    stats = model.generate(ids, max_new_tokens=24, draft_len=3).stats
    assert run.num_decoded / run.num_cycles == stats.tau
    assert len(phases.num_drafted) == len(phases.num_accepted) == stats.num_cycles
    assert (sum(phases.num_drafted), sum(phases.num_accepted)) == (stats.num_drafted, stats.num_accepted)
    assert phases.draft_seconds == phases.verify_seconds == 0


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


def test_methods_take_turns_behind_every_other():
    """A fixed or rotated order would have each run in the caches that the same one leaves."""
    order: list[str] = []
    runs = costs.interleave({name: (lambda name=name: order.append(name)) for name in "abc"}, rounds=20)
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert rounds[0] == "abc"  # the warm-up
    assert {"".join(sorted(taken)) for taken in rounds} == {"abc"}
    assert {a + b for taken in rounds[1:] for a, b in pairwise(taken)} == {"ab", "ba", "ac", "ca", "bc", "cb"}
    assert {len(values) for values in runs.values()} == {20}


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
