"""Tiny random models of many families, built on the spot, and what drives decoding over them."""

import functools
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported first

from scipy import stats
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import selfspec.decode  # noqa: F401  (its attributes are patched through sys.modules)
from selfspec.cache import KVCache
from selfspec.decode import DecodeState, decode
from selfspec.device_cycle import DeviceCycle
from selfspec.drafter import NoDrafter, empty_draft
from selfspec.model import EarlyExitModel
from selfspec.target import Target
from selfspec.verify import Draft, Verdict

CHI_SQUARE_LEVEL = 1e-4
OUTPUTS = ("o_proj", "down_proj", "c_proj", "attention.dense", "dense_4h_to_h")  # what a layer adds to the residual

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"head_dim": 8, **WINDOW},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": False, **WINDOW},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window_pattern": 3, **WINDOW},
    "phi3": WINDOW,
    "olmo2": {},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7},
    "cohere2": {"logit_scale": 0.25, **WINDOW},
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt2": {"n_positions": 256, "n_embd": 32, "n_layer": 6, "n_head": 4, "n_inner": 48},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **WINDOW},
}


def build_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of ``family`` whose logits are spread widely enough that argmax is no coin toss."""
    settings = {**SMALL, **FAMILIES[family], **overrides}
    if family == "gpt2":
        for name in SMALL:  # it has names of its own
            if name not in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id"):
                settings.pop(name)
    config = AutoConfig.for_model(family, **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
    model.generation_config.eos_token_id = None
    return model.to(dtype).eval()


def byte_tokenizer(chat_template: str) -> PreTrainedTokenizerFast:
    """One token a byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(["<s>", "</s>", *alphabet])}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = chat_template
    return tokenizer


