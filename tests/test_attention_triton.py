"""The Triton attention against float64, with a GPU or interpreted: any rows, groups, trees, windows; exact mode."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from selfspec.kernels import attention_reference
from selfspec.kernels.row_view import RowView, words_of
from selfspec.kernels.splits import MAX_SCRATCH, estimate, fixed_split_slots, num_splits, simulate
from tests.conftest import random_parents

triton = pytest.importorskip("triton", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported before TRITON_INTERPRET was set", allow_module_level=True)
kernels = pytest.importorskip("selfspec.kernels.attention_triton")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]  # interpreted, the last is widened
REAL_EMPTY = torch.empty


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch, quick_interpreter: None) -> Iterator[None]:
    """Whatever a launch allocates is full of NaN; three splits leave some empty and give others several tiles."""

    def empty(*size: int, **settings: object) -> Tensor:
        return REAL_EMPTY(*size, **settings).fill_(math.nan)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(kernels, "num_splits", lambda *_: 3)
    with torch.no_grad():
        yield


@dataclass
class Problem:
    """A pass of rows over a ragged cache, in float64, whose unwritten slots and padding hold NaN."""

    q: Tensor  # [B, H, R, D]
    keys: Tensor  # [B, Hkv, S, D], a slice of something larger
    values: Tensor
    prefixes: list[int]
    parents: list[int]
    pads: list[int] | None = None
    window: int = 0
    softcap: float | None = None
    sinks: Tensor | None = None
    width: int | None = None
    scale: float = field(default=0.0)

    def __post_init__(self) -> None:
        self.scale = self.scale or 1.5 * self.q.shape[-1] ** -0.5
        self.depths = [0]
        for parent in self.parents[1:]:
            self.depths.append(self.depths[parent] + 1)

    def ancestors(self, row: int) -> list[int]:
        found = [row]
        while found[-1]:
            found.append(self.parents[found[-1]])
        return found

    def view(self) -> RowView:
        num_rows = len(self.parents)
        sees = torch.zeros(num_rows, num_rows, dtype=torch.bool)
        for row in range(num_rows):
            sees[row, self.ancestors(row)] = True
        lengths = torch.tensor(self.prefixes)
        pads = None if self.pads is None else torch.tensor(self.pads)
        positions = lengths[:, None] + torch.tensor(self.depths) - (0 if pads is None else pads[:, None])
        words = words_of(sees).repeat(len(lengths), 1)
        tensors = [None if t is None else t.to(DEVICE) for t in (lengths, words, positions, pads)]
        return RowView(*tensors[:3], self.window, tensors[3], self.width)  # type: ignore[arg-type]

    def run(self, dtype: torch.dtype, view: RowView | None = None, is_reference: bool = False) -> Tensor:
        """[B, R, H, D] in float64."""
        module = attention_reference if is_reference else kernels
        tensors = [t.to(DEVICE, dtype) for t in (self.q, self.keys, self.values)]
        sinks = None if self.sinks is None else self.sinks.to(DEVICE, dtype)
        out = module.attention_over_cache(*tensors, view or self.view(), self.scale, self.softcap, sinks)
        assert (out.dtype, out.shape) == (dtype, self.q.transpose(1, 2).shape)
        return out.double().cpu()

    def truth(self, dtype: torch.dtype) -> Tensor:
        """What the definition says of the rounded inputs, row by row over the slots that it may see: no masks."""
        q, keys, values = (t.to(dtype).double() for t in (self.q, self.keys, self.values))
        out = torch.full_like(q.transpose(1, 2), math.nan)
        for b, prefix in enumerate(self.prefixes):
            pad = 0 if self.pads is None else self.pads[b]
            for row, depth in enumerate(self.depths):
                place = prefix - pad + depth
                seen = [s for s in range(pad, prefix) if not self.window or s - pad > place - self.window]
                near = [r for r in self.ancestors(row) if not self.window or self.depths[r] > depth - self.window]
                slots = sorted(seen + [prefix + r for r in near])
                for head in range(q.shape[1]):
                    group = head // (q.shape[1] // keys.shape[1])
                    scores = keys[b, group, slots] @ q[b, head, row] * self.scale
                    if self.softcap is not None:
                        scores = torch.tanh(scores / self.softcap) * self.softcap
                    if self.sinks is not None:
                        scores = torch.cat([scores, self.sinks[head].to(dtype).double()[None]])
                    out[b, row, head] = scores.softmax(0)[: len(slots)] @ values[b, group, slots]
        return out


def problem(
    group: int,
    kv_heads: int,
    head_dim: int,
    prefixes: Sequence[int],
    parents: Sequence[int],
    pads: Sequence[int] | None = None,
    seed: int = 0,
    spare: int = 40,
    **settings: object,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    rows, batch, slots = len(parents), len(prefixes), max(prefixes) + len(parents) + spare
    q = torch.randn(batch, rows, group * kv_heads, head_dim, generator=generator, dtype=torch.float64).transpose(1, 2)
    held = [torch.randn(batch, kv_heads, slots + 3, head_dim, generator=generator, dtype=torch.float64) for _ in "kv"]
    for tensor in held:
        for b, prefix in enumerate(prefixes):
            tensor[b, :, prefix + rows :] = math.nan
            tensor[b, :, : pads[b] if pads else 0] = math.nan
    keys, values = (t[:, :, :slots] for t in held)
    return Problem(q, keys, values, list(prefixes), list(parents), list(pads) if pads else None, **settings)  # type: ignore[arg-type]


def chain(rows: int) -> list[int]:
    return [0, *range(rows - 1)]


def is_right(case: Problem, dtype: torch.dtype, found: Tensor | None = None) -> bool:
    """Whether the error against float64 is at most twice that of plain torch in the same dtype.

    Where plain torch happens to be right to the last bits: at most a quarter of the dtype's rounding.
    """
    truth, plain = case.truth(dtype), case.run(dtype, is_reference=True)
    found = case.run(dtype) if found is None else found
    ours, theirs = ((x - truth).square().mean().sqrt() for x in (found, plain))
    return bool(ours <= 2 * theirs + 0.25 * torch.finfo(dtype).eps * truth.square().mean().sqrt())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "kv_heads", "head_dim", "rows", "prefixes"), [
    (1, 4, 64, 1, [0, 1]), (3, 2, 64, 5, [63, 9]), (4, 1, 128, 8, [200, 0]), (7, 1, 80, 3, [64, 65]),
    (8, 1, 16, 9, [127]), (2, 2, 96, 4, [90, 31]), (1, 1, 256, 2, [70, 3]), (2, 1, 8, 64, [130]),
])  # fmt: skip
def test_chains_of_any_shape_are_right(dtype, group, kv_heads, head_dim, rows, prefixes):
    assert is_right(problem(group, kv_heads, head_dim, prefixes, chain(rows)), dtype)


@pytest.mark.parametrize(("rows", "prefixes"), [(6, [100, 0]), (33, [40]), (64, [100])])
def test_random_trees_are_right(rows, prefixes):
    assert is_right(problem(1, 1, 32, prefixes, random_parents(rows, seed=rows)), torch.float32)


@pytest.mark.parametrize("window", [1, 3, 8, 40, 64, 70, 1000])
def test_windows_count_positions_not_slots(window):
    """Of a tree's rows, whose slots lie further apart than their positions, and of sequences behind padding."""
    assert is_right(problem(1, 1, 16, [150, 5], random_parents(14, seed=1), window=window), torch.float32)
    assert is_right(problem(2, 1, 16, [150, 90], chain(4), pads=[7, 66], window=window), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("settings", [
    {"softcap": 5.0}, {"softcap": 50.0, "window": 30}, {"sinks": [0.5, 9.0]}, {"pads": [64, 5, 80]},
    {"softcap": 20.0, "sinks": [-2.0, 1.0], "pads": [3, 70, 128], "window": 100},
])  # fmt: skip
def test_caps_sinks_and_padding(dtype, settings):
    settings = settings | ({"sinks": torch.tensor(settings["sinks"])} if "sinks" in settings else {})
    assert is_right(problem(2, 1, 16, [100, 130, 128], random_parents(4, seed=2), **settings), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eight_bit_keys_and_values(dtype):
    case = problem(4, 1, 32, [70, 20], chain(3))
    scales = (0.25, 0.5)
    stored = [(t / by).to(torch.float8_e4m3fn) for t, by in zip((case.keys, case.values), scales, strict=True)]
    keys, values = (t.double() * by for t, by in zip(stored, scales, strict=True))
    q, (k, v) = case.q.to(DEVICE, dtype), (t.to(DEVICE) for t in stored)
    ours, theirs = (
        module.attention_over_cache(q, k, v, case.view(), case.scale, kv_scales=scales).double().cpu()
        for module in (kernels, attention_reference)
    )
    truth = replace(case, keys=keys, values=values).truth(dtype)
    ours, theirs = ((x - truth).square().mean().sqrt() for x in (ours, theirs))
    assert ours <= 2 * theirs + 0.25 * torch.finfo(dtype).eps * truth.square().mean().sqrt()


def test_rows_of_padding_are_zero_and_disturb_nobody():
    """A prompt that begins behind padding: its first rows stand for nothing."""
    case = problem(2, 1, 16, [0, 0], chain(9), pads=[4, 0])
    case.keys[0, :, :4] = case.values[0, :, :4] = 1.0
    out = case.run(torch.float32)
    assert bool((out[0, :4] == 0).all())
    assert torch.equal(out, case.run(torch.float32, is_reference=True).where(out == 0, out))
    alone = replace(case, q=case.q[:1, :, 4:], keys=case.keys[:1, :, 4:], values=case.values[:1, :, 4:],
                    prefixes=[0], parents=chain(5), pads=None, scale=case.scale)  # fmt: skip
    torch.testing.assert_close(out[0, 4:], alone.truth(torch.float32)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bug", ["ancestor", "length", "window", "scale"])
def test_planted_bug_is_found(bug):
    """One wrong bit of one row, one stale slot, a window one too wide, a scale one per cent off."""
    case = problem(2, 1, 16, [100], random_parents(12, seed=3), window=90)
    case.keys[:, :, 112:] = case.values[:, :, 112:] = 1.0  # else NaN would give it away
    assert is_right(case, torch.float16)
    view, wrong = case.view(), case
    if bug == "ancestor":
        view.words[0, 11] ^= 2
    elif bug == "length":
        view.lengths[0] += 1
    elif bug == "window":
        view = replace(view, window=91)
    else:
        wrong = replace(case, scale=1.01 * case.scale)
    assert not is_right(case, torch.float16, wrong.run(torch.float16, view))


# ---- exact mode ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(("prefix", "settings"), [
    (0, {}), (61, {}), (254, {"softcap": 10.0}), (300, {"window": 70}), (130, {"pads": [65]}),
])  # fmt: skip
def test_exact_rows_know_neither_neighbours_nor_number(matrix_instructions, dtype, prefix, settings):
    """Eight rows in one pass, and some of them alone or in threes behind those before: equal to the last bit."""
    whole = problem(3, 1, 16, [prefix], chain(8), width=8, **settings)
    together = whole.run(dtype)
    assert is_right(whole, dtype)
    for size, firsts in ((1, (0, 2, 7)), (3, (4,))):
        for first in firsts:
            part = replace(whole, q=whole.q[:, :, first : first + size], prefixes=[prefix + first],
                           parents=chain(size), keys=whole.keys.clone(), values=whole.values.clone())  # fmt: skip
            for tensor in (part.keys, part.values):
                tensor[:, :, prefix + first + size :] = math.nan
            assert torch.equal(part.run(dtype), together[:, first : first + size]), (size, first)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_exact_rows_of_a_tree_are_those_of_its_paths(matrix_instructions, dtype):
    """Whatever the other branches hold."""
    parents = [0, 0, 0, 1, 1, 3, 2, 5]
    tree = problem(3, 1, 32, [125], parents, width=8)
    found = tree.run(dtype)
    for leaf in (7, 4, 6):
        path = tree.ancestors(leaf)[::-1]
        one = replace(tree, q=tree.q[:, :, path], parents=chain(len(path)), keys=tree.keys.clone(),
                      values=tree.values.clone())  # fmt: skip
        for tensor, source in ((one.keys, tree.keys), (one.values, tree.values)):
            tensor[:, :, 125:] = math.nan
            tensor[:, :, 125 : 125 + len(path)] = source[:, :, [125 + row for row in path]]
        # a path lies in other slots of the same tile: sums of products in another order, where branches lay between
        torch.testing.assert_close(one.run(dtype), found[:, path], rtol=0, atol=4 * torch.finfo(dtype).eps)
    noisy = replace(tree, keys=tree.keys.clone(), values=tree.values.clone())
    noisy.keys[:, :, 127] = noisy.values[:, :, 127] = 3.0  # row 2, an ancestor of 6 alone
    rows = [0, 1, 3, 4, 5, 7]
    assert torch.equal(noisy.run(dtype)[:, rows], found[:, rows])


def test_exact_rows_do_not_depend_on_the_batch_or_its_padding(matrix_instructions):
    """Tiles lie at positions: a sequence alone, from slot 0, gives the bits it has behind padding beside another."""
    batch = problem(2, 1, 16, [200, 200], chain(4), pads=[0, 37], width=4)
    alone = replace(batch, q=batch.q[1:], keys=batch.keys[1:, :, 37:], values=batch.values[1:, :, 37:],
                    prefixes=[163], pads=None)  # fmt: skip
    assert torch.equal(alone.run(torch.float16)[0], batch.run(torch.float16)[1])


def test_exact_rows_do_not_depend_on_room_that_is_left(matrix_instructions):
    short, long = (problem(2, 1, 16, [60], chain(4), width=4, spare=spare) for spare in (20, 900))
    for tensor, other in ((long.keys, short.keys), (long.values, short.values)):
        tensor[:, :, :64] = other[:, :, :64]
    long.q.copy_(short.q)
    assert torch.equal(short.run(torch.float32), long.run(torch.float32))


@pytest.mark.skipif(DEVICE != "cpu", reason="blocks of 64 rows have matrix instructions of their own")
def test_a_rows_bits_do_not_depend_on_the_size_of_its_block(matrix_instructions, monkeypatch):
    """Exact mode fixes the block, so nothing relies on it; nothing but the matrix instruction may depend on it."""
    case = problem(2, 1, 16, [100], chain(8), width=8)
    found = []
    for block_m in (16, 32, 64):
        config = kernels.config_for("sm_90", 16, 16)[1]
        monkeypatch.setattr(kernels, "config_for", lambda *_, m=block_m, c=config: (m, c))
        found.append(case.run(torch.float32))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_without_exact_mode_the_splits_move(matrix_instructions):
    """The comparisons above could fail: evenly shared splits do change bits."""
    whole = problem(3, 2, 16, [190], chain(8))  # four tiles; of one row three
    one = replace(whole, q=whole.q[:, :, :1], parents=[0])
    assert not torch.equal(one.run(torch.float32)[:, 0], whole.run(torch.float32)[:, 0])


# ---- launching ----------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_with_values():
    case = problem(2, 1, 16, [5], chain(3))
    q, keys, values = (t.float().to(DEVICE) for t in (case.q, case.keys, case.values))
    for wrong, message in (
        ((q.double(), keys, values), "float64"), ((q, keys.half(), values.half()), "float16"),
        ((q, keys, values[..., :8]), r"\[1, 1, 48, 8\]"), ((q[:, :, :2], keys, values), r"\[1, 3\]"),
        ((q.mT.contiguous().mT, keys, values), "side by side"),
        ((q.repeat(2, 1, 1, 1), keys, values), r"\[2, 2, 3, 16\]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            kernels.attention_over_cache(*wrong, case.view(), 1.0)
    with pytest.raises(ValueError, match="scale of 0"):
        kernels.attention_over_cache(q, keys, values, case.view(), 0.0)
    with pytest.raises(ValueError, match="at most 2 rows"):
        replace(case.view(), width=2)


@pytest.mark.parametrize("arch", kernels.CONFIGS)
def test_every_shape_has_a_configuration(arch):
    for head_dim in (8, 16, 64, 80, 96, 128, 192, 256):
        for lines in (1, 16, 17, 64, 65, 512):
            block_m, config = kernels.config_for(arch, head_dim, lines)
            assert block_m in (16, 32, 64, 128)
            assert block_m >= min(lines, 64)
            assert fixed_split_slots(4096) % config.block_n == 0


def test_splits_follow_the_context_and_nothing_on_the_device():
    assert [num_splits(n, 8) for n in (1, 1024, 1025, 4096, 4097, 131072)] == [8, 8, 16, 16, 32, 32]
    assert [num_splits(n, 4) for n in (32768, 32769)] == [32, 64]
    assert num_splits(8192, 8, batch=4) == 8
    assert num_splits(8192, 8, batch=99) == 1
    per_split = 64 * 64 * 128 * 4  # 64 rows of a 70B model
    assert num_splits(8192, 8, 1, 2 * per_split) * 2 * per_split <= MAX_SCRATCH
    assert {num_splits(n, 8) for n in range(4097, 9000)} == {32}  # one graph serves all


def test_modelled_splits_are_near_the_best():
    """Never far from the best power of two, in the model; one split of a long text is."""
    for row in simulate([1, 4, 16], [2, 8], [256, 1024, 8192, 32768, 131072]):
        assert row["us"] <= 1.6 * row["best_us"], row
    assert estimate(1, 32768, 8, 1).seconds > 3 * estimate(num_splits(32768, 8), 32768, 8, 1).seconds
    assert estimate(32, 8192, 8, 1).waves == 1
