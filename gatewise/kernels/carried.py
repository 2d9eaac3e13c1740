"""Fused kernels carry one state from step to step beside the recurrent product: c of an LSTM, of a GRU h itself.

They have arguments and results for a cell state [L*D, B, H]. For a cell without one the hidden state takes its place,
and its gradient, which comes through the recurrent product and through what the step reads of the state, is one.
"""

from __future__ import annotations

from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.contract.saved import InputGradients, Inputs, OutputGradients, Result


def carries_hidden(problem: Problem) -> bool:
    """Whether the hidden state takes the place of the cell state."""
    return not problem.cell.states


def as_carried(inputs: Inputs) -> Inputs:
    """Return inputs with the hidden state as the state that is carried."""
    return inputs._replace(c0=inputs.h0)


def gradients_as_carried(above: OutputGradients) -> OutputGradients:
    """Return gradients of the outputs, of which the final hidden state has one alone."""
    return above._replace(c_n=None)


def without_state(result: Result) -> Result:
    """Return a result with a cell state of no features."""
    return result._replace(c_n=_empty(result.c_n))


def gradients_without_state(found: InputGradients) -> InputGradients:
    """Return gradients with that of a cell state of no features, where it is wanted."""
    return found._replace(c0=None if found.c0 is None else _empty(found.c0))


def _empty(state: Tensor) -> Tensor:
    return state.new_empty(*state.shape[:2], 0)
