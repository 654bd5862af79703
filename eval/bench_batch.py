"""Batches timed: prompts answered together, one by one, and by transformers' generate, greedy."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from selfspec.compare import first_divergence, up_to_end
from selfspec.costs import clocked, interleave
from selfspec.eval.tasks import load_questions
from selfspec.model import EarlyExitModel
from selfspec.settings import eos_ids

TOGETHER, ALONE, PEER = "together", "one by one", "transformers"
Texts = list[list[int]]


def run(
    model: EarlyExitModel,
    tasks: str,
    sizes: Sequence[int],
    max_new_tokens: int,
    rounds: int,
    max_prompt_tokens: int = 512,
) -> dict[str, Any]:
    """New tokens a second, the prompts' passes included, of the first prompts of ``tasks`` in batches of ``sizes``.

    Raises ValueError where there are fewer prompts of at most ``max_prompt_tokens``.
    """
    prompts = _prompts(model, tasks, max_prompt_tokens)
    if max(sizes) > len(prompts):
        raise ValueError(f"{tasks}: {len(prompts)} prompts of at most {max_prompt_tokens} tokens, not {max(sizes)}")
    batches = [_measured(model, prompts[:size], max_new_tokens, rounds) for size in sizes]
    return {
        "model": model.target.name, "dtype": str(model.target.dtype).removeprefix("torch."), "tasks": tasks,
        "max_new_tokens": max_new_tokens, "threads": torch.get_num_threads(), "batches": batches,
    }  # fmt: skip


def _prompts(model: EarlyExitModel, tasks: str, longest: int) -> Texts:
    tokenizer: Any = model.tokenizer
    found = []
    for question in load_questions(tasks):
        chat = [{"role": "user", "content": question.turns[0]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        found += [ids] if len(ids) <= longest else []
    return found


def _measured(model: EarlyExitModel, prompts: Texts, max_new_tokens: int, rounds: int) -> dict[str, Any]:
    writers: dict[str, Callable[[Texts], Texts]] = {
        TOGETHER: partial(_ours, model, max_new_tokens),
        ALONE: lambda given: [_ours(model, max_new_tokens, [prompt])[0] for prompt in given],
        PEER: partial(_theirs, model, max_new_tokens),
    }
    methods: dict[str, Callable[[], Any]] = {
        name: partial(clocked, partial(write, prompts)) for name, write in writers.items()
    }
    made = interleave(methods, rounds)
    texts = {name: found[-1][1] for name, found in made.items()}
    rates = {name: [sum(map(len, answers)) / seconds for seconds, answers in found] for name, found in made.items()}
    speeds = {name: statistics.median(found) for name, found in rates.items()}
    pairs = list(zip(prompts, texts[TOGETHER], texts[PEER], strict=True))
    left = [first_divergence(model.target, prompt, ours, theirs) for prompt, ours, theirs in pairs]
    return {
        "size": len(prompts), "tokens_per_second": speeds, "runs": rates,
        "over_one_by_one": speeds[TOGETHER] / speeds[ALONE], "over_transformers": speeds[TOGETHER] / speeds[PEER],
        "same_text_as_alone": sum(a == b for a, b in zip(texts[TOGETHER], texts[ALONE], strict=True)),
        "transformers": {
            "same_text": left.count(None), "near_ties": sum(d is not None and d.is_near_tie for d in left),
        },
    }  # fmt: skip


def _ours(model: EarlyExitModel, max_new_tokens: int, prompts: Texts) -> Texts:
    ids, mask = _batch(model, prompts)
    made = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False).sequences
    return _new_tokens(model, made, ids)


def _theirs(model: EarlyExitModel, max_new_tokens: int, prompts: Texts) -> Texts:
    ids, mask = _batch(model, prompts)
    made: Any = model.base.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
    return _new_tokens(model, made, ids)


def _batch(model: EarlyExitModel, prompts: Texts) -> tuple[Tensor, Tensor]:
    rows = [torch.tensor(prompt, device=model.target.device) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    return ids, pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")


def _new_tokens(model: EarlyExitModel, sequences: Tensor, ids: Tensor) -> Texts:
    """Without the prompts, and without what pads the batch behind an end token."""
    ends = eos_ids(model.base.generation_config)
    return [up_to_end(row, ends) for row in sequences[:, ids.shape[1] :].tolist()]


def table(held: dict[str, Any]) -> Table:
    """What `run` found, for people."""
    where = f"{held['model']}, {held['dtype']}, threads: {held['threads']}"
    made = Table(title=f"{where}; new tokens a second, prompts included")
    for name in ("batch", TOGETHER, ALONE, PEER, "over one by one", "over transformers", "same text as alone"):
        made.add_column(name)
    for batch in held["batches"]:
        speeds = [f"{batch['tokens_per_second'][name]:.0f}" for name in (TOGETHER, ALONE, PEER)]
        ratios = [f"{batch[name]:.2f}" for name in ("over_one_by_one", "over_transformers")]
        made.add_row(str(batch["size"]), *speeds, *ratios, f"{batch['same_text_as_alone']} of {batch['size']}")
    return made
