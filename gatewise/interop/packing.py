"""Conversion of the tensors of any layout to PyTorch's form, and back.

`DirectionWeights` is the common form of all layouts: gates in the order of the cell, stacked along the rows (G gates of
H rows each). A layout with one bias has no `b_hh`. The constant that a system adds to the forget gate at run time is
stored in `b_hh`, so that no number is rounded; if there is only one bias in the target, it is added to that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from gatewise.contract.errors import ArgumentError, ShapeError, sentence
from gatewise.contract.weights import DirectionWeights
from gatewise.interop.layouts import Form, Matrix, WeightLayout, layout_named

_TURNED_WHOLE = ((Form.ROWS, 0), (Form.COLUMNS, 1))
"""The forms for which transposing the tensor transposes every gate and leaves the gates along the rows."""


def unpack(tensors: Mapping[str, Tensor], layout: str | WeightLayout) -> DirectionWeights:
    """Return the weights of one direction of one layer in PyTorch's form; differentiable.

    Args:
        tensors: The tensors by the layout's names, without prefix and suffix.
        layout: The layout of `tensors`.

    Returns:
        Weights with gates in the order of the layout's cell. `b_hh` is None if the layout has one bias, and both biases
        are None if there is none; a forget bias that the system adds at run time is in `b_hh`. The parameters of the
        cell follow. They may be views of `tensors`.

    Raises:
        ShapeError: The shapes do not fit each other; the message has the actual shapes.

    Examples:
        >>> import torch
        >>> from gatewise.interop.packing import unpack
        >>> keras = {"kernel": torch.randn(3, 8), "recurrent_kernel": torch.randn(2, 8), "bias": torch.zeros(8)}
        >>> unpack(keras, "keras").w_ih.shape
        torch.Size([8, 3])
    """
    layout = layout_named(layout)
    w_hr = tensors.get(layout.projection)
    matrices = [_read_matrix(tensors, matrix, layout) for matrix in layout.matrices]
    hidden_size = matrices[-1].shape[0] // len(layout.gates)
    if layout.recurrent is None:
        input_size = matrices[0].shape[1] - hidden_size
        _require(input_size > 0, tensors, layout)
        sizes = (hidden_size, input_size) if layout.recurrent_first else (input_size, hidden_size)
        w_ih, w_hh = matrices[0].split(sizes, 1)
        if layout.recurrent_first:
            w_ih, w_hh = w_hh, w_ih
    else:
        w_ih, w_hh = matrices
        if layout.convolved[0] in tensors:
            w_ih = _beside_convolved(w_ih, layout)
    _require(w_ih.shape[0] == w_hh.shape[0], tensors, layout)
    _require(w_hh.shape[1] == (hidden_size if w_hr is None else w_hr.shape[0]), tensors, layout)
    biases = _read_biases(tensors, layout)
    _require(all(bias.shape == (len(layout.gates) * hidden_size,) for bias in biases), tensors, layout)
    if layout.forget_bias:
        biases = [biases[0], _forget_bias(biases[0], layout)]
    b_ih, b_hh = [*biases, None, None][:2]
    return DirectionWeights(w_ih, w_hh, b_ih, b_hh, w_hr, _read_parameters(tensors, hidden_size, layout))


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
        ArgumentError: The weights have a projection or biases that the layout does not have.
    """
    layout = layout_named(layout)
    if weights.w_hr is not None and not layout.projection:
        advice = "Only the layout torch has projections."
        raise ArgumentError(sentence("weights", "without a projection", f"w_hr {list(weights.w_hr.shape)}", advice))
    if weights.b_ih is not None and not layout.bias.names:
        advice = f"{layout.system} has no biases before the normalization; train a layer with bias=False."
        raise ArgumentError(sentence("weights", "without biases", f"b_ih {list(weights.b_ih.shape)}", advice))
    packed: dict[str, Tensor] = {}
    w_ih, w_hh = weights.w_ih, weights.w_hh
    if layout.convolved[0] and w_ih.shape[1] == 2 * w_hh.shape[1]:
        w_ih = _without_convolved(w_ih, layout)
    joined = (w_hh, w_ih) if layout.recurrent_first else (w_ih, w_hh)
    sources = (w_ih, w_hh) if layout.recurrent else (torch.cat(joined, 1),)
    for matrix, source in zip(layout.matrices, sources, strict=True):
        blocks = [_formed(block, matrix, layout) for block in _reordered(source, layout.gates_of_pytorch, layout.gates)]
        packed |= _stored(matrix.name, blocks, matrix.gates_along, layout)
    biases = [_reordered(bias, layout.gates_of_pytorch, layout.gates) for bias in _biases_to_write(weights, layout)]
    if layout.bias.halves:
        biases = [[gate for bias in biases for gate in bias]] if biases else []
    for index, bias in enumerate(biases):
        name = layout.bias.names[index]
        if layout.bias.by_heads:
            bias = [part for head in zip(*(gate.chunk(layout.heads) for gate in bias), strict=True) for part in head]
        packed |= _stored(name, bias, None if "{gate}" in name else 0, layout)
        if layout.bias.rows:
            packed[name] = packed[name].view(layout.bias.told_apart, -1)
    packed = {name: tensor for name, tensor in packed.items() if name not in _left_out(layout)}
    if weights.w_hr is not None:
        packed[layout.projection] = weights.w_hr.clone()
    return packed | _parameters_to_write(weights, layout)


