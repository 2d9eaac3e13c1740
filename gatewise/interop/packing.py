"""Conversion of the tensors of any layout to PyTorch's form, and back.

`DirectionWeights` is the common form of all layouts: gates in the order `i f g o`, stacked along the rows. A layout
with one bias has no `b_hh`. The constant that a system adds to the forget gate at run time is stored in `b_hh`, so that
no number is rounded; if there is only one bias in the target, it is added to that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from gatewise.contract.errors import ArgumentError, ShapeError, sentence
from gatewise.contract.weights import DirectionWeights
from gatewise.interop.layouts import GATES, Form, Matrix, WeightLayout, layout_named

_TURNED_WHOLE = ((Form.ROWS, 0), (Form.COLUMNS, 1))
"""The forms for which transposing the tensor transposes every gate and leaves the gates along the rows."""


def unpack(tensors: Mapping[str, Tensor], layout: str | WeightLayout) -> DirectionWeights:
    """Return the weights of one direction of one layer in PyTorch's form; differentiable.

    Args:
        tensors: The tensors by the layout's names, without prefix and suffix.
        layout: The layout of `tensors`.

    Returns:
        Weights with gates in the order `i f g o`. `b_hh` is None if the layout has one bias, and both biases are None
        if there is none; a forget bias that the system adds at run time is in `b_hh`. They may be views of `tensors`.

    Raises:
        ShapeError: The shapes do not fit each other; the message has the actual shapes.

    Example:
        >>> import torch
        >>> from gatewise.interop.packing import unpack
        >>> keras = {"kernel": torch.randn(3, 8), "recurrent_kernel": torch.randn(2, 8), "bias": torch.zeros(8)}
        >>> unpack(keras, "keras").w_ih.shape
        torch.Size([8, 3])
    """
    layout = layout_named(layout)
    w_hr = tensors.get(layout.projection)
    matrices = [_read_matrix(tensors, matrix, layout) for matrix in layout.matrices]
    hidden_size = matrices[-1].shape[0] // 4
    if layout.recurrent is None:
        input_size = matrices[0].shape[1] - hidden_size
        _require(input_size > 0, tensors, layout)
        w_ih, w_hh = matrices[0].split((input_size, hidden_size), 1)
    else:
        w_ih, w_hh = matrices
    _require(w_ih.shape[0] == w_hh.shape[0], tensors, layout)
    _require(w_hh.shape[1] == (hidden_size if w_hr is None else w_hr.shape[0]), tensors, layout)
    biases = _read_biases(tensors, layout)
    _require(all(bias.shape == (4 * hidden_size,) for bias in biases), tensors, layout)
    if layout.forget_bias:
        biases = [biases[0], _forget_bias(biases[0], layout.forget_bias)]
    b_ih, b_hh = [*biases, None, None][:2]
    return DirectionWeights(w_ih, w_hh, b_ih, b_hh, w_hr)


def pack(weights: DirectionWeights, layout: str | WeightLayout) -> dict[str, Tensor]:
    """Return the tensors of one direction of one layer in a layout: the inverse of `unpack`.

    Two biases become one by adding them. One bias becomes two: two exact halves if the layout has both in one tensor,
    otherwise the bias and zeros.

    Args:
        weights: The weights in PyTorch's form; `b_hh` may be None even if `b_ih` is not.
        layout: The layout of the result.

    Returns:
        Tensors by the layout's names, without prefix and suffix.

    Raises:
        ArgumentError: The weights have a projection and the layout does not.
    """
    layout = layout_named(layout)
    if weights.w_hr is not None and not layout.projection:
        advice = "Only the layout torch has projections."
        raise ArgumentError(sentence("weights", "without a projection", f"w_hr {list(weights.w_hr.shape)}", advice))
    packed: dict[str, Tensor] = {}
    sources = (weights.w_ih, weights.w_hh) if layout.recurrent else (torch.cat((weights.w_ih, weights.w_hh), 1),)
    for matrix, source in zip(layout.matrices, sources, strict=True):
        blocks = [_turned(block, matrix.form) for block in _reordered(source, GATES, layout.gates)]
        packed |= _stored(matrix.name, blocks, matrix.gates_along, layout)
    biases = [torch.cat(_reordered(bias, GATES, layout.gates)) for bias in _biases_to_write(weights, layout)]
    if layout.bias.halves:
        biases = [torch.cat(biases)]
    for name, bias in zip(layout.bias.names, biases, strict=bool(biases)):
        packed |= _stored(name, list(bias.chunk(4)), None if "{gate}" in name else 0, layout)
        if layout.bias.row:
            packed[name] = packed[name].unsqueeze(0)
    if weights.w_hr is not None:
        packed[layout.projection] = weights.w_hr.clone()
    return packed


def tensor_names(layout: WeightLayout) -> list[str]:
    """Return the names of one direction's tensors, without prefix and suffix."""
    projection = [layout.projection] if layout.projection else []
    return [*_matrix_names(layout), *_bias_names(layout), *projection]


