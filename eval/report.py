"""From results to something to read: a table, plots, one HTML page. README's table comes from here."""

import base64
import importlib.resources
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment
from rich.console import Console
from rich.table import Table

from selfspec.eval.engine import AR
from selfspec.eval.journal import FORMAT_VERSION
from selfspec.eval.plots import PLOTS
from selfspec.files import write_atomically

BEGIN, END = "<!-- speed: made by selfspec report -->", "<!-- /speed -->"
Results = dict[str, Any]
COLUMNS = (
    "method", "tok/s", "over plain decoding", "over transformers' generate", "over the best plain decoding", "tau",
    "acceptance rate", "same text", "lossless",
)  # fmt: skip


def load_results(path: Path) -> Results:
    """A results.json; raises ValueError naming a file that is none."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        if results["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"{path}: results of format {results['format_version']}, this version reads {FORMAT_VERSION}"
            )
        _ = results["summary"], results["settings"]["methods"], results["provenance"]["versions"], results["rows"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not results of selfspec eval ({type(error).__name__}: {error})") from error
    return results


def table_rows(summary: dict[str, Any]) -> list[list[str]]:
    """Cells under `COLUMNS`, a row a method."""
    return [
        [
            name,
            f"{row['tokens_per_second']:.1f}",
            _ratio(row, "speedup"),
            _ratio(row, "speedup_over_transformers"),
            _ratio(row, "speedup_over_best_ar"),
            f"{row['tau']:.2f}",
            "" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.2f}",
            f"{row['num_identical']} of {row['num_compared_texts']}" if row["num_compared_texts"] else "",
            _lossless(row),
        ]
        for name, row in summary.items()
    ]


def _lossless(row: dict[str, Any]) -> str:
    if row["is_ar"]:
        return "plain decoding"
    return {None: "not promised", True: "yes", False: "NO"}[row["lossless"]]


def _ratio(row: dict[str, Any], name: str) -> str:
    value, interval = row[name], row[f"{name}_ci"]
    if value is None:
        return "failed" if row["num_failures"] else ""
    return f"{value:.2f} ({interval[0]:.2f}-{interval[1]:.2f})"


def headline(results: Results) -> str:
    """What was measured, in one sentence."""
    settings, where = results["settings"], results["provenance"]
    heat = settings["temperatures"][0]
    sampling = "greedy" if heat == 0 else f"sampling at temperature {heat:g}"
    threads = f"{where['threads']} thread{'s' if where['threads'] > 1 else ''} of {where['device']}"
    return (
        f"{settings['model_name']}, {sampling}, {settings['max_new_tokens']} new tokens, {results['num_prompts']} "
        f"prompts ({', '.join(Path(task).name for task in settings['tasks'])}), {settings['dtype']}, {threads}; "
        "decoding time, prefill apart; in brackets 95 % bootstrap intervals over prompts."
    )


def markdown(results: Results, source: str) -> str:
    """The table with what a reader must know of it; ``source`` names the results file."""
    where = results["provenance"]
    lines = [f"**{note}**" for note in results["notes"]]
    lines += ["", headline(results), "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(cells)} |" for cells in table_rows(results["summary"])]
    skipped = "; ".join(f"{name}: {why}" for name, why in results["skipped"].items())
    lines += [
        "",
        "Texts are held against plain decoding: of this engine, `ar`, one row at a time, or the same row width "
        "(`ar-wide-2`) where exact mode promises the same text; for transformers' drafting against its own generate. "
        "Lossless: every text is the same, or differs first at a near-tie of at "
        "most 4 units in the last place, as plain decoding at another width does too."
        + (f" Skipped: {skipped}." if skipped else ""),
        f"Source: [{source}]({source}), commit {str(where['commit'])[:9]}, {where['date'][:10]}.",
    ]  # fmt: skip
    return "\n".join(lines).strip()


def details(results: Results) -> str:
    """Markdown of the first method that drafts, by category, and of what passes cost by context where timed."""
    method = _main(results)
    lines = [
        "| category | tok/s | over plain decoding | over transformers' generate | tau | acceptance rate |",
        "|---" * 6 + "|",
    ]
    for category, held in results["by_category"].items():
        row = held[method]
        rate = "" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.2f}"
        ratios = [_ratio(row, "speedup"), _ratio(row, "speedup_over_transformers")]
        cells = [category, f"{row['tokens_per_second']:.1f}", *ratios, f"{row['tau']:.2f}", rate]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *_cycle_line(method, results["summary"][method])]
    engine = results.get("engine")
    return "\n".join([*lines, *(["", *_engine_lines(engine)] if engine else [])])


def _cycle_line(method: str, row: dict[str, Any]) -> list[str]:
    if row["speedup_model"] is None:
        return []
    parts, drafted = row["breakdown"], row["mean_drafted"]
    return [
        f"A cycle of {method} in steps of plain decoding: drafting {parts['draft']:.3f} ({drafted:.2f} drafts at "
        f"{parts['draft'] / drafted:.3f}, the last token's own shallow layers included), verifying "
        f"{parts['verify']:.3f}, the rest {parts['overhead']:.3f}. tau {row['tau']:.2f} over that sum is the speed; "
        f"with plain decoding's rest it would be {row['speedup_model']:.2f}."
    ]


def _engine_lines(engine: dict[str, Any]) -> list[str]:
    costs = engine["pass_costs"]
    timed = next(iter(costs.values()))
    rows = [int(key.removeprefix("pass_").removesuffix("_ms")) for key in timed if key.startswith("pass_")]
    lines = [
        f"| tokens of context | plain decoding over transformers' | ms of {' / '.join(map(str, rows))} rows "
        "| 5 rows over 1 | cycle without drafts over a pass | draft step over a pass | over its share of weights |",
        "|---" * 7 + "|",
    ]
    for context, cost in costs.items():
        passes = " / ".join(f"{cost[f'pass_{n}_ms']:.1f}" for n in rows)
        step = f"{cost['draft_step_over_pass']:.3f}" if "draft_step_over_pass" in cost else ""
        share = f"{cost['draft_step_over_weights']:.2f}" if "draft_step_over_weights" in cost else ""
        plain, five = engine["plain_decoding"][context]["ratio"], cost["verify_5_over_1"]
        over = 1 + cost["loop_overhead"]
        lines.append(f"| {context} | {plain:.2f} | {passes} | {five:.2f} | {over:.3f} | {step} | {share} |")
    return lines


def insert(text: str, table: str) -> str:
    """``text`` with ``table`` between the markers; raises ValueError where they are missing."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"the markers {BEGIN} and {END} are missing")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


