"""The conditions under which the kernel `persistent` can run a problem, and the messages if it cannot."""

from __future__ import annotations

import bisect
import functools

import torch

from gatewise.cells import Cell, PeepholeLSTM, step_cell
from gatewise.contract.criterion import Criterion
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.derivation.device import MOST_SUMS
from gatewise.derivation.trace import refusal_of
from gatewise.kernels.criteria import (
    AMPERE,
    COMPILER,
    FOUR_GATES,
    NOT_EMPTY,
    NOT_PROJECTED,
    RESETS_TO_INITIAL,
    SEVERAL_UNITS,
    TRACES,
    is_fused,
)
from gatewise.kernels.cuda import formats
from gatewise.kernels.persistent.sizes.cell_size import cell_size_of
from gatewise.kernels.persistent.sizes.exactness import exact_products
from gatewise.kernels.persistent.sizes.tiling_choice import shared_memory, tiling


def _fits(problem: Problem, device: Device) -> bool:
    if device.kind != "cuda" or device.capability < (8, 0) or problem.dtype not in formats.TENSOR_CORE_DTYPES:
        return True
    if refusal_of(step_cell(problem.cell)) or len(problem.cell.gates) > MOST_SUMS:
        return True  # other criteria refuse it
    return _has_tilings(problem.hidden_size, device, *_number(problem))


def _number(problem: Problem) -> tuple[Cell, int, bool, bool]:
    return problem.cell, problem.element_bytes, problem.needs_grad, exact_products(problem)


def _has_tilings(hidden_size: int, device: Device, cell: Cell, value_bytes: int, needs_grad: bool, exact: bool) -> bool:
    # Any batch size works if one group of rows does, because groups can follow each other. A single row is no test for
    # that, as it needs less room.
    passes = (False, True) if needs_grad else (False,)
    sizes = [(backward, value_bytes, exact, cell_size_of(cell, backward=backward)) for backward in passes]
    return all(tiling(hidden_size, 2, 1, device, *size) is not None for size in sizes)


@functools.lru_cache(maxsize=64)
def _largest(device: Device, cell: Cell, value_bytes: int, needs_grad: bool, exact: bool) -> int:
    sizes = range(8, 8192, 8)
    fitting = bisect.bisect(
        sizes, False, key=lambda size: not _has_tilings(size, device, cell, value_bytes, needs_grad, exact)
    )
    return sizes[fitting - 1] if fitting else 0


def _weight_size(problem: Problem, device: Device) -> str:
    # Weights that are rounded to TF32 are stored in 16 bits.
    number_bytes = 4 if exact_products(problem) else 2
    megabytes = 4 * problem.hidden_size**2 * number_bytes / 2**20
    registers = device.multiprocessors * 256 / 1024
    shared = device.multiprocessors * shared_memory(device) / 2**20
    largest = _largest(device, *_number(problem))
    return (
        f"{problem.hidden_size} ({megabytes:.3g} MiB of recurrent weights in {8 * number_bytes} bits; "
        f"{device.multiprocessors} multiprocessors have {registers:.3g} MiB of registers and {shared:.3g} MiB of "
        f"shared memory, enough for {largest} in {'training' if problem.needs_grad else 'inference'})"
    )


CRITERIA = (
    COMPILER,
    AMPERE,
    Criterion(
        "dtype",
        allowed=formats.names(formats.TENSOR_CORE_DTYPES),
        actual=lambda problem, device: formats.names([problem.dtype]),
        holds=lambda problem, device: problem.dtype in formats.TENSOR_CORE_DTYPES,
        violation=lambda problem, device: (problem.replace(dtype=torch.float64), device),
        advice="use float32, autocast, or a 16-bit copy of the model",
    ),
    Criterion(
        "proj_size",
        allowed="0 where memory is 'lean' in training",
        actual=lambda problem, device: str(problem.proj_size),
        holds=lambda problem, device: problem.proj_size == 0 or not problem.rebuilds_gates,
        violation=lambda problem, device: (
            problem.replace(proj_size=1, hidden_size=max(2, problem.hidden_size), lean=True, needs_grad=True),
            device,
        ),
    ),
    Criterion(
        "hidden_size",
        allowed="what the chip holds",
        actual=_weight_size,
        holds=_fits,
        violation=lambda problem, device: (
            problem.replace(hidden_size=1 << 14, dtype=torch.bfloat16),
            device if device.kind == "cuda" and device.capability >= (8, 0) else Device.named("h200"),
        ),
    ),
    TRACES,
    SEVERAL_UNITS,
    FOUR_GATES,
    Criterion(
        "proj_size",
        allowed="0 for a cell with several states, parameters, normalization, dropout or zoneout",
        actual=lambda problem, device: f"{problem.proj_size} with {problem.cell.name}",
        holds=lambda problem, device: problem.proj_size == 0 or is_fused(problem.cell),
        violation=lambda problem, device: (
            problem.replace(cell=PeepholeLSTM(), proj_size=1, hidden_size=max(2, problem.hidden_size)),
            device,
        ),
    ),
    Criterion(
        "memory",
        allowed="'normal' in training for a cell with several states, parameters, normalization, dropout or zoneout",
        actual=lambda problem, device: f"{'lean' if problem.lean else 'normal'!r} with {problem.cell.name}",
        holds=lambda problem, device: not problem.rebuilds_gates or is_fused(problem.cell),
        violation=lambda problem, device: (
            problem.replace(cell=PeepholeLSTM(), proj_size=0, lean=True, needs_grad=True),
            device,
        ),
    ),
    NOT_EMPTY,
    NOT_PROJECTED,
    RESETS_TO_INITIAL,
)
