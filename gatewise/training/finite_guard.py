"""Stopping at the first step whose numbers are not finite, without waiting for the device.

The loss of a step on a GPU is known to the host only when the host waits for it, and by then later steps may long have
made weights, moments and state NaN too. So the device itself remembers: a flag lies there, which every step reads and
may raise. Once it is raised, the optimizer's update does nothing, and the state that is carried and the buffers stay as
they were before that step, in a captured graph as well. The host looks at the flag now and then, and finds
everything that is needed to repeat the step in its place. The alternative, a copy of weights and moments every so many
steps from which the batches since then are trained on again, takes their memory twice, and finds the step only where
kernels repeat their bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gatewise.training.carried import flatten, unflatten


class FiniteGuard:
    """Remembers on the device whether a step was not finite.

    Args:
        device: Where the model is.

    Attributes:
        raised: float32 []: 1 from the first step that was not finite on, before that 0; a fused optimizer takes it as
            its `found_inf`.
        skipped: float32 []: Steps since then that changed nothing, the first one included.
    """

    def __init__(self, device: torch.device) -> None:
        self.raised = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)
        self._flag = torch.zeros((), dtype=torch.bool, device=device)
        self._written: set[int] | None = None

    @torch.no_grad()
    def observe(self, loss: torch.Tensor, state: Any) -> list[torch.Tensor]:
        """Return scalars that are finite if and only if a loss and the state after it are."""
        leaves = [leaf for leaf in flatten(state)[0] if leaf.is_floating_point() and leaf.numel()]
        return [loss.detach(), *(torch._foreach_norm(leaves, ord=torch.inf) if leaves else ())]

    @torch.no_grad()
    def check(self, values: Sequence[torch.Tensor]) -> None:
        """Raise the flag unless these scalars, one or more, are finite; count the step if the flag is raised."""
        # Nothing but zero times a number that is not finite differs from zero, and NaN counts as true.
        wrong = _times_zero(values).any()
        torch.logical_or(self.raised, wrong, out=self._flag)
        self.raised.copy_(self._flag)
        self.skipped.add_(self._flag)

    @torch.no_grad()
    def state(self, before: Any, after: Any) -> Any:
        """Return the state after a step; that before it once the flag is raised, where both have the same form."""
        (old, old_shape), (new, shape) = flatten(before), flatten(after)
        if old_shape != shape or any(one.shape != other.shape for one, other in zip(old, new, strict=True)):
            return after
        kept = [torch.where(self._flag, one, other) for one, other in zip(old, new, strict=True)]
        return unflatten(dict(enumerate(kept)), shape)

    @torch.no_grad()
    def copies(self, buffers: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, int, torch.Tensor]]:
        """Return the buffers that a forward pass may write, each with its version and a copy; then see `put_back`.

        The first time these are all of them, then those that were written before.
        """
        listed = [each for each in buffers if self._written is None or id(each) in self._written]
        return [(each, each._version, each.clone()) for each in listed]

    @torch.no_grad()
    def put_back(self, copies: Iterable[tuple[torch.Tensor, int, torch.Tensor]]) -> None:
        """Write copies back into the buffers that have been written since, if the flag is raised."""
        written = [(each, copy) for each, version, copy in copies if each._version != version]
        self._written = (self._written or set()) | {id(each) for each, _ in written}
        for each, copy in written:
            each.copy_(torch.where(self._flag, copy, each))


@torch.no_grad()
def joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a scalar that is 0 where all of these are finite, otherwise NaN."""
    return _times_zero(values).sum()


def _times_zero(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([each.float() for each in values]) * 0
