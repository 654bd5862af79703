"""The default model with its shipped exits: the claims of the README on real text."""

import pytest
import torch
from torch import Tensor

from selfspec import EarlyExitModel
from selfspec.model import SHIPPED_EXITS
from selfspec.pretrained import DEFAULT_HUB_ID, default_model_path

pytestmark = pytest.mark.skipif(default_model_path() == DEFAULT_HUB_ID, reason="the default model is not here")

PROMPTS = [
    "What is a KV cache?",
    "Name three rivers in Europe and the seas they reach.",
    "Write a short poem about a lighthouse in winter.",
    "Explain why the sky is blue to a child of six.",
    "Translate into French: The train leaves at noon.",
    "What is 17 times 24? Show each step.",
    "Write a Python function that reverses a linked list.",
    "Summarise in one sentence: Bees collect nectar, carry pollen from flower to flower, and make honey.",
    "Give me a recipe for pancakes with four ingredients.",
    "Who wrote Hamlet, and when?",
    "List the planets of the solar system in order.",
    "Draft a polite e-mail that moves a meeting to Thursday.",
    "What is the difference between a virus and a bacterium?",
    "Is the following review positive or negative? The soup was cold and the waiter rude.",
    "Continue the story: The door had been locked for forty years when",
    "Convert 68 degrees Fahrenheit to Celsius.",
    "Suggest five names for a small bookshop.",
    "How does a bicycle stay upright?",
    "Write a haiku about rain on a tin roof.",
    "What should I pack for two days in the mountains?",
]


def load(dtype: str) -> EarlyExitModel:
    if not SHIPPED_EXITS.is_dir():
        return EarlyExitModel.from_pretrained(dtype=dtype, device="cpu", exits=[20])
    return EarlyExitModel.from_pretrained(dtype=dtype, device="cpu")


@pytest.fixture(scope="module")
def single() -> EarlyExitModel:
    return load("float32")


@pytest.fixture(scope="module")
def half() -> EarlyExitModel:
    return load("bfloat16")


def encode(model: EarlyExitModel, text: str) -> Tensor:
    assert model.tokenizer is not None
    chat = [{"role": "user", "content": text}]
    return model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]


def test_greedy_fp32_text_is_ordinary_decodings_and_transformers(single):
    """L2 on 20 prompts of 64 tokens; three of them against transformers' own generate. Drafts really were accepted."""
    accepted = 0
    for number, text in enumerate(PROMPTS):
        ids = encode(single, text)
        drafted = single.generate(ids, max_new_tokens=64)
        plain = single.generate(ids, max_new_tokens=64, draft="off")
        assert torch.equal(drafted.sequences, plain.sequences), text
        accepted += drafted.stats.num_accepted
        if number % 8 == 0:
            theirs = single.base.generate(ids, max_new_tokens=64, do_sample=False)
            assert torch.equal(drafted.sequences, theirs), text
    assert accepted > 20


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}], ids=["T=1", "T=.7"])
def test_sampled_bf16_text_is_the_same_for_the_same_seed(half, sampling):
    """L3 on 20 prompts: exact mode is on by itself, the text depends on the seed and not on the drafts."""
    accepted = 0
    for seed, text in enumerate(PROMPTS):
        ids = encode(half, text)
        drafted = half.generate(ids, max_new_tokens=12, seed=seed, **sampling)
        plain = half.generate(ids, max_new_tokens=12, seed=seed, draft="off", **sampling)
        assert torch.equal(drafted.sequences, plain.sequences), text
        accepted += drafted.stats.num_accepted
    assert accepted > 5


def test_stop_strings_end_the_text_where_transformers_does(single):
    """The string is completed inside a block or across cycles; tokens after it are not emitted."""
    ids = encode(single, PROMPTS[10])
    for stop in ("Mars", ". ", "2"):
        ours = single.generate(ids, max_new_tokens=48, stop_strings=[stop])
        theirs = single.base.generate(
            ids, max_new_tokens=48, do_sample=False, stop_strings=[stop], tokenizer=single.tokenizer
        )
        assert torch.equal(ours.sequences, theirs), stop
