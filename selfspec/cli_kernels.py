"""The sub-commands that time parts alone: kernels, without a GPU, bench-kernels, -engine, -batch and -data."""

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from selfspec.cli_options import Device, Dtype, Exits, Model, Revision, mistakes_in_one_line, parse_exits
from selfspec.files import check_writable, write_atomically

if TYPE_CHECKING:
    import torch


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


def _where(output: Path, device: str | None, dtype: str | None) -> "tuple[torch.device, torch.dtype]":
    """Device and dtype to time on; ``output`` is there and can be written."""
    import torch

    from selfspec.pretrained import resolve_dtype, usable_device

    place = torch.device(usable_device(device))
    output.mkdir(parents=True, exist_ok=True)
    check_writable(output / "results.json")
    kind = resolve_dtype(dtype, place)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"dtype {dtype!r}; choose one of bfloat16, float16, float32")
    return place, kind


def _written(output: Path, held: dict[str, Any], table: Any) -> None:
    """Keep what was measured, and show its ``table``."""
    write_atomically(output / "results.json", json.dumps(held, indent=1).encode() + b"\n")
    Console(highlight=False, width=160).print(table)
    typer.echo(f"written to {output}")


def bench_kernels(
    output: Annotated[Path, typer.Option(help="Folder of results.json and roofline.png.")] = Path("runs/bench-kernels"),
    device: Device = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
) -> None:
    """Check the attention kernel, then time it against others and the memory's speed."""
    with mistakes_in_one_line():
        from selfspec.eval import bench_kernels as bench
        from selfspec.eval.kernel_report import bench_table, plot_roofline, ratios
        from selfspec.provenance import provenance

        place, kind = _where(output, device, dtype)
        found = list(track(bench.run(place, kind), "checking, then timing", total=None,
                           console=Console(stderr=True)))  # fmt: skip
        rows = [line for line in found if "us" in line]
        held = {
            "checks": [line for line in found if "errors" in line],
            "copy_bandwidth": next(line["copy_bandwidth"] for line in found if "copy_bandwidth" in line),
            "rows": rows, "ratios": ratios(rows), "dtype": dtype, "provenance": provenance(place),
        }  # fmt: skip
        write_atomically(output / "roofline.png", plot_roofline(held))
        _written(output, held, bench_table(held))


def bench_engine(
    output: Annotated[Path, typer.Option(help="Folder of results.json and cost.png.")] = Path("runs/bench-engine"),
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Check the engine's texts, then time plain decoding, drafts, verification and whole cycles."""
    with mistakes_in_one_line():
        from selfspec.eval import bench_engine as bench
        from selfspec.eval.tasks import load_questions
        from selfspec.provenance import provenance

        place, kind = _where(output, device, dtype)
        turns = [question.turns[0] for question in load_questions("quick", limit=1)]
        found = list(track(bench.run(place, kind, turns), "checking, then timing", total=None,
                           console=Console(stderr=True)))  # fmt: skip
        held = {
            "copy_bandwidth": found[0]["copy_bandwidth"], "models": found[1:],
            "dtype": str(kind).removeprefix("torch."), "provenance": provenance(place),
        }  # fmt: skip
        write_atomically(output / "cost.png", bench.plot(held))
        _written(output, held, bench.table(held))


def bench_batch(
    tasks: Annotated[str, typer.Argument(help="Prompts: a task or a jsonl file, as for eval.")] = "quick",
    model: Model = None,
    exits: Exits = None,
    revision: Revision = None,
    output: Annotated[Path, typer.Option(help="Folder of results.json.")] = Path("runs/bench-batch"),
    sizes: Annotated[str, typer.Option(help="Batch sizes, as in 1,2,4.")] = "1,2,3,4,8,16,32",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each answers a batch; one more warms up.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Time batches, against the same prompts one by one and transformers' generate, and compare the texts."""
    with mistakes_in_one_line():
        import torch

        from selfspec.eval import bench_batch as bench
        from selfspec.model import EarlyExitModel
        from selfspec.provenance import provenance

        counts = [int(size) for size in sizes.split(",") if size.strip().isdigit() and int(size) > 0]
        if len(counts) < len(sizes.split(",")):
            raise ValueError(f"--sizes {sizes!r}: numbers from 1 on, as in 1,2,4")
        if threads is not None:
            torch.set_num_threads(threads)
        place, kind = _where(output, device, dtype)
        loaded = EarlyExitModel.from_pretrained(model, parse_exits(exits), revision, kind, place)
        if loaded.tokenizer is None or loaded.tokenizer.chat_template is None:
            raise ValueError(f"{loaded.target.name} has no chat template to ask with")
        with Console(stderr=True).status("answering the same batches in turn"):
            held = bench.run(loaded, tasks, counts, max_new_tokens, rounds)
        held["provenance"] = provenance(place)
        _written(output, held, bench.table(held))


def bench_data(
    prompts: Annotated[
        str | None, typer.Option(help="jsonl or hub data set of prompts; the target writes them if not given.")
    ] = None,
    model: Model = None,
    revision: Revision = None,
    output: Annotated[Path, typer.Option(help="Folder of results.json.")] = Path("runs/bench-data"),
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered at once.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 160,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each writes the batch; one more warms up.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Time how training data is written, against transformers' generate, and compare what they write."""
    with mistakes_in_one_line():
        import torch

        from selfspec.pretrained import load_target_model, usable_device
        from selfspec.provenance import provenance
        from selfspec.training import bench

        if threads is not None:
            torch.set_num_threads(threads)
        place = usable_device(device)
        output.mkdir(parents=True, exist_ok=True)
        check_writable(output / "results.json")
        hf_model, tokenizer = load_target_model(model, revision, dtype, place)
        with Console(stderr=True).status("writing the same batch in turn"):
            held = bench.run(hf_model, tokenizer, prompts, batch_size, max_new_tokens, rounds=rounds)
        held["provenance"] = provenance(place)
        _written(output, held, bench.table(held))
