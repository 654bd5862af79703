"""`selfspec trace`: recording changes nothing, every token has one fate, and the page is safe to open."""

import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from typer.testing import CliRunner

from selfspec import EarlyExitModel, cli_generate
from selfspec.cli import app
from selfspec.eval import trace, trace_page
from selfspec.eval.trace import FATES, Cycle, Trace, record
from selfspec.exit_module import ExitConfig, build_adapter
from selfspec.exits import ExitHead
from tests.conftest import mutate, prompt_of, shallow_target_of

NUM_TOKENS = 24
PROMPT = torch.tensor([prompt_of(12)])
SCRIPT = "<script>alert('x')</script>"
PIECES = [
    SCRIPT,
    "</style>",
    '"><img src=http://a.b/c onerror=x>',
    "&lt;",
    "\n",
    "    ",
    ":\n\n\t",
    " a",
    "\x00",
    "\r",
    "\u202e",
]
BYTES = [b"\xf0\x9f", b"\x98", b"\x80", b"\xe6\xbc", b"\xa2", b"\xff"]
BASE = {"max_new_tokens": NUM_TOKENS, "draft_len": 3, "exit": "layer-2"}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 0.9, "seed": 3},
    "rejection": {"temperature": 0.9, "top_p": 0.9, "seed": 4, "acceptance": "rejection"},
    "exact": {"exact": True},
    "penalty": {"repetition_penalty": 1.2},
    "ends early": {"eos_token_id": list(range(40, 48))},
    "stops early": {"draft_len": 3, "min_confidence": 0.9, "exit": "trained"},
}


class Tokenizer:
    """97 tokens: dangerous pieces, parts of characters, words."""

    chat_template = None

    def __init__(self) -> None:
        pieces = [*(p.encode() for p in PIECES), *BYTES]
        self.pieces = pieces + [f" w{i}".encode() for i in range(97 - len(pieces))]

    def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        return {"input_ids": PROMPT}

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", errors="replace")


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    target = shallow_target_of("llama")
    torch.manual_seed(0)
    config = ExitConfig(exit_layer=2, num_steps=3, lora_rank=4, draft_vocab=tuple(range(0, 97, 2)))
    adapter = build_adapter(target, config)
    heads = {"layer-2": ExitHead.untrained(target, 2), "trained": ExitHead(target, "trained", config, adapter)}
    with torch.no_grad():
        heads["trained"].confidence.bias.fill_(2.5)
    return EarlyExitModel(target, heads, Tokenizer())


def traced(model: EarlyExitModel, **request: Any) -> Trace:
    return record(model, PROMPT, **{**BASE, **request})


@pytest.fixture(scope="module", params=REQUESTS)
def case(request: pytest.FixtureRequest, model: EarlyExitModel) -> tuple[dict[str, Any], Trace]:
    asked = {**BASE, **REQUESTS[request.param]}
    return asked, record(model, PROMPT, **asked)


def test_recording_changes_neither_text_nor_counts(model, case):
    """Tokens and counts are those of `generate`; fates, cycles and proposals add up to them."""
    asked, found = case
    plain = model.generate(PROMPT, **asked)
    assert [token.id for token in found.tokens] == plain.sequences[0, PROMPT.shape[1] :].tolist()
    assert found.stats.to_dict() == plain.stats.to_dict()
    assert found.stats.num_drafted > 0
    assert found.stats.num_accepted > 0 or found.settings["exit"] == "trained"
    assert len(found.cycles) == found.stats.num_cycles
    assert sum(len(c.proposals) for c in found.cycles) == found.stats.num_drafted
    assert found.fates["accepted"] == sum(c.num_accepted for c in found.cycles) == found.stats.num_accepted
    assert found.fates.total() == found.stats.num_tokens
    assert set(found.fates) <= set(FATES)


