"""Stand-ins on the CPU for PyTorch's operators of cuDNN's LSTM, GRU and RNN, which run on NVIDIA's GPUs alone.

They demand of their arguments what ATen's cudnn/RNN.cpp demands, read the weights from the one buffer in cuDNN's order,
and compute what PyTorch's modules compute. A reserve can be used once, as cuDNN's.
"""

import functools
import itertools

import torch
from torch.nn.utils.rnn import PackedSequence

_MODULES = {  # by CUDNN_RNN_RELU, CUDNN_RNN_TANH, CUDNN_LSTM and CUDNN_GRU
    0: functools.partial(torch.nn.RNN, nonlinearity="relu"),
    1: torch.nn.RNN,
    2: torch.nn.LSTM,
    3: torch.nn.GRU,
}


class Operators:
    """Stand-ins for `_cudnn_rnn` and `_cudnn_rnn_backward`.

    Attributes:
        modes: The cell's mode in every call.
    """

    def __init__(self):
        self.modes, self.runs, self.numbers = [], {}, itertools.count(1)

    def forward(
        self, x, weights, per_direction, buffer, hx, cx, mode, hidden, proj, layers, batch_first, dropout, train,
        bidirectional, batch_sizes, dropout_state,
    ):  # fmt: skip
        self.modes.append(mode)
        demand(not batch_first and dropout == 0.0 and dropout_state is None)
        module = self.module(mode, x, weights, per_direction, buffer, hidden, proj, layers, bidirectional)
        check_states(mode, hx, cx)
        with torch.enable_grad():
            leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, hx, *(() if cx is None else (cx,)))]
            given = PackedSequence(leaves[0], torch.tensor(batch_sizes)) if batch_sizes else leaves[0]
            y, final = module(given, tuple(leaves[1:]) if mode == 2 else leaves[1])
            y = y.data if batch_sizes else y
            hy, cy = final if mode == 2 else (final, hx.new_empty(0))
        reserve = torch.empty(0, dtype=torch.uint8)
        if train:
            reserve = torch.tensor([next(self.numbers)], dtype=torch.uint8)
            self.runs[int(reserve)] = leaves, module, (y, hy, *([cy] if mode == 2 else []))
        return y.detach(), hy.detach(), cy.detach(), reserve, buffer

    def backward(
        self, x, weights, per_direction, buffer, hx, cx, output, dy, dhy, dcy, mode, hidden, proj, layers, batch_first,
        dropout, train, bidirectional, batch_sizes, dropout_state, reserve, mask,
    ):  # fmt: skip
        demand(train and not batch_first and dropout_state is None)
        check_states(mode, hx, cx)
        demand(mode == 2 or (dcy is None and not mask[2]))
        self.module(mode, x, weights, per_direction, buffer, hidden, proj, layers, bidirectional)
        leaves, module, outputs = self.runs.pop(int(reserve))
        demand(torch.equal(output, outputs[0]))
        if dy is None and dhy is None and dcy is None:
            return None, None, None, [None] * len(weights)
        above = [gradient for gradient in (dy, dhy, dcy) if gradient is not None]
        given = [output for output, gradient in zip(outputs, (dy, dhy, dcy), strict=False) if gradient is not None]
        sources = [*leaves, *(weight for direction in module.all_weights for weight in direction)]
        dx, dhx, *rest = torch.autograd.grad(given, sources, above, materialize_grads=True)
        dcx = rest.pop(0) if mode == 2 else None
        return dx, dhx, dcx, rest if mask[3] else []

    def module(self, mode, x, weights, per_direction, buffer, hidden, proj, layers, bidirectional):
        """Return PyTorch's module with the weights that lie in the buffer: matrices first, then biases."""
        bias = per_direction >= 4
        options = {"proj_size": proj} if proj else {}
        module = _MODULES[mode](
            x.shape[-1], hidden, layers, bias=bias, bidirectional=bidirectional, dtype=x.dtype, **options
        )
        demand(buffer.dim() == 1)
        flat = [weight for direction in module.all_weights for weight in direction]
        demand([weight.shape for weight in flat] == [weight.shape for weight in weights])
        place = 0
        for weight in sorted(flat, key=lambda weight: weight.dim() == 1):
            with torch.no_grad():
                weight.copy_(buffer[place : place + weight.numel()].view(weight.shape))
            place += weight.numel()
        biases = 0 if bias else 2 * sum(weight.shape[0] for weight in flat[::per_direction])
        demand(buffer.numel() == place + biases and not buffer[place:].any())
        return module


def check_states(mode, hx, cx):
    """Refuse what "rnn: hx is not contiguous" and "illegal defined cx for non-LSTM RNN" refuse."""
    demand(hx.is_contiguous())
    demand((cx is not None) == (mode == 2))
    demand(cx is None or cx.is_contiguous())


def demand(holds):
    """Raise as a check of the operator would."""
    if not holds:
        raise RuntimeError("an argument that the operator refuses")
