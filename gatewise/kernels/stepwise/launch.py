"""Compile and launch the element-wise CUDA kernels, and define their argument structs."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.cells import Cell
from gatewise.contract.device import Device
from gatewise.derivation.device import device_code
from gatewise.derivation.row import row_code
from gatewise.kernels.criteria import is_fused
from gatewise.kernels.cuda import driver, formats, toolchain
from gatewise.kernels.stepwise.product_layout import THREADS, ProductLayout, row_tiling, tiling

SOURCES = Path(__file__).parent / "cuda"
_POINTER, _STRIDE, _SIZE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_ONE_THREAD = driver.Shape((1, 1, 1), 1, 0, cooperative=False)


class Forward(ctypes.Structure):
    """The struct `Forward` of forward.cu and of row_forward.cu; the former has no parameters and no masks."""

    _fields_ = [
        *[(name, _POINTER) for name in ("gates", "product", "bias", "hidden", "cell", "output", "cells", "lengths")],
        *[(f"gates_{axis}", _STRIDE) for axis in ("direction", "time", "outer", "gate")],
        *[(f"product_{axis}", _STRIDE) for axis in ("direction", "outer", "gate")],
        *[(f"output_{axis}", _STRIDE) for axis in ("direction", "time", "outer")],
        *[(name, _SIZE) for name in ("time", "outer", "inner", "step")],
        *[(name, _POINTER) for name in ("resets", "parameters", "statistics", "masks", "factors")],
        ("directions", _SIZE),
        ("undropped", _POINTER),
    ]


class Backward(ctypes.Structure):
    """The struct `Backward` of backward.cu and of row_backward.cu; the former has no parameters and no masks."""

    _fields_ = [
        *[(name, _POINTER) for name in ("gates", "written", "dgates", "cells", "c0", "dy", "dh_n", "product")],
        *[(name, _POINTER) for name in ("dcell", "lengths")],
        *[(f"gates_{axis}", _STRIDE) for axis in ("direction", "time", "outer", "gate")],
        *[(f"dgates_{axis}", _STRIDE) for axis in ("direction", "outer", "gate")],
        *[(f"dy_{axis}", _STRIDE) for axis in ("direction", "time", "outer")],
        *[(f"product_{axis}", _STRIDE) for axis in ("direction", "part")],
        *[(name, _SIZE) for name in ("parts", "whole", "time", "outer", "inner", "step")],
        *[(name, _POINTER) for name in ("resets", "parameters", "statistics", "dparameters", "masks", "factors")],
        ("directions", _SIZE),
    ]


class ForwardProjection(ctypes.Structure):
    """The struct `Forward` of projection.cu."""

    _fields_ = [
        *[(name, _POINTER) for name in ("product", "hidden", "output", "lengths")],
        *[(f"output_{axis}", _STRIDE) for axis in ("direction", "time", "outer")],
        *[(name, _SIZE) for name in ("time", "outer", "inner", "step")],
    ]


class BackwardProjection(ctypes.Structure):
    """The struct `Backward` of projection.cu."""

    _fields_ = [
        *[(name, _POINTER) for name in ("product", "dy", "dh_n", "dhidden", "written", "lengths")],
        *[(f"dy_{axis}", _STRIDE) for axis in ("direction", "time", "outer")],
        *[(name, _SIZE) for name in ("time", "outer", "inner", "step")],
    ]


class EnteredForward(ctypes.Structure):
    """The struct `Entered<Forward>` of recorded.cuh."""

    _fields_ = [("table", _POINTER), ("arguments", Forward)]


class EnteredBackward(ctypes.Structure):
    """The struct `Entered<Backward>` of recorded.cuh."""

    _fields_ = [("table", _POINTER), ("arguments", Backward)]


class Recorded(ctypes.Structure):
    """The struct `Recorded` of recorded.cuh."""

    _fields_ = [("table", _POINTER), ("step", _SIZE)]


Arguments = Forward | Backward | ForwardProjection | BackwardProjection


class Launch:
    """An element-wise kernel, compiled for one layout and one size; calling the object launches the kernel.

    Args:
        name: The name of the source file in `cuda/`, without the suffix; for cells that are not fused, the source file
            is the one with the prefix `row_`.
        entry: The name of the kernel.
        layout: The layout of the tensors.
        planes: A tensor [D, B, N] of the size and on the device that the kernel runs on.
        dtype: The dtype of the tensors in memory.
        cell: The cell whose step the kernel computes, or None.
        early: Whether the kernel may start before the preceding product has finished (programmatic dependent launch),
            if the device supports it.
        resets: Whether the arguments contain resets.
    """

    def __init__(
        self,
        name: str,
        entry: str,
        layout: ProductLayout,
        planes: Tensor,
        dtype: torch.dtype,
        cell: Cell | None = None,
        *,
        early: bool = False,
        resets: bool = False,
    ) -> None:
        directions, batch, units = planes.shape
        self._entry, self._device, self._cell = entry, planes.device, cell
        numbers = Device.probe(planes.device)
        early = early and numbers.capability >= (9, 0)
        if cell is not None and not is_fused(cell):
            threads, each = row_tiling(units)
            self._name, self._macros = f"row_{name}", row_macros(dtype, threads, each)
            self._shape = driver.Shape((batch, 1, directions), threads, 0, cooperative=False, early=early)
            return
        sizes = (*layout.axes(batch, units), directions, dtype.itemsize, numbers.multiprocessors)
        width, lanes, grid = tiling(*sizes)
        self._name, self._macros = name, macros_of(dtype, width, lanes, layout, resets=resets)
        self._shape = driver.Shape(grid, THREADS, 0, cooperative=False, early=early)

    def __call__(self, arguments: Arguments, step: int) -> None:
        """Launch the kernel for one step."""
        arguments.step = step
        self._launch(self._entry, self._shape, arguments, table=0)

    def enter(self, table: int, arguments: Forward | Backward) -> None:
        """Write the arguments to the address `table` in device memory, from which captured launches read them."""
        arguments.step = 0
        entered = EnteredForward if isinstance(arguments, Forward) else EnteredBackward
        self._launch(f"enter_{self._name}", _ONE_THREAD, entered(table, arguments), table=1)

    def recorded(self, table: int, step: int) -> None:
        """Launch the kernel with the arguments at the address `table`, `step` steps after the step stored there."""
        self._launch(self._entry, self._shape, Recorded(table, step), table=1)

    def advance(self, table: int, steps: int) -> None:
        """Add a number of steps to the step stored at the address `table`."""
        self._launch(f"advance_{self._name}", _ONE_THREAD, Recorded(table, steps), table=1)

    def _launch(self, entry: str, shape: driver.Shape, arguments: ctypes.Structure, table: int) -> None:
        binary = _binary(self._name, self._cell, (*self._macros, ("TABLE", table)), self._device.index)
        driver.launch(binary, entry, shape, arguments, self._device)


class Prepared(NamedTuple):
    """A launch whose struct begins with addresses, which each call writes anew.

    Attributes:
        addresses: The struct as an array of addresses.
        launch: A function that launches the kernel on the current stream, with the struct as it is then.
    """

    addresses: ctypes.Array[ctypes.c_uint64]
    launch: Callable[[], None]

    @classmethod
    def of(
        cls, binary: bytes, entry: str, shape: driver.Shape, arguments: ctypes.Structure, device: torch.device
    ) -> Prepared:
        """Prepare the launch of a kernel; the arguments are those of `driver.prepared`."""
        addresses = (ctypes.c_uint64 * (ctypes.sizeof(arguments) // 8)).from_buffer(arguments)
        return cls(addresses, driver.prepared(binary, entry, shape, arguments, device))

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch the kernel, with the addresses of these tensors as the first ones in the struct; 0 for None."""
        self.addresses[: len(tensors)] = [address(tensor) or 0 for tensor in tensors]
        self.launch()


