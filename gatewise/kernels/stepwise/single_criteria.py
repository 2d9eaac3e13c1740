"""The criteria and the memory of steps in one launch for each layer (`gatewise.kernels.stepwise.single`)."""

from __future__ import annotations

import functools

import torch

from gatewise.cells import LayerNormLSTM, Regularised
from gatewise.contract.criterion import Criterion, Refusal
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.derivation.fused import carried_states
from gatewise.derivation.trace import is_pointwise
from gatewise.kernels.criteria import AMPERE, COMPILER, TRACES
from gatewise.kernels.stepwise.criteria import HAS_FORMAT
from gatewise.kernels.stepwise.products import state_dtype

MOST_ROWS = 8
"""The largest number of sequences: a thread has the sums of all of them in registers."""

MOST_PARAMETERS = 8
"""The largest number of parameters of a cell, whose addresses are part of a struct."""


_OF_CALLS = (
    Criterion(
        "batch",
        allowed=f"at most {MOST_ROWS}",
        actual=lambda problem, device: str(problem.batch),
        holds=lambda problem, device: problem.batch <= MOST_ROWS,
        violation=lambda problem, device: (problem.replace(batch=MOST_ROWS + 1), device),
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


@functools.lru_cache(maxsize=4096)
def is_single_call(problem: Problem, device: Device) -> bool:
    """Return whether the kernel `stepwise` computes a call in one launch for each layer, products included.

    Args:
        problem: A call that the criteria of that kernel accept.
        device: The properties of its device.
    """
    return (
        problem.time == 1
        and not problem.needs_grad
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