def test_a_fate_says_what_happened(case):
    """Accepted tokens were proposed; a recovered one ends its cycle beside a proposal that was another token."""
    _, found = case
    assert [t.fate for t in found.prefill.tokens] == ["plain"]
    position = PROMPT.shape[1]
    for cycle in [found.prefill, *found.cycles]:
        assert cycle.position == position
        position += len(cycle.tokens)
        fates, count = [t.fate for t in cycle.tokens], cycle.num_accepted
        assert fates[:count] == ["accepted"] * count
        assert [t.id for t in cycle.tokens[:count]] == [p.token for p in cycle.proposals[:count]]
        own = "plain" if not cycle.proposals else "bonus" if count == len(cycle.proposals) else "recovered"
        assert fates[count:] in ([own], [])
        if own == "recovered":
            assert cycle.tokens[count].refused.token == cycle.proposals[count].token != cycle.tokens[count].id


def is_aligned(found: Trace) -> bool:
    """Every greedy token, drafted or emitted, is the likeliest of its own row; probabilities fall and are such."""
    opinions = [token.target for token in found.tokens] + [p.draft for c in found.cycles for p in c.proposals]
    for opinion in opinions:
        probs = [choice.prob for choice in opinion.top]
        assert probs == sorted(probs, reverse=True)
        assert 0 < sum(probs) < 1 + 1e-5
    return all(opinion.chosen == opinion.top[0] for opinion in opinions)


@pytest.mark.parametrize("name", ["layer-2", "trained"])
def test_opinions_are_those_of_the_row_that_gave_the_token(model, name, monkeypatch):
    found = traced(model, exit=name)
    assert is_aligned(found)
    expected = None if name == "layer-2" else pytest.approx(1 / (1 + math.exp(-2.5)))  # its weight is zero: the bias
    assert all(p.confidence == expected for c in found.cycles for p in c.proposals)
    mutate(monkeypatch, trace._cycle, "state.logits[i]", "state.logits[-1]")  # planted: another row's opinion
    assert not is_aligned(traced(model, exit=name))


