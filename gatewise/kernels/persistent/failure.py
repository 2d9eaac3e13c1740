"""Waits that were given up: how a kernel tells the host without making it wait."""

from __future__ import annotations

import ctypes
import functools

import torch

from gatewise.contract.errors import GatewiseError

# About ten seconds of polling: far beyond any wait of a healthy device, and short enough to be an error, not a hang.
PATIENCE = 1 << 24


class WaitGivenUp(GatewiseError, RuntimeError):
    """A block waited for data that never came; the outputs that depend on it are NaN."""


class Flag:
    """The word that kernels of a device set when they give up, in pinned host memory: reading it costs nothing."""

    def __init__(self) -> None:
        self._word = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self.address = self._word.data_ptr()
        self._value = ctypes.c_int32.from_address(self.address)

    def is_set(self) -> bool:
        """Whether a kernel gave up since the flag was cleared."""
        return self._value.value != 0

    def clear(self) -> None:
        """Forget it."""
        self._value.value = 0


@functools.cache
def flag(device_index: int) -> Flag:
    """Return the flag of a device."""
    return Flag()


def raise_if_given_up(device_index: int) -> None:
    """Raise if an earlier call on this device gave up; the flag is cleared, so the next call runs.

    Like every error of asynchronous device work, it is seen by a later call than the one that caused it.

    Raises:
        WaitGivenUp: Naming the kernel and what to report.
    """
    given_up = flag(device_index)
    if not given_up._value.value:  # as `is_set`, one step less in every call
        return
    given_up.clear()
    raise WaitGivenUp(
        "an earlier call of the kernel `persistent` gave up waiting for data from another multiprocessor; what "
        "depended on it is NaN. Repeat it with kernel='cudnn', and report what `gatewise.explain` prints for the call."
    )
