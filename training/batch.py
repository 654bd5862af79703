"""Many answers written at once over one static cache, and what the target's layers held while they were written.

Prompts are padded on the left, so that all of them end at one slot and go on together; a sequence whose answer ends
leaves the batch. What all prompts begin with is run once, and of the rest hardly any padding.

Shapes: B prompts, b sequences under way, T slots, S tokens of a row, A tokens of an answer, D hidden, V vocabulary.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.cache import KVCache
from selfspec.device_steps import Passes
from selfspec.engine import capture, hooked, mode_for
from selfspec.rows import num_shared
from selfspec.target import Target

logger = logging.getLogger(__name__)

CHUNK = 16  # slots of prompts that are run together; a prompt joins in the chunk where it begins


@dataclass(frozen=True)
class Written:
    """An answer, and what it was written from."""

    answer: list[int]  # its end token included
    states: dict[int, Tensor]  # [S - 1, D] by depth (layers behind them): all tokens of prompt and answer but the last
    log_sums: Tensor  # [A], log of the sum of exp(logits)
    argmaxes: Tensor  # [A], most probable tokens


@torch.inference_mode()
def write_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    temperatures: Tensor,
    max_new_tokens: int,
    generator: torch.Generator,
    eos_ids: Sequence[int],
    depths: Sequence[int] = (),
) -> list[Written]:
    """Continue each prompt up to an end token or ``max_new_tokens``; ``temperatures`` [B], 0 is greedy.

    ``depths`` are those at which states are kept.
    """
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    prompts, temperatures = [prompts[i] for i in order], temperatures[order].to(target.device)
    size, longest, eos = len(prompts), len(prompts[0]), torch.tensor(list(eos_ids), device=target.device)
    cache = KVCache(target.num_layers, longest + max_new_tokens)
    notes = _Notes(target, depths, size, cache.capacity)
    logits = notes.read(prompts, cache)  # [b, V]
    rows = torch.arange(size, device=target.device)
    num_tokens, alive = torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
    replayed = _Replayed.of(target, cache)
    for step in range(max_new_tokens):
        tokens = sample(logits, temperatures, generator)  # [b]
        notes.tokens[rows, step], notes.argmaxes[rows, step] = tokens, logits.argmax(-1)
        notes.log_sums[rows, step] = logits.logsumexp(-1)
        num_tokens[rows] += alive
        alive &= ~torch.isin(tokens, eos)
        num_alive = int(alive.sum())
        if not num_alive or step + 1 == max_new_tokens:
            break
        if num_alive <= (len(rows) - 1 if replayed is None else len(rows) // 2):  # each size is another graph
            rows, tokens, temperatures = rows[alive], tokens[alive], temperatures[alive]
            cache.select(alive.nonzero()[:, 0])
            alive = alive[alive]
        logits = notes.run(tokens[:, None], cache, rows, replayed)
    written = [notes.of(i, longest - len(prompt), longest, int(num_tokens[i])) for i, prompt in enumerate(prompts)]
    return [written[order.index(i)] for i in range(size)]


def sample(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """Tokens [b] of ``logits`` [b, V]: the most probable one where the temperature is 0.

    The others invert the cumulative distribution: one random number a sequence, not V.
    """
    tokens = logits.argmax(-1)
    warm = temperatures > 0
    if warm.any():
        total = (logits[warm] / temperatures[warm, None]).softmax(-1).cumsum(-1)  # [b, V]
        draws = torch.rand(len(total), 1, generator=generator, device=logits.device) * total[:, -1:]
        tokens[warm] = torch.searchsorted(total, draws, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return tokens


class _Replayed:
    """A step of all sequences with nothing to ask the host: on a GPU one graph, captured for each size of the batch."""

    def __init__(self, target: Target, is_captured: bool) -> None:
        self.target, self.is_captured = target, is_captured
        self._cache: KVCache | None = None
        self._size = 0
        self._step: Callable[[], None]

    @classmethod
    def of(cls, target: Target, cache: KVCache) -> "_Replayed | None":
        """None where steps are plain calls: on a CPU, and where a graph would miss what the target does."""
        mode = mode_for(target.device)
        if mode == "off" or target.is_split or not target.is_plain_embed or hooked(target.base) is not None:
            return None
        try:
            target.calls_for(cache).require_windows()
        except NotImplementedError:
            return None
        return cls(target, mode == "graphs")

    def __call__(self, ids: Tensor, cache: KVCache, depths: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Logits [b, 1, V] and states [b, 1, D] of ``ids`` [b, 1], which stand until the next step."""
        first = cache.lengths[0]
        if self._cache is not cache or self._size != len(ids):
            self._prepare(ids, cache, depths)
        self._ids.copy_(ids)
        self._first.fill_(first)
        self._step()
        cache.advance(range(self.target.num_layers), 1)
        made = () if self._states is None else self._states.split(self.target.hidden_size, dim=-1)
        return self._logits, dict(zip(sorted(depths), made, strict=True))

    def _prepare(self, ids: Tensor, cache: KVCache, depths: Sequence[int]) -> None:
        passes, order = Passes(self.target, cache), sorted(depths)
        self._cache, self._size = cache, len(ids)
        self._ids, self._first = ids.clone(), torch.full((1,), cache.lengths[0], device=ids.device)

        def step() -> None:
            hidden = self.target.embed(self._ids)
            self._logits, self._states = passes.finish(hidden, 0, self._first, order, None)

        self._step = step
        if self.is_captured:
            try:
                self._step = capture(step)
            except RuntimeError as error:  # whatever an operation that cannot be captured raises
                self.is_captured = False
                logger.warning("steps run as plain calls, slower: %s", " ".join(str(error).split()))