class StopAt(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((1,), input_ids.shape[1] >= self.length)


def test_a_cycle_cut_by_a_stop_keeps_what_was_emitted(model):
    """The cut falls behind each token of the first cycle that accepts two drafts or more."""
    long = next(c for c in traced(model).cycles if c.num_accepted >= 2)
    for kept in range(1, len(long.tokens) + 1):
        found = traced(model, stopping_criteria=StoppingCriteriaList([StopAt(long.position + kept)]))
        assert found.cycles[-1].tokens == long.tokens[:kept]
        assert found.cycles[-1].num_accepted == min(kept, long.num_accepted)
        trace_page.render(found, "hi", Tokenizer())


def test_opinions_are_the_rows_own_where_an_engine_could_run(model, monkeypatch):
    """It would not look at single rows: what is recorded goes through the loop."""
    expected = traced(model, draft="off").cycles
    monkeypatch.setenv("SELFSPEC_ENGINE", "calls")
    assert traced(model, draft="off").cycles == expected


def test_without_drafting_all_is_plain(model):
    found = traced(model, draft="off")
    assert found.fates == {"plain": NUM_TOKENS}
    assert all(cycle.proposals == [] for cycle in found.cycles)


class Page(HTMLParser):
    """What a browser would take for tags, attributes and the generated text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.ids = set[str](), list[tuple[str, str | None]](), list[str]()
        self.pieces, self._depth = list[str](), 0  # text of the tokens
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag == "span" and (dict(attrs).get("class") or "").startswith("t "):
            self._depth = 1
            self.pieces.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "span":
            self._depth = 0

    def handle_data(self, data: str) -> None:
        if self._depth:
            self.pieces[-1] += data


def scripted(tokens: list[int], model: EarlyExitModel) -> Trace:
    """A trace of ``tokens``, whatever the model would have said: each replaces one of a real run."""
    found = traced(model, max_new_tokens=len(tokens))
    left = iter(tokens)

    def rewrite(cycle: Cycle) -> Cycle:
        for token in cycle.tokens:
            object.__setattr__(token.target.chosen, "token", next(left))
        return cycle

    return Trace(found.model, found.settings, rewrite(found.prefill), [*map(rewrite, found.cycles)], found.stats)


def test_the_page_escapes_what_the_model_says_and_asks(model):
    """A script tag stays text in prompt, text, cards and table; nothing is loaded, nothing runs."""
    page = trace_page.render(scripted([0, 1, 2, 3, 0, 9, 8, 10, 7, 4, 5, 6, *range(97)], model), SCRIPT, Tokenizer())
    assert SCRIPT not in page
    assert page.count("&lt;script&gt;") > 10
    parsed = Page(page)
    assert not parsed.tags & {"script", "img", "link", "iframe", "object", "base"}
    names = {name for name, _ in parsed.attributes}
    assert not {name for name in names if name.startswith("on")} | names & {"src", "srcset", "data", "action"}
    assert all((value or "").startswith("#") for name, value in parsed.attributes if name == "href")
    assert "url(" not in page.split("</style>")[0]
    assert "default-src 'none'" in page
    assert "".join(parsed.pieces).startswith(SCRIPT + '</style>"><img src=http://a.b/c onerror=x>&lt;')
    assert page.startswith("<!doctype html>")


def test_split_characters_stand_whole_in_the_text(model):
    """An emoji of three tokens stands at its last one; no U+FFFD, no control character, newlines and blanks as text."""
    first = len(PIECES)
    tokens = [20, first, first + 1, first + 2, 4, 5, first + 3, first + 4, 6, first + 5, 30, 8, 9, 10, 31, first]
    page = trace_page.render(scripted(tokens, model), "hi", Tokenizer())
    pieces = Page(page).pieces
    assert len(pieces) == len(tokens)
    assert pieces[1:4] == ["", "", "\U0001f600"]
    assert pieces[4:9] == ["\n", "    ", "", "\u6f22", ":\n\n\t"]
    assert pieces[-1] == ""
    assert not trace_page.UNSEEN.search(page)


def test_every_token_has_a_card_of_its_own(model):
    found = traced(model)
    page = Page(trace_page.render(found, "hi", Tokenizer()))
    held = [value for name, value in page.attributes if name == "id" and (value or "").startswith("card-")]
    named = [value for name, value in page.attributes if name == "aria-describedby"]
    assert held == named == [f"card-{i}" for i in range(NUM_TOKENS)]


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_a_short_generation_has_a_page(model, num_tokens):
    page = trace_page.render(traced(model, max_new_tokens=num_tokens), "hi", Tokenizer())
    assert ("there was no cycle" in page) == (num_tokens == 1)


def test_the_line_ends_at_tau():
    """Cycles of 3, 1 and 2 tokens: bars of these heights, the running mean 3, 2, 2, ticks at whole numbers."""
    chart = trace_page.tau_chart([3, 1, 2])
    unit = (chart["bottom"] - chart["top"]) / 3
    assert [bar[3] / unit for bar in chart["bars"]] == pytest.approx([3, 1, 2])
    assert [(chart["bottom"] - y) / unit for _, y in chart["line"]] == pytest.approx([3, 2, 2])
    assert [mark for _, mark in chart["x"]] == [1, 2, 3]
    assert [mark for _, mark in trace_page.tau_chart([1] * 83)["x"]] == [20, 40, 60, 80]


def selfspec(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["trace", *arguments], catch_exceptions=False)


def test_the_command_writes_one_page_and_says_where(model, monkeypatch, tmp_path):
    monkeypatch.setattr(cli_generate, "load", lambda *_: model)
    output = tmp_path / "page.html"
    run = selfspec("Hello <b>", "--exit", "layer-2", "--max-new-tokens", "8", "--output", str(output))
    assert run.exit_code == 0, run.stderr
    assert run.stdout.startswith(f"{output}: 8 tokens, tau ")
    assert len(run.stdout.splitlines()) == 1
    assert "Hello &lt;b&gt;" in output.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("output", ["nowhere/page.html", "file/page.html", "."])
def test_an_output_that_cannot_be_written_is_refused_before_loading(monkeypatch, tmp_path, output):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_generate, "load", lambda *_: pytest.fail("loaded"))
    run = selfspec("hi", "--output", output)
    assert run.exit_code == 2
    assert f"cannot write {Path(output)}: " in run.stderr
    assert len(run.stderr.splitlines()) == 1
