"""Training passes with oneDNN's LSTM, one primitive for each layer and direction; and when oneDNN is used at all.

The tensors for the backward pass are kept explicitly, without an autograd graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.cells import LSTM
from gatewise.contract import ranking
from gatewise.contract.device import Device
from gatewise.contract.kernel import TensorSpec
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs, OutputGradients, Result
from gatewise.contract.weights import DirectionWeights
from gatewise.kernels.stack import Layer, LayerGradients

RANKINGS = "aten onednn inference", "aten onednn training"
"""The names of the measured weights for calls without gradients, and with them."""

_LSTM = 2
_forward = torch.ops.aten.mkldnn_rnn_layer.default
_backward = torch.ops.aten.mkldnn_rnn_layer_backward.default


def takes(problem: Problem, device: Device) -> bool:
    """Return whether a problem runs on oneDNN: if PyTorch supports it there, and the native loop is not faster."""
    return supports(problem, device) and not is_slower(problem, device)


def supports(problem: Problem, device: Device) -> bool:
    """Return whether PyTorch supports a problem on oneDNN.

    It supports LSTMs without projection on dense, non-empty input, in float32, in bfloat16 if the processor supports
    it, and in float16 if the processor supports it and no gradient is needed (`use_mkldnn` in ATen's RNN.cpp).
    """
    if type(problem.cell) is not LSTM:
        return False
    if device.kind != "cpu" or problem.proj_size or problem.layout is not Layout.DENSE:
        return False
    if not torch.backends.mkldnn.is_available() or not torch._C._get_mkldnn_enabled():
        return False
    if problem.time * problem.batch * problem.input_size == 0:
        return False
    if problem.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if problem.dtype == torch.float16:
        return not problem.needs_grad and torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return problem.dtype == torch.float32


def is_slower(problem: Problem, device: Device) -> bool:
    """Return whether the native loop takes clearly less time than oneDNN, as it does for a few steps.

    In every call oneDNN converts the weights to its own layout. In every step the native loop issues more operators,
    and in training adds one matrix to the gradients of the weights.

    Args:
        problem: The problem, with any layout.
        device: The device, which is a CPU.
    """
    if problem.dtype is not torch.float32 or problem.traced or type(problem.cell) is not LSTM or problem.proj_size:
        return False
    weights = ranking.weights(device, RANKINGS[problem.needs_grad])
    directions, elements = problem.num_layers * problem.num_directions, problem.parameter_count
    once = directions * weights["calls"] + elements * weights["weights"]
    each = directions * weights["steps"] + elements * weights["weights in steps"]
    each += directions * problem.batch * problem.hidden_size * weights["states in steps"]
    return once > problem.time * each


def kept(problem: Problem) -> tuple[TensorSpec, ...]:
    """Return the kept tensors: the outputs of all layers but the last, then each layer's workspaces and final states.

    The states are copies, because the caller may overwrite the returned states before oneDNN's backward pass reads
    them. oneDNN does not document the size of a workspace, which has gates and states in the dtype, and cell states and
    gradients of states in float32. The estimate is the size of those of 50 steps and more.
    """
    tokens = problem.time * problem.batch
    outputs = [TensorSpec((problem.time, problem.batch, problem.output_size), problem.dtype)] * (problem.num_layers - 1)
    # In integers, because rounding a symbol would bind a compiled graph to the sizes with which it was traced.
    value_bytes = 9 * problem.element_bytes + 26
    workspace = TensorSpec((tokens * problem.hidden_size * value_bytes,), torch.uint8, exact=False)
    state = TensorSpec((problem.batch, problem.hidden_size), problem.dtype)
    directions = problem.num_directions
    return (*outputs, *[*[workspace] * directions, *[state] * (2 * directions)] * problem.num_layers)


def has_kept(result: Result) -> bool:
    """Return whether the forward pass that kept the tensors of a result ran on oneDNN; only workspaces are bytes."""
    return any(tensor.dtype is torch.uint8 for tensor in result.kept)


def layer_forward(problem: Problem, layer: Layer) -> Result:
    """Run the forward pass of one layer; keep the workspaces, hidden states and cell states of all directions."""
    x = layer.x.contiguous()
    # The operator writes a workspace only in grad mode. Below autograd's dispatch keys no graph is recorded regardless.
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        parts = [
            direction_forward(problem, x, layer.h0[direction], layer.c0[direction], weights, reverse=direction == 1)
            for direction, weights in enumerate(layer.weights)
        ]
    outputs, hidden, cell, workspaces = zip(*parts, strict=True)
    kept = (*workspaces, *hidden, *cell)
    if len(parts) == 1:
        return Result(outputs[0], hidden[0].clone()[None], cell[0].clone()[None], kept)
    return Result(torch.cat(outputs, -1), torch.stack(hidden), torch.stack(cell), kept)


def direction_forward(
    problem: Problem, x: Tensor, h0: Tensor, c0: Tensor, weights: DirectionWeights, *, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run one direction of one layer; return y, h_n, c_n and the workspace, which is empty unless autograd is on.

    Args:
        problem: The problem.
        x: The input [T, B, I].
        h0: The initial hidden state [B, H].
        c0: The initial cell state [B, H].
        weights: The weights of the direction.
        reverse: Whether the direction reads the sequences from their last step to their first.
    """
    # The operator ignores the strides of the input and of states.
    states = h0.contiguous(), c0.contiguous()
    options = problem.hidden_size, 1, problem.bias, False, False, problem.needs_grad
    return _forward(x.contiguous(), *_four(weights), *states, reverse, [], _LSTM, *options)


def recorded(
    x: Tensor, weights: DirectionWeights, h0: Tensor, c0: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run one direction of one layer for a backward pass; return y, h_n, c_n and the workspace.

    Args:
        x: The input [T, B, I].
        weights: The weights of the direction.
        h0: The initial hidden state [B, H].
        c0: The initial cell state [B, H].
        reverse: Whether the direction reads the sequences from their last step to their first.
    """
    options = weights.w_hh.shape[1], 1, weights.b_ih is not None, False, False, True
    given = x.contiguous(), *_four(weights), h0.contiguous(), c0.contiguous()
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():  # as in `layer_forward`
        return _forward(*given, reverse, [], _LSTM, *options)


def differentiated(
    x: Tensor,
    weights: DirectionWeights,
    h0: Tensor,
    c0: Tensor,
    y: Tensor,
    h_n: Tensor,
    c_n: Tensor,
    dy: Tensor | None,
    dh: Tensor | None,
    dc: Tensor | None,
    workspace: Tensor,
    reverse: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients of x, of two matrices and two biases, and of both states, from what `recorded` returned."""
    options = reverse, _LSTM, weights.w_hh.shape[1], 1, weights.b_ih is not None, True, False, [], False
    states = h0.contiguous(), c0.contiguous()
    given = (None if each is None else each.contiguous() for each in (dy, dh, dc))
    return _backward(x.contiguous(), *_four(weights), *states, y, h_n, c_n, *given, *options, workspace)


def layer_backward(
    problem: Problem, layer: Layer, result: Result, gradients: OutputGradients, needs: Needs
) -> LayerGradients:
    """Run the backward pass of one layer; oneDNN always computes all gradients."""
    x, directions = layer.x.contiguous(), len(layer.weights)
    if all(gradient is None for gradient in gradients):
        gradients = gradients._replace(y=torch.zeros_like(result.y))  # the operator needs at least one
    workspaces, hidden, cell = (
        result.kept[start : start + directions] for start in range(0, 3 * directions, directions)
    )
    parts = [
        _backward(
            x,
            *_four(weights),
            layer.h0[direction].contiguous(),
            layer.c0[direction].contiguous(),
            _share(result.y, direction, problem),
            hidden[direction],
            cell[direction],
            None if gradients.y is None else _share(gradients.y, direction, problem),
            None if gradients.h_n is None else gradients.h_n[direction].contiguous(),
            None if gradients.c_n is None else gradients.c_n[direction].contiguous(),
            bool(direction),
            _LSTM,
            problem.hidden_size,
            1,
            problem.bias,
            True,
            False,
            [],
            False,
            workspaces[direction],
        )
        for direction, weights in enumerate(layer.weights)
    ]
    if problem.dtype != torch.float32:
        # oneDNN returns the gradients of 16-bit types in float32.
        parts = [tuple(tensor.to(problem.dtype) for tensor in part) for part in parts]
    weights = tuple(tensor for part in parts for tensor in part[1 : 5 if problem.bias else 3])
    if len(parts) == 1:
        return LayerGradients(parts[0][0], parts[0][5][None], parts[0][6][None], weights)
    one, other = parts
    return LayerGradients(one[0] + other[0], torch.stack([one[5], other[5]]), torch.stack([one[6], other[6]]), weights)


def _four(weights: DirectionWeights) -> tuple[Tensor, ...]:
    # The operator takes four tensors even without biases; it then ignores the last two.
    if weights.b_ih is not None and weights.b_hh is not None:
        return weights.w_ih, weights.w_hh, weights.b_ih, weights.b_hh
    return weights.w_ih, weights.w_hh, torch.zeros_like(weights.w_ih), torch.zeros_like(weights.w_hh)


def _share(tensor: Tensor, direction: int, problem: Problem) -> Tensor:
    if not problem.bidirectional:
        return tensor.contiguous()
    return tensor[..., direction * problem.hidden_size : (direction + 1) * problem.hidden_size].contiguous()
