"""What a probe shows: a table, a plot and one sentence, all from the object that ``probe.json`` holds."""

from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from selfspec.eval.plots import png

LABELS = {"lens": "logit lens", "bridge": "closed-form bridge"}
STYLES = {"lens": {"color": "tab:gray", "marker": "o"}, "bridge": {"color": "tab:blue", "marker": "s"}}
FEW_PER_INPUT = 10  # fitted tokens per input of the bridge below which more text is known to help


def by_layer(found: dict[str, Any]) -> dict[int, dict[str, dict[str, Any]]]:
    """Candidates by layer and exit."""
    rows: dict[int, dict[str, dict[str, Any]]] = {}
    for candidate in found["exits"]:
        rows.setdefault(candidate["layer"], {})[candidate["exit"]] = candidate
    return rows


def table(found: dict[str, Any]) -> Table:
    """One row a layer; of every pair the first figure is the lens, the second the bridge."""
    shown = Table(title=f"{found['model']}: exits without training, lens / bridge", title_justify="left")
    for name in ("layer", "agreement", "sum min(p,q)", "cost c", "best k", "speedup"):
        shown.add_column(name, justify="right")
    for layer, pair in by_layer(found).items():
        exits = [pair[name] for name in LABELS]
        shown.add_row(
            str(layer),
            " / ".join(f"{e['score']['agreement']:.2f}" for e in exits),
            " / ".join(f"{e['score']['overlap']:.2f}" for e in exits),
            " / ".join(f"{e['cost']:.2f}" for e in exits),
            " / ".join(f"{e['best']['draft_len']}" for e in exits),
            " / ".join(f"{e['best']['speedup']:.2f}" for e in exits),
        )
    return shown


def notes(found: dict[str, Any]) -> list[str]:
    """What the figures are of."""
    where, rows = found["provenance"], " / ".join(f"{cost:.2f}" for cost in found["row_costs"])
    ids = f"{found['draft_vocab_size']} of {found['vocab_size']} token ids drafted"
    lines = [
        f"{found['judged_tokens']} tokens judged, {found['fitted_tokens']} others fitted the bridge; {ids}; costs in "
        f"plain decoding steps of {found['step_ms']:.1f} ms ({found['dtype']}, {where['threads']} threads of "
        f"{where['device']}, {found['context']} tokens of context), passes over 1, 2, ... rows {rows}",
        "speedup: (1 + a + ... + a^k) / (k c + v_(k+1)), every draft accepted with the same chance a = agreement",
    ]
    if found["fitted_tokens"] < FEW_PER_INPUT * found["hidden_size"]:
        lines.append(
            f"{found['fitted_tokens']} tokens are few for a bridge of {found['hidden_size']} inputs: with more "
            "(--num-tokens) it agrees more often"
        )
    return lines


def verdict(found: dict[str, Any]) -> str:
    """The best exit in one sentence."""
    best = found["best"]
    speedup = best["best"]["speedup"]
    text = (
        f"best: layer {best['layer']} with the {LABELS[best['exit']]}, k={best['best']['draft_len']}, "
        f"predicted {speedup:.2f}x of plain decoding"
    )
    return text if speedup > 1 else f"{text}: not above 1, so do not draft without training"


def plot(found: dict[str, Any]) -> bytes:
    """Agreement and predicted speedup by layer, in two panels; a PNG."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, label in LABELS.items():
        held = [c for c in found["exits"] if c["exit"] == name]
        layers = [c["layer"] for c in held]
        left.plot(layers, [c["score"]["agreement"] for c in held], label=f"{label}: agreement", **STYLES[name])
        overlaps = [c["score"]["overlap"] for c in held]
        left.plot(layers, overlaps, label=f"{label}: sum min(p, q)", linestyle=":", **STYLES[name])
        right.plot(layers, [c["best"]["speedup"] for c in held], label=label, **STYLES[name])
    best, speedup = found["best"], found["best"]["best"]["speedup"]
    label = f"best: layer {best['layer']}, k={best['best']['draft_len']}, {speedup:.2f}"
    right.plot([best["layer"]], [speedup], "*", color="tab:red", markersize=14, label=label)
    right.axhline(1, color="black", linewidth=0.8, label="plain decoding")
    left.set(xlabel="exit layer N", ylabel="share of positions", title="agreement with the target", ylim=(0, 1.02))
    right.set(xlabel="exit layer N", ylabel="speed over plain decoding", title="predicted speedup, best chain length")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
    figure.suptitle(f"{found['model']}, {found['dtype']}, {found['provenance']['device']}", fontsize="medium")
    return png(figure)
