"""Settings resolve as transformers resolves them; what is not supported is refused by name, never ignored."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, RepetitionPenaltyLogitsProcessor, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from selfspec import EarlyExitModel
from selfspec import settings as options
from selfspec.sampling import logits_to_probs
from tests.conftest import build_model, prompt_of

PROMPT = torch.tensor([prompt_of(12)])


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    return EarlyExitModel.from_target(build_model("llama"), [2, 4])


def theirs(model: EarlyExitModel, **kwargs: Any) -> torch.Tensor:
    return model.base.generate(PROMPT, pad_token_id=0, **kwargs)


@pytest.mark.parametrize(
    "criterion", [MaxLengthCriteria(15), EosTokenCriteria(list(range(3, 60)))], ids=["length", "end of text"]
)
def test_the_users_own_length_and_end_criteria_count(model, criterion):
    criteria = StoppingCriteriaList([criterion])
    expected = theirs(model, max_new_tokens=20, do_sample=False, stopping_criteria=criteria)
    assert expected.shape[1] < 32
    assert torch.equal(model.generate(PROMPT, max_new_tokens=20, stopping_criteria=criteria).sequences, expected)


def test_every_criterion_is_asked_at_every_token(model):
    lengths: list[int] = []

    def note(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        lengths.append(ids.shape[1])
        return torch.tensor([False])

    model.generate(PROMPT, max_new_tokens=6, stopping_criteria=StoppingCriteriaList([note]))
    assert lengths == [13, 14, 15, 16, 17, 18]


@pytest.mark.parametrize(
    "settings",
    [
        {"sequence_bias": {(7,): -0.5, (20, 9): -1.0}},
        {"sequence_bias": {(7,): 2.5, (9,): -2.0}, "repetition_penalty": 1.4},
        {"repetition_penalty": 1.4, "suppress_tokens": [5, 6]},
        {"no_repeat_ngram_size": 2, "suppress_tokens": [5, 6]},
        {"min_new_tokens": 9, "eos_token_id": list(range(40, 60))},
        {"exponential_decay_length_penalty": (3, 1.2), "eos_token_id": 50},
    ],
    ids=lambda s: "+".join(s),
)
def test_inside_transformers_every_processor_runs_once(model, settings):
    """The same greedy text through hf.generate, hf.generate(custom_generate=...) and generate."""
    settings = {"max_new_tokens": 16, "do_sample": False, **settings}
    expected = theirs(model, **settings)
    assert torch.equal(theirs(model, custom_generate=model.custom_generate, **settings), expected)
    assert torch.equal(model.generate(PROMPT, **settings).sequences, expected)


def test_a_penalty_of_the_users_own_is_not_taken_for_a_setting(model):
    """repetition_penalty passed as a processor is kept, in both ways of calling."""
    given = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])
    expected = theirs(model, max_new_tokens=16, do_sample=False, logits_processor=given)
    assert not torch.equal(expected, theirs(model, max_new_tokens=16, do_sample=False))
    ours = model.generate(PROMPT, max_new_tokens=16, logits_processor=given).sequences
    inside = theirs(
        model, max_new_tokens=16, do_sample=False, logits_processor=given, custom_generate=model.custom_generate
    )
    assert torch.equal(ours, expected)
    assert torch.equal(inside, expected)


def test_sampled_text_is_the_same_called_from_either_side(model):
    """Defaults that transformers fills in (top_k 50) are filled in here too; without it the text would differ."""
    ours = model.generate(PROMPT, do_sample=True, max_new_tokens=24, seed=3).sequences
    inside = theirs(model, do_sample=True, max_new_tokens=24, seed=3, custom_generate=model.custom_generate)
    assert torch.equal(ours, inside)
    assert not torch.equal(ours, model.generate(PROMPT, do_sample=True, top_k=0, max_new_tokens=24, seed=3).sequences)


@pytest.mark.parametrize(
    "settings",
    [{"typical_p": 0.6}, {"epsilon_cutoff": 0.02}, {"eta_cutoff": 0.05}, {"top_h": 0.4}, {"top_k": 9, "top_p": 0.8},
     {"min_p": 0.1, "repetition_penalty": 1.3}, {}],
    ids=lambda s: next(iter(s), "plain"),
)  # fmt: skip
def test_distributions_are_transformers_own(model, settings):
    """What is drawn from equals softmax of transformers' processors in its own order, at T=.6."""
    (prompt,) = options.read_prompts(PROMPT, None)
    asked = {"do_sample": True, "temperature": 0.6, "max_new_tokens": 4, **settings}
    generation = options.resolve_generation(model.base, None, asked, prompt)
    everything = options.processors(model.base, generation, None, prompt)
    logits = torch.randn(1, 97, generator=torch.Generator().manual_seed(0)) * 3
    expected = everything(PROMPT, logits.clone()).softmax(-1)
    sampling, before = options.divide(generation, everything)
    found = logits_to_probs(logits, sampling, [PROMPT[0]], process=before or None)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    if settings:
        assert (found - (logits / 0.6).softmax(-1)).abs().sum() > 0.01


def test_fields_that_a_given_config_leaves_open_come_from_the_model():
    base = build_model("llama")
    base.generation_config.repetition_penalty = 1.5
    model = EarlyExitModel.from_target(base, [2])
    config = GenerationConfig(max_new_tokens=24)
    expected = theirs(model, generation_config=config)
    assert torch.equal(model.generate(PROMPT, generation_config=config).sequences, expected)
    assert not torch.equal(expected, theirs(model, max_new_tokens=24, repetition_penalty=1.0))


def test_none_switches_a_setting_off_as_in_transformers():
    """eos_token_id=None decodes on, top_k=None filters nothing."""
    base = build_model("llama")
    base.generation_config.eos_token_id = list(range(3, 60))
    model = EarlyExitModel.from_target(base, [2])
    assert model.generate(PROMPT, max_new_tokens=24).sequences.shape[1] < 36
    assert model.generate(PROMPT, max_new_tokens=24, eos_token_id=None).sequences.shape[1] == 36


def test_max_length_counts_padding_as_transformers_does(model):
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), PROMPT], dim=1)
    mask = (torch.arange(17) >= 5).long()[None]
    expected = model.base.generate(padded, attention_mask=mask, max_length=24, do_sample=False, pad_token_id=0)
    ours = model.generate(padded, attention_mask=mask, max_length=24).sequences
    assert ours.shape == expected.shape == (1, 24)
    assert torch.equal(ours, expected)
    default = theirs(model, do_sample=False)
    assert torch.equal(model.generate(PROMPT).sequences, default)  # 20 new tokens, where nothing is said


@pytest.mark.parametrize(
    "settings",
    [{"guidance_scale": 3.0}, {"penalty_alpha": 0.6}, {"dola_layers": "high"}, {"token_healing": True},
     {"num_beams": 4}],
    ids=lambda s: next(iter(s)),
)  # fmt: skip
def test_other_decoding_methods_are_refused_by_name(model, settings):
    with pytest.raises(NotImplementedError, match=next(iter(settings))):
        model.generate(PROMPT, max_new_tokens=4, **settings)