@functools.cache
def chat_model() -> EarlyExitModel:
    """A tiny random Llama with a byte tokenizer, a chat template and an untrained exit."""
    tokenizer = byte_tokenizer("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")
    hf_model = build_model("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    return EarlyExitModel.from_target(hf_model, exits=[2], tokenizer=tokenizer)


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chat model on disk, and prompts for it, of which one is long."""
    path = tmp_path_factory.mktemp("model")
    chat_model().base.save_pretrained(path)
    chat_model().tokenizer.save_pretrained(path)
    lines = [json.dumps({"prompt": "word " * n}) for n in (3, 1, 200, 7, 2)]
    (path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return path


@functools.cache
def target_of(family: str, dtype: torch.dtype = torch.float32) -> Target:
    """The target of a random model of ``family``, one for all tests: decoding leaves it as it is."""
    return Target(build_model(family, dtype))


@functools.cache
def shallow_target_of(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Target:
    """A target whose layers from the third on say little, so that an untrained exit is right about half of the time."""
    target = Target(build_model(family, dtype, **overrides))
    with torch.no_grad():
        for layer in target.layers[2:]:
            for name, parameter in layer.named_parameters():
                if name.endswith(tuple(f"{n}.weight" for n in OUTPUTS)):
                    parameter.mul_(0.3)
    return target


def prompt_of(num_tokens: int, seed: int = 0, vocab_size: int = 97) -> list[int]:
    return torch.randint(3, vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def random_parents(num_rows: int, seed: int = 0) -> list[int]:
    """A random tree: row 0 is the root, every other row hangs on one in front of it."""
    generator = torch.Generator().manual_seed(seed)
    return [0, *(int(torch.randint(row, (1,), generator=generator)) for row in range(1, num_rows))]


def new_state(
    target: Target, prompt: Sequence[int], num_tokens: int, width: int | None = None, **settings: Any
) -> DecodeState:
    """A state with a cache that holds prompt, ``num_tokens`` new tokens and the rows of one pass."""
    return DecodeState(
        tokens=list(prompt),
        cache=KVCache(target.num_layers + 1, len(prompt) + num_tokens + (width or 16), width),
        max_length=len(prompt) + num_tokens,
        vocab_size=target.vocab_size,
        device=torch.device("cpu"),
        **{"seed": 7, **settings},
    )


def generate(
    target: Target, drafter: Any, prompt: Sequence[int], num_tokens: int, width: int | None = None, **settings: Any
) -> DecodeState:
    """Decode to the end; the final state."""
    state = new_state(target, prompt, num_tokens, width, **settings)
    for _ in decode(target, drafter, state):
        pass
    return state


def autoregressive(target: Target, prompt: Sequence[int], num_tokens: int, **settings: Any) -> list[int]:
    """What the same engine says without drafts."""
    return generate(target, NoDrafter(), prompt, num_tokens, **settings).tokens


class ScriptedDrafter:
    """Proposes the tokens of ``script`` (a whole text, prompt included) with wrong ones at positions ``errors``.

    Its rows pass from layer 0. With ``has_decoys`` every token gets a wrong sibling in front of it, so that the draft
    is a tree and its accepted rows do not lie side by side.
    """

    exit_head = None

    def __init__(
        self, script: Sequence[int], draft_len: int, errors: Collection[int] = (), has_decoys: bool = False
    ) -> None:
        self.script, self.draft_len, self.errors, self.has_decoys = list(script), draft_len, set(errors), has_decoys

    def propose(self, state: DecodeState) -> Draft:
        first = len(state.tokens)
        num_drafts = min(self.draft_len, state.num_remaining - 1, len(self.script) - first)
        if num_drafts < 1:
            return empty_draft(state.device)
        tokens, parents, row = list[int](), list[int](), 0
        for position in range(first, first + num_drafts):
            token = self.script[position]
            right, wrong = (token, (token + 1) % state.vocab_size)
            for choice in [wrong] * self.has_decoys + [wrong if position in self.errors else right]:
                tokens.append(choice)
                parents.append(row)
            row = len(tokens)
        return Draft(torch.tensor([tokens]), torch.tensor([parents]))


def every_outcome(first: int, num_tokens: int, draft_len: int) -> set[int]:
    """Places of errors such that cycles of ``draft_len`` accept none, some and all of their drafts."""
    stop = first + num_tokens
    return set(range(first + 1, first + 4)) | set(range(first + 6, stop, draft_len + 3)) - set(range(stop - 12, stop))


def assert_every_outcome(state: DecodeState, draft_len: int) -> None:
    """Cycles accepted none, some (where there is a some) and all of ``draft_len`` drafts."""
    histogram = state.stats.accepted_histogram
    assert len(histogram) == draft_len + 1
    assert histogram[0] > 0
    assert histogram[draft_len] > 0
    assert draft_len == 1 or sum(histogram[1:draft_len]) > 0


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[DecodeState, Draft, Any, Verdict]]:
    """(state, draft, scored, verdict) of every cycle, in order, as the loop saw them."""
    module, seen = sys.modules["selfspec.decode"], []
    judge = module.judge

    def spy(state: DecodeState, draft: Draft, scored: Any) -> Verdict:
        verdict = judge(state, draft, scored)
        seen.append((state, draft, scored, verdict))
        return verdict

    monkeypatch.setattr(module, "judge", spy)
    return seen


@pytest.fixture
def count_cycles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Texts go through the engine; the drafts of each cycle that it ran."""
    seen: list[int] = []
    run = DeviceCycle.__call__

    def spy(cycle: DeviceCycle) -> None:
        seen.append(cycle.kind.draft_len)
        run(cycle)

    monkeypatch.setattr(DeviceCycle, "__call__", spy)
    monkeypatch.setenv("SELFSPEC_ENGINE", "calls")
    return seen


def accepted_logits(judged: list[tuple[DecodeState, Draft, Any, Verdict]]) -> dict[int, Tensor]:
    """Logits [V] by position of the row that they came from, accepted rows only; empties the list."""
    rows = {}
    for _, _, scored, verdict in judged:
        for depth, row in enumerate([0, *verdict.path[0, : int(verdict.num_accepted[0])].tolist()]):
            rows[scored.first + depth] = scored.logits[row].clone()
    judged.clear()
    return rows


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """p-value of ``counts`` under ``probs`` (any equal shapes); 0 if something impossible was counted."""
    observed, expected = counts.double().flatten(), probs.double().flatten() * counts.sum()
    if observed[expected == 0].sum() > 0:
        return 0.0
    is_rare = expected < 5
    observed = torch.cat([observed[~is_rare], observed[is_rare].sum()[None]])
    expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    return float(stats.chi2.sf(statistic, df=len(expected) - 1))


def mutate(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], old: str, new: str) -> None:
    """Plant a bug: replace ``function`` in its module by one whose source has ``new`` for ``old``."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} is not in {function.__qualname__}"
    module = sys.modules[function.__module__]
    names: dict[str, Any] = {}
    exec(compile(source.replace(old, new), f"<mutant of {function.__qualname__}>", "exec"), module.__dict__, names)
    owner, _, name = function.__qualname__.rpartition(".")
    monkeypatch.setattr(getattr(module, owner) if owner else module, name, names[name])


@pytest.fixture
def quick_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter patches its language at every call of a function in a kernel: here once a launch."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch, patched = interpreter._patch_lang, set[int]()

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return None  # the caller is a kernel that is running
        scope = patch(function)
        restore = scope.restore
        scope.restore = lambda: (patched.discard(module), restore())
        patched.add(module)
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)


@pytest.fixture
def matrix_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in Triton's interpreter as a GPU makes them: each sum for itself.

    In numpy's a row's bits depend on where it stands.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = a.data.astype(np.float32), b.data.astype(np.float32)
        sums = (left[:, None, :] * right.T[None]).sum(-1)
        return interpreter.TensorHandle(sums + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