def tensor_names(layout: WeightLayout) -> list[str]:
    """Return the names of one direction's tensors, without prefix and suffix."""
    projection = [name for name in (layout.projection, layout.convolved[0]) if name]
    parameters = [parameters.tensor for parameters in layout.parameters]
    return [*_matrix_names(layout), *_bias_names(layout), *projection, *parameters]


def missing_tensors(found: Collection[str], layout: WeightLayout) -> list[str]:
    """Return the names of missing tensors; biases may be absent altogether, but not in part.

    Args:
        found: The names that exist, without prefix and suffix.
        layout: The layout of the names.
    """
    biases = _bias_names(layout)
    needed = [*_matrix_names(layout), *(biases if layout.bias.required or set(biases) & set(found) else [])]
    needed += [parameters.tensor for parameters in layout.parameters if parameters.required]
    return [name for name in needed if name not in found]


def _matrix_names(layout: WeightLayout) -> list[str]:
    return [name for matrix in layout.matrices for name in _names(matrix.name, layout)]


def _bias_names(layout: WeightLayout) -> list[str]:
    names = [name for template in layout.bias.names for name in _names(template, layout)]
    return [name for name in names if name not in _left_out(layout)]


def _left_out(layout: WeightLayout) -> set[str]:
    """Return the names of the second biases that the layout has for some gates only and not for these."""
    if not layout.bias.second:
        return set()
    return {layout.bias.names[1].format(gate=gate) for gate in layout.gates if gate not in layout.bias.second}


def _names(template: str, layout: WeightLayout) -> list[str]:
    names = [template.format(gate=gate) for gate in layout.gates] if "{gate}" in template else [template]
    return [dict(layout.spelled).get(name, name) for name in names]


def _read_matrix(tensors: Mapping[str, Tensor], matrix: Matrix, layout: WeightLayout) -> Tensor:
    """Return the matrix as [G*H, K], gates in the order of PyTorch."""
    count, wanted = len(layout.gates), layout.gates_of_pytorch
    found = [tensors[name] for name in _names(matrix.name, layout)]
    _require(all(tensor.dim() == matrix.form.rank for tensor in found), tensors, layout)
    if matrix.gates_along is not None:
        _require(found[0].shape[matrix.gates_along] % count == 0 and found[0].numel() > 0, tensors, layout)
        if layout.gates == wanted and (matrix.form, matrix.gates_along) in _TURNED_WHOLE:
            return _turned(found[0], matrix.form)  # a view, so that a layer can do this in every call at no cost
        found = list(found[0].chunk(count, matrix.gates_along))
    _require(len({tensor.shape for tensor in found}) == 1, tensors, layout)
    blocks = [_turned(block, matrix.form) for block in found]
    return torch.cat([blocks[layout.gates.index(gate)] for gate in wanted])


