"""A draft made in one kernel call is the draft made step by step."""

import importlib
import math
from collections.abc import Iterator

import pytest
import torch

from selfspec.decode import DecodeState, decode
from selfspec.drafter import ChainDrafter, ParallelDrafter, RecursiveDrafter
from selfspec.exit_module import ExitConfig, build_adapter
from selfspec.exits import ExitHead
from selfspec.fused_draft import FusedDraft
from selfspec.kernels import dispatch, noise_reference
from selfspec.sampling import Sampling, uniform
from selfspec.target import Target
from selfspec.verify import Draft
from tests.conftest import build_model, new_state, prompt_of

pytest.importorskip("numba")
KERNELS = "selfspec.kernels."


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def exit_of(family: str = "llama", dtype: torch.dtype = torch.float32, **config: object) -> tuple[Target, ExitHead]:
    """A target that the kernel takes, and an exit whose every part differs from the target's own."""
    sizes = {"hidden_size": 64, "intermediate_size": 112, "vocab_size": 192, "head_dim": 16}
    target = Target(build_model(family, dtype, **sizes))
    settings = {"exit_layer": 2, "recall_layers": (3, 6), "num_steps": 2, "draft_vocab": tuple(range(0, 192, 2))}
    made = ExitConfig(**{**settings, **config}, lora_rank=4)
    adapter, generator = build_adapter(target, made), torch.Generator().manual_seed(1)
    for name, parameter in adapter.named_parameters():
        if parameter.requires_grad:
            size = 0.1 if "lora" in name or "bridge" in name else 0.3
            parameter.copy_(parameter + size * torch.randn(parameter.shape, generator=generator))
    return target, ExitHead(target, "new", made, adapter)


