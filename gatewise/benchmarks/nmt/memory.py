"""The memory of a training step at its peak, by part.

PyTorch's profiler records all allocations and releases. The memory at the moment with the most allocated memory is
assigned to the parts that allocated it (`gatewise.benchmarks.nmt.scopes`): attention; LSTM, including the decoder's
loop; output, which is the softmax over the vocabulary; other, such as embeddings. Allocations by autograd's own
operators are "backward", including the gradients and the update; memory allocated before the step is "weights",
including the optimizer's state. The profiler changes no allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from gatewise.benchmarks.nmt.parts import PARTS, WEIGHTS
from gatewise.benchmarks.nmt.scopes import Allocation, allocations


def parts_of_step(step: Callable[[], object], device: torch.device) -> dict[str, int] | None:
    """Run a step and return the bytes of each part at its peak, including all memory allocated on the device.

    Args:
        step: The function to run, once; its libraries and caches must have been initialised.
        device: The device of the step.

    Returns:
        The bytes by part; None on a CPU, where PyTorch does not count the memory from before the step.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    return parts_at_peak(allocations(step, device), before)


def parts_at_peak(seen: Iterable[Allocation], before: int) -> dict[str, int]:
    """Return the bytes of each part at the moment with the most allocated memory.

    Args:
        seen: The actions of the allocator, in order.
        before: The number of bytes that were allocated before the first action.
    """
    parts = dict.fromkeys(PARTS, 0) | {WEIGHTS: before}
    live: dict[int, str] = {}
    total = peak = before
    found = dict(parts)
    for address, size, own in seen:
        if size > 0:
            live[address] = own
        # Memory whose allocation was not seen was allocated before.
        part = own if size > 0 else live.pop(address, WEIGHTS)
        parts[part] += size
        total += size
        if total > peak:
            peak, found = total, dict(parts)
    return found
