"""Launch the small kernels around the passes: fill memory, sort rows, activate gates."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from gatewise.cells import Cell
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.derivation.device import device_code
from gatewise.kernels.cuda import driver, formats, toolchain
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent.launches.compiled import SOURCES, Launch, pointers_of_each_direction
from gatewise.kernels.persistent.launches.passes import LayerWeights, planes
from gatewise.kernels.persistent.sizes.exactness import exact_products
from gatewise.kernels.persistent.sizes.tilings import hidden_of

_THREADS = 128
_SORTING_THREADS = 256
_MOST_BLOCKS = 2048  # about as many as fit on an H200, 16 on a multiprocessor; each takes several rows


def fill_unwritten(buffer: Tensor) -> Tensor:
    """Fill a contiguous tensor with the pattern that means "not yet written" to the kernels, and return it."""
    if buffer.is_meta:
        return buffer
    with driver.on(buffer.device):
        driver.fill_with_ones(buffer)
    return buffer


class _Order(ctypes.Structure):
    """The struct `Order` of order.cu, field by field."""

    _fields_ = [("lengths", ctypes.c_void_p), ("order", ctypes.c_void_p), ("batch", ctypes.c_int)]


def longest_first(launch: Launch, lengths: Tensor | None, scratch: Scratch) -> Tensor | None:
    """Return the rows of a batch [B] sorted by length, the longest first; None where a launch gains nothing by it.

    A launch gains where it takes several groups of rows one after another: groups of short rows end early then. Groups
    that all run at the same time are as fast in any order.
    """
    if lengths is None or launch.tiling.groups <= launch.tiling.together:
        return None
    batch = lengths.shape[0]
    order = scratch.new_empty(batch, dtype=torch.int32)
    if order.is_meta:
        return order
    arguments = _Order(lengths.data_ptr(), order.data_ptr(), batch)
    shape = driver.Shape((-(-batch // _SORTING_THREADS), 1, 1), _SORTING_THREADS, 0, cooperative=False)
    with driver.on(lengths.device):
        driver.launch(_sorting_code(lengths.device), "recurrent_order", shape, arguments, lengths.device)
    return order


@functools.lru_cache(maxsize=8)
def _sorting_code(device: torch.device) -> bytes:
    architecture = Device.probe(device).architecture
    return toolchain.compile_source(SOURCES / "order.cu", architecture, {"THREADS": _SORTING_THREADS})


class _Activate(ctypes.Structure):
    """The struct `Activate` of activate.cu, field by field."""

    _fields_ = [*pointers_of_each_direction("gates", "unwritten", "bias_ih", "bias_hh"), ("tokens", ctypes.c_int)]


def activate(problem: Problem, weights: LayerWeights, gates: Tensor, dgates: Tensor | None, tokens: int) -> None:
    """Add the biases to gate sums and apply the activation functions, in place; mark the gradients as not yet written.

    Args:
        problem: The problem, which gives the cell, the size and the dtype.
        weights: The weights, of which the biases are read.
        gates: The gate sums [D, any, 4H], H padded.
        dgates: Memory for their gradients, of the same size, which is filled as by `fill_unwritten`; None if it is that
            of `gates`, see `memory.overwrites_gates`.
        tokens: The number of tokens of each direction that are activated, from the first on.
    """
    if gates.is_meta:
        return
    directions, _, width = gates.shape
    columns = -(-width // 4 * gates.element_size() // (16 * _THREADS))
    rows = max(1, min(tokens, _MOST_BLOCKS // (columns * directions)))
    shape = driver.Shape((rows, columns, directions), _THREADS, 0, cooperative=False)
    arguments = _Activate(*planes(gates), *planes(dgates), *weights.bias_ih, *weights.bias_hh, tokens)
    with driver.on(gates.device):
        binary = _activating_code(
            problem.cell, problem.hidden_size, problem.dtype, exact_products(problem), gates.device
        )
        driver.launch(binary, "recurrent_activate", shape, arguments, gates.device)


@functools.lru_cache(maxsize=256)
def _activating_code(cell: Cell, hidden_size: int, dtype: torch.dtype, exact: bool, device: torch.device) -> bytes:
    architecture = Device.probe(device).architecture
    macros = activating_macros(hidden_size, dtype, exact)
    return toolchain.compile_source(SOURCES / "activate.cu", architecture, macros, device_code(cell))


def activating_macros(hidden_size: int, dtype: torch.dtype, exact: bool) -> dict[str, int]:
    """Return the template parameters of activate.cu."""
    sizes = {"SIZE": hidden_size, "HIDDEN": hidden_of(hidden_size)}
    return {**sizes, **formats.macros(dtype), "EXACT": int(exact)}
