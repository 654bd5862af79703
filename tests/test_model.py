"""`EarlyExitModel.generate`: transformers' arguments mean what they mean there, and bad ones stop with one line."""

import threading
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.streamers import BaseStreamer

from selfspec import EarlyExitModel
from selfspec.drafter import DRAFTERS, ChainDrafter
from selfspec.exit_module import ExitConfig, build_adapter
from selfspec.exits import ExitHead
from selfspec.proof import UnsupportedModelError
from selfspec.sampling import NonFiniteLogitsError
from selfspec.storage import fingerprint
from tests.conftest import build_model, prompt_of, shallow_target_of

PROMPT = torch.tensor([prompt_of(12)])


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    return EarlyExitModel.from_target(shallow_target_of("llama").base, [2, 4])


def transformers_text(model: EarlyExitModel, **kwargs: Any) -> list[int]:
    out = model.base.generate(PROMPT, pad_token_id=0, **{"do_sample": False, "max_new_tokens": 24, **kwargs})
    return out[0].tolist()


@pytest.mark.parametrize("draft", ["chain", "off"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[7], [11]]},
        {"suppress_tokens": list(range(30, 60))},
        {"max_new_tokens": 1},
        {"eos_token_id": list(range(40, 50))},
        {"eos_token_id": list(range(40, 50)), "min_new_tokens": 9},
    ],
    ids=lambda s: next(iter(s), "plain") if isinstance(s, dict) else s,
)
def test_greedy_text_is_transformers_own(model, draft, settings):
    """Token for token, with drafts accepted on the way; nothing is asserted of a draft that never happened."""
    out = model.generate(PROMPT, **{"max_new_tokens": 24, **settings}, draft=draft, draft_len=3)
    assert out.sequences[0].tolist() == transformers_text(model, **settings)
    if draft == "chain" and not settings:
        assert out.stats.num_accepted > 0
        assert len(out.stats.accepted_histogram) == 4


def test_custom_generate_inside_transformers(model):
    ours = model.base.generate(
        PROMPT, max_new_tokens=16, do_sample=False, pad_token_id=0, custom_generate=model.custom_generate, draft_len=2
    )
    assert ours[0].tolist() == transformers_text(model, max_new_tokens=16)


def test_sampled_text_depends_on_the_seed_alone(model):
    """The same seed, the same text, drafted from either exit or not at all; another seed, another text."""
    sampled = {"max_new_tokens": 32, "temperature": 0.9, "top_p": 0.95}
    texts = [
        model.generate(PROMPT, **sampled, seed=3, **how).sequences[0].tolist()
        for how in ({"draft": "off"}, {"exit": "layer-2"}, {"exit_layer": 4, "draft_len": 5})
    ]
    assert texts[0] == texts[1] == texts[2]
    assert model.generate(PROMPT, **sampled, seed=4).sequences[0].tolist() != texts[0]
    for _ in range(2):  # without a seed torch's own generator decides
        torch.manual_seed(11)
        texts.append(model.generate(PROMPT, **sampled).sequences[0].tolist())
    assert texts[-1] == texts[-2]
    generator = torch.Generator().manual_seed(1)
    first = model.generate(PROMPT, **sampled, generator=generator).sequences
    assert not torch.equal(first, model.generate(PROMPT, **sampled, generator=generator).sequences)


def test_temperature_samples_and_a_config_decides_otherwise(model):
    greedy = transformers_text(model)
    assert model.generate(PROMPT, max_new_tokens=24, temperature=0.0).sequences[0].tolist() == greedy
    config = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert model.generate(PROMPT, generation_config=config).sequences[0].tolist() == greedy
    assert model.generate(PROMPT, max_new_tokens=24, temperature=2.0, seed=1).sequences[0].tolist() != greedy
    assert model.generate(PROMPT, max_new_tokens=24, temperature=2.0, top_p=0.0, seed=1).sequences[0].tolist() == greedy


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_every_token_once(model):
    streamer = Recorder()
    out = model.generate(PROMPT, max_new_tokens=20, streamer=streamer)
    assert streamer.tokens == out.sequences[0].tolist()
    assert streamer.ended


