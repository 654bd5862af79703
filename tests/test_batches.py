"""Batches: padded on the left, every row as if it were alone."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from selfspec import EarlyExitModel
from tests.conftest import prompt_of, shallow_target_of

PROMPT = torch.tensor([prompt_of(12)])


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    return EarlyExitModel.from_target(shallow_target_of("llama").base, [2, 4])


def batch_of(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of those lengths, padded on the left, and their mask."""
    prompts = [torch.tensor(prompt_of(length)) for length in lengths]
    ids = pad_sequence(prompts, batch_first=True, padding_side="left")
    return ids, pad_sequence([torch.ones_like(p) for p in prompts], batch_first=True, padding_side="left")


@pytest.mark.parametrize("how", ["generate", "custom_generate"])
def test_a_batch_is_its_prompts_one_by_one(model, how):
    """Ragged prompts and acceptance, rows that end early: transformers' own sequences, padding included."""
    ids, mask = batch_of(12, 5, 9)
    settings = {"max_new_tokens": 24, "eos_token_id": list(range(40, 50)), "pad_token_id": 0}
    theirs = model.base.generate(ids, attention_mask=mask, do_sample=False, **settings)
    assert (theirs[:, -1] == 0).any()  # one row ended before another
    if how == "custom_generate":
        ours = model.base.generate(
            ids, attention_mask=mask, do_sample=False, custom_generate=model.custom_generate, **settings
        )
        assert torch.equal(ours, theirs)
        return
    out = model.generate(ids, attention_mask=mask, **settings)
    assert torch.equal(out.sequences, theirs)
    alone = [model.generate(ids[i : i + 1], attention_mask=mask[i : i + 1], **settings).stats for i in range(3)]
    for name in ("num_tokens", "num_cycles", "num_drafted", "num_accepted", "num_emitted"):
        assert getattr(out.stats, name) == sum(getattr(stats, name) for stats in alone)
    assert sum(out.stats.accepted_histogram) == out.stats.num_cycles


def test_rows_of_a_batch_have_noise_of_their_own(model):
    """Under one seed equal prompts get different texts, with drafts and without; the first is that of the seed."""
    ids = PROMPT.repeat(3, 1)
    texts = [
        model.generate(ids, max_new_tokens=16, temperature=1.0, seed=5, draft=draft).sequences
        for draft in (None, "off")
    ]
    assert torch.equal(*texts)
    assert len({tuple(row) for row in texts[0].tolist()}) == 3
    alone = model.generate(PROMPT, max_new_tokens=16, temperature=1.0, seed=5).sequences
    assert torch.equal(texts[0][:1], alone)


def test_a_batch_with_one_row_padded_on_the_right_is_refused(model):
    ids, mask = batch_of(6, 6)
    mask[1, -1] = 0
    with pytest.raises(ValueError, match="padded on the right"):
        model.generate(ids, attention_mask=mask, max_new_tokens=4)
