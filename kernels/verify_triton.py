"""Acceptance of drafts, one program a sequence: see `verify_reference` for the rules.

Under `coupled` the walk is a few comparisons of registers. Under `rejection` a draft's p(x) and q(x) are two loads; the
vocabulary is read only where a draft is rejected, and once at the end to leave the distribution that the next token is
drawn from, by `sample`. Neither noise nor the residuals of rows not visited are materialised.
"""

# mypy: allow-incomplete-defs
from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from .checks import require_device
from .noise_reference import ACCEPT_STREAM, RECOVER_STREAM
from .noise_triton import keys, uniform
from .sample_triton import sample
from .verify_reference import Found, check

BLOCK, NUM_WARPS = 8192, 16  # of the vocabulary: one program reads all of it, so its loads are many at a time


@triton.jit
def _first(found, draft, ROWS: tl.constexpr):
    """Row of the first draft that is ``found``; more than ROWS if none is."""
    return tl.min(tl.where(found, draft + 1, ROWS + 1), axis=0)


@triton.jit
def walk_coupled(
    own, tokens, parents, lengths, path, num_accepted, next_token, new_lengths, num_drafts, ROWS: tl.constexpr
):
    """The rows whose drafts agree, from the root on."""
    sequence = tl.program_id(0).to(tl.int64)
    draft = tl.arange(0, ROWS)
    at, is_inside, of_row = sequence * num_drafts + draft, draft < num_drafts, own + sequence * (num_drafts + 1)
    parent = tl.load(parents + at, mask=is_inside, other=-1)
    agrees = is_inside & (tl.load(tokens + at, mask=is_inside, other=0) == tl.load(of_row + parent, mask=is_inside))
    walked = tl.full([ROWS], -1, tl.int64)
    row, count = 0, 0
    child = _first(agrees & (parent == 0), draft, ROWS)
    while child <= ROWS:
        walked = tl.where(draft == count, child.to(tl.int64), walked)
        row = child
        count += 1
        child = _first(agrees & (parent == row), draft, ROWS)
    tl.store(path + at, walked, mask=is_inside)
    tl.store(num_accepted + sequence, count)
    tl.store(next_token + sequence, tl.load(of_row + row))
    tl.store(new_lengths + sequence, tl.load(lengths + sequence) + count + 1)


@triton.jit
def _residual(p, mass, q, token, column, num_columns, HAS_PROBS: tl.constexpr):
    """(p / mass - q)+ of a block of columns."""
    is_inside = column < num_columns
    mine = tl.div_rn(tl.load(p + column, mask=is_inside, other=0.0), mass)
    if HAS_PROBS:
        return tl.maximum(mine - tl.load(q + column, mask=is_inside, other=0.0), 0.0)
    return tl.maximum(mine - tl.where(column == token, 1.0, 0.0), 0.0)


@triton.jit
def _residual_mass(p, mass, q, token, num_columns, HAS_PROBS: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, num_columns, BLOCK):
        total += _residual(p, mass, q, token, begin + tl.arange(0, BLOCK), num_columns, HAS_PROBS)
    return tl.sum(total, axis=0)


