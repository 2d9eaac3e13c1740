"""What a call of padded sequences depends on besides their values, looked up in one step.

The key is everything that could change the answer: shapes, dtypes and devices of every tensor, the options of the call,
what the user prefers, and the settings of PyTorch that are read in choosing. Nothing has to be invalidated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.cells import Cell
from gatewise.contract.capture import state as state_of_capture
from gatewise.contract.device import Device, tf32_allowed
from gatewise.contract.kernel import Kernel
from gatewise.contract.problem import Problem
from gatewise.contract.saved import Inputs, Result
from gatewise.functional.arguments import check_options
from gatewise.functional.signature import form_of
from gatewise.functional.validate import described, with_lengths
from gatewise.selection import Preference, choose, kernel_named, preference


class Plan(NamedTuple):
    """How a call is computed.

    Attributes:
        problem: What is to be computed.
        kernel: Name of the chosen kernel.
        straight: The kernel, where nothing has to be done around its passes while no autocast is on.
        single_use: Whether a backward pass uses up what the forward pass kept.
        recorded: The kernel's `recorded`, where it reads the layout as given, without lengths, no masks must be drawn
            for it, and no CUDA graph is captured.
    """

    problem: Problem
    kernel: str
    straight: Kernel | None = None
    single_use: bool = False
    recorded: Callable[[Problem, Inputs], Result | None] | None = None


def plan(
    x: Tensor,
    state: tuple[Tensor, Tensor] | None,
    flat: tuple[Tensor, ...],
    bidirectional: bool,
    dropout: float,
    needs_grad: bool,
    kernel: str,
    memory: str,
    cell: Cell,
    ragged: bool = False,
) -> Plan:
    """Return the plan of a call without lengths, or with such as `lie_beside` x; arguments and errors as of `prepare`.

    Raises:
        KernelRefused: The kernel that was named cannot run this call.
    """
    wanted = preference(kernel)
    # Measuring depends on what was measured before: it has a memory of its own.
    found = _plan if wanted.policy == "predict" else _plan.__wrapped__
    try:
        return found(
            form_of(x),
            None if state is None else (form_of(state[0]), form_of(state[1])),
            tuple(map(form_of, flat)),
            bidirectional,
            dropout,
            needs_grad,
            x.is_cuda and x.dtype is torch.float32 and tf32_allowed(),
            torch._C._get_cudnn_enabled(),
            wanted,
            memory,
            state_of_capture() if x.is_cuda else "",
            cell,
            ragged,
        )
    except TypeError:  # an option that nothing can be looked up by
        check_options(bidirectional, dropout, memory)
        raise


@functools.lru_cache(maxsize=4096)
def _plan(
    x: tuple,
    state: tuple[tuple, tuple] | None,
    weights: tuple[tuple, ...],
    bidirectional: bool,
    dropout: float,
    needs_grad: bool,
    allow_tf32: bool,
    cudnn_enabled: bool,
    wanted: Preference,
    memory: str,
    capture: str,
    cell: Cell,
    ragged: bool = False,
) -> Plan:
    problem = described(
        x, state, weights, None, bidirectional, dropout, needs_grad, allow_tf32, False, memory, capture, cell
    )
    if ragged:
        problem = with_lengths(problem, on_device=True, all_empty=False)
    way = kernel_named(choose(problem, _numbers(x[2], cudnn_enabled), wanted).chosen or "")
    straight = problem.layout in way.layouts and not capture
    as_given = straight and (needs_grad or not problem.dropout) and not ragged
    return Plan(
        problem,
        way.name,
        way if straight else None,
        way.single_use(problem),
        way.recorded if as_given else None,
    )


def probed(device: torch.device) -> Device:
    """Return the device's numbers as choosing sees them: without cuDNN when the user switched it off."""
    return _numbers(device, torch.backends.cudnn.enabled)


def _numbers(device: torch.device, cudnn_enabled: bool) -> Device:
    numbers = Device.probe(device)
    return numbers.replace(cudnn_version=0) if numbers.cudnn_version and not cudnn_enabled else numbers
