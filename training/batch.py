"""Many answers written at once over one static cache, and what the target's layers held while they were written.

Prompts are padded on the left, so that all of them end at one slot and go on together; a sequence whose answer ends
leaves the batch.

Shapes: B prompts, b sequences under way, T slots, S tokens of a row, A tokens of an answer, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.cache import KVCache
from selfspec.target import Target


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
    size, longest, device = len(prompts), max(map(len, prompts)), target.device
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)  # [B, T]
    pads = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    temperatures, eos = temperatures.to(device), torch.tensor(list(eos_ids), device=device)
    cache = KVCache(target.num_layers, longest + max_new_tokens, pads=pads)
    notes = _Notes(target, depths, size, cache.capacity)
    rows, num_tokens = torch.arange(size, device=device), torch.zeros(size, dtype=torch.long, device=device)
    for step in range(max_new_tokens):
        logits = notes.run(ids, cache, rows)  # [b, V]
        tokens = sample(logits, temperatures, generator)  # [b]
        notes.tokens[rows, step], notes.argmaxes[rows, step] = tokens, logits.argmax(-1)
        notes.log_sums[rows, step] = logits.logsumexp(-1)
        num_tokens[rows] += 1
        alive = ~torch.isin(tokens, eos)
        if not alive.all():
            rows, tokens, temperatures = rows[alive], tokens[alive], temperatures[alive]
            cache.select(alive.nonzero()[:, 0])
        if not len(rows):
            break
        ids = tokens[:, None]
    return [notes.of(row, longest - len(prompt), longest, int(num_tokens[row])) for row, prompt in enumerate(prompts)]


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


class _Notes:
    """Tokens, states and sums of all prompts of a batch, filled in as they come."""

    def __init__(self, target: Target, depths: Sequence[int], size: int, slots: int) -> None:
        self.target = target
        like = torch.empty(0, dtype=target.dtype, device=target.device)
        self.states = {depth: like.new_zeros(size, slots, target.hidden_size) for depth in sorted(set(depths))}
        self.log_sums = torch.zeros(size, slots, device=target.device)
        self.argmaxes, self.tokens = (torch.zeros_like(self.log_sums, dtype=torch.long) for _ in range(2))

    def run(self, ids: Tensor, cache: KVCache, rows: Tensor) -> Tensor:
        """Run ``ids`` [b, R], the sequences ``rows`` [b], through the target: the logits [b, V] of the last ones."""
        first = cache.lengths[0]
        hidden = self.target.embed(ids, first, pads=cache.pads)
        logits, states = self.target.finish(hidden, 0, cache, list(self.states), num_logits=1)
        for depth, held in self.states.items():
            held[rows, first : first + ids.shape[1]] = states[depth]
        return logits[:, 0]

    def of(self, row: int, begin: int, answer: int, num_tokens: int) -> Written:
        """What row ``row`` became, whose prompt begins at slot ``begin`` and whose answer at slot ``answer``."""
        stop = answer + num_tokens - 1
        states = {depth: held[row, begin:stop] for depth, held in self.states.items()}
        tokens: list[int] = self.tokens[row, :num_tokens].tolist()
        return Written(tokens, states, self.log_sums[row, :num_tokens], self.argmaxes[row, :num_tokens])
