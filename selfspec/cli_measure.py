"""The sub-commands that measure and look inside: eval, report, trace, probe."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TaskID, TimeElapsedColumn

from selfspec.cli_options import (
    Acceptance,
    AcceptanceRule,
    AllowBaseMismatch,
    Config,
    Device,
    DraftLen,
    Dtype,
    Exact,
    ExitName,
    Exits,
    Json,
    MaxNewTokens,
    MinConfidence,
    Model,
    Overrides,
    PromptArgument,
    PromptFile,
    Raw,
    Revision,
    Seed,
    Temperature,
    TopK,
    TopP,
    mistakes_in_one_line,
    parse_draft_len,
    parse_exits,
    read_prompt,
)
from selfspec.files import check_writable, write_atomically


def evaluate(
    overrides: Overrides = None,
    config: Config = "quick",
    limit: Annotated[int | None, typer.Option(help="Questions of each category.")] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Two questions of each category, 32 tokens: some five minutes on two cores."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Measure speed and losslessness of this engine and its peers on the same prompts."""
    with mistakes_in_one_line():
        from selfspec.eval.config import load_eval_config
        from selfspec.eval.report import print_summary
        from selfspec.eval.run import evaluate as run

        given = [] if limit is None else [f"limit={limit}"]
        short = ["limit=2", "max_new_tokens=32"] if quick else []
        settings = load_eval_config(config, [*short, *(overrides or []), *given])
        try:
            results = run(settings)
        except KeyboardInterrupt:
            typer.echo("selfspec: interrupted; the same command goes on where it stopped", err=True)
            raise
        if as_json:
            typer.echo(json.dumps({key: held for key, held in results.items() if key != "rows"}))
        else:
            print_summary(results, Console(highlight=False))
            typer.echo(f"written to {Path(settings.output) / 'results.json'}; selfspec report makes a page of it")


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
    with mistakes_in_one_line():
        from selfspec.eval.report import write_report

        page = write_report(results, output or results[0].parent, readme, details)
        typer.echo(f"report written to {page}")


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
    with mistakes_in_one_line():
        check_writable(output)
        text = read_prompt(prompt, prompt_file)
        from selfspec import cli_generate
        from selfspec.eval.trace import record
        from selfspec.eval.trace_page import render

        loaded = cli_generate.load(model, revision, parse_exits(exits), dtype, device, allow_base_mismatch)
        ids = cli_generate.encode(loaded, text, raw, max_new_tokens, truncate=False)
        found = record(
            loaded, ids, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed,
            draft_len=parse_draft_len(draft_len), min_confidence=min_confidence, acceptance=acceptance.value,
            exact=exact, exit=exit_name,
        )  # fmt: skip
        assert loaded.tokenizer is not None
        write_atomically(output, render(found, text, loaded.tokenizer).encode())
        stats = found.stats
        typer.echo(
            f"{output}: {stats.num_tokens} tokens, tau {stats.tau:.2f}, acceptance rate {stats.acceptance_rate:.2f}"
        )


def probe(
    model: Model = None,
    revision: Revision = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Sample: UTF-8 text, or .jsonl with text, prompt or messages; the model's own if not given."),
    ] = None,
    num_tokens: Annotated[int, typer.Option(help="Tokens of the sample; a quarter judges, the rest fits.")] = 4000,
    layers: Annotated[str | None, typer.Option(help="Exit layers, as in 1,2,3; up to twelve if not given.")] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(help="Draft only that many of the most frequent token ids; all if not given.")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    seed: Annotated[int, typer.Option(help="Of the text that the model writes.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for probe.json and probe.png.")] = Path("runs/probe"),
    as_json: Json = False,
) -> None:
    """Which layer to draft from, and is it worth it: agreement, cost and predicted speedup before any training."""
    with mistakes_in_one_line():
        chosen = _layers(layers)
        import torch

        from selfspec.eval import probe_report, probe_run

        if threads is not None:
            torch.set_num_threads(threads)
        config = probe_run.ProbeConfig(model, revision, text, num_tokens, chosen, draft_vocab, dtype, device, seed)
        with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=Console(stderr=True)) as bar:
            found = probe_run.run(config, output, _Stages(bar))
        if as_json:
            typer.echo(json.dumps(found))
            return
        console = Console(highlight=False)
        console.print(probe_report.table(found))
        for line in [*probe_report.notes(found), found["verdict"], f"written: {output}/probe.json, {output}/probe.png"]:
            console.print(line, markup=False, soft_wrap=True)


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    chosen = parse_exits(text)
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
