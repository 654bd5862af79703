"""A whole greedy chain drafted by one kernel on a CPU, not step by step; the drafter's own steps are the definition.

Shapes: R rows, D hidden, n recalled layers, K drafted tokens.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfspec.exits import ExitHead
from selfspec.kernels import dispatch
from selfspec.target import Target
from selfspec.verify import Draft

if TYPE_CHECKING:
    from selfspec.decode import DecodeState

MAX_BACKLOG = 8  # rows that the block catches up on in one call; more of them, as behind a prompt, go step by step


class FusedDraft:
    """Drafts greedy chains of at most ``draft_len`` tokens for one text."""

    def __init__(self, target: Target, exit_head: ExitHead, draft_len: int) -> None:
        self.target, self.exit_head = target, exit_head
        self._kernel = self._prepare(draft_len)

    def _prepare(self, draft_len: int) -> Any:
        """The kernel with the head's weights; None where something is not as it expects."""
        target, head, kernels = self.target, self.exit_head, dispatch.cpu_kernels(self.target.device)
        if kernels is None or head.adapter is None or head.exit_layer < 1:
            return None
        table: Any = target.base.get_input_embeddings()
        norm: Any = head.norm
        output, maps = head.head.output, list(head.bridge.maps)
        weights = [table.weight, output.weight, *(m.weight for m in maps)]
        is_plain = target.is_plain_embed and target.is_plain_head and type(table) is nn.Embedding
        if not is_plain or output.bias is not None or getattr(norm, "variance_epsilon", None) is None:
            return None
        if not all(kernels.takes(w) and w.dtype == target.dtype for w in weights):
            return None
        return dispatch.cpu_draft(target.device).DraftCall(
            table.weight.detach(),
            [(m.weight.detach(), m.bias.detach().float()) for m in maps],
            norm.weight.detach().float(),
            output.weight.detach(),
            head.vocab_ids,
            draft_len,
            kernels.num_threads(),
        )

    def draft(self, state: "DecodeState", num_drafts: int) -> tuple[Draft, bool] | None:
        """``num_drafts`` tokens behind ``state``'s last one, and whether the head's logits were not finite.

        None, and nothing done, where the kernel cannot be used.
        """
        target, head, cache, kernel = self.target, self.exit_head, state.cache, self._kernel
        rows = 1 + sum(taps.shape[1] for taps, _ in state.backlog)
        if kernel is None or rows > MAX_BACKLOG or torch.is_grad_enabled():
            return None
        dtype = target.dtype
        like = torch.empty(1, 1, target.hidden_size, dtype=dtype)
        shallow, slot = range(head.exit_layer), range(target.num_layers, target.num_layers + 1)
        trunk = target.fused.plan(target.layers[: head.exit_layer], like, shallow, cache)
        block = target.fused.plan([head.block], like, slot, cache)
        if trunk is None or block is None or trunk.call(1).threads != kernel.threads:
            return None
        calls = (trunk.call(1), block.call(rows), block.call(1))
        for call in calls:
            call.begin(dtype == torch.float32)
        self._fill(kernel.inputs(rows), state)
        position, seen = cache.lengths[0], cache.lengths[slot.start]
        tokens, tops, taps = kernel(*calls, state.tokens[-1], position, seen, trunk.last_position, num_drafts)
        is_broken = not all(map(math.isfinite, tops))
        if is_broken:
            tokens = tokens[: [math.isfinite(top) for top in tops].index(False)]
        ends = [i for i, token in enumerate(tokens) if token in state.eos_ids]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        state.backlog = []
        cache.advance(shallow, len(tokens) + 1)
        cache.advance(slot, rows + max(len(tokens) - 1, 0))
        draft = Draft(
            tokens=torch.tensor([tokens], dtype=torch.long),
            parents=torch.arange(len(tokens))[None],
            taps=taps[:, : len(tokens) + 1].to(dtype, copy=True),
        )
        return draft, is_broken

    def _fill(self, inputs: Tensor, state: "DecodeState") -> None:
        """What the bridge reads: taps and recalled states that the block has not seen, and the newest recalled ones."""
        size, row = self.target.hidden_size, 0
        for taps, recalls in state.backlog:
            inputs[row : row + taps.shape[1], :size] = taps[0]
            if recalls is not None:
                inputs[row : row + taps.shape[1], size:] = recalls[0]
            row += taps.shape[1]
        if state.recall is not None:
            inputs[row, size:] = state.recall[0, 0]