class StopAt(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length, self.lengths = length, list[int]()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return torch.tensor([input_ids.shape[1] >= self.length])


@pytest.mark.parametrize("length", range(14, 22))
def test_a_stopping_criterion_cuts_where_ordinary_decoding_would(model, length):
    """It sees every length in turn, inside accepted blocks too, and nothing beyond it is emitted."""
    criterion = StopAt(length)
    out = model.generate(PROMPT, max_new_tokens=24, draft_len=5, stopping_criteria=StoppingCriteriaList([criterion]))
    assert out.sequences[0].tolist() == transformers_text(model)[:length]
    assert criterion.lengths == list(range(13, length + 1))


class Shift(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.roll(int(input_ids.shape[1]) % 3, dims=-1)


def test_a_users_processor_changes_the_text_as_in_transformers(model):
    processors = LogitsProcessorList([Shift()])
    out = model.generate(PROMPT, max_new_tokens=24, logits_processor=processors)
    assert out.sequences[0].tolist() == transformers_text(model, logits_processor=LogitsProcessorList([Shift()]))


class Fault(StoppingCriteria):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if input_ids.shape[1] == 17:
            raise self.error
        return torch.tensor([False])


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()], ids=["exception", "ctrl-c"])
def test_an_exception_leaves_the_model_as_it_was(model, error):
    """State, configuration, hooks and the next text are those from before."""

    def snapshot() -> tuple[Any, ...]:
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.base.modules()]
        return fingerprint(model.base), model.base.config.to_dict(), model.base.generation_config.to_dict(), hooks

    before, text = snapshot(), transformers_text(model)
    with pytest.raises(type(error)):
        model.generate(PROMPT, max_new_tokens=24, stopping_criteria=StoppingCriteriaList([Fault(error)]))
    assert snapshot() == before
    assert model.generate(PROMPT, max_new_tokens=24).sequences[0].tolist() == text == transformers_text(model)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"temperature": -1.0}, ValueError, "temperature must be >= 0"),
        ({"temperature": 1.0, "top_p": 1.5}, ValueError, r"top_p must be in \[0, 1\], got 1.5"),
        ({"temperature": 1.0, "top_k": -2}, ValueError, "top_k must be >= 0, got -2"),
        ({"draft": "tree"}, ValueError, "draft='tree'; choose one of chain, recursive, parallel, lookup, off"),
        ({"draft": "parallel"}, ValueError, "draft='parallel': exit layer-2 was made for 'chain'"),
        ({"acceptance": "typical"}, ValueError, "choose one of coupled, rejection"),
        ({"draft_len": -1}, ValueError, "draft_len must be >= 0, got -1"),
        ({"draft_len": 64}, ValueError, "draft_len must be at most 63, got 64"),
        ({"exit": "nine"}, ValueError, "no exit 'nine'; there are: layer-2, layer-4"),
        ({"exit_layer": 5}, ValueError, r"no exit at layer 5; there are exits at \[2, 4\] of 1\.\.5"),
        ({"num_beams": 2}, NotImplementedError, "beam search"),
        ({"num_return_sequences": 2}, NotImplementedError, "num_return_sequences"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be >= 1"),
        ({"max_new_tokens": 245}, ValueError, r"12 prompt tokens \+ 245 new ones exceed the context of 256"),
        ({"max_new_token": 3}, TypeError, "unknown arguments: max_new_token"),
        ({"stop_strings": ["x"]}, ValueError, "stop_strings needs the tokenizer"),
    ],
)
def test_bad_settings_stop_before_any_work(model, settings, error, message):
    with pytest.raises(error, match=message) as caught:
        model.generate(PROMPT, **{"max_new_tokens": 8, **settings})
    assert "\n" not in str(caught.value)


