"""The command line: results as documented, a user's mistake is one line and exit code 2."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer
from typer.testing import CliRunner

from selfspec import EarlyExitModel, cli
from selfspec.cli import app
from selfspec.cli_generate import Writer
from selfspec.decode import RULES
from selfspec.drafter import DRAFTERS
from selfspec.pretrained import default_model_path
from tests.conftest import build_model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with the default model's tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = AutoTokenizer.from_pretrained(default_model_path())
    model = build_model("llama", vocab_size=len(tokenizer), max_position_embeddings=128)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def selfspec(*arguments: str, stdin: str = "", **environment: str) -> Any:
    return CliRunner().invoke(app, list(arguments), input=stdin, env=environment, catch_exceptions=False)


def generate(checkpoint: Path, *arguments: str, **kwargs: Any) -> Any:
    return selfspec("generate", "--model", str(checkpoint), "--exits", "2", *arguments, **kwargs)


def test_json_with_compare_has_every_documented_key(checkpoint):
    """One object on standard output; the text is the same with and without drafts at T=0.8 for one seed."""
    run = generate(checkpoint, "Hello", "--max-new-tokens", "12", "--temperature", "0.8", "--compare", "--json",
                   "--draft-len", "auto")  # fmt: skip
    assert run.exit_code == 0, run.stderr
    report = json.loads(run.stdout)
    assert set(report) == {
        "text", "tokens", "num_tokens", "seconds", "tokens_per_second", "stats", "settings", "compare",
    }  # fmt: skip
    assert set(report["stats"]) == {
        "num_cycles", "num_drafted", "num_accepted", "acceptance_rate", "tau", "accepted_histogram",
    }  # fmt: skip
    assert {"ar_tokens_per_second", "speedup", "identical"} <= set(report["compare"])
    assert report["compare"]["identical"] is True
    assert report["num_tokens"] == len(report["tokens"]) == 12
    assert report["stats"]["num_drafted"] > 0
    assert report["settings"]["draft_len"] == 2  # nothing is recorded of an untrained exit


def test_plain_output_has_no_colour_when_piped_and_ends_with_the_figures(checkpoint, tmp_path):
    """Prompt from a file and from standard input give the same text; no escape codes in a pipe."""
    (tmp_path / "prompt.txt").write_text("Tell me something")
    from_file = generate(checkpoint, "--prompt-file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "8")
    from_stdin = generate(checkpoint, "--max-new-tokens", "8", stdin="Tell me something")
    assert from_file.exit_code == from_stdin.exit_code == 0
    assert "\x1b" not in from_file.stdout
    text, figures = from_file.stdout.rstrip().rsplit("\n", 1)
    assert figures.startswith("[8 tokens, ")
    assert "tau" in figures
    assert text == from_stdin.stdout.rstrip().rsplit("\n", 1)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["", "--max-new-tokens", "4"], "the prompt is empty"),
        (["hi", "--exits", "99"], "exit layer 99 is not in 1..5"),
        (["hi", "--exit", "none"], "no exit 'none'; there are: layer-2"),
        (["hi", "--temperature", "-1", "--max-new-tokens", "4"], "temperature must be >= 0"),
        (["hi", "--top-p", "2", "--temperature", "1", "--max-new-tokens", "4"], "top_p must be in [0, 1]"),
        (["hi", "--dtype", "float8"], "unknown dtype 'float8'"),
        (["hi", "--max-new-tokens", "400"], "exceed the context of 128"),
        (["hi", "--model", "a/../b"], "neither a folder nor a hub id"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["hi", "--prompt-file", "nowhere.txt"], "not both"),
        (["hi", "--exits", "not/a/place"], "neither a folder nor a hub id"),
        (["hi", "--exits", "-1"], "exit layer -1 is not in 1..5"),
        (["hi", "--device", "abacus"], "device 'abacus' cannot be used"),
        (["hi", "--device", "cuda:99"], "device 'cuda:99' cannot be used"),
        (["hi", "--min-confidence", "2"], "min_confidence must be in [0, 1]"),
        (["hi", "--draft-len", "far"], "draft_len='far'; give a number or 'auto'"),
        (["hi", "--draft-len", "-1"], "draft_len must be >= 0, got -1"),
        (["hi", "--kv-cache-dtype", "int8"], "kv_cache_dtype='int8'; choose float8"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(checkpoint, arguments, message):
    run = generate(checkpoint, *arguments)
    assert run.exit_code == 2
    assert message in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
    assert run.stdout == ""


def test_characters_split_over_tokens_are_printed_whole(checkpoint, capsys):
    """Emoji and Chinese take several tokens each: no piece shows U+FFFD, and together they are the text."""
    model = EarlyExitModel.from_pretrained(checkpoint)
    text = "na\u00efve \U0001f600 \u6f22\u5b57, \U0001f469\u200d\U0001f680 and so on, word after word, to the end."
    tokens = model.tokenizer.encode(text)
    assert sum("\ufffd" in model.tokenizer.decode([token]) for token in tokens) > 5
    writer, shown = Writer(model, Console()), []
    for number, token in enumerate(tokens):
        writer.put(token, number % 3 > 0)
        shown.append(capsys.readouterr().out)
    writer.close()
    shown.append(capsys.readouterr().out)
    assert "".join(shown) == text + "\n"
    assert "\ufffd" not in "".join(shown)
    assert sum(map(bool, shown)) > 10


def test_a_prompt_that_is_not_text_is_named(checkpoint, tmp_path):
    (tmp_path / "prompt.bin").write_bytes(b"caf\xe9")
    run = generate(checkpoint, "--prompt-file", str(tmp_path / "prompt.bin"))
    assert run.exit_code == 2
    assert "prompt.bin: not UTF-8 text" in run.stderr


def test_rejection_does_not_promise_the_text(checkpoint):
    """Sampled under `rejection`, identity is neither true nor false; greedy it is promised again."""
    asked = ("hi", "--max-new-tokens", "6", "--compare", "--acceptance", "rejection")
    sampled = generate(checkpoint, *asked, "--temperature", "1", "--json")
    assert json.loads(sampled.stdout)["compare"]["identical"] is None
    assert "identical: not promised by rejection" in generate(checkpoint, *asked, "--temperature", "1").stdout
    assert json.loads(generate(checkpoint, *asked, "--json").stdout)["compare"]["identical"] is True


@pytest.mark.parametrize(("dtype", "is_exact"), [("float32", False), ("bfloat16", True)])
def test_settings_in_the_report_are_those_that_ran(checkpoint, dtype, is_exact):
    report = json.loads(generate(checkpoint, "hi", "--max-new-tokens", "4", "--json", "--dtype", dtype).stdout)
    found = report["settings"]
    assert (found["draft"], found["exit"], found["draft_len"], found["exact"]) == ("chain", "layer-2", 2, is_exact)
    assert found["dtype"] == dtype
    assert isinstance(found["seed"], int)


def test_the_choices_are_those_of_the_library():
    assert [d.value for d in cli.Draft] == list(DRAFTERS)
    assert [a.value for a in cli.Acceptance] == list(RULES)


def test_kernels_that_do_not_exist_are_refused_at_once(checkpoint):
    run = generate(checkpoint, "hi", SELFSPEC_KERNELS="bogus")
    assert run.exit_code == 2
    assert "SELFSPEC_KERNELS='bogus'" in run.stderr


def test_truncate_cuts_the_start_of_a_long_prompt(checkpoint):
    run = generate(checkpoint, "--truncate", "--max-new-tokens", "8", "--json", stdin="word " * 300)
    assert run.exit_code == 0, run.stderr
    assert json.loads(run.stdout)["num_tokens"] == 8


def test_info_names_what_would_run():
    run = selfspec("info", "--json")
    assert run.exit_code == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["kernels"] == "cpu"
    assert json.loads(selfspec("info", "--json", SELFSPEC_KERNELS="reference").stdout)["kernels"] == "reference"
    assert found["versions"]["torch"]
    assert selfspec("info", SELFSPEC_KERNELS="cuda").exit_code == 2


def test_a_typo_in_a_training_setting_says_what_was_meant(tmp_path):
    run = selfspec("train-exits", "--config", "tiny", "exit_layr=2", f"output={tmp_path / 'run'}")
    assert run.exit_code == 2
    assert "exit_layer" in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
    run = selfspec("train-exits", "--config", "tiny", "recall_layers=[1,2", f"output={tmp_path / 'run'}")
    assert run.exit_code == 2
    assert "'recall_layers=[1,2': not valid YAML" in run.stderr
    assert not (tmp_path / "run").exists()


def test_the_installed_program_leaves_no_traceback(checkpoint):
    """The same through a process of its own, as a user starts it."""
    program = [sys.executable, "-c", "from selfspec.cli import main; main()", "generate", "--model", str(checkpoint)]
    run = subprocess.run([*program, "hi", "--draft", "chain"], capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 2
    assert run.stderr.strip().splitlines()[0].startswith("selfspec: ")
    assert "Traceback" not in run.stderr
