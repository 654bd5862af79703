"""`selfspec ...`: the command line. A user's mistake is one line and exit code 2, never a traceback."""

import importlib.metadata
import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress, TaskID, TimeElapsedColumn
from rich.table import Table

from selfspec.files import check_writable, write_atomically

app = typer.Typer(
    help="Faster generation, not a token changed: a model drafts with its first layers, verifies with the rest.\n\n"
    "Losslessness: L1 emitted tokens follow the target's distribution exactly; L2 fp32 text equals plain decoding. "
    "L3 (--exact) logits are bit-identical in any dtype; L4 fast bf16/fp16 differs only at near-ties.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
MISTAKES = (ValueError, TypeError, OSError, NotImplementedError, FloatingPointError, MemoryError)


class Draft(StrEnum):
    """Forms of drafting."""

    chain = "chain"
    off = "off"


class Acceptance(StrEnum):
    """Acceptance rules."""

    coupled = "coupled"
    rejection = "rejection"


def fail(message: object) -> NoReturn:
    """Say one line and leave with exit code 2."""
    text = " ".join(str(message).split()) or type(message).__name__
    typer.echo(f"selfspec: {text}", err=True)
    raise SystemExit(2)


PromptArgument = Annotated[str | None, typer.Argument(help="The question; from --prompt-file or stdin if not given.")]
PromptFile = Annotated[Path | None, typer.Option(help="Read the prompt from a file.")]
Raw = Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without chat template.")]
Model = Annotated[str | None, typer.Option(help="Folder or hub id; SmolLM2-135M-Instruct if not given.")]
Revision = Annotated[str | None, typer.Option(help="Revision of a hub model.")]
Exits = Annotated[str | None, typer.Option(help="Folder or hub id of exits, or layers for untrained ones, as in 4,8.")]
ExitName = Annotated[str | None, typer.Option("--exit", help="Name of the exit to draft from.")]
AllowBaseMismatch = Annotated[
    bool, typer.Option("--allow-base-mismatch", help="Use exits trained for other weights; still lossless.")
]
MaxNewTokens = Annotated[int, typer.Option(help="Length limit of the answer, in tokens.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling; 1 is off.")]
TopK = Annotated[int, typer.Option(help="Sample among the k likeliest tokens; 0 is off.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text, with and without drafting.")]
DraftLen = Annotated[int | None, typer.Option(help="Largest number of drafted tokens a cycle.")]
MinConfidence = Annotated[
    float | None, typer.Option(help="Draft no further below this chance that all drafts stand; 0 is off.")
]
AcceptanceRule = Annotated[Acceptance, typer.Option(help="Acceptance rule when sampling.")]
Exact = Annotated[
    bool | None, typer.Option("--exact/--no-exact", help="Bit-exact mode (L3); default: on in bf16 and fp16.")
]
Dtype = Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; default: what is fast here.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...")]


@app.command()
def generate(
    prompt: PromptArgument = None,
    model: Model = None,
    revision: Revision = None,
    exits: Exits = None,
    exit_name: ExitName = None,
    prompt_file: PromptFile = None,
    raw: Raw = False,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    draft_len: DraftLen = None,
    min_confidence: MinConfidence = None,
    draft: Annotated[Draft | None, typer.Option(help="Form of drafting; off is ordinary decoding.")] = None,
    acceptance: AcceptanceRule = Acceptance.coupled,
    exact: Exact = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut the start of a prompt that is too long.")] = False,
    allow_base_mismatch: AllowBaseMismatch = False,
    dtype: Dtype = None,
    device: Device = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run without drafting: speedup and identity.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Answer a prompt, drafting with the model's own first layers."""
    try:
        text = _read_prompt(prompt, prompt_file)
        from selfspec import cli_generate  # torch and transformers load here: --help stays quick

        loaded = cli_generate.load(model, revision, _exits(exits), dtype, device, allow_base_mismatch)
        request = {
            "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed,
            "draft_len": draft_len, "min_confidence": min_confidence, "draft": draft and draft.value,
            "acceptance": acceptance.value, "exact": exact, "exit": exit_name,
        }  # fmt: skip
        ids = cli_generate.encode(loaded, text, raw, max_new_tokens, truncate)
        cli_generate.run(loaded, ids, request, compare, as_json, Console(highlight=False))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except MISTAKES as error:
        fail(error)


@app.command()
def trace(
    prompt: PromptArgument = None,
    output: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("trace.html"),
    model: Model = None,
    revision: Revision = None,
    exits: Exits = None,
    exit_name: ExitName = None,
    prompt_file: PromptFile = None,
    raw: Raw = False,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    draft_len: DraftLen = None,
    min_confidence: MinConfidence = None,
    acceptance: AcceptanceRule = Acceptance.coupled,
    exact: Exact = None,
    allow_base_mismatch: AllowBaseMismatch = False,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Write an HTML page that shows what became of every token of one answer."""
    try:
        check_writable(output)
        text = _read_prompt(prompt, prompt_file)
        from selfspec import cli_generate
        from selfspec.eval.trace import record
        from selfspec.eval.trace_page import render

        loaded = cli_generate.load(model, revision, _exits(exits), dtype, device, allow_base_mismatch)
        ids = cli_generate.encode(loaded, text, raw, max_new_tokens, truncate=False)
        found = record(
            loaded, ids, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed,
            draft_len=draft_len, min_confidence=min_confidence, acceptance=acceptance.value, exact=exact,
            exit=exit_name,
        )  # fmt: skip
        assert loaded.tokenizer is not None
        write_atomically(output, render(found, text, loaded.tokenizer).encode())
        stats = found.stats
        typer.echo(
            f"{output}: {stats.num_tokens} tokens, tau {stats.tau:.2f}, acceptance rate {stats.acceptance_rate:.2f}"
        )
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except MISTAKES as error:
        fail(error)


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise ValueError("give a prompt or --prompt-file, not both")
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{prompt_file}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    elif prompt is None:
        if sys.stdin.isatty():
            raise ValueError('no prompt: give one ("What is a KV cache?"), --prompt-file FILE, or pipe it in')
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    return prompt


def _exits(text: str | None) -> str | list[int] | None:
    parts = [] if text is None else text.split(",")
    if parts and all(p.strip().lstrip("-").isdigit() for p in parts):
        return [int(p) for p in parts]
    return text


@app.command("train-exits")
def train_exits(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value settings that override the config.")] = None,
    config: Annotated[str, typer.Option(help="Name of a shipped config or path of a YAML file.")] = "smollm2-135m",
    max_steps: Annotated[int | None, typer.Option(help="Training steps; 0 stops after the closed-form start.")] = None,
) -> None:
    """Train exit heads on a frozen target that writes its own data."""
    try:
        from selfspec.training.config import load_train_config
        from selfspec.training.run import train_exits as train

        settings = [*(overrides or []), *([] if max_steps is None else [f"max_steps={max_steps}"])]
        folder = train(load_train_config(config, settings))
        typer.echo(f"exit written to {folder}")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except MISTAKES as error:
        fail(error)


@app.command("eval")
def evaluate(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value settings that override the config.")] = None,
    config: Annotated[str, typer.Option(help="Name of a shipped config or path of a YAML file.")] = "quick",
    limit: Annotated[int | None, typer.Option(help="Questions of each category.")] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Two questions of each category, 32 tokens: some five minutes on two cores."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Measure speed and losslessness of this engine and its peers on the same prompts."""
    try:
        from selfspec.eval.config import load_eval_config
        from selfspec.eval.report import print_summary
        from selfspec.eval.run import evaluate as run

        given = [] if limit is None else [f"limit={limit}"]
        short = ["limit=2", "max_new_tokens=32"] if quick else []
        settings = load_eval_config(config, [*short, *(overrides or []), *given])
        results = run(settings)
        if as_json:
            typer.echo(json.dumps({key: held for key, held in results.items() if key != "rows"}))
        else:
            print_summary(results, Console(highlight=False))
            typer.echo(f"written to {Path(settings.output) / 'results.json'}; selfspec report makes a page of it")
    except KeyboardInterrupt:
        typer.echo("selfspec: interrupted; the same command goes on where it stopped", err=True)
        raise SystemExit(130) from None
    except MISTAKES as error:
        fail(error)


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="results.json of one or more runs.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder of report.html, report.md and plots; beside the first results.")
    ] = None,
    readme: Annotated[
        Path | None, typer.Option(help="Also put the table between the markers of this Markdown file.")
    ] = None,
    details: Annotated[Path | None, typer.Option(help="The same with the figures by category.")] = None,
) -> None:
    """Make an HTML page, plots and a Markdown table of evaluation results."""
    try:
        from selfspec.eval.report import write_report

        page = write_report(results, output or results[0].parent, readme, details)
        typer.echo(f"report written to {page}")
    except MISTAKES as error:
        fail(error)


