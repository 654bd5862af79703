"""README's figures, made from a results file of `selfspec.eval.speed`.

    python -m selfspec.eval.table docs/results/cpu_speed.json --write README.md
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
        f"{where['device']}, decoding time without prefill; texts identical to plain decoding: "
        f"{summary['identical']} of {summary['num_questions']}.",
        "",
        "| method | tok/s | over plain decoding | over transformers' generate | tau | acceptance rate |",
        "|---|---|---|---|---|---|",
        f"| transformers' generate | {summary['transformers']['tokens_per_second']:.1f} | | 1 | | |",
    ]
    names = {"ar": "selfspec, plain decoding", "default": "**selfspec, default settings**"}
    for name in settings["methods"]:
        row = summary[name]
        drafted = f"{row['tau']:.2f} | {row['acceptance_rate']:.2f}" if name != "ar" else " | "
        label = names.get(name, f"selfspec, at most {name.removeprefix('k=')} drafted")
        lines.append(
            f"| {label} | {row['tokens_per_second']:.1f} | {row['over_ar']:.2f} | {row['over_transformers']:.2f} "
            f"| {drafted} |"
        )
    plain = [f"{context} tokens of context {row['ratio']:.2f}" for context, row in results["plain_decoding"].items()]
    lines += [
        "",
        f"Plain decoding over transformers' generate at {', '.join(plain)}. "
        f"Source: [{source}]({source}), commit {str(where['commit'])[:9]}, {where['date'][:10]}.",
    ]
    return "\n".join(lines)


def insert(text: str, table: str) -> str:
    """``text`` with ``table`` between the markers; raises ValueError where they are missing."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"the markers {BEGIN} and {END} are missing")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


def main(
    results: Annotated[Path, typer.Argument(help="A results file.")],
    write: Annotated[Path | None, typer.Option(help="File whose marked part is replaced; print if not given.")] = None,
) -> None:
    """Print the table or put it into a file."""
    table = render(json.loads(results.read_text(encoding="utf-8")), results.as_posix())
    if write is None:
        typer.echo(table)
    else:
        write.write_text(insert(write.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
