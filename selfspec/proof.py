"""What is proved of a target before it is trusted: at load, and before exact mode."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from selfspec.cache import KVCache

if TYPE_CHECKING:
    from selfspec.target import Target

SELF_CHECK_TOKENS = 16


class UnsupportedModelError(NotImplementedError):
    """The family cannot be run in parts with the same result; the message names it and says why."""


def check_split(target: "Target") -> None:
    """Compare split execution with whole forward passes on 16 tokens; raises UnsupportedModelError.

    1. The layers one range at a time against the family's own forward, with the family's own attention and the
       same explicit mask: equal to the last bit. 2. This package's attention against the family's: equal up to
       rounding of the dtype.
    """
    generator = torch.Generator().manual_seed(0)
    high = _num_ids(target)
    tokens = torch.randint(0, high, (1, SELF_CHECK_TOKENS), generator=generator).to(target.device)
    whole, split = whole_and_split(target, tokens)
    if not torch.equal(whole, split):
        gap = (whole.float() - split.float()).abs().max().item()
        raise UnsupportedModelError(
            f"{target.family}: its layers run in parts differ from its own forward (logit gap {gap:.3g}); "
            "linear attention, shared or token-dependent layer inputs cannot be split"
        )
    whole = target.base(input_ids=tokens, use_cache=False).logits.float()  # its own masks, windows and all
    scale = whole.abs().max().item() + 1.0
    # four times the largest gap of 14 families in float32; in bfloat16 experts chosen at near-ties need as much
    tolerance = 64 * torch.finfo(target.dtype).eps * scale

    def gap_of_ours() -> float:
        cache = KVCache(target.num_layers, SELF_CHECK_TOKENS)
        ours = target.logits(target.run_layers(target.embed(tokens), 0, target.num_layers, cache))
        return (whole - ours).abs().max().item()

    gap = gap_of_ours()
    if not gap <= tolerance and target.packed.is_in_use:
        target.packed.refuse(f"packed they differ from the family's own (logit gap {gap:.3g} > {tolerance:.3g})")
        gap = gap_of_ours()
    if not gap <= tolerance:
        raise UnsupportedModelError(
            f"{target.family}: its attention differs from softmax attention (logit gap {gap:.3g} > {tolerance:.3g})"
        )


@torch.no_grad()
def is_row_exact(target: "Target", width: int, num_rows: int | None = None, is_float8: bool = False) -> bool:
    """Whether, at a fixed row width, a row's logits depend neither on its neighbours nor on its index.

    Runs ``num_rows`` tokens (as many as the width unless given) behind a short prompt one at a time and in one pass,
    and compares with `torch.equal`. Width 1 asks whether rows are exact without any padding. False for
    mixture-of-experts models and some quantised kernels: then bit-exact decoding cannot be had.
    """
    num_prompt, num_rows = 7, num_rows or width
    generator = torch.Generator().manual_seed(2)
    high = _num_ids(target)
    tokens = torch.randint(0, high, (1, num_prompt + num_rows), generator=generator).to(target.device)
    cache = KVCache(target.num_layers, num_prompt + num_rows + width, width, is_float8=is_float8)

    def run(first: int, last: int) -> Tensor:
        return target.finish(target.embed(tokens[:, first:last], first), 0, cache)[0]

    run(0, num_prompt)
    single = torch.cat([run(i, i + 1) for i in range(num_prompt, num_prompt + num_rows)], dim=1)
    cache.rollback(num_prompt)
    return torch.equal(single, run(num_prompt, num_prompt + num_rows))


def whole_and_split(target: "Target", tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the untouched model, and of its own layer modules called one by one, same mask, own attention."""
    count = tokens.shape[1]
    allowed = torch.ones(count, count, dtype=torch.bool, device=tokens.device).tril()[None, None]
    mask = allowed
    if target.config._attn_implementation == "eager":
        mask = torch.zeros(allowed.shape, dtype=target.dtype, device=tokens.device).masked_fill(
            ~allowed, torch.finfo(target.dtype).min
        )
    whole = target.base(input_ids=tokens, attention_mask=_mask_argument(target, mask), use_cache=False).logits
    hidden = target.run_uncached(target.base_layers, target.embed(tokens), range(target.num_layers), mask)
    return whole, target.plain_head(hidden)


def _mask_argument(target: "Target", mask: Tensor) -> Any:
    kinds = set(getattr(target.config, "layer_types", None) or [])
    return dict.fromkeys(kinds, mask) if len(kinds) > 1 else mask


def shortcuts(target: "Target") -> tuple[bool, bool]:
    """Whether embedding and head may be called directly, past the family's preamble: where that is bit-equal."""
    tokens = torch.arange(SELF_CHECK_TOKENS, device=target.device)[None] % _num_ids(target)
    plain, family = target.base.get_input_embeddings()(tokens), target.embed(tokens)
    hidden = torch.randn(family.shape, generator=torch.Generator().manual_seed(1)).to(family)
    by_family = target.plain_head.family_forward(hidden)
    return torch.equal(plain, family), torch.equal(target.output(target.norm(hidden)), by_family)


def _num_ids(target: "Target") -> int:
    return min(target.vocab_size, target.base.get_input_embeddings().weight.shape[0])