@app.command()
def probe(
    model: Annotated[str | None, typer.Option(help="Folder or hub id; SmolLM2-135M-Instruct if not given.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a hub model.")] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Sample: UTF-8 text, or .jsonl with text, prompt or messages; the model's own if not given."),
    ] = None,
    num_tokens: Annotated[int, typer.Option(help="Tokens of the sample; a quarter judges, the rest fits.")] = 4000,
    layers: Annotated[str | None, typer.Option(help="Exit layers, as in 1,2,3; up to twelve if not given.")] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(help="Draft only that many of the most frequent token ids; all if not given.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; default: what is fast here.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    seed: Annotated[int, typer.Option(help="Of the text that the model writes.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for probe.json and probe.png.")] = Path("runs/probe"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Which layer to draft from, and is it worth it: agreement, cost and predicted speedup before any training."""
    try:
        chosen = _layers(layers)
        import torch

        from selfspec.eval import probe_report, probe_run

        if threads is not None:
            torch.set_num_threads(threads)
        config = probe_run.ProbeConfig(model, revision, text, num_tokens, chosen, draft_vocab, dtype, device, seed)
        with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=Console(stderr=True)) as bar:
            found = probe_run.run(config, output, _Stages(bar))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except MISTAKES as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(found))
        return
    console = Console(highlight=False)
    console.print(probe_report.table(found))
    for line in [*probe_report.notes(found), found["verdict"], f"written: {output}/probe.json, {output}/probe.png"]:
        console.print(line, markup=False)


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    chosen = _exits(text)
    if not isinstance(chosen, list):
        raise ValueError(f"--layers {text!r} is not a list of numbers such as 1,2,3")
    return tuple(chosen)


