"""Writing data timed: `write_batch` against transformers' own generate, the same prompts in one batch, both greedy."""

import os
import statistics
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.compare import first_divergence, up_to_end
from selfspec.costs import clocked, interleave
from selfspec.target import Target
from selfspec.training.batch import write_batch
from selfspec.training.data import prompt_ids, read_prompts
from selfspec.training.generate_data import content_hash
from selfspec.training.user_turns import eos_ids, first_turns

Answers = list[list[int]]
OURS, PEER = "selfspec", "transformers"


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: str | os.PathLike[str] | None = None,
    batch_size: int = 64,
    max_new_tokens: int = 160,
    max_prompt_tokens: int = 512,
    rounds: int = 3,
    seed: int = 0,
) -> dict[str, Any]:
    """Answer tokens a second of both, in turn, and whether they write the same.

    ``prompts`` is a jsonl or a data set, whose first ones that are short enough are taken; None: the target writes
    them. Raises ValueError where there is none.
    """
    target = Target(model)
    ids = _prompts(target, tokenizer, prompts, batch_size, max_prompt_tokens, seed)
    methods: dict[str, Callable[[], Any]] = {
        name: partial(clocked, partial(make, ids, max_new_tokens)) for name, make in _methods(target).items()
    }
    runs = interleave(methods, rounds)
    rates = {name: [sum(map(len, answers)) / seconds for seconds, answers in made] for name, made in runs.items()}
    medians = {name: statistics.median(found) for name, found in rates.items()}
    answers = {name: made[-1][1] for name, made in runs.items()}
    return {
        "model": target.name, "dtype": str(target.dtype).removeprefix("torch."), "batch_size": len(ids),
        "prompts_sha256": content_hash(prompts) if prompts else None,
        "max_new_tokens": max_new_tokens, "prompt_tokens": [len(prompt) for prompt in ids],
        "answer_tokens": {name: sum(map(len, made)) for name, made in answers.items()},
        "tokens_per_second": medians, "runs": rates, "ratio": medians[OURS] / medians[PEER],
        "texts": _compared(target, ids, answers[PEER], answers[OURS]),
    }  # fmt: skip


def table(held: dict[str, Any]) -> Table:
    """What `run` found, for people."""
    made = Table(title=f"{held['model']}, {held['dtype']}, {held['batch_size']} answers at once")
    for name in ("", "tokens/s", "answer tokens"):
        made.add_column(name)
    for name, rate in held["tokens_per_second"].items():
        made.add_row(name, f"{rate:.1f}", str(held["answer_tokens"][name]))
    texts = held["texts"]
    made.caption = (
        f"{held['ratio']:.2f} times; {texts['equal']} texts equal, {texts['near_ties']} differ first at a near-tie, "
        f"{texts['others']} elsewhere"
    )
    return made


def _prompts(
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    source: str | os.PathLike[str] | None,
    count: int,
    longest: int,
    seed: int,
) -> Answers:
    if source is None:
        generator = torch.Generator(target.device).manual_seed(seed)
        made = first_turns(target, tokenizer, count, generator, Counter())
    else:
        made = [prompt_ids(tokenizer, prompt.messages) for prompt in read_prompts(source)]
    fitting = [prompt for prompt in made if len(prompt) <= longest][:count]
    if not fitting:
        raise ValueError(f"no prompt of at most {longest} tokens in {source or 'what the target wrote'}")
    return fitting


def _methods(target: Target) -> dict[str, Callable[[Answers, int], Answers]]:
    eos = eos_ids(target.base)

    def ours(prompts: Answers, max_new_tokens: int) -> Answers:
        generator, greedy = torch.Generator(target.device), torch.zeros(len(prompts))
        return [written.answer for written in write_batch(target, prompts, greedy, max_new_tokens, generator, eos)]

    def peer(prompts: Answers, max_new_tokens: int) -> Answers:
        longest, pad = max(map(len, prompts)), eos[0] if eos else 0
        ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=target.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=target.device)
        sequences = target.base.generate(
            ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=eos or None,
            pad_token_id=pad,
        )  # fmt: skip
        return [up_to_end(row, eos) for row in sequences[:, longest:].tolist()]

    return {OURS: ours, PEER: peer}


def _compared(target: Target, prompts: Answers, references: Answers, answers: Answers) -> dict[str, Any]:
    """How many of ``answers`` are the reference's, or leave it at a near-tie first (see `compare`)."""
    found = [first_divergence(target, *three) for three in zip(prompts, references, answers, strict=True)]
    left = [divergence for divergence in found if divergence is not None]
    near = sum(divergence.is_near_tie for divergence in left)
    gaps = [divergence.gap_ulp for divergence in left if divergence.gap_ulp is not None]
    return {
        "equal": len(found) - len(left), "near_ties": near, "others": len(left) - near,
        "largest_gap_ulp": max(gaps, default=0.0),
    }  # fmt: skip
