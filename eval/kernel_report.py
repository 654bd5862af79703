"""What is known of the GPU kernels without a GPU: a table of what they compile to, a plot of how splits are chosen."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from rich.table import Table

from selfspec.eval.plots import COLOURS, png
from selfspec.kernels.splits import H200, simulate

if TYPE_CHECKING:
    from selfspec.kernels.aot import Case, Measured

BATCHES, HEADS = (1, 4, 16), (2, 8)
CONTEXTS = tuple(1 << i for i in range(8, 18))


def _extras(case: "Case") -> str:
    """What else is in a case, in a word or two."""
    words = [f"window {case.window}" * bool(case.window), "cap" * case.has_cap, "padding" * case.has_pads]
    return ", ".join(word for word in (*words, "exact" * case.is_exact, "join" * case.is_join) if word)


def table(found: Sequence["Measured"]) -> Table:
    """One row a case."""
    shown = Table(title="attention kernel, compiled ahead of time", title_justify="left")
    names = ("arch", "dtype", "head", "rows x group", "tile", "warps, stages", "registers", "shared KB", "spills",
             "blocks", "matrix", "128-bit loads", "")  # fmt: skip
    for name in names:
        shown.add_column(name, justify="right")
    for m in found:
        case, config = m.case, m.config
        dtype = case.dtype if case.dtype == case.kv_dtype else f"{case.dtype}, {case.kv_dtype}"
        shown.add_row(
            case.arch, dtype, str(case.head_dim), f"{case.rows} x {case.group}", f"{m.block_m} x {config.block_n}",
            f"{config.num_warps}, {config.num_stages}", str(m.registers), f"{m.shared / 1024:.0f}", str(m.spills),
            str(m.blocks), str(m.matrix), str(m.wide_loads), _extras(case),
        )  # fmt: skip
    return shown


def plot_splits() -> bytes:
    """PNG: modelled time over reading keys and values at full speed, as chosen and at best, by context."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(1, len(HEADS), sharey=True)
    for side, heads in zip(axes, HEADS, strict=True):
        for colour, batch in zip(("tab:blue", "tab:orange", "tab:green"), BATCHES, strict=True):
            rows = simulate([batch], [heads], CONTEXTS)
            side.plot(CONTEXTS, [r["us"] for r in rows], color=colour, marker="o", label=f"batch {batch}")
            side.plot(CONTEXTS, [r["best_us"] for r in rows], color=colour, linestyle=":")
            for row in rows:
                side.annotate(str(row["splits"]), (row["slots"], row["us"]), fontsize=7, color=colour)
        side.set(xscale="log", yscale="log", xlabel="slots", title=f"{heads} key/value heads")
        side.grid(alpha=0.3)
    axes[0].set_ylabel("modelled microseconds a call")
    axes[0].legend()
    title = f"Splits of the attention kernel on {H200.name}: chosen (numbers), best power of two (dotted); modelled"
    figure.suptitle(title, fontsize=10)
    return png(figure)


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By model and context: what several rows cost over one, as chains and as the largest tree."""
    found = []
    for model, context in dict.fromkeys((row["model"], row["context"]) for row in rows):
        times = {
            (row["rows"], row["is_tree"]): row["us"]["selfspec"]
            for row in rows
            if (row["model"], row["context"]) == (model, context)
        }
        one = times.get((1, False))
        over = {f"{n} rows{', tree' * is_tree}": t / one for (n, is_tree), t in times.items() if one and n > 1}
        found.append({"model": model, "context": context} | {name: round(value, 3) for name, value in over.items()})
    return found


def bench_table(held: dict[str, Any]) -> Table:
    """One row a cell: microseconds of every way, and over the floor."""
    ways = list(dict.fromkeys(name for row in held["rows"] for name in row["us"]))
    title = f"attention on {held['provenance']['device']}, {held['dtype']}, microseconds; copies run at "
    shown = Table(title=f"{title}{held['copy_bandwidth'] / 1e12:.2f} TB/s", title_justify="left")
    for name in ("model", "context", "rows", *ways, "floor", "over floor", "over best peer"):
        shown.add_column(name, justify="left" if name == "model" else "right")
    for row in held["rows"]:
        times = [f"{row['us'][way]:.1f}" if way in row["us"] else "" for way in ways]
        name = f"{row['rows']}{' tree' * row['is_tree']}"
        rest = [f"{row['floor_us']:.1f}", f"{row['over_floor']:.2f}", f"{row['over_best_peer']:.2f}"]
        shown.add_row(row["model"], str(row["context"]), name, *times, *rest)
    return shown


def plot_roofline(held: dict[str, Any]) -> bytes:
    """PNG: time against bytes of every way, and the floor."""
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.add_subplot()
    ways = list(dict.fromkeys(name for row in held["rows"] for name in row["us"]))
    for way, colour in zip(ways, COLOURS, strict=False):
        rows = [row for row in held["rows"] if way in row["us"]]
        axes.scatter(
            [row["num_bytes"] for row in rows], [row["us"][way] for row in rows], s=14, color=colour, label=way
        )
    rows = sorted(held["rows"], key=lambda row: row["num_bytes"])
    bytes_moved = [row["num_bytes"] for row in rows]
    axes.plot(bytes_moved, [row["floor_us"] for row in rows], color="black", linewidth=0.8, label="floor")
    axes.set(xscale="log", yscale="log", xlabel="bytes that must move", ylabel="microseconds a call")
    axes.set_title(f"attention over a cache, {held['provenance']['device']}, {held['dtype']}", fontsize=10)
    axes.legend(frameon=False, fontsize="small")
    axes.grid(alpha=0.3)
    return png(figure)
