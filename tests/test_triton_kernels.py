"""Kernels on states and caches: rotary embedding with cache write, residual norm, compaction of trees."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as apply_partly
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from selfspec.cache import KVCache
from selfspec.kernels import add_rms_norm_reference, compact_reference, rope_append_reference
from tests.kernel_tools import DEVICE, assert_as_near, error, kernels

add_rms_norm_triton, compact_triton, rope_append_triton = map(kernels, ("add_rms_norm", "compact", "rope_append"))
DTYPES = [torch.float32, torch.float16]


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    with DEVICE, torch.no_grad():
        yield


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(DEVICE)


def tables(num_positions: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.arange(num_positions)[:, None] * 100.0 ** -(torch.arange(width // 2) / (width // 2))
    angles = angles.repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups", "width", "rotary", "rows"), [
    (3, 1, 16, 16, 1), (4, 2, 10, 10, 3), (2, 2, 80, 20, 2), (9, 3, 64, 64, 2), (1, 1, 6, 2, 1),
])  # fmt: skip
def test_rope_append_is_the_modules_own(heads, groups, width, rotary, rows, dtype):
    """Bitwise the reference's and transformers', queries and cache; slots that no row writes stay as they were."""
    batch, num_slots, total = 3, 24, heads + 2 * groups
    qkv = random(width, batch, rows, total * width).to(dtype)
    cos, sin = tables(50, rotary, dtype)
    starts = torch.tensor([[0], [7], [19]])
    positions = starts * 2 + torch.arange(rows)
    slots = starts.expand(-1, rows) + torch.arange(rows).flip(0)
    slots[1, 0] = -1  # a row that is not kept
    layers = torch.full((2, 2, batch, groups, num_slots, width), torch.nan, dtype=dtype)
    found, plain = layers.clone(), layers.clone()
    arguments = (qkv, cos, sin, positions)
    queries = rope_append_triton.rope_append(*arguments, *found[1], slots)
    assert torch.equal(queries, rope_append_reference.rope_append(*arguments, *plain[1], slots))
    assert torch.equal(found.nan_to_num(1e4), plain.nan_to_num(1e4))
    assert bool(found[0].isnan().all())
    written = ~found[1].isnan().any(-1)  # [2, B, Hkv, S]
    assert written.sum() == 2 * groups * int((slots >= 0).sum())
    q, k, v = qkv.unflatten(2, (-1, width)).transpose(1, 2).split([heads, groups, groups], 1)
    theirs = (apply_rotary_pos_emb if rotary == width else apply_partly)(q, k, cos[positions], sin[positions])
    assert torch.equal(queries, theirs[0])
    for sequence, row in (slots >= 0).nonzero().tolist():
        held = found[1, :, sequence, :, slots[sequence, row]]
        assert torch.equal(held, torch.stack([theirs[1][sequence, :, row], v[sequence, :, row]]))
    wide = rope_append_reference.rope_append(
        qkv.double(), cos.double(), sin.double(), positions, *layers[1].double(), slots
    )
    assert_as_near(queries, theirs[0], wide)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_append_norms_heads_first(dtype):
    """As Qwen3's modules do, queries and keys by weights of their own; values stay as they are."""
    batch, rows, heads, groups, width = 2, 3, 4, 2, 24
    qkv, (cos, sin) = 5 * random(1, batch, rows, (heads + 2 * groups) * width).to(dtype), tables(9, width, dtype)
    positions = torch.arange(rows).expand(batch, rows)
    norms = tuple((1 + 0.2 * random(seed, width)).to(dtype) for seed in (2, 3))
    found, plain = (torch.zeros(2, batch, groups, rows, width, dtype=dtype) for _ in range(2))
    arguments = (qkv, cos, sin, positions)
    queries = rope_append_triton.rope_append(*arguments, *found, positions, norms, 1e-5)
    expected = rope_append_reference.rope_append(*arguments, *plain, positions, norms, 1e-5)
    modules = [LlamaRMSNorm(width, 1e-5).to(DEVICE, dtype) for _ in norms]
    q, k, v = qkv.unflatten(2, (-1, width)).split([heads, groups, groups], 2)
    for module, weight in zip(modules, norms, strict=True):
        module.weight.copy_(weight)
    theirs = apply_rotary_pos_emb(
        modules[0](q).transpose(1, 2), modules[1](k).transpose(1, 2), cos[positions], sin[positions]
    )
    assert torch.equal(expected, theirs[0])
    assert torch.equal(plain, torch.stack([theirs[1], v.transpose(1, 2)]))
    wide = torch.zeros(2, batch, groups, rows, width, dtype=torch.float64)
    truth = rope_append_reference.rope_append(
        qkv.double(), cos.double(), sin.double(), positions, *wide, positions, tuple(n.double() for n in norms), 1e-5
    )
    assert_as_near(queries, expected, truth)
    assert_as_near(found[0], plain[0], wide[0])
    assert torch.equal(found[1], plain[1])


