"""The attention kernel timed against the memory's speed and against others', after its numbers have been checked.

A *cell* is one shape of heads, a context and a number of rows, as a chain or as a tree. Every way to compute it runs in
turn, with the second-level cache emptied before each run; medians count. The floor is what reading keys and values once
takes at nine tenths of the bandwidth that copying reached in the same run, and two launches.

Shapes: B = 1, H query heads, Hkv key/value heads, R rows, S slots, D head width.
"""

import functools
import importlib
import importlib.util
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from selfspec.costs import interleave, timed
from selfspec.kernels import attention_reference, dispatch
from selfspec.kernels.row_view import RowView, words_of

LAUNCHES, SHARE = 5.5e-6, 0.9  # seconds of two launches, and of the copy bandwidth, that a call may take
FLUSH_BYTES, COPY_BYTES = 256 << 20, 1 << 30  # beyond any second-level cache
ROUNDS, TOLERANCE = 15, 2.0  # runs of each way; error over that of plain torch in the same dtype


@dataclass(frozen=True)
class Heads:
    """The attention of one model."""

    name: str
    heads: int
    kv_heads: int
    width: int


SMOLLM2, LLAMA_8B, LLAMA_70B = (
    Heads("SmolLM2-135M", 9, 3, 64), Heads("Llama-3.1-8B", 32, 8, 128), Heads("Llama-3.1-70B", 64, 8, 128),
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One problem to be timed."""

    model: Heads
    context: int  # slots in front of the pass's rows
    rows: int
    is_tree: bool = False

    @property
    def num_bytes(self) -> int:
        """What must be read and written at least, in half precision."""
        slots = self.context + self.rows
        return 2 * self.model.width * (2 * slots * self.model.kv_heads + 2 * self.rows * self.model.heads)


@dataclass(frozen=True)
class Problem:
    """A cell's tensors: q [1, H, R, D], keys and values [1, Hkv, S, D], and what its rows see, in two forms."""

    cell: Cell
    q: Tensor
    keys: Tensor
    values: Tensor
    view: RowView
    mask: Tensor  # [1, R, S]
    scale: float


def cells(device: torch.device) -> list[Cell]:
    """Those of the specification on a GPU, a few small ones elsewhere."""
    if device.type != "cuda":
        return [Cell(SMOLLM2, 192, rows, is_tree) for rows in (1, 5, 17) for is_tree in (False, True)[: 1 + (rows > 1)]]
    rows = (1, 2, 5, 9, 17, 33, 64)
    return [
        Cell(model, context, r, is_tree)
        for model in (SMOLLM2, LLAMA_8B, LLAMA_70B)
        for context in (1 << 10, 1 << 13, 1 << 15, 1 << 17)
        for r in rows
        for is_tree in ((False, True) if r > 2 else (False,))
    ]


def make(cell: Cell, device: torch.device, dtype: torch.dtype) -> Problem:
    """Random tensors; of a tree every row hangs on the one at half its number."""
    generator = torch.Generator(device).manual_seed(cell.context + cell.rows)
    slots, model = cell.context + cell.rows, cell.model

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    ancestors, depths = torch.eye(cell.rows, dtype=torch.bool), [0] * cell.rows
    for row in range(1, cell.rows):
        parent = (row - 1) // 2 if cell.is_tree else row - 1
        ancestors[row] |= ancestors[parent]
        depths[row] = depths[parent] + 1
    view = RowView(
        torch.tensor([cell.context], device=device), words_of(ancestors).to(device)[None],
        cell.context + torch.tensor([depths], device=device),
    )  # fmt: skip
    q = draw(1, model.heads, cell.rows, model.width)
    keys, values = (draw(1, model.kv_heads, slots, model.width) for _ in range(2))
    return Problem(cell, q, keys, values, view, view.mask(slots), model.width**-0.5)


Call = Callable[[], Tensor]  # gives [1, R, H, D]


def ours(p: Problem) -> Call:
    """This project's kernel; where there is none, its reference."""
    kernels: Any = attention_reference
    if dispatch.implementation(p.q.device) == "triton":
        kernels = importlib.import_module("selfspec.kernels.attention_triton")
    return lambda: kernels.attention_over_cache(p.q, p.keys, p.values, p.view, p.scale)


def sdpa(p: Problem) -> Call:
    """torch's fused attention; one row sees everything, and needs no mask."""
    mask = None if p.cell.rows == 1 else p.mask[:, None]
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        p.q, p.keys, p.values, attn_mask=mask, scale=p.scale, enable_gqa=True
    ).transpose(1, 2)


def flex(p: Problem) -> Call | None:
    """torch's compiled FlexAttention; it takes groups that are powers of two."""
    group = p.cell.model.heads // p.cell.model.kv_heads
    if p.q.device.type != "cuda" or group & (group - 1) or p.cell.rows not in (1, 5, 64):  # each costs a compilation
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask, context = p.mask[0], p.cell.context

    def sees(_b: Tensor, _h: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        return (slot < context) | mask[row, slot]

    blocks = create_block_mask(sees, None, None, p.cell.rows, p.keys.shape[2], device=str(p.q.device))
    call = _compiled(flex_attention)
    return lambda: call(p.q, p.keys, p.values, block_mask=blocks, scale=p.scale, enable_gqa=True).transpose(1, 2)


@functools.cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)


