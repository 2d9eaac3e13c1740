"""The order in which rows of different lengths are taken."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from gatewise.contract.device import Device
from gatewise.kernels.cuda import driver, toolchain
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent.launch import SOURCES, Launch, on

_THREADS = 256


class _Order(ctypes.Structure):
    """The struct `Order` of order.cu, field by field."""

    _fields_ = [("lengths", ctypes.c_void_p), ("order", ctypes.c_void_p), ("batch", ctypes.c_int)]


def longest_first(launch: Launch, lengths: Tensor | None, scratch: Scratch) -> Tensor | None:
    """Return the rows of a batch [B], the longest first, where a launch takes several groups of rows one after another.

    Groups of short rows are over early then. Groups that are all at work at once are as fast in any order: None.
    """
    if lengths is None or launch.cut.groups <= launch.cut.together:
        return None
    batch = lengths.shape[0]
    order = scratch.new_empty(batch, dtype=torch.int32)
    arguments = _Order(lengths.data_ptr(), order.data_ptr(), batch)
    shape = driver.Shape((-(-batch // _THREADS), 1, 1), _THREADS, 0, cooperative=False)
    with on(lengths.device):
        driver.launch(_code(lengths.device), "recurrent_order", shape, arguments, lengths.device)
    return order


@functools.lru_cache(maxsize=8)
def _code(device: torch.device) -> bytes:
    architecture = Device.probe(device).architecture
    return toolchain.compile_source(SOURCES / "order.cu", architecture, {"THREADS": _THREADS})
