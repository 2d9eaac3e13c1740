"""Single steps of a stack of layers, one launch a layer, with states that stay at the same addresses.

A CUDA graph that has captured a step carries the states from replay to replay, because a launch finds the states where
the last one has left them. Weights are read where they are, and never copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gatewise.cells import Cell
from gatewise.contract.device import Device
from gatewise.contract.errors import DeviceError, DtypeError, ShapeError, sentence
from gatewise.contract.weights import DirectionWeights
from gatewise.derivation.fused import carried_states
from gatewise.derivation.row import row_code
from gatewise.derivation.trace import is_pointwise, refusal_of
from gatewise.kernels.cuda import driver, formats, toolchain
from gatewise.kernels.stepwise.launch import SOURCES, address
from gatewise.kernels.stepwise.products import state_dtype

MOST_ROWS = 8
"""The largest number of sequences: the sums of all of them are in the registers of a lane."""

MOST_PARAMETERS = 8
"""The largest number of parameters of a cell."""

_LANES, _VECTOR_BYTES, _MOST_WARPS = 32, 16, 4
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int
_NOTHING = contextlib.nullcontext()


class Arguments(ctypes.Structure):
    """The struct `Single` of single.cu."""

    _fields_ = [
        *[(name, _POINTER) for name in ("x", "input_weights", "recurrent_weights", "input_bias", "recurrent_bias")],
        ("parameters", _POINTER * MOST_PARAMETERS),
        *[(name, _POINTER) for name in ("hidden", "next", "carried", "output", "finished")],
        *[(name, _SIZE) for name in ("batch", "inputs", "units")],
    ]


class _Launch(NamedTuple):
    """The launch of a layer's step: the addresses and forms of tensors, and the arguments and code that follow."""

    key: tuple[tuple, ...]
    arguments: Arguments
    binary: bytes


def takes(cell: Cell, dtype: torch.dtype, batch: int, projected: bool, device: Device) -> bool:
    """Return whether `SingleSteps` computes the steps of a stack.

    Args:
        cell: The cell, as in evaluation mode.
        dtype: The dtype of the call.
        batch: B, the number of sequences.
        projected: Whether the layers have projections.
        device: The properties of the device.
    """
    on_gpu = device.kind == "cuda" and device.capability >= (8, 0) and device.compiles
    fits = batch <= MOST_ROWS and dtype in formats.NUMBERS and not projected
    if not (on_gpu and fits) or refusal_of(cell):
        return False
    return is_pointwise(cell) and len(cell.parameters) <= MOST_PARAMETERS


