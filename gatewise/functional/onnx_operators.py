"""Recurrent layers as ONNX's own operators LSTM, GRU and RNN, for `torch.onnx.export` with `dynamo=True`.

PyTorch's exporter fixes the number of time steps of a recurrent layer when it traces it. ONNX's operators do not, and
they take the lengths of sequences too, so they are put into the graph directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gatewise.cells import GRU, LSTM, RNN, Cell, CoupledLSTM, PeepholeLSTM
from gatewise.contract.weights import DirectionWeights, by_direction
from gatewise.functional.weights import Structure


class OnnxOperator(NamedTuple):
    """The operator of ONNX that computes a cell.

    Attributes:
        name: The name of the operator.
        gates: The gates of the cell in the order of the operator's; a minus stands before one whose sum is negated.
        attributes: The attributes that choose the cell.
        activation: The operator's attribute `activations` for one direction, where it is not the default.
        parameters: The parameters of the cell in the order of the operator's input P.
    """

    name: str
    gates: tuple[str, ...]
    attributes: dict[str, int] = {}  # noqa: RUF012  an immutable value
    activation: str = ""
    parameters: tuple[str, ...] = ()


_OPERATORS = {
    LSTM(): OnnxOperator("LSTM", ("i", "o", "f", "g")),
    PeepholeLSTM(): OnnxOperator("LSTM", ("i", "o", "f", "g"), parameters=("p_i", "p_o", "p_f")),
    # 1 - sigmoid(z) is sigmoid(-z). What the attribute `input_forget` couples depends on the runtime.
    CoupledLSTM(): OnnxOperator("LSTM", ("-f", "o", "f", "g")),
    GRU(): OnnxOperator("GRU", ("z", "r", "n"), {"linear_before_reset": 1}),
    RNN("tanh"): OnnxOperator("RNN", ("z",), activation="Tanh"),
    RNN("relu"): OnnxOperator("RNN", ("z",), activation="Relu"),
}


def onnx_operator(cell: Cell) -> OnnxOperator | None:
    """Return the operator of ONNX that computes a cell, or None."""
    return _OPERATORS.get(cell)


def layers(
    operator: OnnxOperator,
    cell: Cell,
    found: Structure,
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    flat: Sequence[Tensor],
    lengths: Tensor | None,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Put a stack of layers into the graph, one operator for each layer.

    Args:
        operator: The operator of the cell.
        cell: The cell.
        found: The structure of the weights, without a projection.
        x: The input [T, B, I].
        h0: The initial hidden state [L*D, B, H].
        c0: The initial cell state [L*D, B, H]; [L*D, B, 0] for a cell without.
        flat: The weights in torch's flat order.
        lengths: The lengths [B], or None.
        dropout: The probability of dropping an output between layers.

    Returns:
        y, h_n and c_n, as of `recurrent`.
    """
    count = 1 + found.bidirectional
    weights = by_direction(tuple(flat), 2 + 2 * found.bias + found.parameters, found.parameters)
    steps = None if lengths is None else lengths.to(x.device, torch.int32)
    last: list[tuple[Tensor, ...]] = []
    for layer in range(found.num_layers):
        rows = slice(layer * count, (layer + 1) * count)
        if layer and dropout:
            x = torch.nn.functional.dropout(x, dropout)
        x, *states = _layer(operator, cell, found, x, h0[rows], c0[rows], weights[rows], steps)
        last.append(tuple(states))
    h_n, *c_n = (_joined(states) for states in zip(*last, strict=True))
    if steps is None:
        return x, h_n, c_n[0] if c_n else c0
    # The final states of an empty sequence are its initial states; ONNX Runtime makes them zero.
    empty = (steps == 0)[:, None]
    return x, torch.where(empty, h0, h_n), torch.where(empty, c0, c_n[0]) if c_n else c0


def _layer(
    operator: OnnxOperator,
    cell: Cell,
    found: Structure,
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    weights: Sequence[DirectionWeights],
    steps: Tensor | None,
) -> Sequence[Tensor]:
    (time, batch, _), size, count = x.shape, found.hidden_size, len(weights)
    attributes: dict[str, Any] = {
        "hidden_size": int(size),
        "direction": "bidirectional" if count > 1 else "forward",
        **operator.attributes,
    }
    if operator.activation:
        attributes["activations"] = [operator.activation] * count

    def ordered(of_gates: Tensor) -> Tensor:
        # The exporter computes slices of weights, but not chunks.
        parts = {gate: of_gates.narrow(0, index * size, size) for index, gate in enumerate(cell.gates)}
        return _joined([-parts[gate[1:]] if gate[0] == "-" else parts[gate] for gate in operator.gates])

    inputs: list[Tensor | None] = [
        x,
        torch.stack([ordered(own.w_ih) for own in weights]),
        torch.stack([ordered(own.w_hh) for own in weights]),
        torch.stack([torch.cat([ordered(own.b_ih), ordered(own.b_hh)]) for own in weights]) if found.bias else None,  # type: ignore[arg-type]
        steps,
        h0,
    ]
    shapes = [(time, count, batch, size), h0.shape]
    if cell.states:
        inputs.append(c0)
        shapes.append(c0.shape)
    if operator.parameters:
        of_units = [dict(zip(cell.parameters, own.parameters, strict=True)) for own in weights]
        inputs.append(torch.stack([torch.cat([each[name] for name in operator.parameters]) for each in of_units]))
    y, *states = torch.onnx.ops.symbolic_multi_out(
        operator.name, inputs, attributes, dtypes=[x.dtype] * len(shapes), shapes=shapes
    )
    # PyTorch 2.9 would restrict a program that flattens the transposed tensor to batches of other sizes than 1.
    return _joined([y.select(1, direction) for direction in range(count)], -1), *states


def _joined(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Concatenate tensors; a single one takes no operator."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), axis)
