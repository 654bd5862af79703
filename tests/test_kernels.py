"""The CPU's products and fused layers: right against float64, a row's bits its own, the family's modules the judge."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import linear

from selfspec.cache import KVCache
from selfspec.kernels import attention_reference, dispatch
from selfspec.target import Target
from tests.conftest import build_model, prompt_of

pytest.importorskip("numba")
DTYPES = [torch.bfloat16, torch.float32]
FUSED = {"llama": {}, "qwen2": {"head_dim": 64}, "qwen3": {"head_dim": 32},
         "mistral": {"head_dim": 16, "sliding_window": None}}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def problem(dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(*s, generator=generator) for s in ((rows, inputs), (outputs, inputs), (outputs,)))
    return x.to(dtype), (0.05 * weight).to(dtype), bias.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 8), (48, 97), (80, 15), (576, 64)])
def test_products_are_right_and_a_row_knows_no_neighbours(dtype, with_bias, inputs, outputs):
    """Error against float64 at most rounding of the dtype, or of float32 sums; bits those of the row alone."""
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 64):
        x, weight, bias = problem(dtype, rows, inputs, outputs)
        used = bias if with_bias else None
        ours = dispatch.linear(x, weight, used)
        truth = linear(x.double(), weight.double(), None if used is None else used.double())
        size = linear(x.double().abs(), weight.double().abs()) + bias.double().abs()
        bound = inputs * torch.finfo(torch.float32).eps * size + torch.finfo(dtype).eps * truth.abs()
        assert (ours.dtype, ours.shape) == (dtype, truth.shape)
        assert bool(((ours.double() - truth).abs() <= bound).all())
        alone = torch.cat([dispatch.linear(x[i : i + 1], weight, used) for i in range(rows)])
        assert torch.equal(ours, alone)


def test_the_kernels_are_the_ones_that_ran(monkeypatch):
    x, weight, _ = problem(torch.float32, 3, 64, 96)
    calls = []
    kernels = dispatch.cpu_kernels(x.device)
    monkeypatch.setattr(kernels, "linear", lambda *args: calls.append(args) or linear(*args))
    dispatch.linear(x, weight)
    assert len(calls) == 1
    dispatch.linear(x.repeat(30, 1), weight)  # a prompt
    dispatch.linear(x[:, :60], weight[:, :60])  # 60 is no multiple of 16
    with torch.enable_grad():
        dispatch.linear(x, weight)
    monkeypatch.setenv("SELFSPEC_KERNELS", "reference")
    dispatch.linear(x, weight)
    assert len(calls) == 1


def test_rows_may_lie_anywhere_in_memory():
    x, weight, _ = problem(torch.float32, 6, 64, 96)
    turned = x.T.contiguous().T
    assert torch.equal(dispatch.linear(turned, weight), dispatch.linear(x, weight))
    parts = torch.randn(2, 3, 64)
    assert torch.equal(dispatch.linear(parts, weight).flatten(0, 1), dispatch.linear(parts.flatten(0, 1), weight))


def test_many_rows_of_bfloat16_are_rounded_once():
    x, weight, bias = problem(torch.bfloat16, 65, 64, 96)
    ours, exact = dispatch.linear(x, weight, bias), linear(x.double(), weight.double(), bias.double())
    assert bool(((ours.double() - exact).abs() <= 0.01 * exact.abs() + 1e-2).all())


# ---- whole layers -------------------------------------------------------------------------------------------------


def fused_target(family: str, dtype: torch.dtype, **sizes: int) -> Target:
    target = Target(build_model(family, dtype, hidden_size=64, intermediate_size=112, **FUSED[family] | sizes))
    assert target.fused.is_in_use
    return target


def run(
    target: Target, cache: KVCache, tokens: list[int], first: int, parents: list[int] | None = None
) -> torch.Tensor:
    depths = None
    if parents is not None:
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
    hidden = target.embed(torch.tensor([tokens]), first, depths)
    return target.run_layers(hidden, 0, target.num_layers, cache, parents)


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups", "rows", "slots", "width"), [
    (9, 3, 1, 40, 64), (4, 4, 1, 1, 16), (8, 1, 1, 31, 32), (6, 2, 3, 17, 16), (4, 2, 2, 64, 80),
])  # fmt: skip
@pytest.mark.parametrize("threads", [1, 2])
def test_attention_over_ragged_batches(cache_dtype, heads, groups, rows, slots, width, threads, monkeypatch):
    """Error against float64 at most that of float32 sums; what no row sees is not read, be it NaN."""
    generator = torch.Generator().manual_seed(slots)
    q = torch.randn(5, heads, rows, width, generator=generator)
    held = [torch.randn(5, groups, -(-slots // 8) * 8 + 8, width, generator=generator).to(cache_dtype) for _ in "kv"]
    pads = torch.tensor([0, 1, slots // 2, slots - 1, slots // 3]).clamp(max=slots - 1)
    seen = torch.arange(slots) >= pads[:, None]
    mask = seen[:, None] & (torch.rand(5, rows, slots, generator=generator) < 0.7)
    mask[..., -1] = True
    whole = [t[:, :, :slots].double().repeat_interleave(heads // groups, 1) for t in held]
    scores = q.double() @ whole[0].transpose(2, 3) * 0.2
    truth = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1) @ whole[1]
    for sequence, pad in enumerate(pads.tolist()):
        for tensor in held:
            tensor[sequence, :, : pad // 8 * 8] = float("nan")
    monkeypatch.setattr(attention_reference, "attention", lambda *_: pytest.fail("the reference ran"))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = dispatch.attention(q, *(t[:, :, :slots] for t in held), mask, 0.2)
    finally:
        torch.set_num_threads(before)
    blind = mask & (torch.arange(5) > 0)[:, None, None]  # the first sequence sees nothing
    nothing, rest = dispatch.attention(q, *(t[:, :, :slots] for t in held), blind, 0.2).split([1, 4])
    assert bool(nothing.isnan().all())
    assert torch.equal(rest, found[1:])
    rounded = dispatch.attention(q.bfloat16(), *(t[:, :, :slots] for t in held), mask, 0.2)
    again = dispatch.attention(q.bfloat16().float(), *(t[:, :, :slots] for t in held), mask, 0.2)
    assert torch.equal(rounded, again.bfloat16())
    # scores are off by width eps |q||k|, weights by as much and by the sum's slots eps
    spread = 0.2 * (q.double().abs() @ whole[0].abs().transpose(2, 3)).amax()
    bound = torch.finfo(torch.float32).eps * (2 * width * spread + slots + 8) * whole[1].abs().amax()
    assert found.shape == (5, rows, heads, width)
    assert bool(((found.transpose(1, 2).double() - truth).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FUSED)
def test_fused_layers_are_the_familys_own(family, dtype, monkeypatch):
    """Over empty, odd and long prefixes, chains and trees: as near to the modules in float64 as torch's own dtype."""
    target = fused_target(family, dtype)
    wide = Target(target.base.__class__(target.base.config).double().eval(), check=False)
    wide.base.load_state_dict(target.base.state_dict())
    for prefix, rows, parents in ((0, 5, None), (1, 1, None), (9, 3, None), (70, 17, None), (13, 4, [0, 0, 0, 2])):
        tokens = prompt_of(prefix + rows)
        found = {}
        for name, held in (("ours", target), ("modules", target), ("truth", wide)):
            with monkeypatch.context() as patch:
                if name != "ours":
                    patch.setattr(held.fused, "run", lambda *_: None)
                cache = KVCache(target.num_layers, prefix + rows)
                if prefix:
                    run(held, cache, tokens[:prefix], 0)
                found[name] = run(held, cache, tokens[prefix:], prefix, parents).double()
        error, theirs = ((found[name] - found["truth"]).square().mean().sqrt() for name in ("ours", "modules"))
        assert error <= 2 * theirs + 1e-7 * found["truth"].abs().max(), (prefix, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("threads", "width"), [(1, 16), (2, 16), (1, 32), (1, 64), (2, 128)])
