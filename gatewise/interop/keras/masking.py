"""Conversion of Keras masks to lengths: unmasked steps are moved to the front before the kernel, and back after it.

In Keras, a masked step leaves the state unchanged and repeats the previous output. The recurrence therefore runs over
the unmasked steps only, and a mask of any form costs one gather of the input and one of the output. Nothing in this
module synchronises with the device.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gatewise.contract.tracing import is_compiling


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Masking:
    """The positions of the unmasked steps.

    Attributes:
        mask: True for unmasked steps [B, T], bool.
        seen: The number of unmasked steps up to and including each step [B, T].
        order: The permutation of steps that moves unmasked steps to the front [B, T]; None if they are there already.
    """

    mask: Tensor
    seen: Tensor
    order: Tensor | None

    @classmethod
    def of(cls, mask: Tensor) -> Masking | None:
        """Return the masking of a mask [B, T]; None if all steps are known to be unmasked without synchronising."""
        mask = mask.bool()
        seen = mask.cumsum(1)
        readable = mask.device.type == "cpu" and not is_compiling()
        if readable and bool(mask.all()):
            return None
        # A mask for right-padded sequences never changes from False to True.
        if readable and not bool((mask[:, 1:] & ~mask[:, :-1]).any()):
            return cls(mask, seen, None)
        return cls(mask, seen, torch.argsort(~mask, dim=1, stable=True))

    @property
    def lengths(self) -> Tensor:
        """The number of unmasked steps of each sequence [B]."""
        return self.seen[:, -1]

    def gathered(self, x: Tensor) -> Tensor:
        """Return inputs [B, T, F] with the unmasked steps in front, followed by zeros."""
        if self.order is not None:
            x = x.gather(1, self.order.unsqueeze(2).expand_as(x))
        steps = torch.arange(x.shape[1], device=x.device)
        return torch.where((steps < self.lengths.unsqueeze(1)).unsqueeze(2), x, 0)

    def spread(self, y: Tensor, zeros: bool) -> Tensor:
        """Return outputs [B, T, F] at their original steps, given outputs in the order of `gathered`.

        Args:
            y: The outputs; those after the unmasked steps are ignored.
            zeros: Whether the outputs of masked steps are zero; otherwise they repeat the previous output, which is
                zero before the first unmasked step.
        """
        index = (self.seen - 1).clamp(min=0).unsqueeze(2).expand_as(y)
        there = self.mask if zeros else self.seen > 0
        return torch.where(there.unsqueeze(2), y.gather(1, index), 0)