def flash_attention(p: Problem) -> Call | None:
    """The flash-attn package, for chains."""
    if p.q.device.type != "cuda" or p.cell.is_tree or importlib.util.find_spec("flash_attn") is None:
        return None
    call = importlib.import_module("flash_attn").flash_attn_with_kvcache
    q, k, v = (t.transpose(1, 2).contiguous() for t in (p.q, p.keys, p.values))
    lengths = torch.tensor([k.shape[1]], dtype=torch.int32, device=k.device)
    return lambda: call(q, k, v, cache_seqlens=lengths, softmax_scale=p.scale, causal=True)


def flashinfer(p: Problem) -> Call | None:
    """The flashinfer package; a tree by a mask of its own."""
    if p.q.device.type != "cuda" or importlib.util.find_spec("flashinfer") is None:
        return None
    module = importlib.import_module("flashinfer")
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (p.q, p.keys, p.values))
    if p.cell.rows == 1:
        return lambda: module.single_decode_with_kv_cache(q[0], k, v, sm_scale=p.scale)[None, None]
    rule = {"custom_mask": p.mask[0]} if p.cell.is_tree else {"causal": True}
    return lambda: module.single_prefill_with_kv_cache(q, k, v, sm_scale=p.scale, **rule)[None]


WAYS: dict[str, Callable[[Problem], Call | None]] = {
    "selfspec": ours, "sdpa": sdpa, "flex": flex, "flash-attn": flash_attention, "flashinfer": flashinfer,
}  # fmt: skip


@torch.no_grad()
def check(p: Problem) -> dict[str, float]:
    """Largest error of every way against float64, over that of plain torch in the dtype."""
    truth = attention_reference.attention(p.q.double(), p.keys.double(), p.values.double(), p.mask, p.scale)
    plain = attention_reference.attention(p.q, p.keys, p.values, p.mask, p.scale)
    bound = float((plain.double() - truth).abs().max()) + float(torch.finfo(p.q.dtype).eps) * float(truth.abs().max())
    calls = {name: way(p) for name, way in WAYS.items()}
    return {n: float((call().double() - truth).abs().max()) / bound for n, call in calls.items() if call is not None}


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that copying a large tensor moves, read and written ones."""
    size = COPY_BYTES if device.type == "cuda" else COPY_BYTES >> 4
    source = torch.zeros(size // 2, dtype=torch.uint8, device=device)
    made = torch.empty_like(source)
    times = interleave({"copy": lambda: timed(lambda: made.copy_(source))}, ROUNDS)["copy"]
    return 2 * len(source) / statistics.median(times)


@torch.no_grad()
def measure(p: Problem, bandwidth: float) -> dict[str, Any]:
    """Microseconds of every way, and the kernel's over the floor and over the best of the others."""
    room = torch.empty(FLUSH_BYTES if p.q.device.type == "cuda" else 1 << 20, dtype=torch.uint8, device=p.q.device)
    calls = {name: call for name, way in WAYS.items() if (call := way(p)) is not None}
    runs = interleave({name: partial(_cold, call, room) for name, call in calls.items()}, ROUNDS)
    times = {name: 1e6 * statistics.median(values) for name, values in runs.items()}
    floor = 1e6 * (LAUNCHES + p.cell.num_bytes / (SHARE * bandwidth))
    best = min((t for name, t in times.items() if name != "selfspec"), default=float("nan"))
    return {
        **asdict(p.cell),
        "model": p.cell.model.name,
        "num_bytes": p.cell.num_bytes,
        "us": {name: round(value, 2) for name, value in times.items()},
        "floor_us": round(floor, 2),
        "over_floor": round(times["selfspec"] / floor, 3),
        "over_best_peer": round(times["selfspec"] / best, 3),
    }


def _cold(call: Call, room: Tensor) -> float:
    """Seconds of one run on the device's own clock, nothing of its input in the second-level cache."""
    room.zero_()
    if room.device.type != "cuda":
        return timed(call)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    call()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / 1e3


def run(device: torch.device, dtype: torch.dtype, chosen: Sequence[Cell] | None = None) -> Iterator[dict[str, Any]]:
    """One finding after another: checks of all shapes first, then a line a cell. Raises FloatingPointError for a kernel
    that is further from float64 than allowed.
    """
    chosen = cells(device) if chosen is None else chosen
    least = min(cell.context for cell in chosen)
    for cell in (c for c in chosen if c.context == least):
        errors = check(make(cell, device, dtype))
        yield {"check": asdict(cell) | {"model": cell.model.name}, "errors": errors}
        if errors["selfspec"] > TOLERANCE:
            raise FloatingPointError(f"{cell}: error {errors['selfspec']:.2f} of plain torch's, {TOLERANCE} allowed")
    bandwidth = copy_bandwidth(device)
    yield {"copy_bandwidth": bandwidth}
    for cell in chosen:
        yield measure(make(cell, device, dtype), bandwidth)