def test_prompts_that_cannot_be_decoded(model):
    with pytest.raises(ValueError, match="the prompt is empty"):
        model.generate(torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="one sequence at a time, got 2"):
        model.stream(PROMPT.repeat(2, 1), max_new_tokens=4)
    with pytest.raises(ValueError, match="a streamer shows one sequence, got a batch of 2"):
        model.generate(PROMPT.repeat(2, 1), max_new_tokens=4, streamer=Recorder())
    mask = torch.ones_like(PROMPT)
    mask[0, -1] = 0
    with pytest.raises(ValueError, match="padded on the right"):
        model.generate(PROMPT, attention_mask=mask, max_new_tokens=4)


def test_left_padding_changes_nothing_but_the_padding(model):
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), PROMPT], dim=1)
    mask = (torch.arange(17) >= 5).long()[None]
    out = model.generate(padded, attention_mask=mask, max_new_tokens=24)
    assert out.sequences[0].tolist() == [0] * 5 + transformers_text(model)


def test_without_exits_the_model_decodes_plainly_and_says_what_drafting_needs():
    plain = EarlyExitModel.from_target(build_model("llama"))
    assert plain.generate(PROMPT, max_new_tokens=4).stats.num_drafted == 0
    with pytest.raises(ValueError, match="no exits to draft from"):
        plain.generate(PROMPT, max_new_tokens=4, draft="chain")


@pytest.mark.parametrize("layer", [-1, 0, 6, 31])
def test_untrained_exits_out_of_range_are_refused(layer):
    with pytest.raises(ValueError, match=rf"exit layer {layer} is not in 1\.\.5"):
        EarlyExitModel.from_target(build_model("llama"), [layer])


def test_ids_that_only_pad_the_vocabulary_are_never_drafted():
    """A tokenizer of 90 tokens, a vocabulary of 97: the exit's head knows 90, and the text is still the model's."""

    class Tokenizer:
        def __len__(self) -> int:
            return 90

    padded = EarlyExitModel.from_target(build_model("llama"), [4], tokenizer=Tokenizer())
    head = padded.exits["layer-4"]
    assert head.token_ids(padded.target).tolist() == list(range(90))
    assert head.head(torch.zeros(1, 1, 32)).shape == (1, 1, 90)
    out = padded.generate(PROMPT, max_new_tokens=24)
    assert torch.equal(out.sequences, padded.generate(PROMPT, max_new_tokens=24, draft="off").sequences)
    assert out.stats.num_drafted > 0


def test_resized_embeddings_decode_as_before():
    """New rows in embedding and output layer are ordinary ids; those the tokenizer lacks are not drafted."""
    base = build_model("llama")
    torch.manual_seed(0)
    base.resize_token_embeddings(105)
    resized = EarlyExitModel.from_target(base, [4])
    out = resized.generate(PROMPT, max_new_tokens=24)
    assert resized.target.vocab_size == 105
    assert out.sequences[0].tolist() == transformers_text(resized)


