"""Accumulators for the gradients of the inputs that all decoder steps share."""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.attention import plain
from gatewise.attention.call import Gradients, Inputs, Needs
from gatewise.attention.problem import Problem


def accumulators(problem: Problem, inputs: Inputs, into: Gradients | None, needs: Needs) -> Gradients:
    """Return the tensors that a backward pass adds to: `into`, or new zeros, or none if they are not needed."""
    if into is not None:
        return into
    if not needs.source:
        return Gradients()
    return zeros(problem, inputs)


def zeros(problem: Problem, inputs: Inputs) -> Gradients:
    """Return zeros for the gradients of all inputs except the query, in the dtype of sums."""
    dtype = plain.accumulation_dtype(problem.dtype)

    def like(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)

    return Gradients(None, *(like(tensor) for tensor in (inputs.keys, inputs.values, *inputs[4:])))


def finished(
    problem: Problem, totals: Gradients, into: Gradients | None, found: Tensor | None, dquery: Tensor | None
) -> Gradients:
    """Return the gradients of a call from its accumulators.

    Args:
        problem: The description of the call; its dtype is that of new gradients.
        totals: The accumulators from `accumulators`, after the backward pass.
        into: The caller's accumulators, or None, as in `accumulators`.
        found: The gradient of the query; None when it is not needed.
        dquery: The tensor to copy the query's gradient to; None returns `found` itself.
    """
    if into is None:
        totals = Gradients(*(None if tensor is None else tensor.to(problem.dtype) for tensor in totals))
    if found is not None and dquery is not None:
        found = dquery.copy_(found)
    return totals._replace(query=found)
