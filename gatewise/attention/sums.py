"""Where the gradients that all decoder steps share are added up."""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.attention import plain
from gatewise.attention.call import Gradients, Inputs, Needs
from gatewise.attention.problem import Problem


def begun(problem: Problem, inputs: Inputs, into: Gradients | None, needs: Needs) -> Gradients:
    """Return what a backward pass adds to: `into`, or zeros in the dtype that sums are kept in, or nothing."""
    if into is not None:
        return into
    if not needs.source:
        return Gradients()
    return zeros(problem, inputs)


def zeros(problem: Problem, inputs: Inputs) -> Gradients:
    """Return zeros for the gradients of all inputs but the query, in the dtype that sums are kept in."""
    dtype = plain.wide(problem.dtype)

    def like(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)

    return Gradients(None, *(like(tensor) for tensor in (inputs.keys, inputs.values, *inputs[4:])))


def ended(
    problem: Problem, totals: Gradients, into: Gradients | None, found: Tensor | None, dquery: Tensor | None
) -> Gradients:
    """Return the gradients of a call.

    Args:
        problem: Its dtype is that of new gradients.
        totals: What `begun` returned, added to.
        into: As in `begun`.
        found: The query's gradient; None when it was not wanted.
        dquery: Where the caller wants it; None for a new tensor.
    """
    if into is None:
        totals = Gradients(*(None if tensor is None else tensor.to(problem.dtype) for tensor in totals))
    if found is not None and dquery is not None:
        found = dquery.copy_(found)
    return totals._replace(query=found)
