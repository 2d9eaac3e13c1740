"""The CUDA kernels of the element-wise operations of a decoder step: arguments, compilation and launch."""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from gatewise.contract.device import Device
from gatewise.derivation.device import DeviceCode, device_code
from gatewise.feeding.elementwise import CELL, Dropout, Planes
from gatewise.kernels.cuda import driver, formats, toolchain

SOURCE = Path(__file__).parent / "cuda" / "cell.cu"
THREADS = 128  # per block, as in cell.cu
_VECTOR_BYTES = 16
_ENOUGH_THREADS = 512  # per multiprocessor
_POINTER, _STRIDE, _SIZE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class PlanesArgument(ctypes.Structure):
    """The struct `Planes` of operand.cuh, field by field."""

    _fields_ = [("planes", _POINTER), ("row", _STRIDE), ("part", _STRIDE), ("parts", _STRIDE), ("scale", _POINTER)]


class Cell(ctypes.Structure):
    """The struct `Cell` of cell.cu, field by field."""

    _fields_ = [
        *[(name, _POINTER) for name in ("gates", "product", "bias", "cell", "kept", "hidden", "above", "mask")],
        *[(name, _STRIDE) for name in ("hidden_row", "above_row")],
        ("scale", ctypes.c_double),
        *[(name, _SIZE) for name in ("batch", "units", "sums")],
    ]


class Gates(ctypes.Structure):
    """The struct `Gates` of cell.cu, field by field."""

    _fields_ = [("gates", _POINTER), *[(name, _SIZE) for name in ("batch", "units")]]


class CellGradient(ctypes.Structure):
    """The struct `CellGradient` of cell.cu, field by field."""

    _fields_ = [
        *[(name, _POINTER) for name in ("gates", "cell", "earlier", "dcell", "written")],
        *[(name, PlanesArgument) for name in ("above", "beside", "later")],
        ("mask", _POINTER),
        ("scale", ctypes.c_double),
        *[(name, _SIZE) for name in ("batch", "units")],
    ]


class Attended(ctypes.Structure):
    """The struct `Attended` of cell.cu, field by field."""

    _fields_ = [
        *[(name, _POINTER) for name in ("context", "state", "output", "fed", "mask")],
        *[(name, _STRIDE) for name in ("context_row", "state_row", "output_row", "fed_row")],
        ("scale", ctypes.c_double),
        *[(name, _SIZE) for name in ("batch", "units")],
    ]


class AttendedGradient(ctypes.Structure):
    """The struct `AttendedGradient` of cell.cu, field by field."""

    _fields_ = [
        *[(name, _POINTER) for name in ("sums", "output", "dy")],
        ("later", PlanesArgument),
        ("mask", _POINTER),
        *[(name, _STRIDE) for name in ("sums_row", "output_row", "dy_row")],
        ("scale", ctypes.c_double),
        *[(name, _SIZE) for name in ("batch", "units")],
    ]