def test_the_cache_may_be_of_another_dtype_and_the_projection_lie_anywhere():
    """A float32 cache of half-precision rows, rows cut from a wider product; also what the launchers refuse."""
    qkv, (cos, sin) = random(1, 2, 3, 50).half()[..., 5:45], tables(9, 8, torch.float16)
    positions = torch.arange(3).expand(2, 3)
    held = [torch.zeros(2, 2, 4, 8) for _ in range(4)]
    queries = rope_append_triton.rope_append(qkv, cos, sin, positions, *held[:2], positions)
    assert torch.equal(queries, rope_append_reference.rope_append(qkv, cos, sin, positions, *held[2:], positions))
    assert queries.shape == (2, 1, 3, 8)
    assert all(torch.equal(a, b) for a, b in zip(held[:2], held[2:], strict=True))
    assert bool(held[0][:, :, :3].any())
    for module in (rope_append_triton, rope_append_reference):
        with pytest.raises(ValueError, match="rotary width must be even and at most 8, got 10"):
            module.rope_append(qkv, *tables(9, 10, torch.float16), positions, *held[:2], positions)
        with pytest.raises(TypeError, match=r"cos must be torch\.float16, got torch\.float32"):
            module.rope_append(qkv, cos.float(), sin, positions, *held[:2], positions)
        with pytest.raises(ValueError, match="no query heads"):
            module.rope_append(qkv[..., :32], cos, sin, positions, *held[:2], positions)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_offset", [False, True], ids=["llama", "gemma"])
@pytest.mark.parametrize(
    ("shape", "scale"), [((1, 1, 7), 1.0), ((2, 3, 96), 30.0), ((5, 1000), 1e-2), ((2, 5000), 1.0)]
)
def test_add_rms_norm_is_the_modules_own(shape, scale, is_offset, dtype):
    """The sum bit for bit; the norm as near to float64 as the family's own module is."""
    residual, delta = (scale * random(seed, *shape).to(dtype) for seed in (1, 2))
    weight, eps = (1 + 0.1 * random(3, shape[-1])).to(dtype), 1e-5
    module = (GemmaRMSNorm if is_offset else LlamaRMSNorm)(shape[-1], eps).to(DEVICE, dtype)
    module.weight.copy_(weight)
    total, normed = add_rms_norm_triton.add_rms_norm(residual, delta, weight, eps, is_offset)
    plain = add_rms_norm_reference.add_rms_norm(residual, delta, weight, eps, is_offset)
    assert torch.equal(total, residual + delta)
    assert torch.equal(plain[0], total)
    assert torch.equal(plain[1], module(total))
    wide = total.double()
    truth = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + is_offset)
    assert_as_near(normed, plain[1], truth)
    assert error(plain[1], truth) < 0.01 * truth.abs().max()
    for module in (add_rms_norm_triton, add_rms_norm_reference):  # of a sum that is there already: the same bits
        made = module.add_rms_norm(residual, delta, weight, eps, is_offset)
        assert torch.equal(module.rms_norm(made[0], weight, eps, is_offset), made[1])
    wrong = add_rms_norm_triton.add_rms_norm(residual, delta, weight, eps, not is_offset)[1]
    assert error(wrong, truth) > 2 * error(plain[1], truth)


def test_add_rms_norm_refuses_what_it_cannot_take():
    x, w = torch.zeros(2, 8), torch.ones(8)
    for module in (add_rms_norm_triton, add_rms_norm_reference):
        with pytest.raises(ValueError, match=r"delta must be \[2, 8\], got \[1, 8\]"):
            module.add_rms_norm(x, x[:1], w, 1e-5)
    with pytest.raises(ValueError, match="rows of at most 16384 numbers, got 20000"):
        add_rms_norm_triton.add_rms_norm(torch.zeros(1, 20000), torch.zeros(1, 20000), torch.ones(20000), 1e-5)


# -- compaction

HALF, WIDE = torch.float16, torch.float32
LAYERS = [(2, 16, HALF), (2, 16, HALF), (3, 8, WIDE), (1, 80, torch.bfloat16), (4, 6, HALF)]  # heads, width, dtype


