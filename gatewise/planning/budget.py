"""Parsing of memory budgets such as "8GB"."""

from __future__ import annotations

import re

from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, sentence

AUTO = "auto"
USABLE = 0.9
"""The fraction of a device's memory that a plan may use; the rest is for fragmentation and for the system."""

CONTEXT_BYTES = 800 << 20
"""The memory of a CUDA context and of the code of libraries and kernels on a GPU. On an H200 with PyTorch 2.11 the
driver reported 530 MiB less free memory after the first tensor, and 760 MiB less, beyond what the allocator held, after
training steps."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_TOO_MUCH = float(1 << 63)
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def bytes_of(budget: str, device: Device) -> int | None:
    """Return a budget in bytes.

    Args:
        budget: A number with a unit, such as "8GB" (10^9 bytes each) or "7.5 GiB" (2^30); or "auto" for 90% of the
            device's memory less the CUDA context.
        device: The device of the training.

    Returns:
        The number of bytes; None for "auto" on a device whose memory size is unknown.

    Raises:
        ArgumentError: The budget is neither "auto" nor a size as text.

    Examples:
        >>> from gatewise.contract.device import Device
        >>> bytes_of("8GB", Device.named("h200"))
        8000000000
    """
    if budget == AUTO:
        if not device.memory_bytes:
            return None
        return int(USABLE * device.memory_bytes) - CONTEXT_BYTES * (device.kind == "cuda")
    found = _FORM.fullmatch(budget) if isinstance(budget, str) else None
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or not 0 < float(found[1]) * unit < _TOO_MUCH:
        raise ArgumentError(sentence("memory_budget", "'auto' or a size such as 8GB or 7.5GiB", repr(budget)))
    return int(float(found[1]) * unit)
