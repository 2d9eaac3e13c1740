"""PyTorch's operators of whole layers: `torch.lstm`, `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu`."""

from __future__ import annotations

import torch

from gatewise.contract.problem import Problem
from gatewise.contract.pytorch import pytorch_layer
from gatewise.contract.saved import Inputs, Result


def call(problem: Problem, inputs: Inputs) -> Result:
    """Call the operator that computes all layers of a problem; autograd records the call if it is on.

    Without other states than the hidden one, `c_n` is `c0`, which has no elements.
    """
    x, h0, c0, weights, _, batch_sizes, *_ = inputs
    operator = getattr(torch, pytorch_layer(problem.cell).mode.lower())
    options = (problem.bias, problem.num_layers, problem.dropout, problem.needs_grad, problem.bidirectional)
    state = (h0, c0) if problem.cell.states else h0
    if batch_sizes is None:
        y, h_n, *c_n = operator(x, state, weights, *options, False)
    else:
        y, h_n, *c_n = operator(x, batch_sizes, state, weights, *options)
    return Result(y, h_n, c_n[0] if c_n else c0)
