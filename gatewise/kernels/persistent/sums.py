"""Which rows of the weights each gate sum takes part of.

Memory has a column of H values for each sum that the cell's step reads. The input weights give the first G of them, in
the order of the gates. The recurrent weights give all of an LSTM; of a GRU they give those of r and z, and a sum of
their own for n, because r multiplies it before it is added to that of the input.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from gatewise.cells import Cell

SUMS = 4
"""The sums that memory has columns for."""


class Run(NamedTuple):
    """Neighbouring sums that take the rows of neighbouring gates of a matrix.

    Attributes:
        sums: The first sum.
        gates: The gate of the first sum.
        count: The number of sums.
        adds: Whether the product is added to that of the input.
    """

    sums: int
    gates: int
    count: int
    adds: bool

    def columns_of(self, sums: Tensor, hidden: int) -> Tensor:
        """Return the columns of these sums, of a tensor [..., 4H]."""
        return sums if self.count == SUMS else sums.narrow(-1, self.sums * hidden, self.count * hidden)

    def rows_of(self, matrix: Tensor, size: int) -> Tensor:
        """Return the rows of these gates, of a matrix [G * size, columns]."""
        rows = self.count * size
        return matrix if rows == matrix.shape[0] else matrix.narrow(0, self.gates * size, rows)


@functools.lru_cache(maxsize=256)
def input_runs(cell: Cell) -> tuple[Run, ...]:
    """Return the run of sums that the product of the input gives, as its only one."""
    return (Run(0, 0, len(cell.gates), adds=False),)


@functools.lru_cache(maxsize=256)
def recurrent_runs(cell: Cell) -> tuple[Run, ...]:
    """Return the runs of sums that the recurrent product of a cell gives."""
    runs: list[Run] = []
    for gate, place in enumerate(cell.recurrent_sums):
        adds = place < len(cell.gates)
        last = runs[-1] if runs else None
        if last is not None and last.sums + last.count == place and last.adds == adds:
            runs[-1] = last._replace(count=last.count + 1)
        else:
            runs.append(Run(place, gate, 1, adds))
    return tuple(runs)


def of_input(sums: Tensor, rows: int) -> Tensor:
    """Return the columns of the sums that have a part from the input, of a tensor [tokens, 4H].

    Args:
        sums: The sums, or their gradients.
        rows: The rows of the input weights, G * H with H rounded up.
    """
    return sums if sums.shape[1] == rows else sums.narrow(1, 0, rows)