class ElementwiseKernels:
    """The element-wise operations as CUDA kernels, one launch each; see `Elementwise`.

    Args:
        batch: The batch size, B.
        units: The number of units, H.
        alignment: A number that, like H, divides all column offsets.
        dtype: The dtype of the planes.
        halves: Whether operands of products are stored in float16 although the decoder is in float32.
        device: A CUDA device with an index.
    """

    def __init__(
        self, batch: int, units: int, alignment: int, dtype: torch.dtype, halves: bool, device: torch.device
    ) -> None:
        width = width_of(batch, units, alignment, dtype, Device.probe(device).multiprocessors)
        self._threads_of_a_row = units // width
        self._sizes = {"batch": batch, "units": units}
        self._macros = macros_of(dtype, width, halves)
        self._device, self._halves = device, halves
        self._early = Device.probe(device).capability >= (9, 0)

    def cell(
        self,
        gates: Tensor,
        product: Tensor,
        bias: Tensor | None,
        cell: Tensor,
        hidden: Tensor,
        *,
        kept: Tensor | None,
        above: Tensor | None,
        dropout: Dropout | None,
    ) -> None:
        """Run one step of an LSTM cell."""
        arguments = Cell(
            gates=address(gates),
            product=address(product),
            bias=address(bias),
            cell=address(cell),
            kept=address(kept),
            hidden=address(hidden),
            above=address(above),
            hidden_row=hidden.stride(0),
            above_row=0 if above is None else above.stride(0),
            sums=bias is None,
            **of_dropout(dropout),
            **self._sizes,
        )
        self._launch("feeding_cell", arguments)

    def activate(self, gates: Tensor) -> None:
        """Activate gate sums in place."""
        self._launch("feeding_gates", Gates(address(gates), len(gates), self._sizes["units"]))

    def cell_gradient(
        self,
        gates: Tensor,
        cell: Tensor,
        earlier: Tensor,
        dcell: Tensor,
        *,
        above: Planes | None,
        beside: Planes | None,
        later: Planes | None,
        dropout: Dropout | None,
        scale: Tensor | None,
    ) -> None:
        """Run the backward pass of one step of an LSTM cell."""
        arguments = CellGradient(
            gates=address(gates),
            cell=address(cell),
            earlier=address(earlier),
            dcell=address(dcell),
            written=address(scale),
            above=planes_argument(above),
            beside=planes_argument(beside),
            later=planes_argument(later),
            **of_dropout(dropout),
            **self._sizes,
        )
        if self._halves:
            # One block handles each row, so that its threads can find the row's largest number together.
            self._launch(
                "feeding_cell_gradient", arguments, (self._sizes["batch"], -(-self._threads_of_a_row // 32) * 32)
            )
        else:
            self._launch("feeding_cell_gradient", arguments)

    def attended(
        self, context: Tensor, state: Tensor, output: Tensor | None, fed: Tensor, dropout: Dropout | None
    ) -> None:
        """Write the attentional output."""
        arguments = Attended(
            context=address(context),
            state=address(state),
            output=address(output),
            fed=address(fed),
            context_row=context.stride(0),
            state_row=state.stride(0),
            output_row=0 if output is None else output.stride(0),
            fed_row=fed.stride(0),
            **of_dropout(dropout),
            **self._sizes,
        )
        self._launch("feeding_attended", arguments)

    def attended_gradient(
        self, sums: Tensor, output: Tensor, dy: Tensor | None, later: Planes | None, dropout: Dropout | None
    ) -> None:
        """Write the gradient of context + state."""
        arguments = AttendedGradient(
            sums=address(sums),
            output=address(output),
            dy=address(dy),
            later=planes_argument(later),
            sums_row=sums.stride(0),
            output_row=output.stride(0),
            dy_row=0 if dy is None else dy.stride(0),
            **of_dropout(dropout),
            **self._sizes,
        )
        self._launch("feeding_attended_gradient", arguments)

    def _launch(self, entry: str, arguments: ctypes.Structure, grid: tuple[int, int] | None = None) -> None:
        blocks, threads = grid or (-(-arguments.batch * self._threads_of_a_row // THREADS), THREADS)
        shape = driver.Shape((blocks, 1, 1), threads, 0, cooperative=False, early=self._early)
        driver.launch(
            binary_of(SOURCE, self._macros, self._device.index, device_code(CELL)),
            entry,
            shape,
            arguments,
            self._device,
        )


def available(device: torch.device) -> bool:
    """Return whether the CUDA source can be compiled and run for a device."""
    numbers = Device.probe(device)
    return numbers.compiles and numbers.capability >= (8, 0)


def width_of(batch: int, units: int, alignment: int, dtype: torch.dtype, multiprocessors: int) -> int:
    """Return the elements per thread: as many as possible while every multiprocessor has enough threads."""
    width = math.gcd(units, alignment, _VECTOR_BYTES // dtype.itemsize)
    narrowest = max(1, 4 // dtype.itemsize)
    while width > narrowest and batch * units < width * _ENOUGH_THREADS * multiprocessors:
        width //= 2
    return width


def macros_of(dtype: torch.dtype, width: int, halves: bool = False) -> tuple[tuple[str, int], ...]:
    """Return the template parameters of the CUDA source."""
    return *formats.macros(dtype).items(), ("WIDTH", width), ("HALVES", int(halves))


def of_dropout(dropout: Dropout | None) -> dict[str, object]:
    """Return the kernel arguments for dropout."""
    return {} if dropout is None else {"mask": address(dropout.mask), "scale": dropout.scale}


def planes_argument(found: Planes | None) -> PlanesArgument:
    """Return the kernel argument for a gradient."""
    if found is None:
        return PlanesArgument()
    planes, scale = found
    return PlanesArgument(planes.data_ptr(), planes.stride(1), planes.stride(0), planes.shape[0], address(scale))


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor; None for None."""
    return None if tensor is None else tensor.data_ptr()


@functools.lru_cache(maxsize=256)
def binary_of(
    source: Path, macros: tuple[tuple[str, int], ...], device_index: int, code: DeviceCode | None = None
) -> bytes:
    """Return the machine code of a CUDA source, and of the code of a cell that it includes, for a device."""
    architecture = Device.probe(torch.device("cuda", device_index)).architecture
    return toolchain.compile_source(source, architecture, dict(macros), code)