class SingleSteps:
    """The states of a stack of layers, and their steps.

    Args:
        cell: The cell, which must be one that `takes` accepts.
        states: For each layer the hidden state and the other states before the first step [B, H], on the device.
        dtype: The dtype of the call.
    """

    def __init__(self, cell: Cell, states: Sequence[tuple[Tensor, ...]], dtype: torch.dtype) -> None:
        self.cell, self.dtype = cell, dtype
        (self._batch, self._units), self.device = states[0][0].shape, states[0][0].device
        # In inference mode the tensors would be ones that nothing outside of it may write to.
        with torch.inference_mode(False), torch.no_grad():
            like = torch.empty(0, dtype=dtype, device=self.device)
            shape = len(states), self._batch, self._units
            self._hidden, self._next = like.new_empty(shape), like.new_empty(shape)
            places = len(states), len(carried_states(cell)), self._batch, self._units
            self._carried = like.new_empty(places, dtype=state_dtype(dtype))
            self._finished = like.new_zeros(len(states), dtype=torch.int32)
        self._warps = warps_of(self._units, Device.probe(self.device).multiprocessors)
        self._launches: dict[int, _Launch] = {}
        grid = -(-self._units // self._warps), 1, 1
        self._shape = driver.Shape(grid, _LANES * self._warps, 0, cooperative=False)
        self.write(states)

    def write(self, states: Sequence[tuple[Tensor, ...]]) -> None:
        """Set the states of all layers, at the addresses where they are."""
        with torch.no_grad():
            for layer, (h, *others) in enumerate(states):
                named = dict(zip(("h", *self.cell.states), (h, *others), strict=True))
                self._hidden[layer].copy_(h)
                for place, name in enumerate(carried_states(self.cell)):
                    self._carried[layer, place].copy_(named[name])

    def read(self) -> list[tuple[Tensor, ...]]:
        """Return copies of the states of all layers, in the dtype of states."""
        names, found = carried_states(self.cell), []
        for layer in range(len(self._hidden)):
            carried = {name: self._carried[layer, place].clone() for place, name in enumerate(names)}
            h = carried.get("h", self._hidden[layer].to(self._carried.dtype, copy=True))
            found.append((h, *[carried[name] for name in self.cell.states]))
        return found

    def step(self, x: Tensor, weights: Sequence[Sequence[Tensor]]) -> Tensor:
        """Compute a step, and return the hidden states of the last layer [B, H].

        Args:
            x: The input [B, I], in the dtype of the call.
            weights: The weights of each layer, as in `all_weights`, in the same dtype.

        Raises:
            ShapeError: The sizes of a weight are not those of the states and the input.
            DtypeError: The dtype of a weight is not that of the call.
            DeviceError: A weight is on another device than the states.
        """
        y = x.new_empty(self._batch, self._units)
        with _on(self.device):
            for layer, own in enumerate(weights):
                # Rows of a matrix lie one after the other; the copies of others live until the launch is issued.
                tensors = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in (x, *own)]
                launch = self._launch(layer, tensors)
                launch.arguments.output = y.data_ptr() if layer == len(weights) - 1 else None
                driver.launch(launch.binary, "single_step", self._shape, launch.arguments, self.device)
                x = self._hidden[layer]
        return y

    def _launch(self, layer: int, tensors: Sequence[Tensor]) -> _Launch:
        # A launch has nothing of tensors but their addresses and forms, and these are compared in every call.
        key = tuple([(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors])
        known = self._launches.get(layer)
        if known is None or known.key != key:
            x, *own = tensors
            weights = DirectionWeights.from_tensors(own, len(self.cell.parameters))
            self._check(x, weights)
            known = self._launches[layer] = self._made(layer, key, x, weights)
        return known

    def _made(self, layer: int, key: tuple[tuple, ...], x: Tensor, weights: DirectionWeights) -> _Launch:
        hidden = self._hidden[layer]
        arguments = Arguments(
            x.data_ptr(),
            *[address(tensor) for tensor in weights[:4]],
            (_POINTER * MOST_PARAMETERS)(*map(address, weights.parameters)),
            hidden.data_ptr(),
            self._next[layer].data_ptr(),
            self._carried[layer].data_ptr(),
            None,
            self._finished[layer : layer + 1].data_ptr(),
            self._batch,
            x.shape[1],
            self._units,
        )
        width = width_of((x, weights.w_ih, weights.w_hh, hidden))
        binary = _binary(self.cell, self.dtype, width, rows_of(self._batch), self._warps, self.device)
        return _Launch(key, arguments, binary)

    def _check(self, x: Tensor, weights: DirectionWeights) -> None:
        rows = len(self.cell.gates) * self._units
        expected = {"w_ih": (rows, x.shape[1]), "w_hh": (rows, self._units), "b_ih": (rows,), "b_hh": (rows,)}
        given = [(name, getattr(weights, name), shape) for name, shape in expected.items()]
        names = zip(self.cell.parameters, weights.parameters, strict=True)
        given += [(name, parameter, (self._units,)) for name, parameter in names]
        for name, tensor, shape in given:
            if tensor is None:
                continue
            if tuple(tensor.shape) != shape:
                raise ShapeError(sentence(f"weights, {name},", f"of shape {list(shape)}", list(tensor.shape)))
            if tensor.dtype != self.dtype:
                raise DtypeError(sentence(f"weights, {name},", str(self.dtype), tensor.dtype))
            if tensor.device != self.device:
                raise DeviceError(sentence(f"weights, {name},", f"on {self.device}", f"one on {tensor.device}"))

    def __getstate__(self) -> dict[str, Any]:
        # The addresses of a copy are others.
        return self.__dict__ | {"_launches": {}}


def width_of(tensors: Sequence[Tensor]) -> int:
    """Return the number of values that one instruction can load from rows of all these contiguous matrices."""
    itemsize = tensors[0].itemsize
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr() | tensor.shape[-1] * itemsize
    width = _VECTOR_BYTES // itemsize
    while width > 1 and bits % (width * itemsize):
        width //= 2
    return width


def rows_of(batch: int) -> int:
    """Return the number of sequences for which the kernel is compiled: the next power of two."""
    return 1 << (batch - 1).bit_length()


def warps_of(units: int, multiprocessors: int) -> int:
    """Return the number of warps of a block: more than one only if there is a block for every multiprocessor."""
    warps = _MOST_WARPS
    while warps > 1 and units < warps * multiprocessors:
        warps //= 2
    return warps


def macros_of(dtype: torch.dtype, width: int, rows: int, warps: int) -> dict[str, int]:
    """Return the macros with which single.cu is compiled."""
    sizes = {"WIDTH": width, "ROWS": rows, "WARPS": warps, "MOST_PARAMETERS": MOST_PARAMETERS}
    return formats.macros(dtype) | sizes


@functools.lru_cache(maxsize=256)
def _binary(cell: Cell, dtype: torch.dtype, width: int, rows: int, warps: int, device: torch.device) -> bytes:
    architecture = Device.probe(device).architecture
    return toolchain.compile_source(
        SOURCES / "single.cu", architecture, macros_of(dtype, width, rows, warps), row_code(cell)
    )


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    if device.type != "cuda" or device.index == torch._C._cuda_getDevice():
        return _NOTHING
    return torch.cuda.device(device)