def _read_biases(tensors: Mapping[str, Tensor], layout: WeightLayout) -> list[Tensor]:
    """Return the layout's one or two biases, each [G*H] in the order of PyTorch; an empty list if there are none."""
    if not layout.bias.names or _bias_names(layout)[0] not in tensors:
        return []
    some = tensors[_bias_names(layout)[0]]
    joined = []
    for template in layout.bias.names:
        names = _names(template, layout)
        found = [tensors[name].flatten() if name not in _left_out(layout) else torch.zeros_like(some) for name in names]
        joined.append(found[0] if len(found) == 1 else torch.cat(found))
    if layout.bias.halves:
        # A bias of one row for each of two may have as many numbers as one of another form.
        _require(some.dim() == 2 and some.shape[0] == 2 if layout.bias.rows else some.dim() == 1, tensors, layout)
        _require(joined[0].shape[0] % 2 == 0, tensors, layout)
        joined = list(joined[0].chunk(2))
    _require(all(bias.shape[0] % len(layout.gates) == 0 for bias in joined), tensors, layout)
    if layout.bias.by_heads:
        heads = tensors[_names(layout.matrices[-1].name, layout)[0]].shape[0]
        _require(joined[0].shape[0] % (heads * len(layout.gates)) == 0, tensors, layout)
        joined = [bias.view(heads, len(layout.gates), -1).transpose(0, 1).flatten() for bias in joined]
    if layout.gates == layout.gates_of_pytorch:
        return joined
    return [torch.cat(_reordered(bias, layout.gates, layout.gates_of_pytorch)) for bias in joined]


def _biases_to_write(weights: DirectionWeights, layout: WeightLayout) -> list[Tensor]:
    """Return the layout's number of biases, each [G*H] in the order of PyTorch."""
    b_ih, b_hh = weights.b_ih, weights.b_hh
    if b_ih is None:
        if not layout.bias.required:
            return []
        b_ih = weights.w_ih.new_zeros(weights.w_ih.shape[0])
    if layout.forget_bias:
        # Subtracted from the second bias if there is one: this undoes what `unpack` did without rounding.
        if b_hh is None:
            b_ih = b_ih - _forget_bias(b_ih, layout)
        else:
            b_hh = b_hh - _forget_bias(b_hh, layout)
    if layout.bias.told_apart == 1:
        if b_hh is not None and any(
            b_hh.chunk(len(layout.gates))[_gate(gate, layout)].any() for gate in layout.cell.apart
        ):
            advice = (
                f"{layout.system} has one bias for each gate, and {layout.called} reads both sums of this one apart."
            )
            names = ", ".join(layout.cell.apart)
            raise ArgumentError(sentence(f"the recurrent bias of {names}", "zero", "numbers that are not", advice))
        return [b_ih if b_hh is None else b_ih + b_hh]
    if b_hh is None:
        # Where a cell reads the two sums of a gate apart, only their sum may not be divided.
        half = b_ih / 2
        split = layout.bias.halves and not layout.cell.apart
        b_ih, b_hh = (b_ih - half, half) if split else (b_ih, torch.zeros_like(b_ih))
    if layout.bias.second:
        count = len(layout.gates)
        gates = list(zip(layout.cell.gates, b_ih.chunk(count), b_hh.chunk(count), strict=True))
        apart = layout.bias.second
        b_ih = torch.cat([first if gate in apart else first + second for gate, first, second in gates])
        b_hh = torch.cat([second if gate in apart else torch.zeros_like(second) for gate, _, second in gates])
    return [b_ih, b_hh]


