"""Conversions of arguments and results for cells that carry the hidden state, such as the GRU, in fused kernels.

Besides the recurrent product, a fused kernel (`persistent` or `stepwise`) carries states from step to step: the cell
state c of an LSTM, or the hidden state h itself of a GRU, whose step reads h element by element. The arguments and
results of these kernels contain the carried states in place of the cell states [L*D, B, S*H], with h as the last one.
The hidden state has a single gradient, the sum of those through the recurrent product and through the element-wise
operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.cells import step_cell
from gatewise.contract.problem import Problem
from gatewise.contract.saved import InputGradients, Inputs, OutputGradients, Result
from gatewise.derivation.fused import carried_states


def carried_size(problem: Problem) -> int:
    """Return the number of values of a sequence's carried states, C*H with C carried states."""
    return len(carried_states(step_cell(problem.cell))) * problem.hidden_size


def carries_hidden(problem: Problem) -> bool:
    """Return whether the hidden state is one of the carried states."""
    return "h" in carried_states(step_cell(problem.cell))


def as_carried(problem: Problem, inputs: Inputs) -> Inputs:
    """Return the inputs with the initial hidden state as the last of the initial cell states."""
    return inputs._replace(c0=torch.cat([inputs.c0, inputs.h0], -1) if problem.cell.states else inputs.h0)


def gradients_as_carried(problem: Problem, above: OutputGradients) -> OutputGradients:
    """Return the gradients of the outputs, with zeros for the hidden state as the last of the final cell states."""
    if above.c_n is None or not problem.cell.states:
        return above._replace(c_n=None)
    return above._replace(c_n=torch.nn.functional.pad(above.c_n, (0, problem.hidden_size)))


def without_hidden(problem: Problem, result: Result) -> Result:
    """Return a result whose final cell states do not contain the hidden state."""
    return result._replace(c_n=_without_hidden(problem, result.c_n))


def gradients_without_hidden(problem: Problem, found: InputGradients) -> InputGradients:
    """Return gradients whose gradients of cell states do not contain that of the hidden state."""
    return found._replace(c0=None if found.c0 is None else _without_hidden(problem, found.c0))


def _without_hidden(problem: Problem, states: Tensor) -> Tensor:
    size = states.shape[-1] - problem.hidden_size
    return states[..., :size].contiguous() if size else states.new_empty(*states.shape[:2], 0)
