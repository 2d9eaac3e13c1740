"""The arguments of the forward and the backward kernel, and launching a tiling."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from pathlib import Path

import torch

from gatewise.cells import Cell
from gatewise.contract.device import Device
from gatewise.derivation.device import device_code
from gatewise.kernels.cuda import driver, toolchain
from gatewise.kernels.persistent import failure
from gatewise.kernels.persistent.plan import Tiling, stacked_tiling, tiling

_ALREADY = contextlib.nullcontext()
SOURCES = Path(__file__).parent / "cuda"


def pointers_of_each_direction(*names: str) -> list[tuple[str, type]]:
    """Return the fields of a struct that point to two tensors of each name: forward, reverse."""
    return [(f"{name}_{direction}", ctypes.c_void_p) for name in names for direction in ("forward", "reverse")]


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names]


def _numbers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_int) for name in names]


class Forward(ctypes.Structure):
    """The struct `Forward` of forward.cu, field by field."""

    _fields_ = [
        *pointers_of_each_direction("gates", "weights", "bias_ih", "bias_hh", "y", "narrow", "cells"),
        *_pointers("h0", "c0", "h_n", "c_n", "lengths", "order", "failure"),
        *_numbers("start_forward", "start_reverse", "keep_gates"),
        *_numbers("time", "batch", "groups", "first_direction", "directions", "step", "row"),
        ("patience", ctypes.c_uint),
        *_pointers("between", "dropped", "mask"),
        *_numbers("mask_step", "mask_row"),
        ("scale", ctypes.c_float),
    ]


class Backward(ctypes.Structure):
    """The struct `Backward` of backward.cu, field by field."""

    _fields_ = [
        *pointers_of_each_direction("weights", "gates", "cells", "dy", "dgates"),
        *_pointers("c0", "dh_n", "dc_n", "dh0", "dc0", "bias"),
        *pointers_of_each_direction("dbias_ih", "dbias_hh"),
        *_pointers("done", "lengths", "order", "failure"),
        *_numbers("start_forward", "start_reverse", "earlier"),
        *_numbers("time", "batch", "groups", "first_direction", "directions", "step", "row"),
        ("patience", ctypes.c_uint),
        *_pointers("between", "dy_between", "mask"),
        *_numbers("mask_step", "mask_row"),
        ("scale", ctypes.c_float),
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """A tiling as machine code, ready to be launched.

    Attributes:
        cut: The tiling.
        entry: The kernel's name in the code.
        binary: The code.
        shape: Grid, blocks, clusters.
    """

    cut: Tiling
    entry: str
    binary: bytes
    shape: driver.Shape


@functools.lru_cache(maxsize=4096)
def launch_of(
    name: str,
    cell: Cell,
    hidden_size: int,
    batch: int,
    directions: int,
    dtype: torch.dtype,
    exact: bool,
    ragged: bool,
    device: torch.device,
    stacked: bool = False,
) -> Launch:
    """Return the launch of the pass "forward" or "backward", of a layer or of two stacked ones.

    Raises:
        ValueError: The weights do not fit on the chip, which a criterion refuses beforehand.
    """
    numbers = Device.probe(device)
    asked = numbers, name == "backward", dtype.itemsize, exact
    cut = stacked_tiling(hidden_size, batch, *asked) if stacked else tiling(hidden_size, batch, directions, *asked)
    if cut is None:
        raise ValueError(f"the weights of hidden_size {hidden_size} do not fit on the chip")
    macros = {"SIZE": hidden_size, **cut.macros(dtype == torch.float16, ragged)}
    binary = toolchain.compile_source(SOURCES / f"{name}.cu", numbers.architecture, macros, device_code(cell))
    shape = driver.Shape(cut.grid, cut.warps * 32, cut.shared_bytes, cut.split)
    return Launch(cut, f"recurrent_{name}", binary, shape)


def run(launch: Launch, arguments: Forward | Backward, directions: int, device: torch.device) -> None:
    """Launch both directions at once, or one after the other where they do not fit beside each other.

    Raises:
        WaitGivenUp: An earlier call on the device gave up.
    """
    failure.raise_if_given_up(device.index)
    with on(device):
        for first in range(0, directions, launch.cut.directions):
            arguments.first_direction = first
            driver.launch(launch.binary, launch.entry, launch.shape, arguments, device)


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a device is the current one; it costs nothing where it is so already."""
    # A tensor of the device is there, so CUDA is up.
    return _ALREADY if device.index == torch._C._cuda_getDevice() else torch.cuda.device(device)
