"""Tokens drawn with position-keyed noise in one pass over the scores: see `sample_reference` for the formula.

Neither the noise [B, R, V] nor a softmax is materialised. The vocabulary is cut into parts that are searched side by
side; each leaves its best as one 64-bit word, the score's order above the inverted column, and the largest word wins,
so that equals go to the first column whatever ran first.

The noise has the reference's bits and quotients are rounded as IEEE has it; logarithms, which are libdevice's and no
fast approximation, may be an ulp off. So a token can differ from the reference's only where the two best scores are
within a few ulps of each other.
"""

# mypy: allow-incomplete-defs
import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import require_device
from .noise_reference import TARGET_STREAM
from .noise_triton import keys, uniform
from .sample_reference import check

BLOCK, BLOCKS_PER_PART, NUM_WARPS = 1024, 4, 4


@triton.jit
def _in_order(score):
    """int32 in the order of float32; -0 is 0."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def best_of_part(
    scores, seeds, positions, columns, made, num_rows, num_columns, temperature,
    STREAM: tl.constexpr, IS_PROBS: tl.constexpr, IS_GREEDY: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """The word of the best column of one part of one row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    low, high = keys(tl.load(seeds + row // num_rows), STREAM, tl.load(positions + row))
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    first = part * BLOCK * NUM_BLOCKS
    for begin in range(first, tl.minimum(first + BLOCK * NUM_BLOCKS, num_columns), BLOCK):
        column = begin + tl.arange(0, BLOCK)
        is_inside = column < num_columns
        score = tl.load(scores + row * num_columns + column, mask=is_inside, other=float("-inf")).to(tl.float32)
        if not IS_GREEDY:
            ids = tl.load(columns + column, mask=is_inside, other=0) if HAS_COLUMNS else column
            wait = -tl.log(uniform(low, high, ids))
            score = tl.div_rn(score, wait) if IS_PROBS else tl.div_rn(score, temperature) - tl.log(wait)
        is_better = score > best  # strictly: the first of equals stays
        best = tl.where(is_better, score, best)
        place = tl.where(is_better, column, place)
    word = (_in_order(best).to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)
    tl.store(made + row * tl.num_programs(1) + part, tl.max(word, axis=0))


@triton.jit
def best_of_row(made, columns, tokens, num_parts, HAS_COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """The token of the largest of a row's words."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    words = tl.load(made + row * num_parts + part, mask=part < num_parts, other=-0x8000000000000000)
    token = 0x7FFFFFFF - (tl.max(words, axis=0) & 0x7FFFFFFF)
    tl.store(tokens + row, tl.load(columns + token) if HAS_COLUMNS else token)


def sample(
    scores: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: float = 1.0,
    stream: int = TARGET_STREAM,
    columns: Tensor | None = None,
    is_probs: bool = False,
) -> Tensor:
    """See `sample_reference.sample`."""
    check(scores, seeds, positions, temperature, columns)
    require_device(scores=scores, seeds=seeds, positions=positions, columns=columns)
    batch, rows, vocab = scores.shape
    num_parts = triton.cdiv(vocab, BLOCK * BLOCKS_PER_PART)
    made = torch.empty(batch * rows, num_parts, dtype=torch.int64, device=scores.device)
    tokens = torch.empty(batch, rows, dtype=torch.int64, device=scores.device)
    ids = tokens if columns is None else columns.contiguous()  # of no columns nothing is read
    best_of_part[(batch * rows, num_parts)](
        scores.contiguous(), seeds.contiguous(), positions.contiguous(), ids, made, rows, vocab, float(temperature),
        STREAM=stream, IS_PROBS=is_probs, IS_GREEDY=temperature == 0 and not is_probs, HAS_COLUMNS=columns is not None,
        BLOCK=BLOCK, NUM_BLOCKS=BLOCKS_PER_PART, num_warps=NUM_WARPS,
    )  # fmt: skip
    best_of_row[(batch * rows,)](
        made, ids, tokens, num_parts, HAS_COLUMNS=columns is not None,
        BLOCK=triton.next_power_of_2(num_parts), num_warps=1,
    )  # fmt: skip
    return tokens