def test_encoder_decoders_are_refused_by_name():
    config = T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=2)
    with pytest.raises(NotImplementedError, match="t5"):
        EarlyExitModel.from_target(T5ForConditionalGeneration(config).eval())


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("bloom", {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
        ("mamba", {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
        ("qwen3_next", {
            "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
        }),
    ],
)  # fmt: skip
def test_families_that_cannot_be_split_are_refused_by_name(family, settings):
    """ALiBi, state spaces, linear attention: one line with the family's name, whatever went wrong inside."""
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=torch.float32).eval()
    with pytest.raises(UnsupportedModelError, match=family) as caught:
        EarlyExitModel.from_target(base, [1])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("exact", [False, True])
def test_a_text_may_fill_the_context_to_the_last_token(family, exact):
    """Learned positions end there; the padding rows of exact mode stand beyond it and must not matter."""
    full = EarlyExitModel.from_target(build_model(family), [4])
    out = full.generate(PROMPT, max_new_tokens=244, exact=exact)
    assert out.sequences.shape == (1, 256)
    assert out.stats.num_drafted > 0
    plain = full.generate(PROMPT, max_new_tokens=244, exact=exact, draft="off")
    assert torch.equal(out.sequences, plain.sequences)


def test_weights_edited_between_texts_are_noticed():
    """PEFT merges adapters through .data, which no version counter sees; packed copies of the weights must not stay."""
    model = EarlyExitModel.from_target(build_model("llama"), [4])
    model.generate(PROMPT, max_new_tokens=8)
    for layer in model.base.model.layers:
        layer.mlp.up_proj.weight.data += 0.2 * torch.randn(48, 1) * torch.randn(1, 32)
    assert model.generate(PROMPT, max_new_tokens=24).sequences[0].tolist() == transformers_text(model)


def test_a_stream_is_read_once(model):
    stream = model.stream(PROMPT, max_new_tokens=8)
    assert sum(len(emission.tokens) for emission in stream) == 8
    assert list(stream) == []
    held = model.stream(PROMPT, max_new_tokens=8)
    next(held)
    with pytest.raises(RuntimeError, match="another generation is running"):
        model.generate(PROMPT, max_new_tokens=4)
    held.close()
    assert list(held) == []


def test_a_new_drafter_needs_its_name_in_the_registry_alone(model, monkeypatch):
    class Mine(ChainDrafter):
        pass

    monkeypatch.setitem(DRAFTERS, "mine", Mine)
    stream = model.stream(PROMPT, max_new_tokens=8, draft="mine")
    assert stream.settings["draft"] == "mine"
    tokens = [token for emission in stream for token in emission.tokens]
    assert tokens == transformers_text(model)[12:20]


def test_min_confidence_of_a_call_overrides_the_exits(model):
    """An adapter that claims .982 a step drafts nothing where .99 is asked for, though its own setting is 0."""
    config = ExitConfig(exit_layer=2, recall_layers=(2, 4), draft_vocab=tuple(range(3, 80)), lora_rank=2)
    head = ExitHead(model.target, "new", config, build_adapter(model.target, config))
    own = EarlyExitModel(model.target, {"new": head})
    for stop, drafts in ((None, True), (0.9, True), (0.99, False)):
        out = own.generate(PROMPT, max_new_tokens=12, min_confidence=stop)
        assert (out.stats.num_drafted > 0) is drafts
        assert out.sequences[0].tolist() == transformers_text(model)[:24]
    with pytest.raises(ValueError, match=r"min_confidence must be in \[0, 1\], got 1.5"):
        own.generate(PROMPT, max_new_tokens=8, min_confidence=1.5)


def test_logits_that_are_not_finite_raise_with_their_position(model):
    """The fault comes after loading; the text before it is not returned as if it were whole."""
    broken = EarlyExitModel.from_target(build_model("llama"), [2])
    with torch.no_grad():
        broken.base.lm_head.weight[5] = float("nan")
    with pytest.raises(NonFiniteLogitsError, match="at position 11 are not finite"):
        broken.generate(PROMPT, max_new_tokens=4)


def test_exact_mode_is_refused_where_rows_are_not_exact(monkeypatch):
    """A model whose rows depend on their neighbours: refused before any token, decoded all the same without it."""
    dependent = EarlyExitModel.from_target(build_model("llama"), [2])
    norm = dependent.target.head.norm
    monkeypatch.setattr(dependent.target.head, "norm", lambda hidden: norm(hidden + hidden.mean(dim=1, keepdim=True)))
    with pytest.raises(ValueError, match=r"llama: a row's logits depend on .*--no-exact"):
        dependent.generate(PROMPT, max_new_tokens=4, exact=True)
    monkeypatch.undo()
    assert dependent.generate(PROMPT, max_new_tokens=4, exact=True).stats.num_tokens == 4


def test_a_second_thread_is_refused(model):
    stream = iter(model.stream(PROMPT, max_new_tokens=8))
    next(stream)
    caught: list[BaseException] = []

    def other() -> None:
        try:
            model.generate(PROMPT, max_new_tokens=4)
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "another generation is running on this model" in str(caught[0])
    stream.close()
    assert model.generate(PROMPT, max_new_tokens=4).stats.num_tokens == 4
