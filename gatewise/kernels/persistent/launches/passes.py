"""The launches of the forward and the backward pass, with their tensors as arguments of forward.cu and backward.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.weights import DirectionWeights
from gatewise.kernels.cuda import driver
from gatewise.kernels.persistent.launches import failure
from gatewise.kernels.persistent.launches.compiled import Launch, pointers_of_each_direction
from gatewise.kernels.persistent.launches.masks import Masks, of_episodes_and_masks, with_masks
from gatewise.kernels.persistent.launches.tokens import Tokens

Pair = tuple[int | None, int | None]
"""The addresses of two tensors: of the forward and the reverse direction, or of the two layers of a pair.

With a single direction both are its address.
"""


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names]


def _numbers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_int) for name in names]


class Forward(ctypes.Structure):
    """The struct `Forward` of forward.cu, field by field."""

    _fields_ = [
        *pointers_of_each_direction("gates", "weights", "bias_ih", "bias_hh", "y", "unpadded", "cells"),
        *_pointers("h0", "c0", "h_n", "c_n", "lengths", "order", "failure"),
        *_numbers("start_forward", "start_reverse", "keep_gates"),
        *_numbers("time", "batch", "groups", "first_direction", "directions", "step", "row", "y_width"),
        ("patience", ctypes.c_uint),
        *_pointers("between", "dropped", "mask"),
        *_numbers("mask_step", "mask_row"),
        ("scale", ctypes.c_float),
        *_pointers("resets"),
        *_numbers("total"),
    ]


class Backward(ctypes.Structure):
    """The struct `Backward` of backward.cu, field by field."""

    _fields_ = [
        *pointers_of_each_direction("weights", "gates", "cells", "dy", "dgates", "exchange"),
        *_pointers("c0", "dh_n", "dc_n", "dh0", "dc0", "bias"),
        *pointers_of_each_direction("dbias_ih", "dbias_hh"),
        *_pointers("done", "lengths", "order", "failure"),
        *_numbers("start_forward", "start_reverse", "earlier"),
        *_numbers("time", "batch", "groups", "first_direction", "directions", "step", "row"),
        ("patience", ctypes.c_uint),
        *_pointers("between", "dy_between", "mask"),
        *_numbers("mask_step", "mask_row"),
        ("scale", ctypes.c_float),
        *_pointers("resets"),
        *_numbers("total"),
    ]


class LayerWeights:
    """The recurrent weights and biases of a layer, contiguous; it must live as long as launches read them.

    Attributes:
        directions: The number of directions D.
        recurrent: The addresses of the recurrent weights.
        bias_ih: The addresses of the input biases.
        bias_hh: The addresses of the recurrent biases.
    """

    def __init__(self, weights: list[DirectionWeights]) -> None:
        self.directions = len(weights)
        self._held = [
            [aligned(own.w_hh), *(None if bias is None else bias.contiguous() for bias in (own.b_ih, own.b_hh))]
            for own in weights
        ]
        self.recurrent, self.bias_ih, self.bias_hh = (
            pair([address(tensor) for tensor in kind]) for kind in zip(*self._held, strict=True)
        )


def aligned(matrix: Tensor) -> Tensor:
    """Return a matrix of weights as the kernels read it: contiguous, at an address that is a multiple of 16 bytes."""
    return matrix.contiguous() if matrix.data_ptr() % 16 == 0 else matrix.clone(memory_format=torch.contiguous_format)


class BetweenLayers(NamedTuple):
    """The connection from the first to the second layer of a pair.

    Attributes:
        w_ih: The input weights of the second layer, contiguous.
        passed: Memory for what passes from one layer to the other, filled by `fill_unwritten`: in the forward pass the
            outputs of the first layer after dropout, of the shape of `y`, or None without dropout; in the backward pass
            the gradients of its outputs [tokens, H].
        mask: The dropout mask [T, B, H], H not padded and its rows contiguous, or None.
        scale: The factor of the outputs that survive dropout.
    """

    w_ih: Tensor
    passed: Tensor | None
    mask: Tensor | None
    scale: float


def _between(given: BetweenLayers | None) -> tuple[int | float | None, ...]:
    if given is None:
        return None, None, None, 0, 0, 0.0
    strides = (0, 0) if given.mask is None else given.mask.stride()[:2]
    return address(given.w_ih), address(given.passed), address(given.mask), *strides, given.scale


def forward_pass(
    launch: Launch,
    weights: LayerWeights,
    tokens: Tokens,
    *,
    gates: Pair,
    y: Pair,
    y_width: int,
    unpadded: Pair,
    cells: Pair,
    h0: Tensor,
    c0: Tensor,
    h_n: Tensor,
    c_n: Tensor,
    lengths: Tensor | None,
    order: Tensor | None = None,
    starts: tuple[int, int] = (0, 0),
    keep_gates: bool,
    between: BetweenLayers | None = None,
    resets: Tensor | None = None,
    masks: Masks | None = None,
) -> None:
    """Launch the forward pass over some steps of a sequence.

    Args:
        launch: The pass, from `forward_launch` or `pair_launch`.
        weights: The weights.
        tokens: The steps and the order of their tokens.
        gates: The products of the input and the input weights [tokens, 4H], which the kept gates replace.
        y: The hidden states [tokens, y_width], filled by `fill_unwritten` unless the tiling is `distributed`; if the
            launch is `interleaved`, they have `Launch.exchange_shape`.
        y_width: The number of values of a token in `y`, of all directions: D*H, H padded, or more; not read if the
            launch is `interleaved`.
        unpadded: The outputs without padding [tokens, D*H], or none where they are `y`.
        cells: The cell states [tokens, H], or none if they are not kept.
        h0: The hidden state before the first step [D, B, H], H padded unless the launch is `interleaved`, contiguous.
        c0: The cell state before the first step [D, B, H], contiguous.
        h_n: The hidden state after the last step, contiguous.
        c_n: The cell state after the last step, contiguous.
        lengths: The sequence lengths [B] on the device, int64, or None.
        order: The order of the batch rows, from `longest_first`.
        starts: The steps of the sequence before the first one here, for each direction, in the order of time.
        keep_gates: Whether the gates are kept, in the memory of `gates`.
        between: For a pair of layers, their connection: all pairs of addresses are then those of the layers, the
            states are [2, B, H], D is 1, and the gates of the second layer are filled by `fill_unwritten`.
        resets: The steps of the whole sequence at which episodes begin [T, B], as in `Inputs`; given if and only if the
            problem of the launch has resets.
        masks: The masks of a regularised cell, or None. With recurrent dropout, `y` and `h0` are the hidden states as
            they enter the product, and `unpadded` the outputs in any case.
    """
    device = h0.device
    if h0.is_meta:
        return
    arguments = with_masks(Forward, masks)(
        *gates,
        *weights.recurrent,
        *weights.bias_ih,
        *weights.bias_hh,
        *y,
        *unpadded,
        *cells,
        h0.data_ptr(),
        c0.data_ptr(),
        h_n.data_ptr(),
        c_n.data_ptr(),
        address(lengths),
        address(order),
        failure.flag(device.index).address,
        *starts,
        keep_gates,
        tokens.time,
        tokens.batch,
        launch.tiling.groups,
        0,
        1 if launch.tiling.stacked else weights.directions,
        tokens.step,
        tokens.row,
        y_width,
        failure.PATIENCE,
        *_between(between),
        *of_episodes_and_masks(resets, masks),
    )
    _run(launch, arguments, weights.directions, device)


def backward_pass(
    launch: Launch,
    weights: LayerWeights,
    tokens: Tokens,
    *,
    gates: Pair,
    cells: Pair,
    dy: Pair,
    dgates: Pair,
    exchange: Pair = (None, None),
    c0: Tensor,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    dh0: Tensor,
    dc0: Tensor,
    bias: Tensor | None,
    biases: Sequence[tuple[Tensor, Tensor]] = (),
    done: Tensor | None = None,
    earlier: Tensor | None = None,
    lengths: Tensor | None,
    order: Tensor | None = None,
    starts: tuple[int, int] = (0, 0),
    between: BetweenLayers | None = None,
    resets: Tensor | None = None,
    masks: Masks | None = None,
) -> None:
    """Launch the backward pass over some steps of a sequence.

    Args:
        launch: The pass, from `backward_launch` or `pair_launch`.
        weights: The weights.
        tokens: The steps and the order of their tokens.
        gates: The kept gates [tokens, 4H], H padded, as in `cells` and `dgates`.
        cells: The kept cell states [tokens, H].
        dy: The gradients of the outputs [tokens, D*H], H not padded, or none.
        dgates: Memory for the gradients of the gate sums [tokens, 4H], filled by `fill_unwritten` unless the tiling is
            `distributed`; or the memory of `gates`, see `memory.exchanges_in_gates` and `memory.interleaves_rows`.
        exchange: Memory of `Launch.exchange_shape` in which blocks exchange these gradients, filled by
            `fill_unwritten`; none unless the launch is `interleaved`.
        c0: The cell state before the first step [D, B, H], not padded, as all states here.
        dh_n: The gradient of the hidden state after the last step, or None.
        dc_n: The gradient of the cell state after the last step, or None.
        dh0: Memory for the gradient of the hidden state before the first step.
        dc0: Memory for the gradient of the cell state before the first step.
        bias: Memory for partial sums of the gradients of the biases, as backward.cu describes it; None if a single
            block computes each sum.
        biases: The gradients of both biases of each direction; empty if they remain in `bias`.
        done: Counters of the blocks [D, blocks], filled by `fill_unwritten`; needed with both `biases` and `bias`.
        earlier: The partial sums of earlier launches, which end where `bias` begins and are added to `biases`.
        lengths: The sequence lengths [B] on the device, int64, or None.
        order: The order of the batch rows, from `longest_first`.
        starts: The steps of the sequence before the first one here, for each direction, in the order of time.
        between: As in `forward_pass`; the first layer then has no `dy`.
        resets: As in `forward_pass`.
        masks: As in `forward_pass`.
    """
    device = c0.device
    if c0.is_meta:
        return
    arguments = with_masks(Backward, masks)(
        *weights.recurrent,
        *gates,
        *cells,
        *dy,
        *dgates,
        *exchange,
        c0.data_ptr(),
        address(dh_n),
        address(dc_n),
        dh0.data_ptr(),
        dc0.data_ptr(),
        address(bias),
        *_each([b_ih for b_ih, _ in biases]),
        *_each([b_hh for _, b_hh in biases]),
        address(done),
        address(lengths),
        address(order),
        failure.flag(device.index).address,
        *starts,
        0 if earlier is None else earlier.shape[:2].numel(),
        tokens.time,
        tokens.batch,
        launch.tiling.groups,
        0,
        1 if launch.tiling.stacked else weights.directions,
        tokens.step,
        tokens.row,
        failure.PATIENCE,
        *_between(between),
        *of_episodes_and_masks(resets, masks),
    )
    _run(launch, arguments, weights.directions, device)


def _run(launch: Launch, arguments: ctypes.Structure, directions: int, device: torch.device) -> None:
    """Launch both directions together, or one after the other where they do not fit on the device together.

    Raises:
        ExchangeTimeout: An earlier call on the device gave up.
    """
    failure.raise_if_given_up(device.index)
    with driver.on(device):
        for first in range(0, directions, launch.tiling.directions):
            arguments.first_direction = first
            driver.launch(launch.binary, launch.entry, launch.shape, arguments, device)


def _each(tensors: list[Tensor]) -> Pair:
    return pair([tensor.data_ptr() for tensor in tensors]) if tensors else (None, None)


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor."""
    return None if tensor is None else tensor.data_ptr()


def pair(addresses: list[int | None]) -> Pair:
    """Return one or two addresses as a pair."""
    return addresses[0], addresses[-1]


def planes(tensor: Tensor | None) -> Pair:
    """Return the address of each direction's part of a tensor [D, T, B, ...]."""
    if tensor is None:
        return None, None
    start = tensor.data_ptr()
    return start, start + (tensor.nbytes // 2 if tensor.shape[0] == 2 else 0)


def columns(tensor: Tensor | None, directions: int) -> Pair:
    """Return the address of each direction's columns of a tensor [T, B, D * H]."""
    if tensor is None:
        return None, None
    start = tensor.data_ptr()
    return start, start + (tensor.shape[-1] // 2 * tensor.element_size() if directions == 2 else 0)
