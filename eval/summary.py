"""From rows to figures: ratios of sums over prompts, with bootstrap intervals, and what a reader must be told.

A prompt counts for a ratio of two methods only where both answered; failures are counted beside it, never filled in.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from selfspec.eval.config import EvalConfig
from selfspec.eval.engine import AR
from selfspec.eval.peers import PEER

Row = dict[str, Any]
SLOW = 1.05  # plain decoding of others this much faster than ours is said so


def summarise(rows: Sequence[Row], is_ar: Mapping[str, bool], config: EvalConfig) -> dict[str, Any]:
    """``failures``, ``notes``, ``summary`` (of the first temperature), ``by_temperature`` and ``by_category``."""
    failures = [
        {key: row[key] for key in ("method", "task", "question", "turn", "temperature", "error")}
        for row in rows
        if "error" in row
    ]
    by_temperature = {
        str(t): summarise_group([row for row in rows if row["temperature"] == t], is_ar, config)
        for t in config.temperatures
    }
    first = [row for row in rows if row["temperature"] == config.temperatures[0]]
    categories = sorted({row["category"] for row in first})
    return {
        "num_prompts": len({_key(row) for row in first}),
        "failures": failures,
        "notes": notes(by_temperature, len(failures)),
        "summary": by_temperature[str(config.temperatures[0])],
        "by_temperature": by_temperature,
        "by_category": {
            c: summarise_group([row for row in first if row["category"] == c], is_ar, config) for c in categories
        },
    }


def summarise_group(rows: Sequence[Row], is_ar: Mapping[str, bool], config: EvalConfig) -> dict[str, Row]:
    """Figures by method of one temperature's rows."""
    held = {name: {_key(r): r for r in rows if r["method"] == name} for name in is_ar}
    good = {name: {k: r for k, r in own.items() if "error" not in r} for name, own in held.items()}
    speed = {name: _speed(list(own.values())) for name, own in good.items()}
    plain = [name for name in is_ar if is_ar[name] and speed[name] > 0]
    best = max(plain, key=lambda name: speed[name], default=AR)
    found = {}
    for name in is_ar:
        own = list(good[name].values())
        found[name] = {
            "is_ar": is_ar[name],
            "num_prompts": len(own),
            "num_failures": len(held[name]) - len(own),
            "tokens_per_second": speed[name],
            "prefill_seconds": median(r["prefill_seconds"] for r in own) if own else None,
            **_ratio(good[name], good[AR], "speedup", config),
            **_ratio(good[name], good[best], "speedup_over_best_ar", config),
            **_ratio(good[name], good.get(PEER, {}), "speedup_over_transformers", config),
            "best_ar": best,
            **_cycles(own, speed[AR]),
            **_losslessness(own),
            "peak_bytes": max((r["peak_bytes"] for r in own if r.get("peak_bytes")), default=None),
        }
    for figures in found.values():
        figures["speedup_model"] = _model(figures, found[AR])
    return found


def _model(figures: Row, plain: Row) -> float | None:
    """tau / (k c + v + o), drafting and verifying as measured in place, o as plain decoding has it.

    What a speed falls short of it is lost around the cycle: in the loop, or in what the parts do to each other.
    """
    parts, base = figures["breakdown"], plain["breakdown"]
    if not figures["mean_drafted"] or base is None:
        return None
    modelled: float = figures["tau"] / (parts["draft"] + parts["verify"] + base["overhead"])
    return modelled


def notes(by_temperature: Mapping[str, Mapping[str, Row]], num_failures: int) -> list[str]:
    """What stands in the first lines of a report: failures, a baseline that is slower than another, texts not kept."""
    said = [f"{num_failures} runs failed; they are listed, and left out of every ratio"] if num_failures else []
    for temperature, summary in by_temperature.items():
        for name, figures in summary.items():
            interval = figures["speedup_ci"]
            if figures["is_ar"] and name != AR and interval is not None and interval[0] > SLOW:
                said.append(
                    f"temperature {temperature}: {name} is {figures['speedup']:.2f} times as fast as {AR}: quote "
                    "speedups over the best plain decoding"
                )
            if figures["lossless"] is False:
                verdict = "decodes plainly, but not as this engine does" if figures["is_ar"] else "is not lossless"
                said.append(
                    f"temperature {temperature}: {name} {verdict}: {figures['num_not_explained']} of "
                    f"{figures['num_compared_texts']} texts differ at more than a near-tie"
                )
    return said


