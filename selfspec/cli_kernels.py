"""The sub-command that looks at the GPU kernels without a GPU: kernels."""

import importlib.util
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from selfspec.cli_options import mistakes_in_one_line
from selfspec.files import check_writable, write_atomically


def kernels(
    output: Annotated[Path | None, typer.Option(help="Write the table as JSON.")] = None,
    splits: Annotated[Path | None, typer.Option(help="Write a plot of the modelled choice of splits instead.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A dozen cases in place of the whole table.")] = False,
) -> None:
    """Compile the Triton kernels for four GPU architectures and check registers, memory, instructions."""
    with mistakes_in_one_line():
        if splits is not None:
            check_writable(splits)
            from selfspec.eval.kernel_report import plot_splits

            write_atomically(splits, plot_splits())
            typer.echo(f"written to {splits}")
            return
        if output is not None:
            check_writable(output)
        failures = _compile(quick, output)
    for failure in failures:
        typer.echo(f"selfspec: {failure}", err=True)
    if failures:
        raise typer.Exit(1)


def _compile(quick: bool, output: Path | None) -> list[str]:
    if importlib.util.find_spec("triton") is None:
        raise ValueError("triton is not installed: pip install triton")
    from selfspec.eval.kernel_report import table
    from selfspec.kernels import aot
    from selfspec.provenance import provenance

    chosen = aot.cases(quick)
    found = [aot.measure(case) for case in track(chosen, "compiling", console=Console(stderr=True))]
    failures = aot.gate(found)
    if output is not None:
        held = {"cases": [m.as_dict() for m in found], "failures": failures, "provenance": provenance()}
        write_atomically(output, json.dumps(held, indent=1).encode() + b"\n")
    Console(highlight=False, width=160).print(table(found))
    return failures