def write_report(
    paths: Sequence[Path], folder: Path, readme: Path | None = None, details_file: Path | None = None
) -> Path:
    """report.html (self-contained), report.md and plots of one or more results into ``folder``; returns the page.

    ``readme`` gets the table between its markers, ``details_file`` the figures by category.
    """
    loaded = [(path, load_results(path)) for path in paths]
    table = "\n\n".join(markdown(results, path.as_posix()) for path, results in loaded)
    closer = "\n\n".join(details(results) for _, results in loaded)
    changed = {
        path: insert(path.read_text(encoding="utf-8"), made)
        for path, made in ((readme, table), (details_file, closer))
        if path is not None
    }
    folder.mkdir(parents=True, exist_ok=True)
    sections = []
    for number, (path, results) in enumerate(loaded):
        plots = []
        for name, (draw, caption) in PLOTS.items():
            image = draw(results)
            if image is not None:
                write_atomically(folder / f"{name}{f'-{number + 1}' if number else ''}.png", image)
                plots.append({"data": base64.b64encode(image).decode(), "caption": caption})
        sections.append(_section(path, results, plots))
    template = (importlib.resources.files("selfspec.eval") / "report.html").read_text(encoding="utf-8")
    page = Environment(autoescape=True).from_string(template).render(sections=sections, columns=COLUMNS)
    write_atomically(folder / "report.html", page.encode())
    write_atomically(folder / "report.md", f"{table}\n\n## By category\n\n{closer}\n".encode())
    for path, text in changed.items():
        write_atomically(path, text.encode())
    return folder / "report.html"


def _main(results: Results) -> str:
    """The method that a report looks at more closely: the first that drafts."""
    drafting = [name for name, row in results["summary"].items() if row["mean_drafted"]]
    return drafting[0] if drafting else AR


def _section(path: Path, results: Results, plots: list[dict[str, str]]) -> dict[str, Any]:
    main = _main(results)
    return {
        "title": path.as_posix(),
        "headline": headline(results),
        "notes": results["notes"],
        "rows": table_rows(results["summary"]),
        "main": main,
        "categories": [
            [category, *table_rows({main: held[main]})[0][1:]] for category, held in results["by_category"].items()
        ],
        "failures": results["failures"],
        "skipped": results["skipped"],
        "plots": plots,
        "settings": json.dumps(results["settings"], indent=1),
        "provenance": json.dumps(results["provenance"], indent=1),
    }


def print_summary(results: Results, console: Console) -> None:
    """The table for a terminal, what went wrong first."""
    for note in results["notes"]:
        console.print(note, style="bold", markup=False, soft_wrap=True)
    console.print(headline(results), markup=False, soft_wrap=True)
    table = Table(*COLUMNS)
    for cells in table_rows(results["summary"]):
        table.add_row(*cells)
    console.print(table)
    for name, why in results["skipped"].items():
        console.print(f"skipped {name}: {why}", markup=False, soft_wrap=True)
