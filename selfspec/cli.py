"""`selfspec ...`: the command line. A user's mistake is one line and exit code 2, never a traceback."""

import importlib.metadata
import json
import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from selfspec import cli_kernels, cli_measure
from selfspec.cli_options import (
    Acceptance,
    AcceptanceRule,
    AllowBaseMismatch,
    Cascade,
    Config,
    Device,
    Draft,
    DraftLen,
    DraftWidth,
    Dtype,
    Exact,
    ExitName,
    Exits,
    Json,
    KvCacheDtype,
    MaxNewTokens,
    MinConfidence,
    Model,
    Overrides,
    PromptArgument,
    PromptFile,
    PromptLookup,
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

app = typer.Typer(
    help="Faster generation, not a token changed: a model drafts with its first layers, verifies with the rest.\n\n"
    "Losslessness: L1 emitted tokens follow the target's distribution exactly; L2 fp32 text equals plain decoding. "
    "L3 (--exact) logits are bit-identical in any dtype; L4 fast bf16/fp16 differs only at near-ties.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
def generate(
    prompt: PromptArgument = None,
    model: Model = None,
    revision: Revision = None,
    exits: Exits = None,
    exit_name: ExitName = None,
    cascade: Cascade = None,
    prompt_file: PromptFile = None,
    raw: Raw = False,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    draft_len: DraftLen = None,
    min_confidence: MinConfidence = None,
    draft_width: DraftWidth = None,
    prompt_lookup_num_tokens: PromptLookup = None,
    draft: Annotated[Draft | None, typer.Option(help="Form of drafting; off is ordinary decoding.")] = None,
    acceptance: AcceptanceRule = Acceptance.coupled,
    exact: Exact = None,
    kv_cache_dtype: KvCacheDtype = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut the start of a prompt that is too long.")] = False,
    allow_base_mismatch: AllowBaseMismatch = False,
    dtype: Dtype = None,
    device: Device = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run without drafting: speedup and identity.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Answer a prompt, drafting with the model's own first layers."""
    with mistakes_in_one_line():
        text = read_prompt(prompt, prompt_file)
        from selfspec import cli_generate  # torch and transformers load here: --help stays quick

        loaded = cli_generate.load(model, revision, parse_exits(exits), dtype, device, allow_base_mismatch)
        request = {
            "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed,
            "draft_len": parse_draft_len(draft_len), "min_confidence": min_confidence, "draft_width": draft_width,
            "draft": draft and draft.value, "acceptance": acceptance.value, "exact": exact, "exit": exit_name,
            "kv_cache_dtype": kv_cache_dtype, "cascade": cascade, "prompt_lookup_num_tokens": prompt_lookup_num_tokens,
        }  # fmt: skip
        ids = cli_generate.encode(loaded, text, raw, max_new_tokens, truncate)
        cli_generate.run(loaded, ids, request, compare, as_json, Console(highlight=False))


@app.command("train-exits")
def train_exits(
    overrides: Overrides = None,
    config: Config = "smollm2-135m",
    max_steps: Annotated[int | None, typer.Option(help="Training steps; 0 stops after the closed-form start.")] = None,
    push_to_hub: Annotated[str | None, typer.Option(help="Upload the exit to this hub id (owner/name).")] = None,
) -> None:
    """Train exit heads on a frozen target that writes its own data."""
    with mistakes_in_one_line():
        from selfspec.storage import check_hub_id, upload
        from selfspec.training.config import load_train_config
        from selfspec.training.ranks import is_main
        from selfspec.training.run import train_exits as train

        if push_to_hub is not None:
            check_hub_id(push_to_hub)  # before hours of training
        settings = [*(overrides or []), *([] if max_steps is None else [f"max_steps={max_steps}"])]
        folder = train(load_train_config(config, settings))
        typer.echo(f"exit written to {folder}")
        if push_to_hub is not None and is_main():
            upload(folder, push_to_hub)
            typer.echo(f"exit uploaded to {push_to_hub}")


app.command("eval")(cli_measure.evaluate)
app.command()(cli_measure.report)
app.command()(cli_measure.trace)
app.command()(cli_measure.probe)
app.command()(cli_kernels.kernels)
app.command("bench-kernels")(cli_kernels.bench_kernels)
app.command("bench-engine")(cli_kernels.bench_engine)
app.command("bench-batch")(cli_kernels.bench_batch)
app.command("bench-data")(cli_kernels.bench_data)


@app.command()
def info(as_json: Json = False) -> None:
    """Show versions, device, default model, shipped exits, the kernels that would run and how cycles would."""
    with mistakes_in_one_line():
        found = _info()
    if as_json:
        typer.echo(json.dumps(found))
        return
    table = Table(show_header=False, box=None)
    for key, value in found.items():
        table.add_row(key, ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value))
    Console(highlight=False).print(table)


def _info() -> dict[str, Any]:
    import torch

    from selfspec.engine import mode_for
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
        "cycles": mode_for(torch.device(device)),
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
