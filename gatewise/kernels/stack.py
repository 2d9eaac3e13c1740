"""The loops over layers for kernels that compute one layer at a time.

A kernel passes the functions that compute a single layer to `forward` and `backward`. These call them for every layer,
apply the dropout masks between layers, and concatenate the states and gradients. `layer_after_layer` is the loop for
calls that autograd records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.masks import CellMasks, masks_of_cell
from gatewise.contract.problem import Problem
from gatewise.contract.saved import InputGradients, Inputs, Needs, OutputGradients, Result
from gatewise.contract.weights import DirectionWeights, by_direction


class Layer(NamedTuple):
    """The inputs of one layer.

    Attributes:
        x: The input [T, B, I] or, for packed sequences, [N, I], with I the input size of this layer.
        h0: The initial hidden state [D, B, R].
        c0: The initial cell state [D, B, H].
        weights: The weights of each direction.
        lengths: The lengths of the sequences, as in `Inputs`.
        batch_sizes: The batch sizes of packed sequences, as in `Inputs`.
        ends_in_zeros: Whether x is known to be zero after the end of each sequence, as the output of another layer is;
            otherwise, x may contain any values there.
        resets: The steps at which episodes begin, as in `Inputs`.
        masks: The masks of a regularised cell.
    """

    x: Tensor
    h0: Tensor
    c0: Tensor
    weights: list[DirectionWeights]
    lengths: Tensor | None
    batch_sizes: Tensor | None
    ends_in_zeros: bool = False
    resets: Tensor | None = None
    masks: CellMasks = CellMasks()


class LayerGradients(NamedTuple):
    """The gradients of one layer's inputs; None for those that were not requested. `weights` are in PyTorch's order."""

    x: Tensor | None
    h0: Tensor | None
    c0: Tensor | None
    weights: tuple[Tensor | None, ...]


LayerForward = Callable[[Problem, Layer], Result]
LayerBackward = Callable[[Problem, Layer, Result, OutputGradients, Needs], LayerGradients]


def forward(problem: Problem, inputs: Inputs, layer_forward: LayerForward) -> Result:
    """Run the forward pass of all layers.

    `Result.kept` contains the outputs of all layers but the last, then the kept tensors of each layer, layer by layer.

    Args:
        problem: The problem.
        inputs: The inputs.
        layer_forward: The function that runs the forward pass of one layer.
    """
    if problem.num_layers == 1:
        return layer_forward(problem, _only_layer(problem, inputs))
    x, outputs, kept, h_n, c_n = inputs.x, [], [], [], []
    for index in range(problem.num_layers):
        result = layer_forward(problem, layer_of(problem, inputs, index, x))
        x = result.y
        h_n.append(result.h_n)
        c_n.append(result.c_n)
        kept += result.kept
        if index < problem.num_layers - 1:
            if problem.needs_grad:
                outputs.append(x)
            x = _dropped(problem, inputs, index, x)
    return Result(x, torch.cat(h_n), torch.cat(c_n), (*outputs, *kept) if problem.needs_grad else ())


def backward(
    problem: Problem,
    inputs: Inputs,
    result: Result,
    gradients: OutputGradients,
    needs: Needs,
    layer_backward: LayerBackward,
) -> InputGradients:
    """Run the backward pass of all layers, from the last layer to the first.

    Args:
        problem: The problem.
        inputs: The inputs of the forward pass.
        result: The result of the forward pass.
        gradients: The gradients of the outputs.
        needs: The gradients to compute.
        layer_backward: The function that runs the backward pass of one layer.
    """
    if problem.num_layers == 1:
        found = layer_backward(problem, _only_layer(problem, inputs), result, gradients, needs)
        states = (found.h0, found.c0) if needs.state else (None, None)
        return InputGradients(found.x if needs.x else None, *states, found.weights)
    count, directions = problem.num_layers, problem.num_directions
    outputs = (*result.kept[: count - 1], result.y)
    kept = result.kept[count - 1 :]
    share = len(kept) // count
    dy, states, weights = gradients.y, [], []
    for index in reversed(range(count)):
        rows = slice(index * directions, (index + 1) * directions)
        x = inputs.x if index == 0 else _dropped(problem, inputs, index - 1, outputs[index - 1])
        layer_result = Result(
            outputs[index], result.h_n[rows], result.c_n[rows], tuple(kept[index * share : (index + 1) * share])
        )
        above = OutputGradients(
            dy,
            None if gradients.h_n is None else gradients.h_n[rows],
            None if gradients.c_n is None else gradients.c_n[rows],
        )
        wanted = needs if index == 0 else needs._replace(x=True)
        below = layer_backward(problem, layer_of(problem, inputs, index, x), layer_result, above, wanted)
        states.append((below.h0, below.c0))
        weights.append(below.weights)
        dy = below.x
        if index > 0 and dy is not None:
            dy = _dropped(problem, inputs, index - 1, dy)
    states.reverse()
    weights.reverse()
    return InputGradients(
        dy if needs.x else None,
        joined([h0 for h0, _ in states]) if needs.state else None,
        joined([c0 for _, c0 in states]) if needs.state else None,
        tuple(gradient for layer in weights for gradient in layer),
    )


def _only_layer(problem: Problem, inputs: Inputs) -> Layer:
    # Most problems have one layer, for which slicing would cost as much CPU time as the rest of this module.
    weights = by_direction(inputs.weights, problem.weights_per_direction, len(problem.cell.parameters))
    ragged = inputs.lengths, inputs.batch_sizes
    masks = masks_of_cell(problem, inputs.masks, 0, 0)
    return Layer(inputs.x, inputs.h0, inputs.c0, weights, *ragged, resets=inputs.resets, masks=masks)


def layer_after_layer(problem: Problem, inputs: Inputs, call: Callable[[Problem, Inputs], Result]) -> Result:
    """Run a function for every layer in turn, with dropout between layers, so that autograd can record all operators.

    Args:
        problem: The problem, with any number of layers.
        inputs: The inputs.
        call: The function that computes a problem with one layer and no dropout.
    """
    single = problem.replace(num_layers=1, dropout=0.0)
    rows, share = problem.num_directions, problem.num_directions * problem.weights_per_direction
    x, states = inputs.x, []
    for index in range(problem.num_layers):
        if index:
            x = _dropped(problem, inputs, index - 1, x)
        state, weights = slice(index * rows, (index + 1) * rows), slice(index * share, (index + 1) * share)
        layer = Inputs(x, inputs.h0[state], inputs.c0[state], inputs.weights[weights], None, inputs.batch_sizes)
        x, h_n, c_n, _ = call(single, layer)
        states.append((h_n, c_n))
    return Result(x, torch.cat([h_n for h_n, _ in states]), torch.cat([c_n for _, c_n in states]))


def layer_of(problem: Problem, inputs: Inputs, index: int | Sequence[int], x: Tensor) -> Layer:
    """Return the inputs of one layer or of several consecutive layers.

    Args:
        problem: The problem.
        inputs: The inputs of the problem.
        index: The index of the layer, or the indices of the layers. The returned states and weights are those of all
            these layers.
        x: The input of the layer, or of the first of the layers.
    """
    first, last = (index, index) if isinstance(index, int) else (index[0], index[-1])
    rows = slice(first * problem.num_directions, (last + 1) * problem.num_directions)
    per_direction = problem.weights_per_direction
    flat = inputs.weights[rows.start * per_direction : rows.stop * per_direction]
    return Layer(
        x,
        inputs.h0[rows],
        inputs.c0[rows],
        by_direction(flat, per_direction, len(problem.cell.parameters)),
        inputs.lengths,
        inputs.batch_sizes,
        ends_in_zeros=first > 0,
        resets=inputs.resets,
        masks=masks_of_cell(problem, inputs.masks, first, last),
    )


def _dropped(problem: Problem, inputs: Inputs, gap: int, tensor: Tensor) -> Tensor:
    # Dropout is its own adjoint: the same function applies to outputs and to their gradients.
    if not (problem.dropout and inputs.masks):
        return tensor
    return tensor * inputs.masks[gap] * survivors_scale(problem)


def survivors_scale(problem: Problem) -> float:
    """Return the factor by which dropout multiplies the elements that it keeps."""
    return 1.0 / (1.0 - problem.dropout) if problem.dropout < 1.0 else 0.0


def joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate the states or gradients of several layers; return None if any of them is None."""
    present = [tensor for tensor in tensors if tensor is not None]
    if len(present) < len(tensors):
        return None
    return present[0] if len(present) == 1 else torch.cat(present)


def stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Stack one tensor per direction into a tensor [D, ...]; return None if any of them is None."""
    return joined([None if tensor is None else tensor.unsqueeze(0) for tensor in tensors])


def summed(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Add one tensor per direction; return None if any of them is None."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = None if total is None or tensor is None else total + tensor
    return total
