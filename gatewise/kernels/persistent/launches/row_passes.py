"""The launches of the passes for cells that are not fused, with the arguments of row_forward.cu and row_backward.cu."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.weights import DirectionWeights
from gatewise.kernels.cuda import driver
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent.launches import failure
from gatewise.kernels.persistent.launches.compiled import Launch, pointers_of_each_direction
from gatewise.kernels.persistent.launches.masks import Masks, of_episodes_and_masks, with_masks
from gatewise.kernels.persistent.launches.passes import LayerWeights, Pair, address, columns, pair, planes
from gatewise.kernels.persistent.launches.tokens import Tokens

_SIZES = ("time", "batch", "groups", "first_direction", "directions", "step", "row")


class _Forward(ctypes.Structure):
    """The struct `Forward` of row_forward.cu, field by field."""

    _fields_ = [
        *pointers_of_each_direction("gates", "recurrent", "weights", "bias_ih", "bias_hh", "parameters"),
        *pointers_of_each_direction("y", "unpadded", "cells", "statistics"),
        *((name, ctypes.c_void_p) for name in ("ring", "h0", "c0", "h_n", "c_n", "lengths", "order", "failure")),
        *((name, ctypes.c_int) for name in (*_SIZES, "y_width")),
        ("patience", ctypes.c_uint),
        ("resets", ctypes.c_void_p),
        ("total", ctypes.c_int),
    ]


class _Backward(ctypes.Structure):
    """The struct `Backward` of row_backward.cu, field by field."""

    _fields_ = [
        *pointers_of_each_direction("weights", "bias_ih", "bias_hh", "parameters", "gates", "recurrent"),
        *pointers_of_each_direction("cells", "statistics", "dy", "dgates", "dinput"),
        *((name, ctypes.c_void_p) for name in ("dvalues", "ring", "c0", "dh_n", "dc_n", "dh0", "dc0")),
        *((name, ctypes.c_void_p) for name in ("lengths", "order", "failure")),
        *((name, ctypes.c_int) for name in _SIZES),
        ("patience", ctypes.c_uint),
        ("resets", ctypes.c_void_p),
        ("total", ctypes.c_int),
    ]


class RowWeights:
    """The weights that the passes read, and the parameters of the cell; it must live as long as launches read them.

    Args:
        weights: The weights of each direction.
        scratch: The memory for the parameters, side by side.

    Attributes:
        matrices: The recurrent weights and biases.
        parameters: The addresses of the parameters of each direction.
    """

    def __init__(self, weights: list[DirectionWeights], scratch: Scratch) -> None:
        self.matrices = LayerWeights(weights)
        self._held = [_side_by_side(own.parameters, scratch) for own in weights]
        self.parameters = pair([address(own) for own in self._held])


def _side_by_side(parameters: tuple[Tensor, ...], scratch: Scratch) -> Tensor | None:
    if not parameters:
        return None
    return torch.stack(parameters, out=scratch.new_empty(len(parameters), *parameters[0].shape))


class KeptRows(NamedTuple):
    """The values of all steps that a forward pass keeps for the backward pass.

    Attributes:
        gates: The sums of the first tensor [D, T, B, 4H], H padded, as in all of these.
        cells: The carried states [D, T, B, C*H], float32.
        statistics: The means and deviations over units [D, T, B, count], float32.
        recurrent: The sums of the second tensor [D, T, B, 4H], as row_sums.cuh describes it, or None.
    """

    gates: Tensor
    cells: Tensor
    statistics: Tensor
    recurrent: Tensor | None


def row_forward_pass(
    launch: Launch,
    weights: RowWeights,
    tokens: Tokens,
    *,
    gates: Tensor,
    y: Tensor,
    unpadded: Tensor | None,
    kept: KeptRows | None,
    h0: Tensor,
    c0: Tensor,
    h_n: Tensor,
    c_n: Tensor,
    lengths: Tensor | None,
    order: Tensor | None,
    resets: Tensor | None,
    masks: Masks | None,
    ring: Tensor | None,
) -> None:
    """Launch the forward pass over a sequence.

    Args:
        launch: The pass, from `forward_launch`.
        weights: The weights.
        tokens: The steps and the order of their tokens.
        gates: The products of the input and the input weights [D, T, B, 4H]; the memory of `kept.gates` if they are
            kept.
        y: The hidden states [T, B, D*W], W at least H padded, filled by `fill_unwritten`.
        unpadded: The outputs without padding [T, B, D*H], or None where nothing is padded.
        kept: The memory for what is kept; None in inference.
        h0: The hidden state before the first step [D, B, H], H padded, contiguous.
        c0: The carried states before the first step [D, B, C*H], contiguous.
        h_n: The hidden state after the last step, contiguous.
        c_n: The carried states after the last step, contiguous.
        lengths: The sequence lengths [B] on the device, int64, or None.
        order: The order of the batch rows, from `longest_first`.
        resets: The steps at which episodes begin [T, B], as in `Inputs`, or None.
        masks: The masks of a regularised cell, or None. With recurrent dropout, `y` and `h0` are the hidden states as
            they enter the product, and `unpadded` the outputs in any case.
        ring: Memory for the exchange of statistics, of `Tiling.ring_words` for each group of batch rows at work and
            each direction, filled by `fill_unwritten`; None without statistics.
    """
    directions = weights.matrices.directions
    if h0.is_meta:
        return
    arguments = with_masks(_Forward, masks)(
        *planes(gates),
        *planes(None if kept is None else kept.recurrent),
        *_weights(weights),
        *columns(y, directions),
        *columns(unpadded, directions),
        *planes(None if kept is None else kept.cells),
        *planes(None if kept is None else kept.statistics),
        address(ring),
        h0.data_ptr(),
        c0.data_ptr(),
        h_n.data_ptr(),
        c_n.data_ptr(),
        *_of_rows(launch, tokens, directions, lengths, order, h0.device, y.shape[-1]),
        *of_episodes_and_masks(resets, masks),
    )
    _run(launch, arguments, directions, h0.device)


def row_backward_pass(
    launch: Launch,
    weights: RowWeights,
    tokens: Tokens,
    *,
    kept: KeptRows,
    dy: Tensor | None,
    dgates: Tensor,
    dinput: Tensor | None,
    dvalues: Tensor,
    c0: Tensor,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    dh0: Tensor,
    dc0: Tensor,
    lengths: Tensor | None,
    order: Tensor | None,
    resets: Tensor | None,
    masks: Masks | None,
    ring: Tensor | None,
) -> None:
    """Launch the backward pass over a sequence.

    Args:
        launch: The pass, from `backward_launch`.
        weights: The weights.
        tokens: The steps and the order of their tokens.
        kept: The kept values.
        dy: The gradients of the outputs [T, B, D*H], H not padded, or None.
        dgates: Memory for the gradients of the sums with a recurrent product [D, T, B, 4H], filled by `fill_unwritten`.
        dinput: Memory for the gradients of the sums of the first tensor [D, T, B, 4H]; None if there is one tensor.
        dvalues: Memory for partial sums of the gradients of the parameters, and after them of the gate sums
            [groups at work, D, P + S, H], float32. Without biases, those of the sums are zeros.
        c0: The carried states before the first step [D, B, C*H], H not padded, as in all states here.
        dh_n: The gradient of the hidden state after the last step, or None.
        dc_n: The gradient of the carried states after the last step, or None.
        dh0: Memory for the gradient of the hidden state before the first step.
        dc0: Memory for the gradient of the carried states before the first step.
        lengths: As in `row_forward_pass`, like all others.
        order: The order of the batch rows.
        resets: The steps at which episodes begin.
        masks: The masks of a regularised cell.
        ring: The memory for the exchange of statistics.
    """
    directions = weights.matrices.directions
    if c0.is_meta:
        return
    arguments = with_masks(_Backward, masks)(
        *_weights(weights),
        *planes(kept.gates),
        *planes(kept.recurrent),
        *planes(kept.cells),
        *planes(kept.statistics),
        *columns(dy, directions),
        *planes(dgates),
        *planes(dinput),
        dvalues.data_ptr(),
        address(ring),
        c0.data_ptr(),
        address(dh_n),
        address(dc_n),
        dh0.data_ptr(),
        dc0.data_ptr(),
        *_of_rows(launch, tokens, directions, lengths, order, c0.device),
        *of_episodes_and_masks(resets, masks),
    )
    _run(launch, arguments, directions, c0.device)


def _weights(weights: RowWeights) -> tuple[int | None, ...]:
    matrices = weights.matrices
    addresses: tuple[Pair, ...] = (matrices.recurrent, matrices.bias_ih, matrices.bias_hh, weights.parameters)
    return tuple(one for both in addresses for one in both)


def _of_rows(
    launch: Launch,
    tokens: Tokens,
    directions: int,
    lengths: Tensor | None,
    order: Tensor | None,
    device: torch.device,
    *widths: int,
) -> tuple[int | None, ...]:
    ragged = address(lengths), address(order), failure.flag(device.index).address
    sizes = tokens.time, tokens.batch, launch.tiling.groups, 0, directions, tokens.step, tokens.row, *widths
    return *ragged, *sizes, failure.PATIENCE


def _run(launch: Launch, arguments: ctypes.Structure, directions: int, device: torch.device) -> None:
    """Launch both directions together, or one after the other where they do not fit on the device together."""
    failure.raise_if_given_up(device.index)
    with driver.on(device):
        for first in range(0, directions, launch.tiling.directions):
            arguments.first_direction = first
            driver.launch(launch.binary, launch.entry, launch.shape, arguments, device)
