"""The two passes over a stretch of the sequence, each one launch: tensors and places in, arguments out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.contract.weights import DirectionWeights
from gatewise.kernels.persistent import failure
from gatewise.kernels.persistent.exactness import exact_products
from gatewise.kernels.persistent.launch import Backward, Forward, Launch, launch_of, run
from gatewise.kernels.persistent.tokens import Tokens

Pair = tuple[int | None, int | None]
"""Where each direction's tensor begins: forward, reverse; the same twice when there is one direction."""


class Matrices:
    """The recurrent weights and biases of a layer, contiguous, for as long as launches read them.

    Attributes:
        directions: D.
        recurrent: Where each direction's matrix begins.
        bias_ih: Where its input bias begins.
        bias_hh: Where its recurrent bias begins.
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
    """Return a matrix as the kernels read weights: contiguous, beginning on 16 bytes."""
    return matrix.contiguous() if matrix.data_ptr() % 16 == 0 else matrix.clone(memory_format=torch.contiguous_format)


def forward_launch(problem: Problem, batch: int, directions: int, ragged: bool, device: torch.device) -> Launch:
    """Return the launch of the forward pass of a layer."""
    number = problem.dtype, exact_products(problem)
    return launch_of("forward", problem.cell, problem.hidden_size, batch, directions, *number, ragged, device)


def backward_launch(problem: Problem, batch: int, directions: int, ragged: bool, device: torch.device) -> Launch:
    """Return the launch of the backward pass of a layer."""
    number = problem.dtype, exact_products(problem)
    return launch_of("backward", problem.cell, problem.hidden_size, batch, directions, *number, ragged, device)


class Between(NamedTuple):
    """What lies between two stacked layers.

    Attributes:
        w_ih: Input weights of the second, contiguous.
        passed: For the outputs of the first as the second reads them [tokens, H], or for the gradients of its outputs,
            filled by `fill_unwritten`; in the forward pass None without a mask.
        mask: What survives of them [T, B, H], its rows without gaps, not rounded up; or None.
        scale: Of what survives.
    """

    w_ih: Tensor
    passed: Tensor | None
    mask: Tensor | None
    scale: float


def _between(given: Between | None) -> tuple[int | float | None, ...]:
    if given is None:
        return ()
    strides = (0, 0) if given.mask is None else given.mask.stride()[:2]
    return address(given.w_ih), address(given.passed), address(given.mask), *strides, given.scale


def stacked_launch(name: str, problem: Problem, batch: int, ragged: bool, device: torch.device) -> Launch:
    """Return the launch of the pass "forward" or "backward" of two stacked layers."""
    number = problem.dtype, exact_products(problem)
    return launch_of(name, problem.cell, problem.hidden_size, batch, 1, *number, ragged, device, stacked=True)


def forward_pass(
    launch: Launch,
    matrices: Matrices,
    tokens: Tokens,
    *,
    gates: Pair,
    y: Pair,
    narrow: Pair,
    cells: Pair,
    h0: Tensor,
    c0: Tensor,
    h_n: Tensor,
    c_n: Tensor,
    lengths: Tensor | None,
    order: Tensor | None = None,
    starts: tuple[int, int] = (0, 0),
    keep_gates: bool,
    between: Between | None = None,
) -> None:
    """Go through a stretch of the sequence.

    Args:
        launch: From `forward_launch`.
        matrices: The weights.
        tokens: The stretch: its steps, and their order.
        gates: Products of the input [tokens, 4H].
        y: Hidden states [tokens, D*H], H rounded up, filled by `fill_unwritten`.
        narrow: The same without what was rounded up, or none.
        cells: Cell states [tokens, H], or none.
        h0: Hidden state before the stretch [D, B, H], H rounded up, contiguous.
        c0: Cell state before it [D, B, H], contiguous.
        h_n: Hidden state after it, contiguous.
        c_n: Cell state after it, contiguous.
        lengths: Sequence lengths [B] on the device, or None.
        order: The rows as `longest_first` returns them.
        starts: Steps of the sequence before each direction's stretch, in the order of time.
        keep_gates: Whether activated gates take the place of the products.
        between: For two stacked layers: all pairs are of the layers then, D counts them in states and is 1 elsewhere,
            and the gates of the second are filled by `fill_unwritten`.
    """
    device = h0.device
    arguments = Forward(
        *gates,
        *matrices.recurrent,
        *matrices.bias_ih,
        *matrices.bias_hh,
        *y,
        *narrow,
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
        launch.cut.groups,
        0,
        1 if launch.cut.stacked else matrices.directions,
        tokens.step,
        tokens.row,
        failure.PATIENCE,
        *_between(between),
    )
    run(launch, arguments, matrices.directions, device)


def backward_pass(
    launch: Launch,
    matrices: Matrices,
    tokens: Tokens,
    *,
    gates: Pair,
    cells: Pair,
    dy: Pair,
    dgates: Pair,
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
    between: Between | None = None,
) -> None:
    """Go back through a stretch of the sequence.

    Args:
        launch: From `backward_launch`.
        matrices: The weights.
        tokens: The stretch: its steps, and their order.
        gates: Activated gates [tokens, 4H], H rounded up here and below.
        cells: Cell states [tokens, H].
        dy: Gradients of the outputs [tokens, D*H], not rounded up, or none.
        dgates: For the gradients of the gate sums [tokens, 4H], filled by `fill_unwritten`; or `gates`, see
            `memory.overwrites_gates`.
        c0: Cell state before the stretch [D, B, H], not rounded up, as all states here.
        dh_n: Gradient of the hidden state after it, or None.
        dc_n: Gradient of the cell state after it, or None.
        dh0: For the gradient of the hidden state before it.
        dc0: For the gradient of the cell state before it.
        bias: For the gradients of the biases, as cuda/backward.cu describes them; None if each block has its own.
        biases: Where those of each direction are put; empty to leave them in `bias`.
        done: For counters of blocks [D, blocks], filled by `fill_unwritten`; needed with `biases` and `bias`.
        earlier: What launches before left of such gradients, in front of `bias`; it is added to `biases`.
        lengths: Sequence lengths [B] on the device, or None.
        order: The rows as `longest_first` returns them.
        starts: Steps of the sequence before each direction's stretch, in the order of time.
        between: As in `forward_pass`; the first layer has no `dy` then.
    """
    device = c0.device
    arguments = Backward(
        *matrices.recurrent,
        *gates,
        *cells,
        *dy,
        *dgates,
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
        launch.cut.groups,
        0,
        1 if launch.cut.stacked else matrices.directions,
        tokens.step,
        tokens.row,
        failure.PATIENCE,
        *_between(between),
    )
    run(launch, arguments, matrices.directions, device)


def _each(tensors: list[Tensor]) -> Pair:
    return pair([tensor.data_ptr() for tensor in tensors]) if tensors else (None, None)


def address(tensor: Tensor | None) -> int | None:
    """Return where a tensor begins."""
    return None if tensor is None else tensor.data_ptr()


def pair(addresses: list[int | None]) -> Pair:
    """Return the addresses of one or two directions."""
    return addresses[0], addresses[-1]


def planes(tensor: Tensor | None) -> Pair:
    """Return where each direction's plane of a tensor [D, T, B, ...] begins."""
    if tensor is None:
        return None, None
    start = tensor.data_ptr()
    return start, start + (tensor.nbytes // 2 if tensor.shape[0] == 2 else 0)


def columns(tensor: Tensor | None, directions: int) -> Pair:
    """Return where each direction's share of a tensor [T, B, D * H] begins."""
    if tensor is None:
        return None, None
    start = tensor.data_ptr()
    return start, start + (tensor.shape[-1] // 2 * tensor.element_size() if directions == 2 else 0)