class Watched(ChainDrafter):
    """Keeps what it drafted, and how far the cache was filled behind it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.pace.min_accepted = 0.0
        self.seen: list[tuple[list[int], torch.Tensor, list[int]]] = []

    def propose(self, state: DecodeState) -> Draft:
        draft = super().propose(state)
        if draft.taps is not None:
            self.seen.append((draft.tokens[0].tolist(), draft.taps, list(state.cache.lengths)))
        return draft


class Stepwise(Watched):
    is_stepwise = True


class WatchedParallel(Watched, ParallelDrafter):
    pass


class StepwiseParallel(Stepwise, ParallelDrafter):
    pass


class WatchedRecursive(Watched, RecursiveDrafter):
    pass


class StepwiseRecursive(Stepwise, RecursiveDrafter):
    pass


KINDS = {
    "chain": {Watched: Watched, Stepwise: Stepwise},
    "recursive": {Watched: WatchedRecursive, Stepwise: StepwiseRecursive},
    "parallel": {Watched: WatchedParallel, Stepwise: StepwiseParallel},
}
RECURSIVE = {"form": "recursive", "num_steps": 3}
PARALLEL = {"form": "parallel", "num_steps": 3, "correction_rank": 16}
FORMS = pytest.mark.parametrize("config", [{}, RECURSIVE, PARALLEL], ids=["chain", "recursive", "parallel"])


def run(
    kind: type[Watched], target: Target, head: ExitHead, draft_len: int, num_prompt: int = 9, stop: float = 0.0,
    width: int = 1, **settings: object,
):  # fmt: skip
    drafter = KINDS[head.config.form][kind](target, head, draft_len, stop, width)
    state = new_state(target, prompt_of(num_prompt, vocab_size=192), 40, **settings)
    list(decode(target, drafter, state))
    return drafter, state


@pytest.mark.parametrize(
    ("family", "draft_len"), [("llama", 1), ("llama", 2), ("llama", 4), ("qwen2", 2), ("qwen3", 4)]
)
@pytest.mark.parametrize(
    "config",
    [{}, {"recall_layers": (), "num_steps": 1, "draft_vocab": None}, {"exit_layer": 0}, RECURSIVE,
     {**RECURSIVE, "exit_layer": 0}, PARALLEL, {"form": "parallel", "recall_layers": (), "draft_vocab": None},
     {**PARALLEL, "exit_layer": 0}],
    ids=["all", "bare", "no-trunk", "recursive", "no-trunk-recursive", "parallel", "bare-parallel",
         "no-trunk-parallel"],
)  # fmt: skip
def test_the_same_drafts_taps_and_lengths(family, draft_len, config, monkeypatch):
    target, head = exit_of(family, **config)
    calls = []
    draft = FusedDraft.draft
    monkeypatch.setattr(FusedDraft, "draft", lambda *args: calls.append(draft(*args)) or calls[-1])
    ours, state = run(Watched, target, head, draft_len)
    assert len(calls) == len(ours.seen) > 0
    assert None not in calls
    theirs, expected = run(Stepwise, target, head, draft_len)
    assert len(calls) == len(ours.seen)  # the other one does not call it
    assert state.tokens == expected.tokens
    for (tokens, taps, lengths), (other_tokens, other_taps, other_lengths) in zip(ours.seen, theirs.seen, strict=True):
        assert (tokens, lengths) == (other_tokens, other_lengths)
        assert torch.equal(taps, other_taps)


@FORMS
@pytest.mark.parametrize(("draft_len", "stop"), [(3, 0.1), (3, 0.4), (3, 0.7), (1, 0.9), (1, 0.97)])
def test_a_draft_stops_where_it_is_not_sure(draft_len, stop, config, monkeypatch):
    """The same lengths as step by step, of every kind."""
    target, head = exit_of(**config)
    calls, draft = [], FusedDraft.draft
    monkeypatch.setattr(FusedDraft, "draft", lambda *args: calls.append(draft(*args)) or calls[-1])
    ours, state = run(Watched, target, head, draft_len, stop=stop)
    assert None not in calls
    theirs, expected = run(Stepwise, target, head, draft_len, stop=stop)
    assert state.tokens == expected.tokens
    assert [(t, n) for t, _, n in ours.seen] == [(t, n) for t, _, n in theirs.seen]
    assert len({len(tokens) for tokens, _, _ in ours.seen}) > 1


@FORMS
@pytest.mark.parametrize(("draft_len", "width", "stop"), [(1, 2, 0.0), (1, 4, 0.0), (3, 3, 0.0), (3, 3, 0.2)])
def test_the_same_siblings(draft_len, width, stop, config):
    """Trees too: the same tokens in the same order, taps and lengths, also in text that ends."""
    target, head = exit_of(**config)
    plain, _ = run(Watched, target, head, draft_len, width=width)
    end = plain.seen[3][0][0]
    for eos_ids in (frozenset(), frozenset({end})):
        ours, state = run(Watched, target, head, draft_len, stop=stop, width=width, eos_ids=eos_ids)
        theirs, expected = run(Stepwise, target, head, draft_len, stop=stop, width=width, eos_ids=eos_ids)
        assert state.tokens == expected.tokens
        assert [(t, n) for t, _, n in ours.seen] == [(t, n) for t, _, n in theirs.seen]
        assert all(torch.equal(a[1], b[1]) for a, b in zip(ours.seen, theirs.seen, strict=True))
    assert any(len(tokens) > draft_len for tokens, _, _ in plain.seen)


@FORMS
@pytest.mark.parametrize(
    ("draft_len", "width", "filters"),
    [(1, 1, {}), (3, 1, {"temperature": 1.3}), (2, 3, {"top_k": 7}), (2, 2, {"top_p": 0.6}), (2, 3, {"min_p": 0.2}),
     (1, 3, {"top_k": 30, "top_p": 0.8, "temperature": 1.5})],
)  # fmt: skip
def test_the_same_drafts_where_tokens_are_drawn(draft_len, width, filters, config, monkeypatch):
    """With the noise of the target's own draws: tokens, siblings, text, but for a tie that rounds otherwise."""
    target, head = exit_of(**config)
    head.config = head.config.model_copy(update={"noise_scale": 0.6})
    calls, draft = [], FusedDraft.draft
    monkeypatch.setattr(FusedDraft, "draft", lambda *args: calls.append(draft(*args)) or calls[-1])
    settings = {"sampling": Sampling(**{"temperature": 0.9, **filters}), "seed": 11, "width": width}
    ours, state = run(Watched, target, head, draft_len, **settings)
    assert len(calls) == len(ours.seen) > 0
    assert None not in calls
    theirs, expected = run(Stepwise, target, head, draft_len, **settings)
    assert state.tokens == expected.tokens
    same = [a[0] == b[0] for a, b in zip(ours.seen, theirs.seen, strict=False)]
    assert sum(same) >= len(same) - 1
    calls.clear()
    run(Watched, target, head, draft_len, **settings | {"sampling": Sampling(temperature=1.0, repetition_penalty=1.2)})
    assert not calls


def test_noise_of_the_kernel_is_the_references():
    cpu_noise = importlib.import_module(KERNELS + "cpu_noise")
    ids = torch.arange(0, 40_000, 7)
    low, high = noise_reference.keys(5, 0, 17)
    made = torch.zeros(len(ids))
    cpu_noise.add_noise(made.data_ptr(), ids.data_ptr(), 0, len(ids), low, high, 1.0, -math.inf)
    expected = -uniform(5, 0, [17], ids)[0].double().log().neg().log()
    torch.testing.assert_close(made.double(), expected, rtol=2e-6, atol=2e-6)


