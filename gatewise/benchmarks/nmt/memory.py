"""Where the memory of a training step goes at its peak, part by part.

PyTorch's allocator can write down every allocation and every release with the Python lines that asked for it. From
that, the moment at which most is allocated is found, and what lies there then is given to parts by the innermost line
that belongs to one: attention; LSTM, with the decoder's loop; output, the softmax over the vocabulary; other, such as
embeddings. What autograd's own operators allocate has no such line and is "backward", with the gradients; what lay
there before the step is "weights", with the optimizer's state. Writing it down changes no allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

ATTENTION, LSTM, OUTPUT, OTHER, BACKWARD, WEIGHTS = "attention", "LSTM", "output", "other", "backward", "weights"
PARTS = (ATTENTION, LSTM, OUTPUT, OTHER, BACKWARD, WEIGHTS)

# Part, end or folder of the file's name, function (any where empty).
_LINES = (
    (ATTENTION, "/gatewise/attention/", ""),
    (ATTENTION, "/gatewise/nn/attention.py", ""),
    (ATTENTION, "/nmt/rival_attention.py", ""),
    (LSTM, "/gatewise/kernels/", ""),
    (LSTM, "/gatewise/feeding/", ""),
    (LSTM, "/gatewise/functional/", ""),
    (LSTM, "/gatewise/nn/lstm.py", ""),
    (LSTM, "/gatewise/nn/cell.py", ""),
    (LSTM, "/torch/nn/modules/rnn.py", ""),
    (OUTPUT, "softmax.py", ""),
    (OUTPUT, "/gatewise/models/seq2seq.py", "loss"),
    (OUTPUT, "/nmt/rival.py", "loss"),
    (OTHER, "/gatewise/models/seq2seq.py", ""),
    (OTHER, "/nmt/rival.py", ""),
)
_BLOCK = 512  # bytes
_MOST_EVENTS = 1_000_000

Event = Mapping[str, Any]


def parts_of_step(step: Callable[[], object], device: torch.device) -> dict[str, int] | None:
    """Run a step and return the bytes of each part at its peak, all that is allocated on the device counted.

    Args:
        step: What is run, once; its libraries and caches are ready.
        device: Where it works.

    Returns:
        Bytes by part; None on a CPU, whose allocations PyTorch does not write down.
    """
    if device.type != "cuda":
        return None
    memory = torch.cuda.memory
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    memory._record_memory_history(enabled="all", context="alloc", stacks="python", max_entries=_MOST_EVENTS)
    try:
        step()
        torch.cuda.synchronize(device)
        events = memory._snapshot(device).get("device_traces", [[]])[torch.cuda.current_device()]
    finally:
        memory._record_memory_history(enabled=None)
    return parts_at_peak(events, before)


def parts_at_peak(events: Iterable[Event], before: int) -> dict[str, int]:
    """Return the bytes of each part at the moment when most is allocated.

    Args:
        events: The allocator's: `action`, `addr`, `size` and, of an allocation, `frames`, the innermost first.
        before: Bytes that were allocated before the first of them.
    """
    parts = dict.fromkeys(PARTS, 0) | {WEIGHTS: before}
    live: dict[int, tuple[str, int]] = {}
    total = peak = before
    found = dict(parts)
    for event in events:
        if event["action"] == "alloc":
            # It writes down what was asked for, and counts in whole blocks.
            part, size = part_of(event.get("frames", ())), -(-event["size"] // _BLOCK) * _BLOCK
            live[event["addr"]] = part, size
            parts[part] += size
            total += size
            if total > peak:
                peak, found = total, dict(parts)
        elif event["action"] == "free_completed":
            # What the recording did not see being allocated was there before it.
            part, size = live.pop(event["addr"], (WEIGHTS, -(-event["size"] // _BLOCK) * _BLOCK))
            parts[part] -= size
            total -= size
    return found


def part_of(frames: Sequence[Event]) -> str:
    """Return the part that allocates, from the lines that led there, the innermost first."""
    for frame in frames:
        file = frame["filename"]
        for part, place, function in _LINES:
            if place in file and function in ("", frame["name"]):
                return part
    return BACKWARD