def test_a_rows_bits_do_not_depend_on_how_tokens_are_grouped(dtype, threads, width):
    """One at a time, in chains of any length, as a branch of a tree, with whatever lay in unwritten slots."""
    target, tokens = fused_target("llama", dtype, head_dim=width), prompt_of(30)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cache = KVCache(target.num_layers, 50)
        one = torch.cat([run(target, cache, [token], i) for i, token in enumerate(tokens)], dim=1)
        for sizes in ((30,), (7, 1, 2, 20), (13, 17)):
            cache, made, first = KVCache(target.num_layers, 50 + len(sizes)), [], 0
            for layer in range(target.num_layers):
                for held in cache.tensors(layer, one, 2, width):
                    held.fill_(float("nan"))
            for size in sizes:
                made.append(run(target, cache, tokens[first : first + size], first))
                first += size
            assert torch.equal(torch.cat(made, dim=1), one)
        cache.rollback(28)
        branches = run(target, cache, [tokens[28], 5, tokens[29], 6], 28, [0, 0, 0, 1])
        assert torch.equal(branches[:, [0, 2]], one[:, 28:30])
        cache.rollback(25)  # an odd prefix, so that the first row is the second of a pair
        branches = run(target, cache, [tokens[25], 5, tokens[26], 6, tokens[27]], 25, [0, 0, 0, 1, 2])
        assert torch.equal(branches[:, [0, 2, 4]], one[:, 25:28])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FUSED)
