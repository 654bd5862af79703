"""What a user says: the first turn of a conversation and what follows an answer, written by the target, or read.

The target goes on with its own chat template where a user's text stands.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.target import Target
from selfspec.training.batch import write_batch
from selfspec.training.data import Row, prompt_ids

ANSWER, MARK = "ASSISTANTTURNSTANDSHERE", "USERTURNBEGINSHERE"  # split a template where texts stand
USER_TURN_TOKENS = 128  # a sampled user turn is cut there
TEMPERATURE = 0.8


def first_turns(
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    generator: torch.Generator,
    skipped: Counter[str],
) -> list[list[int]]:
    """Prompts with a user turn that the target wrote (empty ones are left out), or the bare start of a text."""
    if not tokenizer.chat_template:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        return [[start]] * count
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    before = tokenizer.encode(text.split(MARK)[0], add_special_tokens=False)
    turns = _sample(target, tokenizer, [before] * count, generator)
    skipped["empty user turn"] += turns.count("")
    return [prompt_ids(tokenizer, [{"role": "user", "content": turn}]) for turn in turns if turn]


def next_turns(
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    max_tokens: int,
    generator: torch.Generator,
) -> list[list[int]]:
    """The prompts of at most ``max_tokens`` that ``rows`` become with what the user says next.

    Answers that were cut off are not gone on with, and nothing is where there is no chat template.
    """
    if not tokenizer.chat_template:
        return []
    before, behind = (tokenizer.encode(part, add_special_tokens=False) for part in _around_next(tokenizer))
    eos = eos_ids(target.base)
    histories = [row.ids[:-1].tolist() + before for row in rows if row.ids[-1] in eos]  # the template has its own end
    longest = max_tokens - USER_TURN_TOKENS - len(behind)
    histories = [history for history in histories if len(history) <= longest]
    turns = _sample(target, tokenizer, histories, generator) if histories else []
    made = [
        history + tokenizer.encode(turn, add_special_tokens=False) + behind
        for history, turn in zip(histories, turns, strict=True)
        if turn
    ]
    return [prompt for prompt in made if len(prompt) <= max_tokens]


def last_turns(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]]) -> list[str]:
    """What the user says last in each of ``prompts``; nothing where that cannot be told.

    Without a chat template it is the whole prompt.
    """
    if not tokenizer.chat_template:
        return [text.strip() for text in tokenizer.batch_decode(prompts, skip_special_tokens=True)]
    first = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False).split(MARK)[0]
    opening, closing = _around_next(tokenizer)
    turns = []
    for text in tokenizer.batch_decode(prompts):
        begins = opening if opening in text else first
        is_found = begins in text and text.endswith(closing)
        turns.append(text.rpartition(begins)[2].removesuffix(closing).strip() if is_found else "")
    return turns


def _around_next(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the chat template puts between an answer and the next user turn, and between that and the answer to it."""
    messages = [
        {"role": "user", "content": "x"}, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": MARK},
    ]  # fmt: skip
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    opening, closing = text.split(ANSWER)[1].split(MARK)
    return opening, closing


def _sample(
    target: Target, tokenizer: PreTrainedTokenizerBase, starts: list[list[int]], generator: torch.Generator
) -> list[str]:
    """The text that the target puts behind each of ``starts``."""
    eos = eos_ids(target.base)
    heat = torch.full((len(starts),), TEMPERATURE)
    made = write_batch(target, starts, heat, USER_TURN_TOKENS, generator, eos)
    ids = [[token for token in turn.answer if token not in eos] for turn in made]
    return [tokenizer.decode(turn, skip_special_tokens=True).strip() for turn in ids]


def eos_ids(model: PreTrainedModel) -> list[int]:
    """All ids that end a turn."""
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = model.config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
