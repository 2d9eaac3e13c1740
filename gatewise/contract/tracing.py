"""Whether the call of this thread is traced by `torch.compile` or `torch.export`.

PyTorch's own functions tell whether any thread compiles or exports, so that calls of other threads would be taken for
traced ones. Where each Python call counts, PyTorch's function is asked first.
"""

from __future__ import annotations

import torch
from torch._guards import TracingContext


def is_compiling() -> bool:
    """Return whether `torch.compile` or `torch.export` traces the call."""
    return torch.compiler.is_compiling() and (torch.compiler.is_dynamo_compiling() or _in_this_thread())


def is_exporting() -> bool:
    """Return whether `torch.export` traces the call; with PyTorch 2.6 only if ``strict=False``."""
    # PyTorch 2.6 has no such function. There, only `torch.export` lets the other one be true outside of Dynamo.
    return getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)() and _in_this_thread()


# Without this, `torch.compile` of PyTorch 2.11 takes the function of PyTorch as always true.
is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _in_this_thread() -> bool:
    """Return whether this thread traces: in Dynamo, in AOTAutograd, or by operators on fake tensors."""
    if TracingContext.try_get() is not None:
        return True
    modes = torch._C._TorchDispatchModeKey
    return torch._C._len_torch_dispatch_stack() > 0 and any(
        torch._C._get_dispatch_mode(mode) for mode in (modes.PROXY, modes.FAKE, modes.FUNCTIONAL)
    )
