"""Compaction of a cache in one launch for all layers: see `compact_reference` for the formula.

A program moves the rows of one head of one sequence of one tensor, which it finds by the table's addresses; rows that
are in place already are not touched. All rows are read before the first is written, so no copy of them is needed in
memory. They move as words of up to 8 bytes, as wide as everything is aligned to, whatever their dtype.
"""

# mypy: allow-incomplete-defs
import triton
import triton.language as tl
from torch import Tensor

from .checks import require_device
from .compact_reference import FIELDS, Held, check

WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64, 16: tl.int64}  # by alignment
MOST_WORDS = 32  # of a row at a time: of 64 rows 32 registers a thread
NUM_WARPS = 4


@triton.jit
def move_rows(
    table, path, num_accepted, first, num_drafts,
    FIELDS: tl.constexpr, WORD: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows of head `program 1` of sequence `program 2` of tensor `program 0`."""
    line, head, sequence = table + tl.program_id(0) * FIELDS, tl.program_id(1), tl.program_id(2)
    row = tl.arange(0, ROWS)
    num_rows = tl.where(head < tl.load(line + 4), tl.load(num_accepted + sequence), 0)
    source = tl.load(path + sequence * num_drafts + row, mask=row < num_rows, other=0)
    is_moved = source > row + 1
    num_words = tl.load(line + 5) // SIZE
    begin = tl.load(line) + sequence * tl.load(line + 1) + head * tl.load(line + 2)
    begin += tl.load(first + sequence) * tl.load(line + 3)
    stride = tl.load(line + 3) // SIZE
    slots = begin.to(tl.pointer_type(WORD))
    for start in range(0, num_words, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = is_moved[:, None] & (column < num_words)[None, :]
        words = tl.load(slots + (source * stride)[:, None] + column[None, :], mask=mask)
        tl.debug_barrier()  # what one thread writes another may still have to read
        tl.store(slots + ((row + 1) * stride)[:, None] + column[None, :], words, mask=mask)


def compact(held: Held, path: Tensor, num_accepted: Tensor, first: Tensor) -> None:
    """See `compact_reference.compact`."""
    check(held, path, num_accepted, first)
    require_device(cache=held.table, path=path, num_accepted=num_accepted, first=first)
    num_drafts = path.shape[1]
    if num_drafts == 0:
        return
    word = WORDS[held.alignment]
    size = word.primitive_bitwidth // 8
    move_rows[(len(held.tensors), held.num_heads, held.batch)](
        held.table, path.contiguous(), num_accepted.contiguous(), first.contiguous(), num_drafts,
        FIELDS=FIELDS, WORD=word, SIZE=size, ROWS=triton.next_power_of_2(num_drafts),
        COLUMNS=min(MOST_WORDS, triton.next_power_of_2(held.num_bytes // size)), num_warps=NUM_WARPS,
    )  # fmt: skip