def missing_tensors(found: Collection[str], layout: WeightLayout) -> list[str]:
    """Return the names of missing tensors; biases may be absent altogether, but not in part.

    Args:
        found: The names that exist, without prefix and suffix.
        layout: The layout of the names.
    """
    biases = _bias_names(layout)
    needed = [*_matrix_names(layout), *(biases if layout.bias.required or set(biases) & set(found) else [])]
    return [name for name in needed if name not in found]


def _matrix_names(layout: WeightLayout) -> list[str]:
    return [name for matrix in layout.matrices for name in _names(matrix.name, layout)]


def _bias_names(layout: WeightLayout) -> list[str]:
    return [name for template in layout.bias.names for name in _names(template, layout)]


def _names(template: str, layout: WeightLayout) -> list[str]:
    return [template.format(gate=gate) for gate in layout.gates] if "{gate}" in template else [template]


def _read_matrix(tensors: Mapping[str, Tensor], matrix: Matrix, layout: WeightLayout) -> Tensor:
    """Return the matrix as [4H, K], gates in the order `i f g o`."""
    found = [tensors[name] for name in _names(matrix.name, layout)]
    _require(all(tensor.dim() == 2 for tensor in found), tensors, layout)
    if matrix.gates_along is not None:
        _require(found[0].shape[matrix.gates_along] % 4 == 0 and found[0].numel() > 0, tensors, layout)
        if layout.gates == GATES and (matrix.form, matrix.gates_along) in _TURNED_WHOLE:
            return _turned(found[0], matrix.form)  # a view, so that a layer can do this in every call at no cost
        found = list(found[0].chunk(4, matrix.gates_along))
    _require(len({tensor.shape for tensor in found}) == 1, tensors, layout)
    blocks = [_turned(block, matrix.form) for block in found]
    return torch.cat([blocks[layout.gates.index(gate)] for gate in GATES])


def _read_biases(tensors: Mapping[str, Tensor], layout: WeightLayout) -> list[Tensor]:
    """Return the layout's one or two biases, each [4H] in the order `i f g o`; an empty list if there are none."""
    if _bias_names(layout)[0] not in tensors:
        return []
    joined = []
    for template in layout.bias.names:
        found = [tensors[name].flatten() for name in _names(template, layout)]
        joined.append(found[0] if len(found) == 1 else torch.cat(found))
    if layout.bias.halves:
        _require(joined[0].shape[0] % 2 == 0, tensors, layout)
        joined = list(joined[0].chunk(2))
    _require(all(bias.shape[0] % 4 == 0 for bias in joined), tensors, layout)
    if layout.gates == GATES:
        return joined
    return [torch.cat(_reordered(bias, layout.gates, GATES)) for bias in joined]


def _biases_to_write(weights: DirectionWeights, layout: WeightLayout) -> list[Tensor]:
    """Return the layout's number of biases, each [4H] in the order `i f g o`."""
    b_ih, b_hh = weights.b_ih, weights.b_hh
    if b_ih is None:
        if not layout.bias.required:
            return []
        b_ih = weights.w_ih.new_zeros(weights.w_ih.shape[0])
    if layout.forget_bias:
        # Subtracted from the second bias if there is one: this undoes what `unpack` did without rounding.
        if b_hh is None:
            b_ih = b_ih - _forget_bias(b_ih, layout.forget_bias)
        else:
            b_hh = b_hh - _forget_bias(b_hh, layout.forget_bias)
    if layout.bias.told_apart == 1:
        return [b_ih if b_hh is None else b_ih + b_hh]
    if b_hh is None:
        half = b_ih / 2
        b_ih, b_hh = (b_ih - half, half) if layout.bias.halves else (b_ih, torch.zeros_like(b_ih))
    return [b_ih, b_hh]


def _forget_bias(like: Tensor, value: float) -> Tensor:
    bias = torch.zeros_like(like)
    bias.chunk(4)[GATES.index("f")].fill_(value)
    return bias


def _turned(block: Tensor, form: Form) -> Tensor:
    """Convert a gate's matrix between [H, K] and its form; every form is its own inverse."""
    match form:
        case Form.ROWS:
            return block
        case Form.COLUMNS:
            return block.t()
        case Form.RESHAPED:
            return block.reshape(block.shape[1], block.shape[0])


def _reordered(tensor: Tensor, order: str, wanted: str) -> list[Tensor]:
    blocks = tensor.chunk(4)
    return [blocks[order.index(gate)] for gate in wanted]


def _stored(template: str, blocks: list[Tensor], along: int | None, layout: WeightLayout) -> dict[str, Tensor]:
    if along is not None:
        return {template: torch.cat(blocks, along)}
    return {name: block.clone().contiguous() for name, block in zip(_names(template, layout), blocks, strict=True)}


def _require(fits: bool, tensors: Mapping[str, Tensor], layout: WeightLayout) -> None:
    if fits:
        return
    found = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    if layout.bias.halves:
        advice = "A bias of 4H is that of Keras' LSTM: the layout keras."
    elif layout.name == "keras":
        advice = "A bias of 8H is that of CuDNNLSTM: the layout keras-cudnn."
    else:
        advice = "Check the layout."
    raise ShapeError(sentence("weights", f"those of an LSTM in the layout {layout.name}", found, advice))
