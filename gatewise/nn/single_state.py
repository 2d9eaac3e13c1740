"""The calls of the layers and cells that have a single state: the drop-ins for `torch.nn.GRU` and `torch.nn.RNN`.

Each class has a `forward` of its own, because `torch.compile` limits the number of graphs for one function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from gatewise.contract.errors import ShapeError, sentence
from gatewise.functional.differentiable import recurrent
from gatewise.nn.arguments import check_state, check_step
from gatewise.nn.call_errors import CALL_ERRORS, restate, restate_step
from gatewise.nn.pytorch_layer import check_assigned_options, weights_of, weights_of_cell
from gatewise.nn.sequences import run_one, run_packed, time_first
from gatewise.nn.symbolic import recorded
from gatewise.nn.weight_dropout import with_dropped_weights


def run(
    layer: Any,
    input: Tensor | PackedSequence,
    hx: Tensor | None,
    lengths: Tensor | Sequence[int] | None,
    resets: Tensor | None,
) -> tuple[Tensor | PackedSequence, Tensor]:
    """Run the layers over a batch of sequences; the arguments and results are those of `forward`."""
    padded = isinstance(input, Tensor)
    if not padded and not isinstance(input, PackedSequence):
        return recorded(layer, input, hx=hx, lengths=lengths, resets=resets)
    states = None
    if hx is not None:
        check_state(hx)
        states = (hx,)
    try:
        if not padded:
            packed, (h_n,) = run_packed(functools.partial(_run, layer), input, states, lengths, "[L*D, B, H]", resets)
            return packed, h_n
        rank = input.dim()
        if rank == 2:
            y, (h_n,) = run_one(functools.partial(_run, layer), input, states, lengths, "[L*D, H]", resets)
            return y, h_n
        if rank != 3:
            arrangement = "[B, T, I]" if layer.batch_first else "[T, B, I]"
            expectation = f"{arrangement}, or [T, I] for one sequence"
            raise ShapeError(sentence("input", expectation, f"rank {rank} with shape {list(input.shape)}"))
        if not layer.batch_first:
            y, (h_n,) = _run(layer, input, states, lengths=lengths, resets=resets)
            return y, h_n
        if resets is not None:
            resets = time_first(resets, input.shape[:2])
        y, (h_n,) = _run(layer, input.transpose(0, 1), states, lengths=lengths, resets=resets)
        return y.transpose(0, 1), h_n
    except CALL_ERRORS as error:
        restate(error, input, hx, layer.batch_first)
        raise


def _run(
    layer: Any,
    x: Tensor,
    states: tuple[Tensor, ...] | None,
    batch_sizes: Tensor | None = None,
    *,
    lengths: Tensor | Sequence[int] | None = None,
    resets: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor]]:
    if states is not None and states[0].dim() != 3:
        raise ShapeError(sentence("hx", "a state of [L*D, B, H]", list(states[0].shape)))
    rate = layer.weight_dropout
    if type(rate) is not float or rate or layer.reverse:
        check_assigned_options(layer)
    weights = weights_of(layer)
    if rate and layer.training:
        weights = with_dropped_weights(weights, len(layer._all_weights[0]), rate)
    y, h_n, _ = recurrent(
        x,
        states,
        weights,
        lengths=lengths,
        batch_sizes=batch_sizes,
        bidirectional=layer.bidirectional,
        dropout=layer.dropout if layer.training else 0.0,
        kernel=layer.kernel,
        memory=layer.memory,
        resets=resets,
        reverse=layer.reverse,
        cell=layer.mode,
    )
    return y, (h_n,)


def step(cell: Any, operator: Callable[..., Tensor], input: Tensor, hx: Tensor | None) -> Tensor:
    """Compute a single time step of a cell, as its `forward` does.

    Args:
        cell: The drop-in for `torch.nn.GRUCell` or `torch.nn.RNNCell`.
        operator: PyTorch's operator of the step.
        input: The input [B, I], or [I] without a batch.
        hx: The hidden state [B, H] or [H]; None for zeros.

    Raises:
        ShapeError: A rank or size does not fit.
        DtypeError: The dtype of the input differs from that of the parameters, and autocast is off.
        ArgumentError: `input` or `hx` is not a tensor.
    """
    states = None
    if hx is not None:
        check_state(hx)
        states = (hx,)
    weights = weights_of_cell(cell)
    check_step(input, states, cell.input_size, cell.hidden_size, weights[0].dtype)
    try:
        if input.dim() == 2:
            return operator(input, input.new_zeros(input.shape[0], cell.hidden_size) if hx is None else hx, *weights)
        state = input.new_zeros(1, cell.hidden_size) if hx is None else hx.unsqueeze(0)
        return operator(input.unsqueeze(0), state, *weights).squeeze(0)
    except CALL_ERRORS as error:
        restate_step(error, input, hx, weights[0])
        raise
