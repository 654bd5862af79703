"""Training rows: token ids with the index where the answer begins; read from jsonl, kept in checked shards.

A folder of shards is `manifest.json` plus `shard-00000.safetensors`, ...: tokens [N] (uint16 or uint32, chosen by the
vocabulary), offsets [R + 1], answer_starts [R], temperatures [R] (NaN: the answer was given, not generated).
"""

from __future__ import annotations

import bisect
import hashlib
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors
from transformers import PreTrainedTokenizerBase

from selfspec.files import read_records, write_atomically
from selfspec.training.overlap import Overlap, texts_of

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
Message = dict[str, str]


@dataclass(frozen=True)
class Row:
    """One conversation: ids[answer_start:] were written by the assistant and carry the loss."""

    ids: np.ndarray  # [S] int64
    answer_start: int  # 1..S-1: position 0 has nothing to be predicted from
    temperature: float = math.nan

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that carry the loss."""
        return len(self.ids) - self.answer_start


@dataclass(frozen=True)
class Prompt:
    """What the target is asked: chat messages that do not end in an assistant turn, and a stratum to balance by."""

    messages: list[Message]
    category: str = ""


def num_rows_for(sizes: Sequence[int], num_tokens: int) -> int:
    """How many of the first rows, of ``sizes`` tokens, reach ``num_tokens`` together; all if they do not."""
    return min(bisect.bisect_left(list(accumulate(sizes)), num_tokens) + 1, len(sizes))


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Prompts from the fields `messages`, `prompt` or `text`; assistant turns at the end are dropped (to be rewritten).

    ``path`` is a jsonl file or a data set on the hub, see `read_records`.

    Raises ValueError with file:line for a bad line, and when the file has no prompt at all.
    """
    prompts = []
    for where, record in read_records(path):
        if "messages" in record:
            messages = _messages(where, record)
            while messages and messages[-1]["role"] == "assistant":
                messages.pop()
        else:
            messages = [{"role": "user", "content": _text(where, record, "prompt", "text")}]
        if messages:
            prompts.append(Prompt(messages, str(record.get("category", ""))))
    if not prompts:
        raise ValueError(f"{path}: no prompts")
    return prompts


def rows_from_jsonl(
    path: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int = 2048,
    skipped: Counter[str] | None = None,
    avoid: Overlap | None = None,
) -> list[Row]:
    """Rows from data that has answers: `messages` ending in an assistant turn, `prompt` + `completion`, or `text`.

    ``path`` is a jsonl file or a data set on the hub, see `read_records`; what overlaps with ``avoid`` is left out, and
    so is a row that was there before.

    The answer is what the chat template of all turns adds to that of the turns before the last one; plain `text` is
    answer throughout. Rows over max_tokens and empty answers are counted in `skipped` and reported once. Raises
    ValueError with file:line for a bad line, and when no row is left.
    """
    skipped = Counter() if skipped is None else skipped
    rows, seen = [], set[bytes]()
    for where, record in read_records(path):
        row = _row_from_record(where, record, tokenizer)
        if row is None:
            skipped["empty answer"] += 1
        elif avoid is not None and avoid.touches(texts_of(record)):
            skipped["found in what is to be avoided"] += 1
        elif row.ids.tobytes() in seen:
            skipped["twice"] += 1
        elif len(row.ids) > max_tokens:
            skipped[f"over {max_tokens} tokens"] += 1
        else:
            rows.append(row)
            seen.add(row.ids.tobytes())
    if skipped:
        logger.warning("%s: skipped %s", path, ", ".join(f"{n} rows ({why})" for why, n in skipped.items()))
    if not rows:
        raise ValueError(f"{path}: no usable rows ({dict(skipped) or 'empty file'})")
    return rows


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    """Token ids of the messages up to where the assistant begins; plain text when there is no chat template."""
    if not tokenizer.chat_template:
        return _with_bos(tokenizer, "\n\n".join(message["content"] for message in messages))
    return _template_ids(tokenizer, messages, add_generation_prompt=True)