@triton.jit
def walk_rejection(
    target_probs, tokens, parents, draft_probs, seeds, positions, lengths,
    path, num_accepted, left, last_position, new_lengths, num_drafts, num_columns,
    STREAM: tl.constexpr, HAS_PROBS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The walk's rows, and in ``left`` [B, V] what has become of p where it ends."""
    sequence = tl.program_id(0).to(tl.int64)
    draft = tl.arange(0, ROWS)
    at, is_inside = sequence * num_drafts + draft, draft < num_drafts
    parent = tl.load(parents + at, mask=is_inside, other=-1)
    first_row = sequence * (num_drafts + 1)
    low, high = keys(tl.load(seeds + sequence), STREAM, tl.load(positions + first_row))
    chances = uniform(low, high, draft)
    walked = tl.full([ROWS], -1, tl.int64)
    left += sequence * num_columns
    p = target_probs + first_row * num_columns
    mass, row, count = 1.0, 0, 0  # p stands for p / mass
    child = _first(parent == 0, draft, ROWS)
    while child <= ROWS:
        which = sequence * num_drafts + child - 1
        token, q = tl.load(tokens + which), draft_probs + which * num_columns
        q_here = tl.load(q + token) if HAS_PROBS else 1.0
        chance = tl.sum(tl.where(draft == child - 1, chances, 0.0), axis=0)
        if chance * q_here < tl.div_rn(tl.load(p + token), mass):
            walked = tl.where(draft == count, child.to(tl.int64), walked)
            row = child
            count += 1
            p = target_probs + (first_row + row) * num_columns
            mass = 1.0
            child = _first(parent == row, draft, ROWS)
        else:
            rest = _residual_mass(p, mass, q, token, num_columns, HAS_PROBS, BLOCK)
            if rest > 0:
                for begin in range(0, num_columns, BLOCK):
                    column = begin + tl.arange(0, BLOCK)
                    residual = _residual(p, mass, q, token, column, num_columns, HAS_PROBS)
                    tl.store(left + column, residual, mask=column < num_columns)
                tl.debug_barrier()  # other threads read it next
                p, mass = left, rest
            child = _first((parent == row) & (draft >= child), draft, ROWS)
    for begin in range(0, num_columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        value = tl.load(p + column, mask=column < num_columns, other=0.0)
        tl.store(left + column, tl.div_rn(value, mass), mask=column < num_columns)
    tl.store(path + at, walked, mask=is_inside)
    tl.store(num_accepted + sequence, count)
    tl.store(last_position + sequence, tl.load(positions + first_row + row))
    tl.store(new_lengths + sequence, tl.load(lengths + sequence) + count + 1)


def _numbers(tokens: Tensor) -> Iterator[Tensor]:
    """Three times a number a sequence, not views of one tensor: operators may not return those."""
    return (tokens.new_empty(tokens.shape[0]) for _ in range(3))


def verify_coupled(own: Tensor, tokens: Tensor, parents: Tensor, lengths: Tensor) -> Found:
    """See `verify_reference.verify_coupled`."""
    check(tokens, parents, lengths, own)
    require_device(own=own, tokens=tokens, parents=parents, lengths=lengths)
    batch, count = tokens.shape
    path, (accepted, following, new_lengths) = tokens.new_empty(batch, count), _numbers(tokens)
    walk_coupled[(batch,)](
        own.contiguous(), tokens.contiguous(), parents.contiguous(), lengths.contiguous(),
        path, accepted, following, new_lengths, count, ROWS=triton.next_power_of_2(max(count, 2)), num_warps=1,
    )  # fmt: skip
    return path, accepted, following, new_lengths


def verify_rejection(
    target_probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    draft_probs: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    lengths: Tensor,
) -> Found:
    """See `verify_reference.verify_rejection`."""
    check(tokens, parents, lengths, positions, seeds, target_probs, draft_probs)
    require_device(target_probs=target_probs, tokens=tokens, parents=parents, draft_probs=draft_probs,
                   seeds=seeds, positions=positions, lengths=lengths)  # fmt: skip
    (batch, count), vocab = tokens.shape, target_probs.shape[2]
    seeds, target_probs = seeds.contiguous(), target_probs.contiguous()
    path, left = tokens.new_empty(batch, count), target_probs.new_empty(batch, 1, vocab)
    accepted, last_position, new_lengths = _numbers(tokens)
    walk_rejection[(batch,)](
        target_probs, tokens.contiguous(), parents.contiguous(),
        target_probs if draft_probs is None else draft_probs.contiguous(), seeds, positions.contiguous(),
        lengths.contiguous(), path, accepted, left, last_position, new_lengths, count, vocab,
        STREAM=ACCEPT_STREAM, HAS_PROBS=draft_probs is not None, ROWS=triton.next_power_of_2(max(count, 2)),
        BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    following = sample(left, seeds, last_position[:, None], stream=RECOVER_STREAM, is_probs=True)[:, 0]
    return path, accepted, following, new_lengths