def _read_parameters(tensors: Mapping[str, Tensor], hidden_size: int, layout: WeightLayout) -> tuple[Tensor, ...]:
    """Return the parameters of the cell, each [H], in the order of the cell."""
    found: dict[str, Tensor] = {}
    for tensor, names, rows, _ in layout.parameters:
        if tensor not in tensors:
            continue
        count = len(names)
        shape = [rows, count * hidden_size // rows] if rows else [count * hidden_size]
        _require(list(tensors[tensor].shape) == shape, tensors, layout)
        for name, part in zip(names, tensors[tensor].flatten().chunk(count), strict=True):
            found[name] = found[name] + part if name in found else part
    if layout.shift_of_forget:
        found["shift_f"] = found["shift_f"] + layout.shift_of_forget
    return tuple(found[name] for name in layout.cell.parameters)


def _parameters_to_write(weights: DirectionWeights, layout: WeightLayout) -> dict[str, Tensor]:
    left = dict(zip(layout.cell.parameters, weights.parameters, strict=True))
    if layout.shift_of_forget:
        left["shift_f"] = left["shift_f"] - layout.shift_of_forget
    written: dict[str, Tensor] = {}
    for tensor, names, rows, _ in layout.parameters:
        joined = torch.cat([left[name] for name in names])
        written[tensor] = joined.view(rows, -1) if rows else joined
        left |= {name: torch.zeros_like(left[name]) for name in names}
    return written


def _gate(gate: str, layout: WeightLayout) -> int:
    return layout.gates_of_pytorch.index(gate)


def _forget_bias(like: Tensor, layout: WeightLayout) -> Tensor:
    bias = torch.zeros_like(like)
    bias.chunk(len(layout.gates))[layout.gates_of_pytorch.index("f")].fill_(layout.forget_bias)
    return bias


def _turned(block: Tensor, form: Form) -> Tensor:
    """Return a gate's matrix [H, K] in its form, or the matrix of a form; without blocks these are the same."""
    match form:
        case Form.BLOCKS:
            return torch.block_diag(*block)
        case Form.COLUMN_BLOCKS:
            return torch.block_diag(*block.transpose(1, 2))
        case Form.ROWS_OF_BLOCKS:
            return torch.block_diag(*block.split(block.shape[1]))
        case Form.ROWS:
            return block
        case Form.COLUMNS:
            return block.t()
        case Form.RESHAPED:
            return block.reshape(block.shape[1], block.shape[0])


def _formed(matrix: Tensor, described: Matrix, layout: WeightLayout) -> Tensor:
    """Return a gate's matrix [H, K] in the form in which it is written.

    Raises:
        ArgumentError: It is to be written in blocks, and some weight outside of them is not zero.
    """
    if not described.form.in_blocks:
        return _turned(matrix, described.form)
    heads, name = layout.heads, "the input weights" if described is layout.input else "the recurrent weights"
    if matrix.shape[0] != matrix.shape[1] or matrix.shape[0] % heads:
        expectation = f"square for each gate, with a number of units that {heads} heads divide"
        advice = f"{layout.system} has as many features as units." if described is layout.input else ""
        raise ArgumentError(sentence(name, expectation, list(matrix.shape), advice))
    units = matrix.shape[0] // heads
    blocks = torch.stack(
        [matrix[head * units : (head + 1) * units, head * units : (head + 1) * units] for head in range(heads)]
    )
    if not torch.equal(torch.block_diag(*blocks), matrix):
        advice = "Write fewer heads; every matrix is one block of one head."
        expectation = f"zero outside of the blocks of {heads} heads"
        raise ArgumentError(sentence(name, expectation, "weights that connect heads", advice))
    if described.form is Form.ROWS_OF_BLOCKS:
        return blocks.flatten(0, 1)
    return blocks if described.form is Form.BLOCKS else blocks.transpose(1, 2).contiguous()


def _beside_convolved(w_ih: Tensor, layout: WeightLayout) -> Tensor:
    """Return input weights [G*H, 2 I] of the convolved input beside the input, of which each gate reads one."""
    gates = []
    for gate, block in zip(layout.gates_of_pytorch, w_ih.chunk(len(layout.gates)), strict=True):
        zeros = torch.zeros_like(block)
        gates.append(torch.cat((block, zeros) if gate in layout.convolved[1] else (zeros, block), 1))
    return torch.cat(gates)


def _without_convolved(w_ih: Tensor, layout: WeightLayout) -> Tensor:
    gates = []
    for gate, block in zip(layout.gates_of_pytorch, w_ih.chunk(len(layout.gates)), strict=True):
        read, other = block.chunk(2, 1) if gate in layout.convolved[1] else reversed(block.chunk(2, 1))
        if other.any():
            half, advice = (
                "second" if gate in layout.convolved[1] else "first",
                "The input is the convolved input beside it.",
            )
            name = f"the weights of gate {gate} on the {half} half of the input"
            raise ArgumentError(sentence(name, f"zero for {layout.system}", "weights that are not", advice))
        gates.append(read)
    return torch.cat(gates)


def _reordered(tensor: Tensor, order: str, wanted: str) -> list[Tensor]:
    blocks = tensor.chunk(len(order))
    return [blocks[order.index(gate)] for gate in wanted]


def _stored(template: str, blocks: list[Tensor], along: int | None, layout: WeightLayout) -> dict[str, Tensor]:
    if along is not None:
        return {template: torch.cat(blocks, along)}
    return {name: block.clone().contiguous() for name, block in zip(_names(template, layout), blocks, strict=True)}


def _require(fits: bool, tensors: Mapping[str, Tensor], layout: WeightLayout) -> None:
    if fits:
        return
    found = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    expectation = f"those of {layout.called} in the layout {layout.name}"
    raise ShapeError(sentence("weights", expectation, found, layout.advice))
