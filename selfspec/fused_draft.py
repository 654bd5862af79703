"""A whole draft by one kernel on a CPU, not step by step; the drafter's own steps are the definition.

Shapes: R rows, D hidden, n recalled layers, K drafted tokens.
"""

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfspec.exits import ExitHead
from selfspec.kernels import dispatch, noise_reference
from selfspec.sampling import TARGET_STREAM
from selfspec.target import Target
from selfspec.verify import Draft

if TYPE_CHECKING:
    from selfspec.decode import DecodeState

MAX_BACKLOG = 16  # rows that the block catches up on in one call; more of them, as behind a prompt, go step by step


class FusedDraft:
    """Drafts for one text, which ``eos_ids`` end; the other arguments as in `ChainDrafter`."""

    def __init__(
        self, target: Target, exit_head: ExitHead, draft_len: int, min_confidence: float, draft_width: int,
        min_branch: float, eos_ids: Collection[int], most_looked: int = 0,
    ) -> None:  # fmt: skip
        self.target, self.exit_head, self.draft_width = target, exit_head, draft_width
        self.most_looked = most_looked  # tokens of a draft up to which looked-up ones join it
        self.is_one_pass = exit_head.config.form == "parallel" or draft_len == 1
        self.is_recursive = exit_head.config.form == "recursive"
        self._kernel = self._prepare(draft_len, min_confidence, min_branch, eos_ids)

    def _prepare(self, draft_len: int, min_confidence: float, min_branch: float, eos_ids: Collection[int]) -> Any:
        """The kernel with the head's weights; None where something is not as it expects."""
        target, head, kernels = self.target, self.exit_head, dispatch.cpu_kernels(self.target.device)
        if kernels is None or not head.blocks:
            return None
        if head.correction is not None and (not self.is_one_pass or head.config.correction == "state"):
            return None  # steps are corrected one by one
        table: Any = target.base.get_input_embeddings()
        norm: Any = head.norm
        output, maps = head.head.output, [*head.bridge.maps, *([head.bridge.feedback] if self.is_recursive else [])]
        tables = [] if head.correction is None else [head.correction.before.weight, head.correction.after.weight]
        weights = [table.weight, output.weight, *(m.weight for m in maps), *tables]
        is_plain = target.is_plain_embed and target.is_plain_head and type(table) is nn.Embedding
        if not is_plain or output.bias is not None or getattr(norm, "variance_epsilon", None) is None:
            return None
        if not all(kernels.takes(w) and w.dtype == target.dtype for w in weights):
            return None
        module = dispatch.cpu_draft(target.device)
        parts = module.DraftHead(
            embedding=table.weight.detach(),
            maps=[(head.compressed(m.weight, module.compressed), m.bias.detach().float()) for m in maps],
            norm=norm.weight.detach().float(),
            vocabulary=head.compressed(output.weight, module.compressed),
            vocab_ids=head.vocab_ids,
            is_one_pass=self.is_one_pass,
            is_recursive=self.is_recursive,
            correction=tuple(t.detach() for t in tables) or None,
            confidence=(head.confidence.weight.detach().float()[0].contiguous(), head.confidence.bias.detach().float()),
        )
        return module.DraftCall(
            parts, draft_len, kernels.num_threads(), min_confidence, self.draft_width, min_branch, eos_ids,
            self.most_looked,
        )  # fmt: skip

    def draft(self, state: "DecodeState", num_drafts: int, looked: Sequence[int] = ()) -> tuple[Draft, bool] | None:
        """At most ``num_drafts`` tokens behind ``state``'s last one, and whether the head's logits were not finite.

        Greedy, or drawn with the noise of `coupled`; repetitions are not looked at. ``looked`` are tokens that may
        follow as well, and join the draft. None, and nothing done, where the kernel cannot be used.
        """
        target, head, cache, kernel = self.target, self.exit_head, state.cache, self._kernel
        rows = 1 + sum(taps.shape[1] for taps, _ in state.backlog)
        if kernel is None or rows > MAX_BACKLOG or torch.is_grad_enabled():
            return None
        dtype = target.dtype
        like = torch.empty(1, 1, target.hidden_size, dtype=dtype)
        shallow, slots = range(head.exit_layer), head.slots(target)
        block = target.fused.plan(head.blocks, like, slots, cache)
        trunk = block and target.fused.plan(target.layers[: head.exit_layer], like, shallow, cache, block)
        if trunk is None or block is None or trunk.call(1).threads != kernel.threads:
            return None
        is_chain, width = not self.is_one_pass and not self.is_recursive, self.draft_width
        most = 1 if is_chain else num_drafts  # rows of the trunk
        if width > 1 or looked:
            most = 1 + max(num_drafts * width, self.most_looked if looked else 0)
        position, seen = cache.lengths[0], cache.lengths[slots.start]
        if max(position + max(most, num_drafts + 1), seen + rows + num_drafts - 1) > cache.capacity:
            return None  # step by step, where there is room or a word about it
        trunks = [trunk.call(n + 1) for n in range(most)]
        blocks = [block.call(rows + num_drafts - 1)] if self.is_one_pass else [block.call(rows), block.call(1)]
        for call in (*trunks, *blocks):
            call.begin(dtype == torch.float32)
        self._fill(kernel.inputs(rows), state)
        noise, sampling = list[tuple[int, int]](), state.sampling
        if not sampling.is_greedy:  # the noise that verification will draw with
            places = range(len(state.tokens), len(state.tokens) + num_drafts)
            noise = [noise_reference.keys(state.seed, TARGET_STREAM, place) for place in places]
        made = kernel(
            trunks, blocks, state.tokens[-1], position, seen, trunk.last_position, num_drafts, noise,
            (sampling.temperature or 1.0, sampling.top_k, sampling.top_p, sampling.min_p, head.config.noise_scale),
            looked,
        )  # fmt: skip
        is_sound = [math.isfinite(top) for top in made.tops]
        is_broken, count = not all(is_sound), len(made.tops)
        count = is_sound.index(False) if is_broken else count
        tokens = made.tokens[:count] if is_broken else made.tokens
        parents = made.parents[: len(tokens)]
        state.backlog = []
        cache.advance(shallow, len(tokens) + 1)
        num_steps = max(count, 1) if is_broken else made.num_steps
        # rows of a parallel or recursive draft knew no tap of their own: they do not stay
        cache.advance(slots, rows + num_steps - 1 if is_chain else rows)
        draft = Draft(
            tokens=torch.tensor([tokens], dtype=torch.long),
            parents=torch.tensor([parents], dtype=torch.long),
            taps=made.taps[:, : len(tokens) + 1].to(dtype, copy=True),
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
