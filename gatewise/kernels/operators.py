"""PyTorch's operators of whole layers: `torch.lstm`, `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gatewise.contract.kernel import Operator
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.pytorch import pytorch_layer
from gatewise.contract.saved import Inputs, Result


def call(problem: Problem, inputs: Inputs) -> Result:
    """Call the operator that computes all layers of a problem; autograd records the call if it is on.

    Without other states than the hidden one, `c_n` is `c0`, which has no elements.
    """
    x, h0, c0, weights, _, batch_sizes, *_ = inputs
    return Result(*operator_of(problem)(x, h0, c0, weights, batch_sizes))


# The name and the options follow from the problem alone. The operator is taken from `torch` in each call, as PyTorch's
# layers do, and reads PyTorch's settings then.
@functools.lru_cache(maxsize=1024)
def operator_of(problem: Problem) -> Operator:
    """Return the operator that computes all layers of a problem, with its options.

    Args:
        problem: The problem, dense or packed.
    """
    name = pytorch_layer(problem.cell).mode.lower()
    # A call without gradients drops as one with them does.
    train = problem.needs_grad or problem.dropout > 0
    options = (problem.bias, problem.num_layers, problem.dropout, train, problem.bidirectional)
    pair, zeros = bool(problem.cell.states), zeros_of(problem)
    if problem.layout is Layout.PACKED:

        def packed(
            x: Tensor, h0: Tensor | None, c0: Tensor | None, weights: Sequence[Tensor], batch_sizes: Tensor | None
        ) -> tuple[Tensor, Tensor, Tensor]:
            if h0 is None or c0 is None:
                h0, c0 = zeros(x)
            found = getattr(torch, name)(x, batch_sizes, (h0, c0) if pair else h0, weights, *options)
            return found if pair else (*found, c0)

        return packed

    def dense(
        x: Tensor, h0: Tensor | None, c0: Tensor | None, weights: Sequence[Tensor], batch_sizes: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if h0 is None or c0 is None:
            h0, c0 = zeros(x)
        found = getattr(torch, name)(x, (h0, c0) if pair else h0, weights, *options, False)
        return found if pair else (*found, c0)

    return dense


def zeros_of(problem: Problem) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return a function that makes the initial states of a call that gives none, which are zero, for its input."""
    rows, states = problem.num_layers * problem.num_directions, problem.states_size
    h0_shape, c0_shape = (rows, problem.batch, problem.state_size), (rows, problem.batch, states)
    shared = not states or c0_shape == h0_shape  # nothing writes to the states

    def zeros(x: Tensor) -> tuple[Tensor, Tensor]:
        h0 = x.new_zeros(h0_shape)
        return h0, h0 if shared else x.new_zeros(c0_shape)

    return zeros