def macros_of(
    dtype: torch.dtype, width: int, lanes: int, layout: ProductLayout, *, resets: bool = False
) -> tuple[tuple[str, int], ...]:
    """Return the macros with which the sources are compiled, except for TABLE."""
    layout_macros = ("WIDTH", width), ("LANES", lanes), ("COLUMN", int(layout.column_major))
    return (*formats.macros(dtype).items(), *layout_macros, *((("RESETS", 1),) if resets else ()))


def row_macros(dtype: torch.dtype, threads: int, units: int) -> tuple[tuple[str, int], ...]:
    """Return the macros with which the sources for rows are compiled, except for TABLE.

    Args:
        dtype: The dtype of the tensors in memory.
        threads: The number of threads of a block.
        units: The number of hidden units that a thread computes.
    """
    return (*formats.macros(dtype).items(), ("THREADS", threads), ("UNITS", units))


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's first element; None for None."""
    return None if tensor is None else tensor.data_ptr()


@functools.lru_cache(maxsize=1024)
def _binary(name: str, cell: Cell | None, macros: tuple[tuple[str, int], ...], device_index: int) -> bytes:
    architecture = Device.probe(torch.device("cuda", device_index)).architecture
    code = None if cell is None else device_code(cell) if is_fused(cell) else row_code(cell)
    return toolchain.compile_source(SOURCES / f"{name}.cu", architecture, dict(macros), code)