@FORMS
def test_in_bfloat16_the_text_stays_and_drafts_hardly_change(config, monkeypatch):
    """With the kernel's weights as they are, not in eight bits."""
    target, head = exit_of(dtype=torch.bfloat16, **config)
    made = dispatch.cpu_draft(target.device).Compressed
    monkeypatch.setattr(head, "compressed", lambda weight, _: made(weight.detach(), None))
    ours, state = run(Watched, target, head, 2)
    theirs, expected = run(Stepwise, target, head, 2)
    assert state.tokens == expected.tokens
    same = [a[0] == b[0] for a, b in zip(ours.seen, theirs.seen, strict=False)]
    assert sum(same) >= 0.9 * len(same)


def test_weights_in_eight_bits_are_near_and_kept() -> None:
    """Rounded once, to half a 127th of a row's largest, where the CPU has the products; once more when changed."""
    cpu_draft = dispatch.cpu_draft(torch.device("cpu"))
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    made = cpu_draft.compressed(weight)
    if made.scales is not None:
        error = (made.weight * made.scales[:, None] - weight.float()).abs()
        assert (error <= 0.501 * weight.float().abs().amax(1, keepdim=True) / 127).all()
    assert cpu_draft.compressed(weight.float()).scales is None
    _, head = exit_of(dtype=torch.bfloat16)
    output = head.head.output.weight
    first = head.compressed(output, cpu_draft.compressed)
    assert head.compressed(output, cpu_draft.compressed) is first
    output.mul_(2)
    assert head.compressed(output, cpu_draft.compressed) is not first


@pytest.mark.parametrize("rows", [1, 3, 8, 11])
def test_products_with_weights_in_eight_bits(rows: int) -> None:
    cpu_dot, cpu_math = pytest.importorskip("selfspec.kernels.cpu_dot"), importlib.import_module(KERNELS + "cpu_math")
    if not cpu_dot.HAS_PAIRS:
        pytest.skip("this CPU does not multiply pairs of bfloat16")
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 96, generator=generator).bfloat16().float()
    weight = torch.randint(-127, 128, (24, 96), generator=generator).to(torch.int8)
    scales, y = torch.rand(24, generator=generator), torch.full((rows, 24), float("nan"))
    room = torch.empty(rows * 96, dtype=torch.bfloat16)
    addresses = [t.data_ptr() for t in (x, weight, scales, y)]
    cpu_math.byte_product(*addresses, rows, 96, 0, 24, 24, room.data_ptr())
    expected = (x.double() @ weight.double().T * scales).float()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)


@FORMS
@pytest.mark.parametrize("draft_len", [1, 3])
def test_two_threads_draft_the_same(draft_len, config):
    target, head = exit_of(**config)
    one, _ = run(Watched, target, head, draft_len)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        two, _ = run(Watched, target, head, draft_len)
    finally:
        torch.set_num_threads(before)
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(one.seen, two.seen, strict=True))


@FORMS
def test_a_draft_ends_behind_an_end_of_text(config):
    target, head = exit_of(**config)
    plain, _ = run(Watched, target, head, 4)
    end = next(tokens[1] for tokens, _, _ in plain.seen)  # some draft's second token
    for kind in (Watched, Stepwise):
        drafter, _ = run(kind, target, head, 4, eos_ids=frozenset({end}))
        assert all(end not in tokens[:-1] for tokens, _, _ in drafter.seen)
    ours, theirs = (run(kind, target, head, 4, eos_ids=frozenset({end}))[0].seen for kind in (Watched, Stepwise))
    assert [(t, n) for t, _, n in ours] == [(t, n) for t, _, n in theirs]


@FORMS
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=9)])
def test_logits_that_are_not_finite_end_drafting_and_change_no_text(config, sampling):
    target, head = exit_of(**config)
    _, expected = run(Stepwise, target, head, 2, sampling=sampling)
    head.head.output.weight[5, 3] = float("nan")
    drafter, state = run(Watched, target, head, 2, sampling=sampling)
    assert drafter.is_broken
    assert state.stats.num_drafted == 0
    assert state.tokens == expected.tokens


def test_what_is_not_plainly_greedy_goes_step_by_step(monkeypatch):
    target, head = exit_of()
    kernel = dispatch.cpu_draft(target.device).DraftCall
    monkeypatch.setattr(kernel, "__call__", lambda *_: pytest.fail("called"))
    state = new_state(target, prompt_of(9, vocab_size=192), 12, min_length=30)
    list(decode(target, ChainDrafter(target, head, 2), state))
    list(decode(target, Stepwise(target, head, 2), new_state(target, prompt_of(9, vocab_size=192), 12)))
