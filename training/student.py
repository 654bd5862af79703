"""The training graph of an exit: the same parts that decode, over whole rows."""

import torch
from peft import PeftModel
from torch import Tensor, nn

from selfspec.exits import active, unwrap
from selfspec.target import Target
from selfspec.training.states import StudentHead, Teacher, recall_back


class Student(nn.Module):
    """The training graph of an exit: bridge maps chosen by each position's draft step, block, exit norm."""

    target: Target
    head: StudentHead
    teacher: Teacher
    vocab_ids: Tensor | None

    def __init__(self, target: Target, adapter: PeftModel, vocab_ids: Tensor | None) -> None:
        super().__init__()
        self.adapter = adapter
        self.__dict__["target"] = target  # not a submodule: nothing of it is trained or saved
        self.__dict__["head"] = StudentHead(target, vocab_ids)
        self.__dict__["vocab_ids"] = vocab_ids
        self.__dict__["teacher"] = Teacher(target, vocab_ids)

    def forward(self, taps: Tensor, recalls: Tensor | None, steps: Tensor) -> Tensor:
        """Normed states [B, S, D]; ``recalls`` [B, S, nD] at their own positions, ``steps`` [B, S] from 1."""
        module = unwrap(self.adapter)
        maps = active(module.bridge).maps
        if recalls is None:
            return module(self.target, maps[0](taps))
        inputs = torch.cat([taps, recall_back(recalls, steps)], dim=-1)  # [B, S, (1 + n) D]
        which = steps.clamp(max=len(maps))
        bridged = taps.new_zeros(taps.shape)
        for j, linear in enumerate(maps, start=1):
            chosen = which == j
            bridged = bridged.index_put(chosen.nonzero(as_tuple=True), linear(inputs[chosen]))
        return module(self.target, bridged)

    def guess(self, logits: Tensor) -> Tensor:
        """The exit's most probable token ids [A], from logits [A, V_d]."""
        best = logits.argmax(-1)
        return best if self.vocab_ids is None else self.vocab_ids[best]

    def trained_state(self) -> dict[str, Tensor]:
        """Copies of all weights that training changes, by name."""
        return {n: p.detach().clone() for n, p in self.adapter.named_parameters() if p.requires_grad}

    def load_trained_state(self, state: dict[str, Tensor]) -> None:
        """Put back what `trained_state` gave."""
        own = {n: p for n, p in self.adapter.named_parameters() if p.requires_grad}
        if own.keys() != state.keys():
            raise ValueError(f"state has other weights: {sorted(own.keys() ^ state.keys())[:4]}")
        with torch.no_grad():
            for name, value in state.items():
                own[name].copy_(value)
