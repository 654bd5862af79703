"""The engine timed part by part, after its texts have been checked: what a cycle costs and what it could win.

Times are of whole steps as the engine runs them: captured graphs on a GPU, the same steps called one by one elsewhere.
A cycle's time does not depend on what is accepted, so that a model of random weights gives a true cost; its speedup is
then stated for *simulated* acceptance rates: tau of a chain, (1 - a^(k+1)) / (1 - a), over the cycle's cost.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from selfspec.costs import at_one_place, device_cycle, interleave, random_prompt, timed, weight_share
from selfspec.device_cycle import DeviceCycle
from selfspec.device_steps import Kind
from selfspec.engine import capture
from selfspec.eval.bench_kernels import copy_bandwidth
from selfspec.eval.measure import Meter, Phases, Request
from selfspec.eval.peers import StaticCompiled, Transformers
from selfspec.eval.plots import COLOURS, png
from selfspec.exits import ExitHead
from selfspec.model import EarlyExitModel

WIDTHS = (1, 2, 3, 5, 9, 17, 33, 64)  # rows of a verify pass
DRAFT_LENS = (1, 2, 3, 5, 8)
ACCEPTANCE = (0.5, 0.6, 0.7, 0.8, 0.9)  # simulated
CONTEXT = 1000


@dataclass(frozen=True)
class Shape:
    """A model to be timed: the default one, or one of random weights."""

    name: str
    sizes: dict[str, int] = field(default_factory=dict)  # of a Llama; none: the default model with its exits
    exit_layers: tuple[int, ...] = ()  # of untrained exits, where draft steps are timed


def shapes(device: torch.device) -> list[Shape]:
    """Those of the specification on a GPU, small ones elsewhere."""
    if device.type != "cuda":
        tiny = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
                "vocab_size": 1024, "max_position_embeddings": 4096}  # fmt: skip
        return [Shape("6 layers of 64", tiny | {"num_hidden_layers": 6}, (1, 2)),
                Shape("20 layers of 64", tiny | {"num_hidden_layers": 20}, (1, 2, 4))]  # fmt: skip
    wide = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
            "vocab_size": 128256, "max_position_embeddings": 131072}  # fmt: skip
    return [
        Shape("SmolLM2-135M", exit_layers=(1, 3, 6)),
        Shape("8B", wide | {"num_hidden_layers": 32}, (2, 4, 8)),
        Shape("80 layers of 4096", wide | {"num_hidden_layers": 80}, (4, 8, 16)),
    ]


def build(shape: Shape, device: torch.device, dtype: torch.dtype) -> EarlyExitModel:
    """The model with untrained exits at the shape's layers; the default model keeps its own besides."""
    if not shape.sizes:
        model = EarlyExitModel.from_pretrained(device=device, dtype=dtype)
    else:
        config = AutoConfig.for_model("llama", **shape.sizes, eos_token_id=None)
        with torch.device(device):
            base = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model = EarlyExitModel.from_target(base.eval())
    model.engine.mode = "graphs" if device.type == "cuda" else "calls"
    model.exits |= {f"layer-{n}": ExitHead.untrained(model.target, n) for n in shape.exit_layers}
    return model


def check(model: EarlyExitModel, num_tokens: int = 32) -> dict[str, bool]:
    """Whether the engine's text with drafts from each exit is its own without, in exact mode: to the last token."""
    ids, found = random_prompt(model.target, 48), {}
    settings: dict[str, Any] = {"max_new_tokens": num_tokens, "draft_len": 2, "exact": True, "eos_token_id": None}
    expected = model.generate(ids, draft="off", **settings).sequences
    for name in model.exits:
        found[name] = torch.equal(model.generate(ids, exit=name, **settings).sequences, expected)
    return found


@dataclass(frozen=True)
class Bench:
    """Steps of one model behind a context, ready to be timed."""

    model: EarlyExitModel
    context: int
    is_captured: bool

    def cycle(self, head: ExitHead | None, draft_len: int) -> DeviceCycle:
        """A cycle at this context."""
        return device_cycle(self.model.target, Kind(head, draft_len), self.context)

    def step(self, call: Callable[[], Any]) -> Callable[[], float]:
        """Seconds of ``call``, captured where the engine would capture it."""
        with torch.no_grad():
            replay = capture(call) if self.is_captured else call

        def run() -> float:
            with torch.no_grad():
                return timed(replay)

        return run

    def verify(self, rows: int) -> Callable[[], float]:
        """A whole pass of so many rows."""
        cycle, target = self.cycle(None, rows - 1), self.model.target
        hidden = torch.zeros(1, rows, target.hidden_size, dtype=target.dtype, device=target.device)
        return self.step(lambda: cycle.score(hidden))

    def draft(self, head: ExitHead) -> Callable[[], float]:
        """The first draft step: trunk, exit, guess."""
        cycle = self.cycle(head, 1)
        drafter = cycle.drafter
        assert drafter is not None
        return self.step(lambda: drafter.guess(drafter.first_states(drafter.trunk(cycle.held.token, 0), 1), []))

    def whole(self, head: ExitHead | None, draft_len: int) -> Callable[[], float]:
        """A whole cycle, at one place."""
        return self.step(at_one_place(self.cycle(head, draft_len)))


