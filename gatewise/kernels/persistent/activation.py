"""What the forward pass keeps of gate sums, made again of sums where it did not keep it."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from gatewise.cells import Cell
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.derivation.device import device_code
from gatewise.kernels.cuda import driver, toolchain
from gatewise.kernels.persistent.exactness import exact_products
from gatewise.kernels.persistent.launch import SOURCES, on, pointers_of_each_direction
from gatewise.kernels.persistent.passes import Matrices, planes
from gatewise.kernels.persistent.plan import hidden_of

_THREADS = 128
_MOST_BLOCKS = 2048  # about as many as an H200 has room for, 16 on a multiprocessor; they take several rows each


class _Activate(ctypes.Structure):
    """The struct `Activate` of activate.cu, field by field."""

    _fields_ = [*pointers_of_each_direction("gates", "unwritten", "bias_ih", "bias_hh"), ("tokens", ctypes.c_int)]


def activate(problem: Problem, matrices: Matrices, gates: Tensor, dgates: Tensor | None, tokens: int) -> None:
    """Add biases to gate sums and activate them, in place; mark their gradients as not yet written.

    Args:
        problem: Gives size and dtype.
        matrices: Where the biases lie.
        gates: Sums [D, any, 4H], H rounded up.
        dgates: As large, filled as `fill_unwritten` does; None if it is `gates`, see `memory.overwrites_gates`.
        tokens: How many of each direction are activated, the first ones.
    """
    directions, _, width = gates.shape
    columns = -(-width // 4 * gates.element_size() // (16 * _THREADS))
    rows = max(1, min(tokens, _MOST_BLOCKS // (columns * directions)))
    shape = driver.Shape((rows, columns, directions), _THREADS, 0, cooperative=False)
    arguments = _Activate(*planes(gates), *planes(dgates), *matrices.bias_ih, *matrices.bias_hh, tokens)
    with on(gates.device):
        binary = _code(problem.cell, problem.hidden_size, problem.dtype, exact_products(problem), gates.device)
        driver.launch(binary, "recurrent_activate", shape, arguments, gates.device)


@functools.lru_cache(maxsize=256)
def _code(cell: Cell, hidden_size: int, dtype: torch.dtype, exact: bool, device: torch.device) -> bytes:
    architecture = Device.probe(device).architecture
    macros = {
        "SIZE": hidden_size,
        "HIDDEN": hidden_of(hidden_size),
        "FLOAT16": int(dtype == torch.float16),
        "FLOAT32": int(dtype == torch.float32),
        "EXACT": int(exact),
    }
    return toolchain.compile_source(SOURCES / "activate.cu", architecture, macros, device_code(cell))