def random_paths(batch: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Increasing rows [B, K] with -1 beyond their number [B]; the first accept nothing, all, a chain, the last row."""
    path, accepted = torch.full((batch, count), -1), torch.zeros(batch, dtype=torch.int64)
    for b in range(batch):
        size = int(torch.randint(0, count + 1, (), generator=generator, device="cpu"))
        size = {0: 0, 1: count, 2: min(2, count), 3: min(1, count)}.get(b, size)
        rows = torch.randperm(count, generator=generator, device="cpu")[:size].sort().values + 1
        rows = rows.clamp(min=count) if b == 3 else rows
        path[b, :size] = torch.arange(1, size + 1) if b == 2 else rows.to(DEVICE)
        accepted[b] = size
    return path, accepted


def compacted_by_cache(tensors: list[Tensor], path: Tensor, accepted: Tensor, first: Tensor) -> list[Tensor]:
    """What `KVCache.compact` makes of each sequence."""
    made = [tensor.clone() for tensor in tensors]
    for b, (rows, size, begin) in enumerate(zip(path.tolist(), accepted.tolist(), first.tolist(), strict=True)):
        cache = KVCache(1, tensors[0].shape[2])
        for tensor in made:
            cache._keys[0] = tensor[b : b + 1]
            cache.compact(begin, [0, *rows[:size]], range(1))
    return made


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


@pytest.mark.parametrize("count", [0, 1, 2, 9, 63])
@pytest.mark.parametrize("is_one_tensor", [False, True], ids=["tensor-a-layer", "one-tensor"])
def test_compaction_moves_whole_paths_of_all_layers(count: int, is_one_tensor: bool) -> None:
    """What `KVCache.compact` does sequence by sequence, bit for bit, over layers of any shape and dtype."""
    generator, batch = torch.Generator().manual_seed(count), 5
    path, accepted = random_paths(batch, count, generator)
    first = torch.randint(0, 12, (batch,), generator=generator, device="cpu").to(DEVICE)
    num_slots = 12 + count + 1
    if is_one_tensor:
        tensors = list(random(count, 6, batch, 2, num_slots, 16).half())
    else:
        tensors = [random(i, batch, h, num_slots, w).to(dtype) for i, (h, w, dtype) in enumerate(LAYERS)]
    tensors[0][:, :, -1] = torch.nan
    expected = compacted_by_cache(tensors, path, accepted, first)
    plain = [tensor.clone() for tensor in tensors]
    compact_reference.compact(compact_reference.hold(plain), path, accepted, first)
    held = compact_reference.hold(tensors)
    before = [tensor.clone() for tensor in tensors]
    compact_triton.compact(held, path, accepted, first)
    for found, reference, own, old in zip(tensors, plain, expected, before, strict=True):
        assert torch.equal(bits(found), bits(own))
        assert torch.equal(bits(reference), bits(own))
        assert torch.equal(bits(found), bits(old)) == (count < 2)


def test_compaction_reads_rows_before_they_are_written() -> None:
    """Paths whose sources are the targets of later rows; rows in their place already, and others, are not touched."""
    cache = torch.arange(9.0).view(1, 1, 9, 1).expand(1, 1, 9, 4).contiguous()
    path, first = torch.tensor([[2, 3, 4, 7, -1, -1, -1]]), torch.tensor([1])
    compact_triton.compact(compact_reference.hold([cache]), path, torch.tensor([4]), first)
    assert cache[0, 0, :, 0].tolist() == [0, 1, 3, 4, 5, 8, 6, 7, 8]


def test_compaction_refuses_what_it_cannot_take() -> None:
    caches = [torch.zeros(2, 1, 4, 8), torch.zeros(2, 2, 4, 8)]
    with pytest.raises(ValueError, match=r"a cache of 2 sequences needs .* got \[3, 1, 4, 8\]"):
        compact_reference.hold([*caches, torch.zeros(3, 1, 4, 8)])
    with pytest.raises(ValueError, match="rows in one piece"):
        compact_reference.hold([torch.zeros(2, 1, 8, 4).transpose(2, 3)])
    held, ones = compact_reference.hold(caches), torch.ones(2, dtype=torch.int64)
    for module in (compact_triton, compact_reference):
        with pytest.raises(ValueError, match=r"first must be \[2\], got \[1\]"):
            module.compact(held, ones[:, None], ones, ones[:1])
        with pytest.raises(TypeError, match=r"path must be torch\.int64"):
            module.compact(held, ones[:, None].int(), ones, ones)
