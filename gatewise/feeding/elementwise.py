"""The element-wise operations between the matrix products of a decoder step, in PyTorch: the reference, on any device.

cell        h, c = the step of `gatewise.cells.LSTM` with the sums gates + product + bias, and the cell state before it
attended    a = mask * tanh(context + state)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gatewise.cells import LSTM
from gatewise.derivation.unit import unit_of

CELL = LSTM()
"""The cell of the decoder."""

_LARGEST = 14  # the exponent of the largest number of a row after scaling to float16, whose range ends at 2^16


class Dropout(NamedTuple):
    """The dropout of a plane [B, H].

    Attributes:
        mask: The units that are kept, bool, shaped as the plane.
        scale: The factor of the units that are kept.
    """

    mask: Tensor
    scale: float


class Planes(NamedTuple):
    """A gradient as the result of one or more products.

    Attributes:
        planes: The partial sums [parts, B, H], whose sum is the gradient.
        scale: The factor of each row [B]; None for 1.
    """

    planes: Tensor
    scale: Tensor | None = None


class Elementwise(Protocol):
    """The interface of the element-wise operations of a step. Planes are [B, H], gates [B, 4H] in the order i f g o.

    Rows may be parts of wider rows, except those of gates, products, cells and masks. Operands of products may be
    float16 while the other tensors are float32.
    """

    def cell(
        self,
        gates: Tensor,
        product: Tensor,
        bias: Tensor | None,
        cell: Tensor,
        hidden: Tensor,
        *,
        kept: Tensor | None,
        above: Tensor | None,
        dropout: Dropout | None,
    ) -> None:
        """Run one step of an LSTM cell.

        Args:
            gates: The summands of the product if `bias` is None, otherwise uninitialised; with `kept`, the activated
                gates are written to it.
            product: The product of weights and operand [B, 4H].
            bias: The bias [4H], or None.
            cell: The cell state, updated in place; float32 if the other tensors have 16 bits.
            hidden: The tensor for the hidden state.
            kept: The tensor for the copy of the cell state for the backward pass; None if nothing is kept.
            above: The tensor for the hidden state after dropout, which the layer above reads; or None.
            dropout: The dropout of `above`; None for none.
        """
        ...

    def activate(self, gates: Tensor) -> None:
        """Activate gate sums [N, 4H] in place, for any number of rows."""
        ...

    def cell_gradient(
        self,
        gates: Tensor,
        cell: Tensor,
        earlier: Tensor,
        dcell: Tensor,
        *,
        above: Planes | None,
        beside: Planes | None,
        later: Planes | None,
        dropout: Dropout | None,
        scale: Tensor | None,
    ) -> None:
        """Run the backward pass of one step of an LSTM cell.

        Args:
            gates: The activated gates, which are overwritten by the gradients of their sums: see `operands_in`.
            cell: The cell state after the step.
            earlier: The cell state before the step.
            dcell: The gradient of the cell state after the step, which is overwritten by that before the step.
            above: The gradient of the input of the layer above, after dropout.
            beside: The gradient of the hidden state from attention.
            later: The gradient of the hidden state from the next step.
            dropout: The dropout of the input of the layer above.
            scale: None; or a tensor [B] for the scale of each row, a power of two, if the gradients are written as
                float16 numbers into the first half of each row's memory.
        """
        ...

    def attended(
        self, context: Tensor, state: Tensor, output: Tensor | None, fed: Tensor, dropout: Dropout | None
    ) -> None:
        """Write the attentional output, the dropout of tanh(context + state), to two tensors.

        Args:
            context: The context of attention.
            state: The contribution of the hidden state.
            output: The tensor for the output in the dtype of the computation; or None.
            fed: The tensor for the output as an operand of the next step.
            dropout: The dropout of the output; None for none.
        """
        ...

    def attended_gradient(
        self, sums: Tensor, output: Tensor, dy: Tensor | None, later: Planes | None, dropout: Dropout | None
    ) -> None:
        """Write the gradient of context + state, from the output's gradients from the loss and from the next step."""
        ...


