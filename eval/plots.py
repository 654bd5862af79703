"""Plots of results, as PNG bytes; None where there is nothing to draw."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Results = dict[str, Any]
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")  # Okabe and Ito


def png(figure: Figure) -> bytes:
    """The figure as a file's bytes."""
    held = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(held, format="png", dpi=110, bbox_inches="tight")
    return held.getvalue()


def _drafting(results: Results) -> dict[str, Any]:
    return {name: row for name, row in results["summary"].items() if row["mean_drafted"]}


def speedup_by_category(results: Results) -> bytes | None:
    """Speed over plain decoding by category, with intervals, of every method that is not a plain one."""
    names = [name for name, row in results["summary"].items() if not row["is_ar"] and row["speedup"] is not None]
    groups = {**results["by_category"], "all": results["summary"]}
    if not names:
        return None
    figure = Figure(figsize=(max(7.0, 0.9 * len(groups)), 4.2))
    axes = figure.add_subplot()
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        places, values, errors = [], [], []
        for place, held in enumerate(groups.values()):
            value, interval = held[name]["speedup"], held[name]["speedup_ci"]
            if value is not None:
                places.append(place + (i - (len(names) - 1) / 2) * width)
                values.append(value)
                errors.append([max(value - interval[0], 0), max(interval[1] - value, 0)])
        axes.bar(
            places, values, width, yerr=np.array(errors).T, label=name, color=COLOURS[i % len(COLOURS)],
            error_kw={"elinewidth": 0.8, "ecolor": "#444444"},
        )  # fmt: skip
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), list(groups), rotation=40, ha="right")
    axes.set_ylabel("speed over plain decoding (ar)")
    axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return png(figure)


def accepted_histogram(results: Results) -> bytes | None:
    """Share of cycles by accepted length."""
    held = {name: row for name, row in results["summary"].items() if not row["is_ar"] and row["accepted_histogram"]}
    if not held:
        return None
    figure = Figure(figsize=(6.5, 3.6))
    axes = figure.add_subplot()
    width = 0.8 / len(held)
    for i, (name, row) in enumerate(held.items()):
        counts = np.array(row["accepted_histogram"], dtype=float)
        places = np.arange(len(counts)) + (i - (len(held) - 1) / 2) * width
        axes.bar(places, counts / counts.sum(), width, label=name, color=COLOURS[i % len(COLOURS)])
    axes.set_xlabel("accepted drafts in a cycle")
    axes.set_ylabel("share of cycles")
    axes.legend(frameon=False, fontsize="small")
    return png(figure)


def acceptance_by_position(results: Results) -> bytes | None:
    """Chance that draft j is accepted where those before it were."""
    held = _drafting(results)
    if not held:
        return None
    figure = Figure(figsize=(6.5, 3.6))
    axes = figure.add_subplot()
    for i, (name, row) in enumerate(held.items()):
        values = row["acceptance_by_position"]
        axes.plot(range(1, len(values) + 1), values, "o-", label=name, color=COLOURS[i % len(COLOURS)])
    deepest = max(len(row["acceptance_by_position"]) for row in held.values())
    axes.set_xticks(range(1, deepest + 1))
    axes.set_xlim(0.5, deepest + 0.5)
    axes.set_ylim(0, 1)
    axes.set_xlabel("draft position j")
    axes.set_ylabel("acceptance, given those before")
    axes.legend(frameon=False, fontsize="small")
    return png(figure)


def cycle_breakdown(results: Results) -> bytes | None:
    """Where a cycle's time goes, in steps of plain decoding, beside the tokens it emits."""
    held = {name: row for name, row in results["summary"].items() if row["breakdown"]}
    if not held:
        return None
    figure = Figure(figsize=(7.0, 0.6 * len(held) + 1.6))
    axes = figure.add_subplot()
    for i, (_, row) in enumerate(held.items()):
        left = 0.0
        for part, colour in zip(("draft", "verify", "overhead"), COLOURS, strict=False):
            value = row["breakdown"][part]
            axes.barh(i, value, left=left, color=colour, label=part if i == 0 else None)
            left += value
        axes.plot([row["tau"]] * 2, [i - 0.4, i + 0.4], color="black", linewidth=2, label=None if i else "tokens (tau)")
    axes.set_yticks(range(len(held)), list(held))
    axes.invert_yaxis()
    axes.set_xlabel("steps of plain decoding a cycle; speedup is tau over the whole bar")
    axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return png(figure)


PLOTS: dict[str, tuple[Callable[[Results], bytes | None], str]] = {
    "speedup_by_category": (speedup_by_category, "Speed over plain decoding by category, 95 % bootstrap intervals."),
    "cycle_breakdown": (cycle_breakdown, "Where the time of a cycle goes, and how many tokens it emits."),
    "acceptance_by_position": (acceptance_by_position, "Acceptance by draft position."),
    "accepted_histogram": (accepted_histogram, "Accepted drafts in a cycle."),
}
