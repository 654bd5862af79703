"""Tasks made of what the target has answered: prompts with text to go by, in whose answers that text comes back."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from selfspec.training.data import Prompt, Row
from selfspec.training.user_turns import last_turns

Item = TypeVar("Item")
Deal = Callable[[int], list[Item]]  # gives the next few

SHORTEST_ANSWER, LONGEST_QUESTION, SENTENCE = 150, 300, range(40, 260)  # characters
TASKS = {
    "summary": (
        "Summarize the following text in two sentences.\n\n{text}",
        "{text}\n\nWhat are the main points of the text above?",
        "Please write a brief summary:\n\n{text}",
    ),
    "question": (
        "Use the passages below to answer the question.\n\n{text}\n\nQuestion: {question}",
        "{text}\n\nBased on the text above, answer: {question}",
        "Question: {question}\n\nHere is what was found:\n\n{text}\n\nAnswer the question from it.",
    ),
    "translation": (
        "Translate into {language}: {text}",
        "Translate the following sentence to {language}.\n\n{text}",
        "How do you say this in {language}? {text}",
    ),
}
LANGUAGES = ("English", "French", "German", "Italian", "Spanish")


@dataclass(frozen=True)
class _Turn:
    """A question, and the answer to it."""

    question: str
    answer: str


def own_tasks(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, num: int, seed: int = 0) -> list[Prompt]:
    """``num`` tasks, every kind in turn: summaries of 1 to 4 answers, questions on 2 to 5 as passages, translations.

    Answers that are short or hold code are left out. Within a kind no answer (no sentence, of translations) is used
    again before all others were. The same ``rows`` and ``seed`` give the same tasks.

    Raises ValueError where no answer is of use.
    """
    rng = np.random.default_rng(seed)
    turns = _turns(rows, tokenizer)
    asked = [turn for turn in turns if 0 < len(turn.question) <= LONGEST_QUESTION]
    sentences = [
        s for turn in turns for s in re.split(r"(?<=[.!?])\s+", turn.answer) if len(s) in SENTENCE and "\n" not in s
    ]
    kinds: list[tuple[Callable[..., Prompt], list[Any]]] = [
        (_summary, turns), (_question, asked), (_translation, sentences),
    ]  # fmt: skip
    makers = [partial(make, _dealt(items, rng), rng) for make, items in kinds if items]
    if not makers:
        raise ValueError(
            f"no tasks to be made of {len(rows)} answers: all are under {SHORTEST_ANSWER} characters or hold code"
        )
    return [make() for make in itertools.islice(itertools.cycle(makers), num)]


def _turns(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[_Turn]:
    """What was asked and answered in those of ``rows`` that are of use."""
    questions = last_turns(tokenizer, [row.ids[: row.answer_start].tolist() for row in rows])
    answers = tokenizer.batch_decode([row.ids[row.answer_start :].tolist() for row in rows], skip_special_tokens=True)
    turns = [_Turn(question, answer.strip()) for question, answer in zip(questions, answers, strict=True)]
    return [turn for turn in turns if len(turn.answer) >= SHORTEST_ANSWER and "```" not in turn.answer]


def _dealt(items: Sequence[Item], rng: np.random.Generator) -> Deal[Item]:
    """A function that gives the next few of the shuffled ``items``, never one twice at once."""
    deck = itertools.cycle([items[i] for i in rng.permutation(len(items))])
    return lambda count: list(itertools.islice(deck, min(count, len(items))))


def _summary(deal: Deal[_Turn], rng: np.random.Generator) -> Prompt:
    turns = deal(int(rng.integers(1, 5)))
    return _prompt("summary", rng, text="\n\n".join(turn.answer for turn in turns))


def _question(deal: Deal[_Turn], rng: np.random.Generator) -> Prompt:
    turns = deal(int(rng.integers(2, 6)))
    passages = [f"Passage {i}: {turn.answer}" for i, turn in enumerate(turns, start=1)]
    return _prompt("question", rng, text="\n\n".join(passages), question=turns[rng.integers(len(turns))].question)


def _translation(deal: Deal[str], rng: np.random.Generator) -> Prompt:
    (sentence,) = deal(1)
    return _prompt("translation", rng, text=sentence, language=LANGUAGES[rng.integers(len(LANGUAGES))])


def _prompt(kind: str, rng: np.random.Generator, **parts: str) -> Prompt:
    template = TASKS[kind][rng.integers(len(TASKS[kind]))]
    return Prompt([{"role": "user", "content": template.format(**parts)}], kind)