class Plain:
    """The element-wise operations in PyTorch."""

    def cell(
        self,
        gates: Tensor,
        product: Tensor,
        bias: Tensor | None,
        cell: Tensor,
        hidden: Tensor,
        *,
        kept: Tensor | None,
        above: Tensor | None,
        dropout: Dropout | None,
    ) -> None:
        """Run one step of an LSTM cell."""
        total = product.to(cell.dtype) + (gates if bias is None else bias)
        activated, after, h = unit_of(CELL).stepped(*total.chunk(4, -1), cell)
        cell.copy_(after)
        hidden.copy_(h)
        if above is not None:
            above.copy_(h if dropout is None else _dropped(h, dropout))
        if kept is not None:
            kept.copy_(cell)
            _write(gates, activated)

    def activate(self, gates: Tensor) -> None:
        """Activate gate sums in place."""
        sums = gates.to(elementwise_dtype(gates.dtype)).chunk(4, -1)
        activated, _, _ = unit_of(CELL).stepped(*sums, torch.zeros_like(sums[0]))
        _write(gates, activated)

    def cell_gradient(
        self,
        gates: Tensor,
        cell: Tensor,
        earlier: Tensor,
        dcell: Tensor,
        *,
        above: Planes | None,
        beside: Planes | None,
        later: Planes | None,
        dropout: Dropout | None,
        scale: Tensor | None,
    ) -> None:
        """Run the backward pass of one step of an LSTM cell."""
        dh = torch.zeros_like(dcell)
        if above is not None:
            dh = _sum(above, dh)
            dh = dh if dropout is None else _dropped(dh, dropout)
        for planes in (beside, later):
            dh = dh if planes is None else dh + _sum(planes, dh)
        activated = gates.to(dh.dtype).chunk(4, -1)
        found, before = unit_of(CELL).adjoint(*activated, cell.to(dh.dtype), earlier.to(dh.dtype), dh, dcell)
        dcell.copy_(before)
        if scale is None:
            _write(gates, found)
        else:
            both = torch.cat(found, -1)
            largest = both.abs().amax(1).clamp(min=2.0**-100)
            torch.exp2(largest.log2().floor() - _LARGEST, out=scale)
            operands_in(gates).copy_(both / scale.unsqueeze(1))

    def attended(
        self, context: Tensor, state: Tensor, output: Tensor | None, fed: Tensor, dropout: Dropout | None
    ) -> None:
        """Write the attentional output."""
        found = torch.add(context.to(elementwise_dtype(context.dtype)), state).tanh_()
        found = found if dropout is None else _dropped(found, dropout)
        fed.copy_(found)
        if output is not None:
            output.copy_(found)

    def attended_gradient(
        self, sums: Tensor, output: Tensor, dy: Tensor | None, later: Planes | None, dropout: Dropout | None
    ) -> None:
        """Write the gradient of context + state."""
        squashed = output.to(elementwise_dtype(output.dtype))
        d = torch.zeros_like(squashed) if dy is None else dy.to(squashed.dtype)
        d = d if later is None else d + _sum(later, squashed)
        if dropout is not None:
            # The tanh of a dropped unit is lost, but its gradient is zero anyway.
            squashed, d = squashed / dropout.scale, _dropped(d, dropout)
        sums.copy_(d * (1 - squashed * squashed))


def operands_in(gates: Tensor) -> Tensor:
    """Return the float16 numbers in the first half of the memory of each row of float32 gates [..., 4H]."""
    return gates.view(torch.float16)[..., : gates.shape[-1]]


def elementwise_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of element-wise operations and of the states between steps: float32 for 16-bit dtypes."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def _write(gates: Tensor, values: Sequence[Tensor]) -> None:
    for place, value in zip(gates.chunk(4, -1), values, strict=True):
        place.copy_(value)


def _dropped(plane: Tensor, dropout: Dropout) -> Tensor:
    return torch.where(dropout.mask, plane * dropout.scale, 0)


def _sum(found: Planes, like: Tensor) -> Tensor:
    planes = found.planes.to(like.dtype)
    total = planes[0] if len(planes) == 1 else planes.sum(0)
    return total if found.scale is None else total * found.scale.unsqueeze(1)
