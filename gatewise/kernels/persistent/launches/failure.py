"""The failure flag: how a kernel that gave up waiting tells the host, without a synchronisation."""

from __future__ import annotations

import ctypes
import functools

import torch

from gatewise.contract.errors import ExchangeTimeout

# About ten seconds of polling: far longer than any wait on a healthy device, and short enough not to be a hang.
PATIENCE = 1 << 24


class Flag:
    """A word in pinned host memory that the kernels of a device set when they give up; the host reads it for free."""

    def __init__(self) -> None:
        self._word = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self.address = self._word.data_ptr()
        self._value = ctypes.c_int32.from_address(self.address)

    def is_set(self) -> bool:
        """Whether a kernel gave up since the flag was cleared."""
        return self._value.value != 0

    def clear(self) -> None:
        """Clear the flag."""
        self._value.value = 0


@functools.cache
def flag(device_index: int) -> Flag:
    """Return the flag of a device."""
    return Flag()


def raise_if_given_up(device_index: int) -> None:
    """Raise an error if an earlier call on this device gave up, and clear the flag, so that the next call runs.

    Raises:
        ExchangeTimeout: The message names the kernel and says what to report.
    """
    given_up = flag(device_index)
    if not given_up._value.value:  # the same as `is_set`, without a Python call in every call of the kernel
        return
    given_up.clear()
    raise ExchangeTimeout(
        "an earlier call of the kernel `persistent` gave up waiting for data from another multiprocessor; what "
        "depended on it is NaN. Repeat it with kernel='cudnn', and report what `gatewise.explain` prints for the call."
    )
