"""Detection of the first step that is not finite, without synchronising with the device.

The host knows the loss of a step on a GPU only after synchronising, and by then later steps can have made weights,
moments and state NaN as well. So the device itself stores a flag, which every step reads and can set. Once the flag is
set, the optimizer does not update, and the state and the buffers keep the values that they had before that step, in a
CUDA graph as well. The host reads the flag from time to time, and finds everything that is needed to repeat the step.
The alternative, copies of weights and moments every few steps, from which the following batches are repeated, takes
twice the memory of both, and finds the step only if kernels are deterministic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gatewise.training.carried import flatten, unflatten


class FiniteGuard:
    """A flag on the device which is set when a step is not finite.

    Args:
        device: The device of the model.

    Attributes:
        raised: The flag, a float32 scalar: 1 from the first step that was not finite, 0 before; fused optimizers take
            it as `found_inf`.
        skipped: The number of steps without effect since then, including the first one, as a float32 scalar.
    """

    def __init__(self, device: torch.device) -> None:
        self.raised = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)
        self._flag = torch.zeros((), dtype=torch.bool, device=device)
        self._written: set[int] | None = None

    @torch.no_grad()
    def observe(self, loss: torch.Tensor, state: Any) -> list[torch.Tensor]:
        """Return some numbers that are finite if and only if a loss and the state after it are."""
        leaves = [leaf for leaf in flatten(state)[0] if leaf.is_floating_point() and leaf.numel()]
        # By rows: PyTorch reduces a small tensor to one number, or several tensors, on few multiprocessors.
        return [loss.detach(), *[leaf.abs().amax(-1) for leaf in leaves]]

    @torch.no_grad()
    def check(self, values: Sequence[torch.Tensor]) -> None:
        """Set the flag if any of the numbers (at least one) is not finite; count the step if the flag is set."""
        # Zero times a number differs from zero only if the number is not finite, and NaN counts as true.
        wrong = _times_zero(values).any()
        torch.logical_or(self.raised, wrong, out=self._flag)
        self.raised.copy_(self._flag)
        self.skipped.add_(self._flag)

    @torch.no_grad()
    def state(self, before: Any, after: Any) -> Any:
        """Return the state after a step, or the state before it if the flag is set and both have the same structure."""
        (old, old_shape), (new, shape) = flatten(before), flatten(after)
        if old_shape != shape or any(one.shape != other.shape for one, other in zip(old, new, strict=True)):
            return after
        kept = [torch.where(self._flag, one, other) for one, other in zip(old, new, strict=True)]
        return unflatten(dict(enumerate(kept)), shape)

    @torch.no_grad()
    def copies(self, buffers: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, int, torch.Tensor]]:
        """Return the buffers that a forward pass may modify, each with its version and a copy, for `put_back`.

        In the first call these are all buffers, later those that were modified before.
        """
        listed = [each for each in buffers if self._written is None or id(each) in self._written]
        return [(each, each._version, each.clone()) for each in listed]

    @torch.no_grad()
    def put_back(self, copies: Iterable[tuple[torch.Tensor, int, torch.Tensor]]) -> None:
        """If the flag is set, copy the values back into the buffers that were modified since."""
        written = [(each, copy) for each, version, copy in copies if each._version != version]
        self._written = (self._written or set()) | {id(each) for each, _ in written}
        for each, copy in written:
            each.copy_(torch.where(self._flag, copy, each))


@torch.no_grad()
def joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a scalar that is 0 if all given numbers are finite, otherwise NaN."""
    return _times_zero(values).sum()


def _times_zero(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.float().reshape(-1) for each in values]) * 0
