"""The figures in README and docs, made from a results file of `selfspec.eval.speed`.

python -m selfspec.eval.table docs/results/cpu_speed.json --write README.md
python -m selfspec.eval.table docs/results/cpu_speed.json --details --write docs/speed.md
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

BEGIN, END = "<!-- speed: made by selfspec.eval.table -->", "<!-- /speed -->"


def render(results: dict[str, Any], source: str) -> str:
    """Markdown of the speeds in ``results``, with machine, settings and the name of their ``source`` file."""
    summary, settings, where = results["summary"], results["settings"], results["provenance"]
    lines = [
        f"SmolLM2-135M-Instruct, greedy, {settings['new_tokens']} new tokens, {summary['num_questions']} questions of "
        f"Spec-Bench's development half, {settings['dtype'].removeprefix('torch.')}, {settings['threads']} thread of "
        f"{where['device']}, decoding time without prefill. Texts of the default settings identical to plain decoding "
        f"in the same settings: {summary['default']['same_text']} of {summary['num_questions']}.",
        "",
        "| method | tok/s | over plain decoding | over transformers' generate | tau | acceptance rate "
        "| text as expected |",
        "|---|---|---|---|---|---|---|",
        f"| transformers' generate | {summary['transformers']['tokens_per_second']:.1f} | | 1 | | | |",
    ]
    held = [row["default"]["accepted_histogram"] for row in results["rows"] if "default" in row]
    most = max(map(len, held), default=1) - 1
    names = {
        "ar": "selfspec, plain decoding, one row at a time",
        "ar_default": "selfspec, plain decoding in the default settings",
        "default": f"**selfspec, default settings of that commit** (at most {most} drafted)",
    }
    for name in settings["methods"]:
        row = summary[name]
        drafted = f"{row['tau']:.2f} | {row['acceptance_rate']:.2f}" if not name.startswith("ar") else " | "
        label = names.get(name, f"selfspec, at most {name.removeprefix('k=')} drafted, fast mode")
        lines.append(
            f"| {label} | {row['tokens_per_second']:.1f} | {row['over_ar']:.2f} | {row['over_transformers']:.2f} "
            f"| {drafted} | {row['same_text']} |"
        )
    plain = [f"{context} tokens of context {row['ratio']:.2f}" for context, row in results["plain_decoding"].items()]
    lines += [
        "",
        "Expected is the text of plain decoding: one row at a time for fast mode, where only float32 promises the same "
        f"text, and in the same settings for the default. transformers' generate gave the text of "
        f"{summary['same_as_transformers']} of {summary['num_questions']}. "
        f"Plain decoding over transformers' generate at {', '.join(plain)}. "
        f"Source: [{source}]({source}), commit {str(where['commit'])[:9]}, {where['date'][:10]}.",
    ]
    return "\n".join(lines)


def render_details(results: dict[str, Any], source: str) -> str:
    """Markdown of speed and acceptance by category, and of what the parts of a cycle cost by context."""
    where = results["provenance"]
    lines = [
        "| category | tok/s | over plain decoding | over transformers' generate | tau | acceptance rate |",
        "|---|---|---|---|---|---|",
    ]
    for category, held in sorted(results["by_category"].items()):
        row = held["default"]
        lines.append(
            f"| {category} | {row['tokens_per_second']:.1f} | {row['over_ar']:.2f} | {row['over_transformers']:.2f} "
            f"| {row['tau']:.2f} | {row['acceptance_rate']:.2f} |"
        )
    timed = next(iter(results["pass_costs"].values()))
    rows = [int(key.removeprefix("pass_").removesuffix("_ms")) for key in timed if key.startswith("pass_")]
    lines += [
        "",
        f"| tokens of context | ms of a pass over {' / '.join(map(str, rows))} rows | 5 rows over 1 | cycle without "
        "drafts over a bare pass | draft step over a pass | over its parts | over its share of the weights |",
        "|---|---|---|---|---|---|---|",
    ]
    for context, cost in results["pass_costs"].items():
        passes = " / ".join(f"{cost[f'pass_{n}_ms']:.1f}" for n in rows)
        lines.append(
            f"| {context} | {passes} | {cost['verify_5_over_1']:.2f} | {1 + cost['loop_overhead']:.3f} "
            f"| {cost['draft_step_over_pass']:.3f} | {cost['draft_step_over_parts']:.2f} "
            f"| {cost['draft_step_over_weights']:.2f} |"
        )
    return "\n".join([*lines, "", f"Source: {source}, commit {str(where['commit'])[:9]}, {where['date'][:10]}."])


def insert(text: str, table: str) -> str:
    """``text`` with ``table`` between the markers; raises ValueError where they are missing."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"the markers {BEGIN} and {END} are missing")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


def main(
    results: Annotated[Path, typer.Argument(help="A results file.")],
    write: Annotated[Path | None, typer.Option(help="File whose marked part is replaced; print if not given.")] = None,
    details: Annotated[bool, typer.Option("--details", help="By category, and the costs of a cycle's parts.")] = False,
) -> None:
    """Print the table or put it into a file."""
    held = json.loads(results.read_text(encoding="utf-8"))
    table = (render_details if details else render)(held, results.as_posix())
    if write is None:
        typer.echo(table)
    else:
        write.write_text(insert(write.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