class _Stages:
    """Shows the stages of a long command, each with a bar of its own."""

    def __init__(self, bar: Progress) -> None:
        self._bar, self._tasks = bar, dict[str, TaskID]()

    def __call__(self, stage: str, done: float, total: float) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage)
        self._bar.update(self._tasks[stage], completed=done, total=total)


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show versions, device, default model, shipped exits and the kernels that would run."""
    try:
        found = _info()
    except MISTAKES as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(found))
        return
    table = Table(show_header=False, box=None)
    for key, value in found.items():
        table.add_row(key, ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value))
    Console(highlight=False).print(table)


def _info() -> dict[str, Any]:
    import torch

    from selfspec.kernels import dispatch
    from selfspec.model import SHIPPED_EXITS
    from selfspec.pretrained import default_model_path, resolve_dtype
    from selfspec.provenance import device_name, versions

    device = "cuda" if torch.cuda.is_available() else "cpu"
    exits = sorted(p.parent.name for p in SHIPPED_EXITS.glob("*/selfspec_config.json"))
    return {
        "versions": versions(),
        "device": device_name(device),
        "dtype": str(resolve_dtype(None, torch.device(device))).removeprefix("torch."),
        "model": default_model_path(),
        "exits": exits,
        "kernels": dispatch.implementation(device),
    }


def _version(value: bool) -> None:
    if value:
        typer.echo(importlib.metadata.version("selfspec"))
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of the program itself."""
    del version


def main() -> None:
    """Entry point of the `selfspec` script."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    app()