def _key(row: Row) -> tuple[str, str, int]:
    return row["task"], row["question"], row["turn"]


def _speed(rows: Sequence[Row]) -> float:
    seconds = sum(row["decode_seconds"] for row in rows)
    return sum(row["num_decoded"] for row in rows) / seconds if seconds > 0 else 0.0


def _ratio(own: Mapping[Any, Row], base: Mapping[Any, Row], name: str, config: EvalConfig) -> dict[str, Any]:
    """Speed of one method over another on the prompts that both answered, with a 95 % bootstrap interval."""
    both = [key for key in own if key in base]
    pairs = np.array(
        [
            [own[k]["num_decoded"], own[k]["decode_seconds"], base[k]["num_decoded"], base[k]["decode_seconds"]]
            for k in both
        ],
        dtype=float,
    )
    if not len(pairs) or pairs.sum(0).min() <= 0:
        return {name: None, f"{name}_ci": None}
    drawn = np.random.default_rng(config.seed).integers(len(pairs), size=(config.bootstrap, len(pairs)))
    sums = pairs[drawn].sum(1)  # [resamples, 4]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])
    low, high = np.nanpercentile(ratios, [2.5, 97.5])
    tokens, seconds, base_tokens, base_seconds = pairs.sum(0)
    return {name: (tokens / seconds) / (base_tokens / base_seconds), f"{name}_ci": [float(low), float(high)]}


def _cycles(rows: Sequence[Row], ar_speed: float) -> dict[str, Any]:
    """tau and acceptance of all cycles; where a cycle's time goes, in steps of plain decoding."""
    num_cycles, num_decoded = sum(r["num_cycles"] for r in rows), sum(r["num_decoded"] for r in rows)
    known = [r for r in rows if "num_drafted" in r]
    drafted = [n for r in known for n in r["num_drafted"]]
    accepted = [n for r in known for n in r["num_accepted"]]
    found: dict[str, Any] = {
        "tau": num_decoded / num_cycles if num_cycles else 0.0,
        "accepted_histogram": _histogram(accepted if known else [n - 1 for r in rows for n in r["emissions"]]),
        "acceptance_rate": None, "acceptance_by_position": None, "mean_drafted": None, "breakdown": None,
    }  # fmt: skip
    if not known or not drafted:
        return found
    depth = max(drafted)
    tried = [sum(d >= j and a >= j - 1 for d, a in zip(drafted, accepted, strict=True)) for j in range(1, depth + 1)]
    stood = [sum(a >= j for a in accepted) for j in range(1, depth + 1)]
    found["acceptance_rate"] = sum(accepted) / sum(drafted) if sum(drafted) else 0.0
    found["acceptance_by_position"] = [s / t if t else 0.0 for s, t in zip(stood, tried, strict=True)]
    found["mean_drafted"] = sum(drafted) / len(drafted)
    step = ar_speed / len(drafted)  # seconds of all cycles -> plain steps per cycle
    draft, verify = sum(r["draft_seconds"] for r in known) * step, sum(r["verify_seconds"] for r in known) * step
    whole = sum(r["decode_seconds"] for r in known) * step
    if draft + verify > 0:  # zero where a cycle is one launch
        found["breakdown"] = {"draft": draft, "verify": verify, "overhead": whole - draft - verify}
    return found


def _histogram(counts: Sequence[int]) -> list[int]:
    return np.bincount(np.array(counts, dtype=int)).tolist() if counts else []


def _losslessness(rows: Sequence[Row]) -> dict[str, Any]:
    """Whether all texts are the reference's, up to near-ties (L4); None where texts say nothing about it."""
    compared = [row for row in rows if "identical" in row]
    flips = [row for row in compared if row["is_near_tie"]]
    wrong = [row for row in compared if not row["identical"] and not row["is_near_tie"]]
    num_tokens = sum(row["num_compared"] for row in compared)
    gaps = [row["gap_ulp"] for row in compared if row["gap_ulp"] is not None]
    return {
        "lossless": not wrong if compared else None,
        "num_compared_texts": len(compared),
        "num_identical": sum(row["identical"] for row in compared),
        "num_not_explained": len(wrong),
        "tie_flip_rate": len(flips) / num_tokens if num_tokens else None,
        "max_gap_ulp": max(gaps, default=None),
    }