def write_shard(path: Path, rows: list[Row], vocab_size: int) -> str:
    """Write rows through a temporary file and a rename; returns the sha256 of the file."""
    lengths = [len(row.ids) for row in rows]
    data = save_tensors(
        {
            "tokens": np.concatenate([row.ids for row in rows]).astype(np.uint16 if vocab_size <= 65536 else np.uint32),
            "offsets": np.cumsum([0, *lengths], dtype=np.int64),
            "answer_starts": np.array([row.answer_start for row in rows], dtype=np.int32),
            "temperatures": np.array([row.temperature for row in rows], dtype=np.float32),
        }
    )
    write_atomically(path, data)
    return hashlib.sha256(data).hexdigest()


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a folder of shards; ValueError when there is none or it is of another format."""
    path = Path(folder) / "manifest.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no manifest.json; this is not a folder of training shards")
    manifest = json.loads(path.read_text())
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{path}: format_version {manifest.get('format_version')}, expected {FORMAT_VERSION}")
    return manifest


def load_shards(folder: str | os.PathLike[str]) -> list[Row]:
    """All rows of a folder of shards, in order; ValueError for a shard that is missing or fails its sha256."""
    rows = []
    for entry in read_manifest(folder)["shards"]:
        path = Path(folder) / entry["file"]
        data = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise ValueError(f"{path}: {'sha256 differs from the manifest' if data else 'missing or empty'}")
        rows += _rows_of_shard(load_tensors(data))
    if not rows:
        raise ValueError(f"{folder}: no rows yet")
    return rows


def _rows_of_shard(shard: dict[str, np.ndarray]) -> list[Row]:
    tokens, offsets = shard["tokens"].astype(np.int64), shard["offsets"]
    spans = zip(offsets[:-1], offsets[1:], shard["answer_starts"], shard["temperatures"], strict=True)
    return [Row(tokens[begin:end], int(start), float(temperature)) for begin, end, start, temperature in spans]


def _row_from_record(where: str, record: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Row | None:
    if "messages" in record:
        messages = _messages(where, record)
        if not messages or messages[-1]["role"] != "assistant":
            raise ValueError(f"{where}: `messages` must end in an assistant turn")
    elif "prompt" in record:
        prompt, completion = _text(where, record, "prompt"), _text(where, record, "completion")
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    else:
        ids = _with_bos(tokenizer, _text(where, record, "text"))
        return Row(np.array(ids), 1) if len(ids) > 1 else None
    if not messages[-1]["content"].strip():
        return None
    before = prompt_ids(tokenizer, messages[:-1])
    if tokenizer.chat_template:
        ids = _template_ids(tokenizer, messages)
    else:
        ids = [*before, *tokenizer.encode(messages[-1]["content"], add_special_tokens=False), tokenizer.eos_token_id]
    start = next((i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), min(len(before), len(ids)))
    if tokenizer.chat_template and start < len(_template_ids(tokenizer, messages[:-1])):
        raise ValueError(f"{where}: the chat template rewrites earlier turns, so the answer cannot be told apart")
    ends = [i for i in range(start, len(ids)) if ids[i] == tokenizer.eos_token_id]
    ids = ids[: ends[-1] + 1] if ends else ids  # templates add a line break that the target never writes
    return Row(np.array(ids), max(start, 1)) if len(ids) > max(start, 1) else None


def _messages(where: str, record: dict[str, Any]) -> list[Message]:
    messages = record["messages"]
    if not isinstance(messages, list):
        raise ValueError(f"{where}: `messages` must be a list, got {type(messages).__name__}")
    for index, message in enumerate(messages):
        for field in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(field), str):
                raise ValueError(f"{where}: message {index} has no string `{field}`")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _text(where: str, record: dict[str, Any], *fields: str) -> str:
    value = next((record[field] for field in fields if field in record), None)
    if not isinstance(value, str):
        wanted = " or ".join(f"`{field}`" for field in fields)
        raise ValueError(f"{where}: needs a string {wanted}, has {sorted(record)}")
    return value


def _template_ids(tokenizer: PreTrainedTokenizerBase, messages: list[Message], **kwargs: Any) -> list[int]:
    if not messages:
        return []
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **kwargs)["input_ids"]


def _with_bos(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids]
