"""The sample text of a probe: from a file, or written by the target itself.

Shapes: S tokens of a sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from selfspec.files import read_jsonl

Message = dict[str, str]
Report = Callable[[str, float, float], None]  # name of a stage, how far it is, how far it goes

MARK = "USERTURNBEGINSHERE"  # splits a template in two at the user's text
BATCH = 32  # texts that the target writes at once
TURN_TOKENS = 32  # a user turn that the target wrote is cut there
ANSWER_TOKENS = 96
MIN_SAMPLES = 8  # no text is more than that part of the sample
PIECE_TOKENS = 256  # of a plain text
ROW_TOKENS = 512  # longer conversations are cut there
TEMPERATURES = (0.0, 0.8)  # of one batch and the next


@dataclass(frozen=True)
class Sample:
    """A text of which ``ids[start:]`` is judged, without what only leads up to it."""

    ids: Tensor  # [S]
    start: int  # 1..S-1

    @property
    def num_tokens(self) -> int:
        """Tokens that are judged."""
        return len(self.ids) - self.start


def read_file(path: Path) -> list[str | list[Message]]:
    """Texts and conversations of a file: UTF-8 text, or jsonl with `text`, `prompt` or `messages`.

    Raises ValueError naming the line of what does not fit, and where there is no text at all; OSError as `open` does.
    """
    if path.suffix != ".jsonl":
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
        records: list[str | list[Message]] = [text] if text.strip() else []
    else:
        records = [_record(where, line) for where, line in read_jsonl(path)]
    if not records:
        raise ValueError(f"{path}: no text in it")
    return records


def _record(where: str, line: dict[str, Any]) -> str | list[Message]:
    match line:
        case {"text": str(text)} if text.strip():
            return text
        case {"prompt": str(prompt)} if prompt.strip():
            return [{"role": "user", "content": prompt}]
        case {"messages": [*messages]} if messages and all(map(_is_message, messages)):
            return [{"role": m["role"], "content": m["content"]} for m in messages]
    raise ValueError(f"{where}: needs a `text`, a `prompt` or `messages` with role and content, has {sorted(line)}")


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def make_samples(
    records: Sequence[str | list[Message]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_tokens: int,
    seed: int,
    report: Report,
) -> list[Sample]:
    """Samples with ``num_tokens`` judged tokens, fewer where ``records`` do not give that many.

    Texts are taken as they are, conversations that end in an assistant turn are judged by that turn, others are
    answered by the target. Without records the target writes the user turns too.
    """
    samples: list[Sample] = []
    prompts: list[list[int]] = []
    for record in records:
        if isinstance(record, str):
            samples += _pieces(tokenizer(record)["input_ids"], 4 if len(records) == 1 else 1)
        elif record[-1]["role"] == "assistant":
            samples += _given(record, tokenizer)
        else:
            prompts.append(_encode(record, tokenizer)[-ROW_TOKENS:])
    missing = num_tokens - _count(samples)
    if missing > 0 and (prompts or not records):
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed)
            samples += _answers(prompts, model, tokenizer, missing, report)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
    return _cut([samples[i] for i in order], num_tokens)


def _count(samples: Sequence[Sample]) -> int:
    return sum(sample.num_tokens for sample in samples)


def _cut(samples: Sequence[Sample], num_tokens: int) -> list[Sample]:
    kept: list[Sample] = []
    for sample in samples:
        if (room := num_tokens - _count(kept)) > 0:
            size = min(room, max(num_tokens // MIN_SAMPLES, 8))
            kept.append(Sample(sample.ids[: sample.start + size], sample.start))
    return kept


def _pieces(ids: list[int], least: int) -> list[Sample]:
    """A text in pieces of equal length, judged from their third token on: what follows the first is noise."""
    num_pieces = max(-(-len(ids) // PIECE_TOKENS), least)
    size = -(-len(ids) // num_pieces)
    parts = [ids[i : i + size] for i in range(0, len(ids), size)]
    return [Sample(torch.tensor(part), 2) for part in parts if len(part) > 2]


def _encode(messages: list[Message], tokenizer: PreTrainedTokenizerBase, is_answered: bool = False) -> list[int]:
    """Token ids of a conversation, with what opens the assistant's turn unless that is answered."""
    if not tokenizer.chat_template:
        return list(tokenizer("\n\n".join(m["content"] for m in messages))["input_ids"])
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=not is_answered, return_dict=True)
    return list(rendered["input_ids"])


def _given(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """A conversation whose last turn is judged: where its ids part from those of the turns before it."""
    before, ids = _encode(messages[:-1], tokenizer) if len(messages) > 1 else [], _encode(messages, tokenizer, True)
    shared = next((i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), min(len(before), len(ids)))
    start, ids = max(shared, 2), ids[:ROW_TOKENS]
    return [Sample(torch.tensor(ids), start)] if start < len(ids) else []


def _answers(
    prompts: list[list[int]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_tokens: int,
    report: Report,
) -> list[Sample]:
    """What the target says to ``prompts``, or to user turns of its own, until there is enough or a batch is empty."""
    samples: list[Sample] = []
    size = max(min(BATCH, num_tokens // TURN_TOKENS), MIN_SAMPLES)
    for number in count():
        report("the target writes", min(_count(samples), num_tokens), num_tokens)
        batch = prompts[number * size :][:size] if prompts else _user_turns(model, tokenizer, size)
        # without a template all texts begin alike: greedy ones would be one text
        temperature = TEMPERATURES[number % 2 if prompts or tokenizer.chat_template else 1]
        answers = write(model, tokenizer, batch, ANSWER_TOKENS, temperature) if batch else []
        made = [Sample(torch.tensor(p + a), len(p)) for p, a in zip(batch, answers, strict=True) if a]
        samples += made
        if not made or _count(samples) >= num_tokens:
            report("the target writes", num_tokens, num_tokens)
            return samples
    raise AssertionError("unreachable")


def _user_turns(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, size: int) -> list[list[int]]:
    """Prompts whose user turn the target wrote behind the bare chat template; the start of a text without one."""
    if not tokenizer.chat_template:
        known = [i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id, 0) if i is not None]
        return [known[:1]] * size
    text = str(tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False))
    before = list(tokenizer(text.split(MARK)[0], add_special_tokens=False)["input_ids"])
    turns = write(model, tokenizer, [before] * size, TURN_TOKENS, TEMPERATURES[1])
    contents = [str(tokenizer.decode(turn, skip_special_tokens=True)).strip() for turn in turns]
    return [_encode([{"role": "user", "content": content}], tokenizer) for content in contents if content]


def write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    num_tokens: int,
    temperature: float,
) -> list[list[int]]:
    """Continue each of ``prompts`` by at most ``num_tokens``, its end token included, with transformers' generate."""
    eos = _eos_ids(model, tokenizer)
    longest = max(map(len, prompts))
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    warm: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        max_new_tokens=min(num_tokens, max((limit or longest + num_tokens) - longest, 1)),
        eos_token_id=sorted(eos) or None,
        pad_token_id=min(eos, default=0),
        **(warm if temperature > 0 else {"do_sample": False}),
    )
    written = model.generate(padded, attention_mask=mask, generation_config=config)[:, longest:].tolist()
    ends = [next((i for i, token in enumerate(row) if token in eos), len(row) - 1) for row in written]
    return [row[: end + 1] for row, end in zip(written, ends, strict=True)]


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    found = (model.generation_config and model.generation_config.eos_token_id) or tokenizer.eos_token_id
    return set() if found is None else {found} if isinstance(found, int) else set(found)
