"""The masks of a regularised cell, as one direction of one layer reads them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gatewise.cells import Cell, Regularised
from gatewise.contract.masks import CellMasks
from gatewise.kernels.eager.reading_order import ReadingOrder


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DirectionMasks:
    """The masks of one direction of one layer.

    Attributes:
        factor: The factor of each unit of the hidden state that enters the recurrent product [B, R], in the dtype of
            the states: 0, or 1 / (1 - rate); None without recurrent dropout.
        of_steps: The masks that change at every step [T, B, H], bool, in the order of time.
    """

    factor: Tensor | None = None
    of_steps: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, cell: Cell, masks: CellMasks, direction: int, hidden_size: int, dtype: torch.dtype) -> DirectionMasks:
        """Return the masks of a direction.

        Args:
            cell: The cell of the problem.
            masks: The masks of the layer.
            direction: 0 for the forward direction, 1 for the reverse one.
            hidden_size: H, the number of hidden units.
            dtype: The dtype of the states.
        """
        factor = None
        if masks.hidden is not None and isinstance(cell, Regularised):
            factor = masks.hidden[direction].to(dtype) * (1.0 / (1.0 - cell.recurrent_dropout))
        start = direction * hidden_size
        return cls(factor, tuple(mask[..., start : start + hidden_size] for mask in masks.of_steps))

    def dropped(self, hidden: Tensor) -> Tensor:
        """Return hidden states [..., B, R] as they enter the recurrent product, in their dtype.

        Dropout is its own adjoint: the gradient of the hidden state is the same function of that of the result.
        """
        return hidden if self.factor is None else (hidden * self.factor).to(hidden.dtype)

    def in_reading_order(self, order: ReadingOrder) -> tuple[Tensor, ...]:
        """Return the masks of steps in the order in which the direction reads the steps."""
        return tuple(order.reordered(mask) for mask in self.of_steps)


NO_MASKS = DirectionMasks()
