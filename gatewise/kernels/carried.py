"""Conversions of arguments and results for cells without a cell state, such as the GRU, in fused kernels.

Besides the recurrent product, a fused kernel (`persistent` or `stepwise`) carries one state from step to step: the cell
state c of an LSTM, or the hidden state h itself of a GRU, whose step reads h element by element. The arguments and
results of these kernels contain a cell state [L*D, B, H]. For a cell without one, the hidden state is passed as the
cell state. It has a single gradient, the sum of those through the recurrent product and through the element-wise
operations.
"""

from __future__ import annotations

from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.contract.saved import InputGradients, Inputs, OutputGradients, Result


def carries_hidden(problem: Problem) -> bool:
    """Return whether the hidden state is passed in place of the cell state."""
    return not problem.cell.states


def as_carried(inputs: Inputs) -> Inputs:
    """Return the inputs with the initial hidden state in place of the initial cell state."""
    return inputs._replace(c0=inputs.h0)


def gradients_as_carried(above: OutputGradients) -> OutputGradients:
    """Return the gradients of the outputs without that of the final cell state."""
    return above._replace(c_n=None)


def without_state(result: Result) -> Result:
    """Return a result with an empty cell state [L*D, B, 0]."""
    return result._replace(c_n=_empty(result.c_n))


def gradients_without_state(found: InputGradients) -> InputGradients:
    """Return gradients with an empty gradient of the cell state [L*D, B, 0], or None if it was not requested."""
    return found._replace(c0=None if found.c0 is None else _empty(found.c0))


def _empty(state: Tensor) -> Tensor:
    return state.new_empty(*state.shape[:2], 0)
