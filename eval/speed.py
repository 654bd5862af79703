"""Speed on one machine: this engine against transformers' generate, and what each part of a cycle costs.

    python -m selfspec.eval.speed --prompts questions.jsonl --output docs/results/cpu_speed.json

The file of prompts is in Spec-Bench's format (`category`, `turns`), of which the first turn is asked. Methods run in
turn, prompt by prompt, in rotating order after a warm-up; figures are medians, or ratios of summed decoding times
(prefill apart).
"""

import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from selfspec.costs import CONTEXTS, interleave, pass_costs, random_prompt
from selfspec.model import EarlyExitModel
from selfspec.provenance import provenance

REFERENCE = "ar_default"  # plain decoding in the default settings: exact mode where that is the default


class _Clock(BaseStreamer):
    """Notes when tokens come out of transformers' generate."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        del value
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to do."""

    @property
    def decode(self) -> tuple[int, float]:
        """Tokens and seconds between the first new token and the last (the first `put` is the prompt)."""
        return len(self.times) - 2, self.times[-1] - self.times[1]


def run_transformers(model: EarlyExitModel, ids: Tensor, num_tokens: int) -> tuple[Tensor, int, float]:
    """Sequences, decoded tokens and seconds of transformers' own greedy generate."""
    clock = _Clock()
    sequences = model.base.generate(ids, max_new_tokens=num_tokens, do_sample=False, streamer=clock)
    return sequences, *clock.decode


def plain_decoding(model: EarlyExitModel, rounds: int, num_tokens: int) -> dict[str, Any]:
    """Ordinary decoding of this engine (width 1) over transformers' generate, by context."""
    found = {}
    for context in CONTEXTS:
        ids = random_prompt(model, context)

        def ours(ids: Tensor = ids) -> float:
            out = model.generate(ids, max_new_tokens=num_tokens, draft="off", exact=False, eos_token_id=None)
            return out.stats.tokens_per_second

        def theirs(ids: Tensor = ids) -> float:
            _, tokens, seconds = run_transformers(model, ids, num_tokens)
            return tokens / seconds

        runs = interleave({"selfspec": ours, "transformers": theirs}, rounds)
        speeds = {name: statistics.median(values) for name, values in runs.items()}
        found[str(context)] = {**speeds, "ratio": speeds["selfspec"] / speeds["transformers"]}
    return found


def read_questions(path: Path, per_category: int) -> list[tuple[str, str]]:
    """(category, first turn) of the first ``per_category`` questions of each category."""
    kept: list[tuple[str, str]] = []
    counts: dict[str, int] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            question = json.loads(line)
            category, text = question["category"], question["turns"][0]
        except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a question with category and turns ({error})") from error
        counts[category] = counts.get(category, 0) + 1
        if counts[category] <= per_category:
            kept.append((category, text))
    if not kept:
        raise ValueError(f"{path}: no questions")
    return kept


def questions(
    model: EarlyExitModel, asked: Iterable[tuple[str, str]], num_tokens: int, methods: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """One row per question: what each method emitted, in how many seconds, and whether its text was the expected one.

    Expected is plain decoding's text at the same row widths: fast mode is held against ``ar``, at width 1, the default
    settings against `REFERENCE`.
    """
    assert model.tokenizer is not None
    rows = []
    for number, (category, text) in enumerate(asked):
        chat = [{"role": "user", "content": text}]
        ids = model.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        row: dict[str, Any] = {"category": category, "prompt_tokens": ids.shape[1]}
        names = ["transformers", *methods]
        texts, theirs = {}, list[list[int]]()
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if name == "transformers":
                sequences, tokens, seconds = run_transformers(model, ids, num_tokens)
                row[name], theirs = {"tokens": tokens, "seconds": seconds}, sequences.tolist()
                continue
            out = model.generate(ids, max_new_tokens=num_tokens, **methods[name])
            texts[name] = out.sequences.tolist()
            stats = out.stats
            row[name] = {"tokens": stats.num_emitted, "seconds": stats.decode_seconds, **stats.to_dict()}
        for name, sequences_made in texts.items():
            row[name]["same_text"] = sequences_made == texts[REFERENCE if "exact" not in methods[name] else "ar"]
        row["same_as_transformers"] = texts["ar"] == theirs
        rows.append(row)
    return rows


def summarise(rows: list[dict[str, Any]], methods: Iterable[str]) -> dict[str, Any]:
    """Tokens per second (summed tokens over summed seconds), speedups, tau and acceptance of the rows."""
    summary: dict[str, Any] = {"num_questions": len(rows)}
    summary["same_as_transformers"] = sum(r["same_as_transformers"] for r in rows)
    for name in ["transformers", *methods]:
        held = [row[name] for row in rows]
        tokens, seconds = sum(h["tokens"] for h in held), sum(h["seconds"] for h in held)
        summary[name] = {"tokens_per_second": tokens / seconds if seconds else 0.0}
        if name != "transformers":
            cycles, drafted = sum(h["num_cycles"] for h in held), sum(h["num_drafted"] for h in held)
            summary[name]["tau"] = tokens / cycles if cycles else 0.0
            accepted = sum(h["num_accepted"] for h in held)
            summary[name]["acceptance_rate"] = accepted / drafted if drafted else 0.0
            summary[name]["same_text"] = sum(h["same_text"] for h in held)
    for name in methods:
        speed = summary[name]["tokens_per_second"]
        summary[name]["over_ar"] = speed / summary["ar"]["tokens_per_second"]
        summary[name]["over_transformers"] = speed / summary["transformers"]["tokens_per_second"]
    return summary


def main(
    prompts: Annotated[Path, typer.Option(help="jsonl with category and turns.")],
    output: Annotated[Path, typer.Option(help="Where the results go.")],
    per_category: int = 5,
    new_tokens: int = 64,
    rounds: int = 7,
    dtype: str | None = None,
    threads: int = 1,
    draft_lens: str = "1,2,3",
    exits: str | None = None,
) -> None:
    """Measure and write one results file."""
    torch.set_num_threads(threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model = EarlyExitModel.from_pretrained(dtype=dtype, exits=exits)
    asked = read_questions(prompts, per_category)
    methods: dict[str, dict[str, Any]] = {"ar": {"draft": "off", "exact": False}, REFERENCE: {"draft": "off"}}
    if model.exits:
        methods |= {
            f"k={k}": {"draft_len": int(k), "min_confidence": 0.0, "exact": False} for k in draft_lens.split(",")
        }
        methods["default"] = {}
    rows = questions(model, [asked[0], *asked], new_tokens, methods)[1:]  # the first one twice: warm-up
    categories = sorted({row["category"] for row in rows})
    results = {
        "settings": {
            "dtype": str(model.target.dtype), "threads": threads, "new_tokens": new_tokens,
            "per_category": per_category, "methods": methods, "exit": model.default_exit and model.default_exit.name,
        },
        "summary": summarise(rows, methods),
        "by_category": {c: summarise([r for r in rows if r["category"] == c], methods) for c in categories},
        "plain_decoding": plain_decoding(model, rounds, new_tokens),
        "pass_costs": pass_costs(model, 3 * rounds),
        "rows": rows,
        "provenance": provenance(model.target.device),
    }  # fmt: skip
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    typer.echo(json.dumps(results["summary"], indent=1))


if __name__ == "__main__":
    typer.run(main)
