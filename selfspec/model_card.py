"""The README.md beside a saved exit: what it is, how good it is, how to use it, what made it."""

import re
from typing import Any

import yaml

FORMS = {
    "chain": "token by token, each through layers 1 to {n} and the exit",
    "recursive": "token by token on the exit's own output, layers 1 to {n} for the first one alone",
    "parallel": "all tokens from one pass of layers 1 to {n} and the exit",
}
STEPWISE = {
    "agreement": "agrees with the target",
    "accepted_mass": "sum min(p, q) at T=1",
    "acceptance": "right, given that all before were",
    "tau": "tokens a cycle, drafting so far",
}


def model_card(name: str, sidecar: dict[str, Any]) -> str:
    """Markdown for the exit ``name``, from what its ``sidecar`` holds."""
    base, head, training = sidecar["base"], sidecar["head"], sidecar["training"]
    lines = [
        "---", "library_name: peft", f"base_model: {base['id']}", "tags: [selfspec, speculative-decoding]", "---", "",
        f"# Exit head `{name}` for {base['id']}", "",
        f"An exit after layer {head['exit_layer']} of {base['num_layers']}: the model drafts with its own first layers "
        "and this head, and verifies with the rest. The text is the model's own, token for token; the base is not "
        "changed.", "",
        "```python", "from selfspec import EarlyExitModel", "",
        f'model = EarlyExitModel.from_pretrained("{base["id"]}", exits="path/of/this/folder")', "```", "",
        "## Drafting", "",
        f"It drafts {FORMS[head['form']].format(n=head['exit_layer'])}: at most {head['draft_len']} tokens, "
        + (f"while all of them are likely to stand (at least {head['min_confidence']})." if head["min_confidence"]
           else "without a stop."), "",
        *_table({k: v for k, v in head.items() if k != "draft_vocab" and v is not None}),
        f"| drafted vocabulary | {_size(head)} |", "",
        *_quality(sidecar["metrics"]), *_training(training),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def _size(head: dict[str, Any]) -> str:
    return "all tokens" if head["draft_vocab"] is None else f"{len(head['draft_vocab']):,} tokens"


def _table(values: dict[str, Any]) -> list[str]:
    return ["| setting | value |", "|---|---|", *(f"| {k} | {v} |" for k, v in values.items())]


def _quality(metrics: dict[str, Any]) -> list[str]:
    """On held-out text that no choice has seen, by draft step."""
    if not metrics:
        return []
    steps = sorted({int(found[1]) for k in metrics if (found := re.fullmatch(r"\w+?_(\d+)", k))})
    rows = [
        f"| {text} | " + " | ".join(f"{metrics.get(f'{name}_{j}', float('nan')):.3f}" for j in steps) + " |"
        for name, text in STEPWISE.items()
        if f"{name}_1" in metrics
    ]
    other = {k: v for k, v in metrics.items() if not re.fullmatch(r"\w+?_\d+", k) and v is not None}
    table = ["| draft step | " + " | ".join(map(str, steps)) + " |", "|---" * (len(steps) + 1) + "|", *rows, ""]
    return [
        "## How good it is", "", "On held-out text of the kind it was trained on:", "", *(table if rows else []),
        *(f"* {k.replace('_', ' ')}: {v}" for k, v in other.items()), "",
    ]  # fmt: skip


def _training(training: dict[str, Any]) -> list[str]:
    """What made it; everything is in the sidecar too."""
    if not training:
        return []
    facts = {k: v for k, v in training.items() if not isinstance(v, dict)}
    told = {k: training[k] for k in ("config", "data", "start", "costs") if training.get(k)}
    block = ["```yaml", yaml.safe_dump(told, sort_keys=False).rstrip(), "```"] if told else []
    return ["## Training", "", *(f"* {k.replace('_', ' ')}: {v}" for k, v in facts.items()), "", *block]
