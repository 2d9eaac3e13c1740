"""Where the memory of a training step goes at its peak, part by part.

PyTorch's profiler can write down every allocation and every release. From that, the moment at which most is allocated
is found, and what lies there then is given to the part that allocated it (`gatewise.benchmarks.nmt.scopes`): attention;
LSTM, with the decoder's loop; output, the softmax over the vocabulary; other, such as embeddings. What autograd's own
operators allocate is "backward", with the gradients and the update; what lay there before the step is "weights", with
the optimizer's state. Writing it down changes no allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from gatewise.benchmarks.nmt.parts import PARTS, WEIGHTS
from gatewise.benchmarks.nmt.scopes import Allocation, allocations


def parts_of_step(step: Callable[[], object], device: torch.device) -> dict[str, int] | None:
    """Run a step and return the bytes of each part at its peak, all that is allocated on the device counted.

    Args:
        step: What is run, once; its libraries and caches are ready.
        device: Where it works.

    Returns:
        Bytes by part; None on a CPU, where PyTorch does not count what lay there before.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    return parts_at_peak(allocations(step, device), before)


def parts_at_peak(seen: Iterable[Allocation], before: int) -> dict[str, int]:
    """Return the bytes of each part at the moment when most is allocated.

    Args:
        seen: What the allocator did, in order.
        before: Bytes that were allocated before the first of them.
    """
    parts = dict.fromkeys(PARTS, 0) | {WEIGHTS: before}
    live: dict[int, str] = {}
    total = peak = before
    found = dict(parts)
    for address, size, own in seen:
        if size > 0:
            live[address] = own
        # What was not seen being allocated was there before.
        part = own if size > 0 else live.pop(address, WEIGHTS)
        parts[part] += size
        total += size
        if total > peak:
            peak, found = total, dict(parts)
    return found