class _Notes:
    """Tokens, states and sums of all prompts of a batch, filled in as they come."""

    def __init__(self, target: Target, depths: Sequence[int], size: int, slots: int) -> None:
        self.target = target
        like = torch.empty(0, dtype=target.dtype, device=target.device)
        self.states = {depth: like.new_zeros(size, slots, target.hidden_size) for depth in sorted(set(depths))}
        self.log_sums = torch.zeros(size, slots, device=target.device)
        self.argmaxes, self.tokens = (torch.zeros_like(self.log_sums, dtype=torch.long) for _ in range(2))

    def read(self, prompts: Sequence[Sequence[int]], cache: KVCache) -> Tensor:
        """Run ``prompts``, the longest first, through the target: the logits [B, V] of their last tokens."""
        longest, shared, device = len(prompts[0]), num_shared(prompts), self.target.device
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        ids, rows = torch.tensor(padded, device=device), torch.arange(len(prompts), device=device)  # [B, T], [B]
        pads = longest - torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.run(ids[:1, : max(shared, 1)], cache, rows[:1])  # one token at least, for the cache to be laid out
        cache.spread(pads)
        cache.rollback(shared)
        for held in self.states.values():
            for row, pad in enumerate(pads.tolist()):
                held[row, pad : pad + shared] = held[0, :shared].clone()
        for begin in range(shared, longest, CHUNK):
            stop = min(begin + CHUNK, longest)
            count = int((pads + shared < stop).sum())
            logits = self.run(ids[:count, begin:stop], cache.first(count), rows[:count])
        return logits

    def run(self, ids: Tensor, cache: KVCache, rows: Tensor, replayed: "_Replayed | None" = None) -> Tensor:
        """Run ``ids`` [b, R], the sequences ``rows`` [b], through the target: the logits [b, V] of the last ones."""
        first = cache.lengths[0]
        if replayed is None:
            hidden = self.target.embed(ids, first, pads=cache.pads)
            logits, states = self.target.finish(hidden, 0, cache, list(self.states), num_logits=1)
        else:
            logits, states = replayed(ids, cache, list(self.states))
        for depth, held in self.states.items():
            held[rows, first : first + ids.shape[1]] = states[depth]
        return logits[:, 0]

    def of(self, row: int, begin: int, answer: int, num_tokens: int) -> Written:
        """What row ``row`` became, whose prompt begins at slot ``begin`` and whose answer at slot ``answer``."""
        stop = answer + num_tokens - 1
        states = {depth: held[row, begin:stop] for depth, held in self.states.items()}
        tokens: list[int] = self.tokens[row, :num_tokens].tolist()
        return Written(tokens, states, self.log_sums[row, :num_tokens], self.argmaxes[row, :num_tokens])
