"""A probe from its options to its files: load, sample, judge, time, predict, write."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from selfspec.eval import probe, probe_report, probe_text
from selfspec.eval.probe import Candidate
from selfspec.eval.probe_costs import measure_costs
from selfspec.eval.probe_text import Report, Sample
from selfspec.files import check_writable, write_atomically
from selfspec.pretrained import load_target_model, resolve_dtype, usable_device
from selfspec.provenance import provenance
from selfspec.target import Target

LEAST_TOKENS = 64  # fewer tell nothing
JUDGED_SHARE = 4  # one text in so many judges, the others fit the bridge


@dataclass(frozen=True)
class ProbeConfig:
    """What `selfspec probe` was asked for."""

    model: str | None = None
    revision: str | None = None
    text: Path | None = None
    num_tokens: int = 4000
    layers: tuple[int, ...] | None = None
    draft_vocab: int | None = None  # how many token ids exits may draft
    dtype: str | None = None
    device: str | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise ValueError for a number out of range."""
        if self.num_tokens < LEAST_TOKENS:
            raise ValueError(f"num_tokens must be at least {LEAST_TOKENS}, got {self.num_tokens}")
        if self.draft_vocab is not None and self.draft_vocab < 1:
            raise ValueError(f"draft_vocab must be at least 1, got {self.draft_vocab}")

    def dtypes(self) -> tuple[str | torch.dtype, str | torch.dtype]:
        """Of judging and of decoding: many rows at once are faster in float32 on a CPU."""
        device = usable_device(self.device)
        decoding = resolve_dtype(self.dtype, device)
        return torch.float32 if device.type == "cpu" else decoding, decoding

    def load(self, dtype: str | torch.dtype) -> tuple[Target, PreTrainedTokenizerBase]:
        """The target and its tokenizer."""
        hf_model, tokenizer = load_target_model(self.model, self.revision, dtype, self.device)
        return Target(hf_model), tokenizer


def run(config: ProbeConfig, output: Path, report: Report) -> dict[str, Any]:
    """Probe and write ``probe.json`` and ``probe.png`` into ``output``; returns what the json holds.

    ``report`` hears of progress. Raises ValueError or OSError for what cannot be read, written or probed; all but the
    layers and the length of the text is checked before the model is loaded.
    """
    config.check()
    records = [] if config.text is None else probe_text.read_file(config.text)
    output.mkdir(parents=True, exist_ok=True)
    check_writable(output / "probe.json")
    transformers_logging.disable_progress_bar()
    judging, decoding = config.dtypes()
    target, tokenizer = config.load(judging)
    layers = check_layers(config.layers, target.num_layers)
    samples = probe_text.make_samples(records, target.base, tokenizer, config.num_tokens, config.seed, report)
    held, fitted = divide(samples)
    vocab = probe.draft_vocab(fitted, config.draft_vocab, len(tokenizer), target.vocab_size)
    scores = probe.score_exits(target, held, probe.fit_bridges(target, fitted, layers, report), vocab, report)
    if decoding != judging:
        del target  # one copy of the weights at a time
        target, _ = config.load(decoding)
    costs = measure_costs(target, layers, vocab, report)
    exits = [
        Candidate(layer, name, score, costs.drafts[name, layer],
                  probe.predict(score.agreement, costs.drafts[name, layer], costs.rows))
        for (name, layer), score in scores.items()
    ]  # fmt: skip
    found = {
        "model": target.name,
        "settings": {**asdict(config), "text": config.text and config.text.name, "model": config.model and target.name},
        "dtype": str(target.dtype).removeprefix("torch."),
        "hidden_size": target.hidden_size,
        "num_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size if vocab is None else len(vocab),
        "num_texts": len(samples),
        "fitted_tokens": count(fitted),
        "judged_tokens": count(held),
        "context": costs.context,
        "step_ms": costs.step_ms,
        "row_costs": list(costs.rows),
        "exits": [asdict(candidate) for candidate in exits],
        "best": asdict(max(exits, key=lambda c: c.best.speedup)),
        "provenance": provenance(target.device),
    }
    found["verdict"] = probe_report.verdict(found)
    write_atomically(output / "probe.json", (json.dumps(found, indent=1) + "\n").encode())
    write_atomically(output / "probe.png", probe_report.plot(found))
    return found


def check_layers(layers: Sequence[int] | None, num_layers: int) -> list[int]:
    """The layers to judge; raises ValueError for one that no exit can stand at."""
    for layer in layers or ():
        if not 1 <= layer < num_layers:
            raise ValueError(f"layer {layer} is not in 1..{num_layers - 1}")
    return sorted(set(layers)) if layers else probe.default_layers(num_layers)


def divide(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Samples that judge and samples that fit; raises ValueError where there is too little of either."""
    held = [sample for i, sample in enumerate(samples) if i % JUDGED_SHARE == 0]
    fitted = [sample for i, sample in enumerate(samples) if i % JUDGED_SHARE]
    if not fitted or count(samples) < LEAST_TOKENS:
        found = f"{count(samples)} tokens in {len(samples)} texts"
        raise ValueError(f"too little text, {found}: at least {LEAST_TOKENS} tokens in two texts are needed")
    return held, fitted


def count(samples: Sequence[Sample]) -> int:
    """Tokens that are judged, or fitted on."""
    return sum(sample.num_tokens for sample in samples)