@torch.no_grad()
def test_a_finished_pass_is_its_parts(family, dtype, monkeypatch):
    """Layers, final norm and output layer in one call, states noted on the way: chains, trees, from the middle on.

    States to the bit, logits up to how the norm's module rounds.
    """
    target, tokens = fused_target(family, dtype), prompt_of(16)
    target.norm.weight.uniform_(0.5, 1.5)
    target.notice_changes()
    passes = ((0, (), None), (2, (2, 3, 6), None), (1, (4,), [0, 0, 1, 0]))
    for start, depths, parents in passes:
        found = {}
        for name in ("whole", "parts"):
            cache = KVCache(target.num_layers, 20)
            run(target, cache, tokens[:12], 0)
            with monkeypatch.context() as patch:
                if name == "parts":
                    patch.setattr(target.fused, "finish", lambda *_: None)
                places = None if parents is None else [0, 1, 2, 1]
                hidden = target.embed(torch.tensor([tokens[12:]]), 12, places)
                if start:
                    hidden = target.run_layers(hidden, 0, start, cache, parents)
                found[name] = target.finish(hidden, start, cache, depths, parents)
            assert cache.lengths == [16] * target.num_layers
        (logits, states), (expected, wanted) = found["whole"], found["parts"]
        torch.testing.assert_close(logits, expected, rtol=torch.finfo(dtype).eps * 4, atol=torch.finfo(dtype).eps * 8)
        assert logits.dtype == torch.float32
        assert all(torch.equal(states[depth], wanted[depth]) for depth in {start, *depths})
        assert all(states[depth].dtype == dtype for depth in depths)


@torch.no_grad()
def test_a_hooked_output_layer_is_called():
    target, seen = fused_target("llama", torch.float32), []
    hidden = target.embed(torch.tensor([[5]]))
    plain, _ = target.finish(hidden, 0, KVCache(6, 8))
    for module in (target.norm, target.output):
        handle = module.register_forward_hook(lambda *_: seen.append(1))
        found, _ = target.finish(hidden, 0, KVCache(6, 8))
        handle.remove()
        torch.testing.assert_close(found, plain)
    assert seen == [1, 1]


def test_whatever_stands_in_the_way_is_left_to_the_modules(monkeypatch):
    target = fused_target("llama", torch.float32)
    states, cache = torch.randn(1, 3, 64), KVCache(target.num_layers, 200)

    def is_fused(hidden: torch.Tensor = states) -> bool:
        cache.rollback(0)
        return target.fused.run(target.layers, hidden, range(target.num_layers), cache, None) is not None

    assert is_fused()
    assert not is_fused(torch.randn(1, 65, 64))  # a prompt
    assert not is_fused(torch.randn(2, 3, 64))
    with torch.enable_grad():
        assert not is_fused()
    for hooked in (target.base_layers[2], target.base_layers[3].mlp.up_proj):
        handle = hooked.register_forward_hook(lambda *_: None)
        target.notice_changes()
        assert not is_fused()
        handle.remove()
        target.notice_changes()
        assert is_fused()
    assert not Target(build_model("mistral", hidden_size=64, head_dim=16)).fused.is_in_use  # a sliding window
    assert not Target(build_model("granite", hidden_size=64)).fused.is_in_use
    monkeypatch.setenv("SELFSPEC_KERNELS", "reference")
    target.notice_changes()
    assert not is_fused()


def test_a_hook_set_in_the_middle_of_a_text_is_called():
    target, cache, seen = fused_target("llama", torch.float32), KVCache(6, 50), []
    run(target, cache, prompt_of(5), 0)
    target.base_layers[2].register_forward_hook(lambda *_: seen.append(1))
    run(target, cache, [5], 5)
    assert seen == [1]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_edited_weights_are_used(is_replaced):
    target, tokens = fused_target("llama", torch.float32), prompt_of(6)
    before = run(target, KVCache(6, 50), tokens, 0)
    for name in ("mlp.down_proj", "input_layernorm"):
        weight = target.base_layers[1].get_submodule(name).weight
        if is_replaced:
            weight.data = weight.data * 2
        else:
            weight.mul_(2)
    target.notice_changes()
    after = run(target, KVCache(6, 50), tokens, 0)
    fresh = run(Target(target.base), KVCache(6, 50), tokens, 0)
    assert torch.equal(after, fresh)
    assert not torch.equal(after, before)


def test_no_order_of_sums_is_left_to_the_compiler():
    """What the target computes must have the same bits in every kernel it is compiled into, and on the next start."""
    if dispatch.implementation("cpu") != "cpu":
        pytest.skip("there are no kernels on this CPU")
    from selfspec.kernels import cpu_attention, cpu_layers, cpu_math, cpu_pairs

    compiled = {
        f"{module.__name__}.{name}": function.targetoptions.get("fastmath")
        for module in (cpu_math, cpu_layers, cpu_pairs, cpu_attention)
        for name, function in vars(module).items()
        if hasattr(function, "targetoptions")
    }
    assert len(compiled) > 15
    functions = {
        id(f): f.py_func for m in (cpu_math, cpu_layers, cpu_pairs) for f in vars(m).values() if hasattr(f, "py_func")
    }
    names = [(f.__module__, f.__qualname__) for f in functions.values()]
    assert len(names) == len({*names})  # kernels from disk know their parts by these
    guesses = {"selfspec.kernels.cpu_math.mass"}  # how likely a draft is: nothing of the text hangs on it
    assert {name for name, flags in compiled.items() if flags} == guesses
