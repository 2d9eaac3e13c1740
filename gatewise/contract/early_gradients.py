"""The points in the work of a backward pass at which it has computed the gradients of single weights.

An autograd node returns the gradients of all its inputs at once, but the work for them on a GPU ends one after the
other. What is to be done with a gradient on another stream, such as its exchange between processes, needs to wait only
for the point at which that gradient is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

_noted: ContextVar[EarlyGradients | None] = ContextVar("gatewise_early_gradients", default=None)


class EarlyGradients:
    """The gradients that kernels have computed in a `noted` block, with an event at the end of the work for each.

    An event stays true of a gradient because its memory is kept here, and is not used for another gradient meanwhile.
    Work that changes a gradient in place after its event is not waited for: who asks for an event must know that there
    is none. Autograd does so only where several nodes read a weight, and PyTorch does not allow hooks to do it.
    """

    def __init__(self) -> None:
        self._by_address: dict[int, tuple[Tensor, torch.cuda.Event]] = {}

    def note(self, gradient: Tensor) -> None:
        """Record an event on the current stream, whose work up to now computes a gradient."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(gradient.device))
        # Another tensor of the same memory, because autograd would copy a gradient that is referenced here.
        self._by_address[gradient.data_ptr()] = gradient.detach(), event

    def event_of(self, gradient: Tensor) -> torch.cuda.Event | None:
        """Return the event of a gradient; None if no kernel has noted this gradient."""
        noted, event = self._by_address.get(gradient.data_ptr(), (None, None))
        return event if noted is not None and noted.shape == gradient.shape else None


@contextlib.contextmanager
def noted() -> Iterator[EarlyGradients]:
    """Collect the gradients that kernels compute in the block, as far as they note them."""
    found = EarlyGradients()
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def note(gradient: Tensor) -> None:
    """Tell the `noted` block of this context, if there is one, that the current stream has computed a gradient."""
    found = _noted.get()
    if found is not None and gradient.is_cuda:
        found.note(gradient)
