"""Which calls of one time step take one launch for each layer, in streams, in other calls and in training.

The limits of `gatewise.kernels.stepwise.single` are here, too, and the memory that a stream holds.
"""

from __future__ import annotations

import functools

import torch

from gatewise.cells import Cell, LayerNormLSTM, Regularised
from gatewise.contract.criterion import Criterion, Refusal
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.derivation.fused import carried_states
from gatewise.derivation.trace import is_pointwise
from gatewise.kernels.criteria import AMPERE, COMPILER, TRACES
from gatewise.kernels.stepwise.criteria import HAS_FORMAT
from gatewise.kernels.stepwise.products import state_dtype

MOST_ROWS = 8
"""The largest number of sequences of products without tensor cores: a thread has the sums of all in registers."""

MOST_TILED_ROWS = 64
"""The largest number of sequences where tensor cores compute the products."""

_MOST_VECTOR_BYTES = 32 << 20
"""The largest number of bytes of inputs and hidden states that all blocks together read.

Each block reads those of all sequences. On an H200, wider layers with more sequences mostly take more time than with
cuDNN (`benchmarks/results/single_steps.jsonl`: sizes of 256 to 2048 with 1 to 64 sequences).
"""

TILED_UNITS = 4
"""The number of units of a block whose products tensor cores compute."""

MOST_TILED_WARPS = 8
"""The largest number of warps of such a block, which share the products."""

_TILED_VALUES = 8
"""The values of a row that a lane loads at once for tensor cores: 16 bytes."""

_MOST_TILED_SUMS = (40 << 10) // (4 * MOST_TILED_WARPS * TILED_UNITS)
"""The largest number of sums of a unit, those of all sequences together, for which 40 KiB of shared memory suffice."""

SHARED_BYTES = 48 << 10
"""The shared memory that a block can have without asking for more."""

_MOST_TOTALS = SHARED_BYTES // (32 * 8)
"""The largest number of sums and parameters in training: shared memory has a total of each for 32 threads."""

MOST_PARAMETERS = 8
"""The largest number of parameters of a cell, whose addresses are part of a struct."""


def is_tiled(cell: Cell, itemsize: int, inputs: int, units: int) -> bool:
    """Return whether tensor cores compute the products of a layer.

    Args:
        cell: The cell.
        itemsize: The number of bytes of a value.
        inputs: The number of input features.
        units: The number of units.
    """
    return itemsize == 2 and not (inputs | units) % _TILED_VALUES and len(cell.sums) * MOST_ROWS <= _MOST_TILED_SUMS


def most_rows(problem: Problem) -> int:
    """Return the largest number of sequences for the sizes and the dtype of a call."""
    itemsize, units = problem.element_bytes, problem.hidden_size
    if not is_tiled(problem.cell, itemsize, problem.input_size, units):
        return MOST_ROWS
    fitting = 1 << (_MOST_TILED_SUMS // len(problem.cell.sums)).bit_length() - 1  # compiled for a power of two
    inputs = max(problem.layer_input_size(layer) for layer in range(problem.num_layers))
    of_sequence = -(-units // TILED_UNITS) * (inputs + units) * itemsize
    return min(MOST_TILED_ROWS, fitting, max(MOST_ROWS, _MOST_VECTOR_BYTES // of_sequence))


_OF_CALLS = (
    Criterion(
        "batch",
        allowed=(
            f"at most {MOST_ROWS}, or up to {MOST_TILED_ROWS} in 16-bit dtypes with sizes that are multiples of "
            f"{_TILED_VALUES} and not too large"
        ),
        actual=lambda problem, device: str(problem.batch),
        holds=lambda problem, device: problem.batch <= most_rows(problem),
        violation=lambda problem, device: (problem.replace(batch=MOST_TILED_ROWS + 1), device),
    ),
    Criterion(
        "proj_size",
        allowed="0",
        actual=lambda problem, device: str(problem.proj_size),
        holds=lambda problem, device: problem.proj_size == 0,
        violation=lambda problem, device: (problem.replace(proj_size=1, hidden_size=2), device),
    ),
    TRACES,
    Criterion(
        "cell",
        allowed=f"a cell that computes each unit by itself, with at most {MOST_PARAMETERS} parameters",
        actual=lambda problem, device: f"{problem.cell.name} with {len(problem.cell.parameters)} parameters",
        # A cell that cannot be traced is refused by the criterion before.
        holds=lambda problem, device: (
            TRACES.check(problem, device) is not None
            or (is_pointwise(problem.cell) and len(problem.cell.parameters) <= MOST_PARAMETERS)
        ),
        violation=lambda problem, device: (problem.replace(cell=LayerNormLSTM(), proj_size=0), device),
    ),
)

CRITERIA = (AMPERE, COMPILER, HAS_FORMAT, *_OF_CALLS)


@functools.lru_cache(maxsize=256)
def refusals_of(problem: Problem, device: Device) -> tuple[Refusal, ...]:
    """Return why `SingleSteps` does not compute a call of one step; nothing if it does.

    Args:
        problem: The call.
        device: The properties of its device.
    """
    found = (criterion.check(problem, device) for criterion in CRITERIA)
    return tuple([refusal for refusal in found if refusal is not None])


def is_single_call(problem: Problem, device: Device) -> bool:
    """Return whether the kernel `stepwise` computes a call in one launch for each layer, products included.

    Args:
        problem: A call that the criteria of that kernel accept.
        device: The properties of its device.
    """
    return not problem.needs_grad and _is_single_step(problem, device)


def is_single_training(problem: Problem, device: Device) -> bool:
    """Return whether the kernel `stepwise` computes a training call as a single step (see `single_training`).

    It does not where PyTorch traces calls: one trace is for any number of steps, and what a pass keeps depends on it.

    Args:
        problem: A call that the criteria of that kernel accept.
        device: The properties of its device.
    """
    fits = len(problem.cell.sums) + len(problem.cell.parameters) <= _MOST_TOTALS
    return problem.needs_grad and not problem.traced and fits and _is_single_step(problem, device)


@functools.lru_cache(maxsize=4096)
def _is_single_step(problem: Problem, device: Device) -> bool:
    return (
        problem.time == 1
        and not problem.bidirectional
        and not problem.resets
        and problem.layout is Layout.DENSE
        and not isinstance(problem.cell, Regularised)
        and all(criterion.check(problem, device) is None for criterion in _OF_CALLS)
    )


def held_bytes(problem: Problem) -> int:
    """Return the memory that `SingleSteps` holds from call to call, in bytes.

    Args:
        problem: A call that the criteria accept.
    """
    layers, each = problem.num_layers, problem.batch * problem.hidden_size
    hidden = (2 * layers + layers - 1) * each * problem.element_bytes  # two buffers, and what lies between layers
    carried = layers * len(carried_states(problem.cell)) * each * state_dtype(problem.dtype).itemsize
    return hidden + carried + layers * torch.int32.itemsize  # the count of each layer
