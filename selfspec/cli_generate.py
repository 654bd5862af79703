"""What `selfspec generate` does once its options are read: encode, stream, compare, report."""

import json
import statistics
import sys
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor
from transformers.utils import logging as transformers_logging

from selfspec.detokenizer import Detokenizer
from selfspec.model import EarlyExitModel, Stream
from selfspec.stats import DecodeStats

COMPARE_ROUNDS = 3  # interleaved runs of each method; the median counts


def load(
    model: str | None, revision: str | None, exits: Any, dtype: str | None, device: str | None, allow_mismatch: bool
) -> EarlyExitModel:
    """The model and its exits, quietly."""
    transformers_logging.disable_progress_bar()
    return EarlyExitModel.from_pretrained(model, exits, revision, dtype, device, allow_mismatch)


def encode(model: EarlyExitModel, text: str, raw: bool, max_new_tokens: int, truncate: bool) -> Tensor:
    """Token ids [1, S] of the prompt, through the chat template unless ``raw``; cut from the left on ``truncate``."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    if raw or not tokenizer.chat_template:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
    else:
        chat = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
            "input_ids"
        ]
    context = model.target.context_length
    if truncate and context is not None:
        room = context - max_new_tokens
        if room < 1:
            raise ValueError(f"max_new_tokens {max_new_tokens} leaves no room for a prompt in a context of {context}")
        ids = ids[:, -room:]
    return ids.to(model.target.device)


def run(
    model: EarlyExitModel, ids: Tensor, request: dict[str, Any], compare: bool, as_json: bool, console: Console
) -> None:
    """Generate, print text and figures; with ``compare`` also without drafting."""
    request = dict(request)
    if request["seed"] is None and request["temperature"] > 0:
        request["seed"] = int(torch.randint(0, 2**31, (1,)))  # one seed for all runs of a comparison
    tokens, stream = _stream(model, ids, request, None if as_json else console)
    assert model.tokenizer is not None
    text = model.tokenizer.decode(tokens, skip_special_tokens=True)
    compared = _compare(model, ids, request, tokens, stream.stats) if compare else None
    if as_json:
        report = _report(text, tokens, stream.stats, {**request, **stream.settings}, compared)
        print(json.dumps(report))  # noqa: T201
    else:
        _summarise(console, stream.stats, request, compared)


def _stream(
    model: EarlyExitModel, ids: Tensor, request: dict[str, Any], console: Console | None
) -> tuple[list[int], Stream]:
    stream = model.stream(ids, **request)
    writer = Writer(model, console) if console is not None else None
    tokens: list[int] = []
    for emission in stream:
        tokens += emission.tokens
        if writer is not None:
            for place, token in enumerate(emission.tokens):
                writer.put(token, place < emission.num_accepted)
    if writer is not None:
        writer.close()
    return tokens, stream


class Writer:
    """Prints tokens as text, accepted drafts in a second colour, never half a character."""

    def __init__(self, model: EarlyExitModel, console: Console) -> None:
        assert model.tokenizer is not None
        self._pieces, self._console = Detokenizer(model.tokenizer), console

    def put(self, token: int, is_drafted: bool) -> None:
        self._show(self._pieces.put(token), is_drafted)

    def close(self) -> None:
        self._show(self._pieces.rest() + "\n", False)

    def _show(self, text: str, is_drafted: bool) -> None:
        if self._console.is_terminal:
            self._console.print(Text(text, style="green" if is_drafted else ""), end="", soft_wrap=True)
        else:
            sys.stdout.write(text)
            sys.stdout.flush()


def _compare(
    model: EarlyExitModel, ids: Tensor, request: dict[str, Any], tokens: list[int], stats: DecodeStats
) -> dict[str, Any]:
    """Speed against ordinary decoding at width 1 (the fastest), identity against it at the same width.

    ``identical`` is None where the text is not promised: `rejection` keeps the distribution, not the text.
    """
    same_width = {**request, "draft": "off"}
    methods = {"drafting": request, "ar_same_width": same_width, "ar": {**same_width, "exact": False}}
    runs: dict[str, list[DecodeStats]] = {name: [] for name in methods}
    runs["drafting"].append(stats)
    reference: list[int] = []
    for _ in range(COMPARE_ROUNDS):
        for name, options in methods.items():
            text, stream = _stream(model, ids, options, None)
            runs[name].append(stream.stats)
            reference = text if name == "ar_same_width" else reference
    speed = {name: statistics.median(s.tokens_per_second for s in held) for name, held in runs.items()}
    is_promised = request["acceptance"] == "coupled" or request["temperature"] == 0
    return {
        "ar_tokens_per_second": speed["ar"],
        "ar_same_width_tokens_per_second": speed["ar_same_width"],
        "tokens_per_second": speed["drafting"],
        "seconds": statistics.median(s.seconds for s in runs["drafting"]),
        "ar_seconds": statistics.median(s.seconds for s in runs["ar"]),
        "speedup": speed["drafting"] / speed["ar"] if speed["ar"] else 0.0,
        "identical": tokens == reference if is_promised else None,
    }


def _report(
    text: str, tokens: list[int], stats: DecodeStats, request: dict[str, Any], compared: dict[str, Any] | None
) -> dict[str, Any]:
    report = {
        "text": text,
        "tokens": tokens,
        "num_tokens": len(tokens),
        "seconds": stats.seconds,
        "tokens_per_second": stats.tokens_per_second,
        "stats": stats.to_dict(),
        "settings": request,
    }
    return report if compared is None else {**report, "compare": compared}


def _summarise(console: Console, stats: DecodeStats, request: dict[str, Any], compared: dict[str, Any] | None) -> None:
    line = (
        f"{stats.num_tokens} tokens, {stats.tokens_per_second:.1f} tok/s, tau {stats.tau:.2f}, "
        f"acceptance rate {stats.acceptance_rate:.2f}"
    )
    if request["temperature"] > 0:
        line += f", seed {request['seed']}"
    console.print(f"[{line}]", markup=False)
    if compared is not None:
        identical = "not promised by rejection" if compared["identical"] is None else str(compared["identical"]).lower()
        console.print(
            f"with drafting {compared['tokens_per_second']:.1f} tok/s, {compared['seconds']:.2f} s; without "
            f"{compared['ar_tokens_per_second']:.1f} tok/s, {compared['ar_seconds']:.2f} s (at the same width "
            f"{compared['ar_same_width_tokens_per_second']:.1f} tok/s); speedup {compared['speedup']:.2f}\n"
            f"identical: {identical}",
            markup=False,
            soft_wrap=True,
        )
