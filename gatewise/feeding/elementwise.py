"""What stands between the products of a decoder step, in plain torch: the reference, on any device.

cell        z = gates + product + bias;  i, f, o = sigmoid(z_i, z_f, z_o);  g = tanh(z_g)
            c = f * c' + i * g;  h = o * tanh(c)
attended    a = mask * tanh(context + state)
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

_LARGEST = 14  # the exponent that the largest number of a row gets in float16, which ends at 2^16


class Dropout(NamedTuple):
    """Which units of a plane stay.

    Attributes:
        mask: bool, shaped as the plane.
        scale: What those that stay are multiplied with.
    """

    mask: Tensor
    scale: float


class Planes(NamedTuple):
    """A gradient as products left it.

    Attributes:
        planes: To be summed [parts, B, H].
        scale: What each row is to be multiplied with [B]; None for 1.
    """

    planes: Tensor
    scale: Tensor | None = None


class Elementwise(Protocol):
    """The four element-wise parts of a step. Planes are [B, H], gates [B, 4H] in the order i f g o.

    Rows may be parts of wider ones, except those of gates, products, cells and masks. What products multiply may be
    float16 beside float32 numbers.
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
        """Step an LSTM cell.

        Args:
            gates: With a bias unwritten, otherwise what is added to the product; with `kept`, activated on return.
            product: Of weights and operand [B, 4H].
            bias: [4H], or None.
            cell: Cell state, replaced; float32 for 16-bit numbers.
            hidden: Where the hidden state is written.
            kept: Where the cell state is written for the backward pass; None where nothing is kept.
            above: Where the hidden state is written for the layer above, after dropout; or None.
            dropout: Of `above`; None for none.
        """
        ...

    def activate(self, gates: Tensor) -> None:
        """Replace sums of gates [N, 4H], of any number of rows, by the activated gates."""
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
        """Step the adjoint of a cell.

        Args:
            gates: Activated, replaced by the gradients of their sums: see `operands_in`.
            cell: Cell state after the step.
            earlier: Cell state before it.
            dcell: Gradient of the former, replaced by that of the latter.
            above: Gradient of what the layer above read; after its dropout.
            beside: Gradient of the hidden state from attention.
            later: Gradient of the hidden state from the next step.
            dropout: Of what the layer above read.
            scale: None; or, where the gradients are written as float16 in the first half of each row's memory, what
                each row of them is to be multiplied with, a power of two [B].
        """
        ...

    def attended(
        self, context: Tensor, state: Tensor, output: Tensor | None, fed: Tensor, dropout: Dropout | None
    ) -> None:
        """Write the attended output, the dropout of the tanh of the sum of context and state, twice.

        Args:
            context: Of attention.
            state: What the hidden state adds.
            output: Where it is written as it is; or None.
            fed: Where it is written for the next step.
            dropout: None for none.
        """
        ...

    def attended_gradient(
        self, sums: Tensor, output: Tensor, dy: Tensor | None, later: Planes | None, dropout: Dropout | None
    ) -> None:
        """Write the gradient of that sum, from gradients of the output: from outside and from the next step."""
        ...


class Plain:
    """The parts in plain torch."""

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
        """Step an LSTM cell."""
        total = product.to(cell.dtype) + (gates if bias is None else bias)
        i, f, g, o = _activated(total)
        cell.mul_(f).addcmul_(i, g)
        h = torch.tanh(cell).mul_(o)
        hidden.copy_(h)
        if above is not None:
            above.copy_(h if dropout is None else _dropped(h, dropout))
        if kept is not None:
            kept.copy_(cell)
            gates.copy_(total)

    def activate(self, gates: Tensor) -> None:
        """Replace sums of gates by the activated gates."""
        sums = gates.to(wide(gates.dtype))
        _activated(sums)
        gates.copy_(sums)

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
        """Step the adjoint of a cell."""
        dh = torch.zeros_like(dcell)
        if above is not None:
            dh = _sum(above, dh)
            dh = dh if dropout is None else _dropped(dh, dropout)
        for planes in (beside, later):
            dh = dh if planes is None else dh + _sum(planes, dh)
        i, f, g, o = gates.to(dh.dtype).chunk(4, -1)
        squashed = cell.to(dh.dtype).tanh()
        total = torch.addcmul(dcell, dh * o, 1 - squashed * squashed)
        of_i, of_f, of_g, of_o = gates.chunk(4, -1)
        found = (
            total * g * i * (1 - i),
            total * earlier * f * (1 - f),
            total * i * (1 - g * g),
            dh * squashed * o * (1 - o),
        )
        torch.mul(total, f, out=dcell)
        if scale is None:
            for place, gradient in zip((of_i, of_f, of_g, of_o), found, strict=True):
                place.copy_(gradient)
        else:
            both = torch.cat(found, -1)
            largest = both.abs().amax(1).clamp(min=2.0**-100)
            torch.exp2(largest.log2().floor() - _LARGEST, out=scale)
            operands_in(gates).copy_(both / scale.unsqueeze(1))

    def attended(
        self, context: Tensor, state: Tensor, output: Tensor | None, fed: Tensor, dropout: Dropout | None
    ) -> None:
        """Write the attended output."""
        found = torch.add(context.to(wide(context.dtype)), state).tanh_()
        found = found if dropout is None else _dropped(found, dropout)
        fed.copy_(found)
        if output is not None:
            output.copy_(found)

    def attended_gradient(
        self, sums: Tensor, output: Tensor, dy: Tensor | None, later: Planes | None, dropout: Dropout | None
    ) -> None:
        """Write the gradient of the sum."""
        squashed = output.to(wide(output.dtype))
        d = torch.zeros_like(squashed) if dy is None else dy.to(squashed.dtype)
        d = d if later is None else d + _sum(later, squashed)
        if dropout is not None:
            # Where a unit was dropped, its tanh is lost, and not needed.
            squashed, d = squashed / dropout.scale, _dropped(d, dropout)
        sums.copy_(d * (1 - squashed * squashed))


def operands_in(gates: Tensor) -> Tensor:
    """Return the float16 numbers in the first half of the memory of each row of float32 gates [..., 4H]."""
    return gates.view(torch.float16)[..., : gates.shape[-1]]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that is computed in between products, and that states are carried in between steps."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def _activated(sums: Tensor) -> tuple[Tensor, ...]:
    """Activate sums in place and return the four gates."""
    i, f, g, o = sums.chunk(4, -1)
    for gate in (i, f, o):
        gate.sigmoid_()
    g.tanh_()
    return i, f, g, o


def _dropped(plane: Tensor, dropout: Dropout) -> Tensor:
    return torch.where(dropout.mask, plane * dropout.scale, 0)


def _sum(found: Planes, like: Tensor) -> Tensor:
    planes = found.planes.to(like.dtype)
    total = planes[0] if len(planes) == 1 else planes.sum(0)
    return total if found.scale is None else total * found.scale.unsqueeze(1)
