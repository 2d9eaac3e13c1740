"""Calls on a CPU in the graphs of `torch.compile`, by operators that take little time beside PyTorch's own.

An LSTM without gradients is `aten::mkldnn_rnn_layer` itself, one for each layer and direction. With gradients that
operator cannot be in a graph: it writes the workspace that its backward pass reads only while autograd records it, and
nothing records while a compiled graph runs. So it is called by an operator of ours. The size of the workspace is known
only when it has been written, and such a size would end the graph: the operator returns the first byte of the
workspace, whose storage holds the rest.

PyTorch's other layers are in the graph as one operator that calls them, because in a graph they would be unrolled over
their steps, and the graph would be one for a single number of steps. Their loops are differentiated by autograd alone,
so that the operator is one of calls without gradients.

Masks of dropout are drawn by an operator of their own, because the compiler would draw others than PyTorch's layers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gatewise.contract.device import Device
from gatewise.contract.kernel import Operator
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.pytorch import pytorch_layer
from gatewise.contract.weights import DirectionWeights, by_direction
from gatewise.kernels.aten import onednn
from gatewise.kernels.stack import survivors_scale

_OPERATORS = {
    "onednn_forward": (
        "(Tensor x, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor h0, Tensor c0, bool reverse,"
        " bool last) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "onednn_backward": (
        "(Tensor? dy, Tensor? dh, Tensor? dc, Tensor x, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh,"
        " Tensor h0, Tensor c0, Tensor y, Tensor h, Tensor c, Tensor workspace, Tensor size, bool reverse)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "dropout_mask": "(Tensor x, float kept) -> Tensor",
    "pytorch_layers": (
        "(Tensor x, Tensor h0, Tensor c0, Tensor[] weights, str mode, bool bias, int num_layers, bool bidirectional)"
        " -> (Tensor, Tensor, Tensor)"
    ),
}


def in_graph(problem: Problem, device: Device) -> Operator | None:
    """Return the function that puts a call into a graph, or None where the graph must have the general operator.

    The general one also takes packed batches, and has the gradients of all layers.

    Args:
        problem: The problem, whose numbers of steps and sequences count for nothing.
        device: The device.
    """
    if device.kind != "cpu" or problem.layout is not Layout.DENSE:
        return None
    by_onednn = onednn.takes(problem, device)
    if not by_onednn and (problem.needs_grad or problem.dropout):
        return None

    def layers(
        x: Tensor, h0: Tensor | None, c0: Tensor | None, weights: Sequence[Tensor], batch_sizes: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert h0 is not None  # for the type checker: graphs have the initial states
        assert c0 is not None
        if by_onednn:
            return _by_onednn(problem, x, h0, c0, weights)
        mode = pytorch_layer(problem.cell).mode.lower()
        options = mode, problem.bias, problem.num_layers, problem.bidirectional
        return torch.ops.gatewise.pytorch_layers.default(x, h0, c0, weights, *options)

    return layers


def _by_onednn(
    problem: Problem, x: Tensor, h0: Tensor, c0: Tensor, flat: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    directions, finals = by_direction(flat, problem.weights_per_direction), []
    for first in range(0, len(directions), problem.num_directions):
        if first and problem.dropout:
            mask = torch.ops.gatewise.dropout_mask.default(x, 1.0 - problem.dropout)
            x = x * mask * survivors_scale(problem)
        outputs, last = [], first + problem.num_directions == len(directions)
        for place in range(first, first + problem.num_directions):
            weights, reverse = directions[place], place > first
            given = x, h0[place], c0[place]
            if problem.needs_grad:
                of_layer = weights.w_ih, weights.w_hh, weights.b_ih, weights.b_hh
                y, *final = _Layer.apply(reverse, last, *given, *of_layer)
            else:
                y, *final, _ = onednn.direction_forward(problem, *given, weights, reverse=reverse)
            outputs.append(y)
            finals.append(final)
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    h_n, c_n = (torch.stack(of_all) for of_all in zip(*finals, strict=True))
    return x, h_n, c_n


class _Layer(torch.autograd.Function):
    """One direction of one layer by oneDNN, with gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        reverse: bool,
        last: bool,
        x: Tensor,
        h0: Tensor,
        c0: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output and the final states.

        Callers may change the final states and the last layer's output in place, and the backward pass reads them. The
        operator itself returns copies, because the compiler removes those that the graph has: it would return views of
        what is saved.
        """
        given = x, w_ih, w_hh, b_ih, b_hh, h0, c0
        y, h, c, workspace, size, *copies = torch.ops.gatewise.onednn_forward.default(*given, reverse, last)
        ctx.save_for_backward(*given, y, h, c, workspace, size)
        ctx.reverse = reverse
        ctx.set_materialize_grads(False)
        return copies[0] if last else y, copies[1], copies[2]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:  # type: ignore[override]
        """Return the gradients of all arguments."""
        if all(gradient is None for gradient in gradients):
            return (None,) * 9
        found = torch.ops.gatewise.onednn_backward.default(*gradients, *ctx.saved_tensors, ctx.reverse)
        dx, dw_ih, dw_hh, db, dh0, dc0 = found
        biased = ctx.saved_tensors[3] is not None
        # Callers change the gradients of both biases in place.
        return None, None, dx, dh0, dc0, dw_ih, dw_hh, *((db, db.clone()) if biased else (None, None))


def _onednn_forward(
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    reverse: bool,
    last: bool,
) -> tuple[Tensor, ...]:
    y, h, c, workspace = onednn.recorded(x, DirectionWeights(w_ih, w_hh, b_ih, b_hh), h0, c0, reverse)
    size = torch.full((1,), workspace.numel(), dtype=torch.int64)
    return y, h, c, workspace.resize_(1), size, y.clone() if last else y.new_empty(0), h.clone(), c.clone()


def _onednn_backward(
    dy: Tensor | None,
    dh: Tensor | None,
    dc: Tensor | None,
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    y: Tensor,
    h: Tensor,
    c: Tensor,
    workspace: Tensor,
    size: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    weights, count = DirectionWeights(w_ih, w_hh, b_ih, b_hh), int(size)
    if workspace.untyped_storage().nbytes() == count:
        storage = workspace.untyped_storage()
        workspace = workspace.new_empty(0).set_(storage, 0, (count,), (1,))  # type: ignore[call-overload]
    else:  # a copy of the byte, as hooks for saved tensors make
        *_, workspace = onednn.recorded(x, weights, h0, c0, reverse)
    found = onednn.differentiated(x, weights, h0, c0, y, h, c, dy, dh, dc, workspace, reverse)
    dx, dw_ih, dw_hh, db, _, dh0, dc0 = (gradient.to(x.dtype) for gradient in found)
    return dx, dw_ih, dw_hh, db, dh0, dc0


def _dropout_mask(x: Tensor, kept: float) -> Tensor:
    return torch.bernoulli(torch.empty(x.shape, dtype=torch.bool), kept)


def _pytorch_layers(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    weights: Sequence[Tensor],
    mode: str,
    bias: bool,
    num_layers: int,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    options = bias, num_layers, 0.0, False, bidirectional, False
    if mode == "lstm":
        return torch.lstm(x, (h0, c0), tuple(weights), *options)
    return *getattr(torch, mode)(x, h0, weights, *options), torch.empty_like(c0)


def _fake_forward(
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    reverse: bool,
    last: bool,
) -> tuple[Tensor, ...]:
    y = x.new_empty(*x.shape[:2], w_hh.shape[1])
    first, size = x.new_empty(1, dtype=torch.uint8), x.new_empty(1, dtype=torch.int64)
    h, c, h_n, c_n = (state.new_empty(state.shape) for state in (h0, c0, h0, c0))
    return y, h, c, first, size, y.new_empty(y.shape if last else (0,)), h_n, c_n


def _fake_backward(
    dy: Tensor | None,
    dh: Tensor | None,
    dc: Tensor | None,
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    *rest: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx, dw_ih, dw_hh, dh0, dc0 = (tensor.new_empty(tensor.shape) for tensor in (x, w_ih, w_hh, h0, c0))
    return dx, dw_ih, dw_hh, w_ih.new_empty(w_ih.shape[0]), dh0, dc0


def _fake_layers(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    weights: Sequence[Tensor],
    mode: str,
    bias: bool,
    num_layers: int,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty(*x.shape[:2], h0.shape[-1] * (1 + bidirectional))
    return y, h0.new_empty(h0.shape), c0.new_empty(c0.shape)


# `torch.library.custom_op` would put functions of Python around ours, which take longer than the rest of a small call.
_LIBRARY = torch.library.Library("gatewise", "FRAGMENT")
if not hasattr(torch.ops.gatewise, "onednn_forward"):  # gatewise may be imported anew
    for _name, _schema in _OPERATORS.items():
        # Without the tag, the compiler would take two masks of the same size for one.
        _tags = (torch.Tag.nondeterministic_seeded,) if _name == "dropout_mask" else ()
        _LIBRARY.define(_name + _schema, tags=_tags)
    for _name, _function, _fake in (
        ("onednn_forward", _onednn_forward, _fake_forward),
        ("onednn_backward", _onednn_backward, _fake_backward),
        ("dropout_mask", _dropout_mask, lambda x, kept: x.new_empty(x.shape, dtype=torch.bool)),
        ("pytorch_layers", _pytorch_layers, _fake_layers),
    ):
        _LIBRARY.impl(_name, _function, "CPU")
        torch.library.register_fake(f"gatewise::{_name}", _fake, lib=_LIBRARY)