def parts(model: EarlyExitModel, rounds: int, context: int) -> dict[str, Any]:
    """Milliseconds of passes by rows, of a draft step and of whole cycles by exit, and their ratios to a plain step.

    What a cycle takes beyond its parts is said of chains, whose draft steps are alike.
    """
    bench = Bench(model, context, model.engine.mode == "graphs")
    heads = model.exits
    methods = {f"verify {rows}": bench.verify(rows) for rows in WIDTHS}
    methods |= {"step": bench.whole(None, 0)}
    for name, head in heads.items():
        methods[f"draft {name}"] = bench.draft(head)
        methods |= {f"cycle {name} {k}": bench.whole(head, k) for k in DRAFT_LENS}
    runs = {name: 1e3 * statistics.median(times) for name, times in interleave(methods, rounds).items()}
    step, found = runs["step"], dict[str, Any]()
    for name, head in heads.items():
        draft, share = runs[f"draft {name}"], weight_share(model, head)
        cycles = {k: runs[f"cycle {name} {k}"] for k in DRAFT_LENS}
        bare = {k: k * draft + _between(runs, k + 1) for k in DRAFT_LENS if head.config.form == "chain"}
        found[name] = {
            "draft_ms": draft, "draft_over_step": draft / step, "draft_over_weights": draft / step / share,
            "cycle_ms": cycles, "cycle_over_step": {k: t / step for k, t in cycles.items()},
            "overhead_over_step": {k: (cycles[k] - parts) / step for k, parts in bare.items()},
            "simulated_speedup": {str(a): max(_tau(a, k) * step / cycles[k] for k in DRAFT_LENS) for a in ACCEPTANCE},
        }  # fmt: skip
    verify = {rows: runs[f"verify {rows}"] for rows in WIDTHS}
    return {"step_ms": step, "verify_ms": verify, "exits": found,
            "verify_over_1": {rows: t / verify[1] for rows, t in verify.items()}}  # fmt: skip


def _between(runs: dict[str, float], rows: int) -> float:
    """Time of a pass of ``rows`` rows, interpolated between those that were timed."""
    above = next(w for w in WIDTHS if w >= rows)
    below = max((w for w in WIDTHS if w <= rows), default=above)
    share = (rows - below) / (above - below) if above > below else 0.0
    return (1 - share) * runs[f"verify {below}"] + share * runs[f"verify {above}"]


def _tau(acceptance: float, draft_len: int) -> float:
    """Tokens a cycle of a chain whose every draft is accepted with the same chance."""
    return (1 - acceptance ** (draft_len + 1)) / (1 - acceptance)


def plain(model: EarlyExitModel, rounds: int, context: int, num_tokens: int, bandwidth: float) -> dict[str, Any]:
    """Tokens a second without drafts: this engine, transformers' generate, the same with static cache and compiled."""
    ids = random_prompt(model.target, context)
    methods: dict[str, Callable[[], float]] = {"selfspec": partial(_speed, model, ids, num_tokens, draft="off")}
    peers: dict[str, Transformers] = {"transformers": Transformers(model)}
    if model.target.device.type == "cuda":
        peers["static, compiled"] = StaticCompiled(model)
    for name, peer in peers.items():
        peer.prepare(ids, Request(num_tokens))
        methods[name] = partial(_peer_speed, peer, ids, num_tokens)
    speeds = {name: statistics.median(values) for name, values in interleave(methods, rounds).items()}
    target = model.target
    is_tied = target.embedding.weight is target.output.weight  # one of an embedding's rows is read
    read = {*target.base.parameters()} - (set() if is_tied else {target.embedding.weight})
    weights = sum(p.numel() * p.element_size() for p in read)
    heads, width = target.config.num_key_value_heads, target.config.hidden_size // target.config.num_attention_heads
    cached = 2 * target.num_layers * heads * width * context * target.embedding.weight.element_size()
    limit = bandwidth / (weights + cached)
    ours = speeds["selfspec"]
    return {"tokens_per_second": speeds, "limit": limit, "over_limit": ours / limit,
            "over": {name: ours / value for name, value in speeds.items() if name != "selfspec"}}  # fmt: skip


def _speed(model: EarlyExitModel, ids: Tensor, num_tokens: int, **settings: Any) -> float:
    made = model.generate(ids, max_new_tokens=num_tokens, eos_token_id=None, exact=False, **settings)
    return made.stats.tokens_per_second


def _peer_speed(peer: Transformers, ids: Tensor, num_tokens: int) -> float:
    run = Meter(ids.device).measure(lambda meter: peer.run(ids, Request(num_tokens), meter, Phases()))
    return run.num_decoded / run.decode_seconds


def plot(held: dict[str, Any]) -> bytes:
    """PNG: what a pass costs by its rows, and what a cycle would win at simulated acceptance rates."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for colour, row in zip(COLOURS, held["models"], strict=False):
        rows = [int(r) for r in row["verify_over_1"]]
        left.plot(rows, list(row["verify_over_1"].values()), color=colour, marker="o", label=row["model"])
        for line, (name, costs) in zip(("-", "--", ":", "-."), row["exits"].items(), strict=False):
            rates, values = costs["simulated_speedup"].keys(), costs["simulated_speedup"].values()
            right.plot([float(a) for a in rates], list(values), line, color=colour, label=f"{row['model']}, {name}")
    left.set(xscale="log", xlabel="rows of a pass", ylabel="time over one row")
    right.set(xlabel="acceptance rate (simulated)", ylabel="speedup at the best draft length")
    for side in (left, right):
        side.grid(alpha=0.3)
        side.legend(fontsize="small")
    figure.suptitle(
        f"{held['provenance']['device']}, {held['dtype']}, {held['models'][0]['context']} tokens of context"
    )
    return png(figure)


def table(held: dict[str, Any]) -> Table:
    """One row a model and exit."""
    shown = Table(title=f"{held['provenance']['device']}, {held['dtype']}", title_justify="left")
    for name in ("model", "exit", "step ms", "over limit", "over transformers", "5 rows / 1", "draft / step",
                 "cycle k=2 / step", "overhead k=2", "S at a=.7 (simulated)", "S greedy, T=1"):  # fmt: skip
        shown.add_column(name, justify="right")
    for row in held["models"]:
        for name, costs in row["exits"].items():
            speed = ", ".join(f"{s['speedup']:.2f}" for s in row["speedups"].values()) if name == row["default"] else ""
            shown.add_row(
                row["model"], name, f"{row['step_ms']:.2f}", f"{row['plain']['over_limit']:.2f}",
                f"{row['plain']['over']['transformers']:.2f}", f"{row['verify_over_1'][5]:.2f}",
                f"{costs['draft_over_step']:.3f}", f"{costs['cycle_over_step'][2]:.3f}",
                f"{costs['overhead_over_step'].get(2, math.nan):.3f}", f"{costs['simulated_speedup']['0.7']:.2f}",
                speed,
            )  # fmt: skip
    return shown


def encode(model: EarlyExitModel, turns: Sequence[str]) -> list[Tensor]:
    """User turns as prompts [1, S], in the model's chat template."""
    assert model.tokenizer is not None
    chats = [[{"role": "user", "content": turn}] for turn in turns]
    make = partial(model.tokenizer.apply_chat_template, add_generation_prompt=True, return_tensors="pt")
    return [make(chat, return_dict=True)["input_ids"].to(model.target.device) for chat in chats]


def speedups(model: EarlyExitModel, prompts: Sequence[Tensor], num_tokens: int) -> dict[str, Any]:
    """Tokens a second with the default exit over those without drafts, prompt by prompt in turn: greedy, and at T=1."""
    found, ways = {}, dict[str, dict[str, Any]](greedy={"temperature": 0.0}) | {"T=1": {"temperature": 1.0, "seed": 0}}
    for name, sampling in ways.items():
        ratios, taus = [], []
        for ids in prompts:
            times = {}
            for draft in (None, "off"):
                made = model.generate(ids, max_new_tokens=num_tokens, draft=draft, exact=False, **sampling)
                times[draft] = made.stats.tokens_per_second
                if draft is None:
                    taus.append(made.stats.tau)
            ratios.append(times[None] / times["off"])
        found[name] = {"speedup": statistics.median(ratios), "tau": statistics.mean(taus), "prompts": len(ratios)}
    return found


def run(
    device: torch.device, dtype: torch.dtype, turns: Sequence[str],
    chosen: Sequence[Shape] | None = None, rounds: int = 9, context: int = CONTEXT, num_tokens: int = 64,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One finding a model. Raises FloatingPointError where drafts change a text."""
    bandwidth = copy_bandwidth(device)
    yield {"copy_bandwidth": bandwidth}
    for shape in shapes(device) if chosen is None else chosen:
        model = build(shape, device, dtype)
        checked = check(model)
        if not all(checked.values()):
            raise FloatingPointError(f"{shape.name}: drafts changed the text: {checked}")
        yield {
            "model": shape.name, "is_random": bool(shape.sizes), "context": context, "same_text": checked,
            "default": None if model.default_exit is None else model.default_exit.name,
            "plain": plain(model, rounds, context, num_tokens, bandwidth), **parts(model, rounds, context),
            "speedups": {} if shape.sizes else speedups(model, encode(model, turns), num_tokens),
        }  # fmt: skip
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()
