"""Which rows of the weights each gate sum takes part of.

Memory has a column of H values for each sum that the cell's step reads. The input weights give the first G of them, in
the order of the gates. The recurrent weights give all of an LSTM; of a GRU they give those of r and z, and a sum of
their own for n, because r multiplies it before it is added to that of the input.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.cells import Cell

SUMS = 4
"""The sums that memory has columns for."""


class Run(NamedTuple):
    """Neighbouring sums that take the rows of neighbouring gates of a matrix.

    Attributes:
        sums: The first sum.
        gates: The gate of the first sum.
        number: The number of sums.
        adds: Whether the product is added to that of the input.
    """

    sums: int
    gates: int
    number: int
    adds: bool

    def columns_of(self, sums: Tensor, hidden: int) -> Tensor:
        """Return the columns of these sums, of a tensor [..., 4H]."""
        return sums if self.number == SUMS else sums.narrow(-1, self.sums * hidden, self.number * hidden)

    def rows_of(self, matrix: Tensor, size: int) -> Tensor:
        """Return the rows of these gates, of a matrix [G * size, columns]."""
        rows = self.number * size
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
        if last is not None and last.sums + last.number == place and last.adds == adds:
            runs[-1] = last._replace(number=last.number + 1)
        else:
            runs.append(Run(place, gate, 1, adds))
    return tuple(runs)


def bias_of_sums(cell: Cell, b_ih: Tensor | None, b_hh: Tensor | None) -> Tensor | None:
    """Return the bias of each gate sum [S*H] from both bias vectors [G*H]; None without biases."""
    if b_ih is None or b_hh is None:
        return None
    gates, sums = len(cell.gates), len(cell.sums)
    if gates == sums and len(recurrent_runs(cell)) == 1:
        return b_ih + b_hh
    found = b_ih.new_zeros(sums, b_ih.shape[0] // gates)
    found[:gates] = b_ih.unflatten(0, (gates, -1))
    of_gates = b_hh.unflatten(0, (gates, -1))
    for run in recurrent_runs(cell):
        found[run.sums : run.sums + run.number] += of_gates[run.gates : run.gates + run.number]
    return found.flatten()


def biases_of_sums(cell: Cell, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of both bias vectors [G*H] from those of the gate sums [S*H]."""
    gates, runs = len(cell.gates), recurrent_runs(cell)
    if len(cell.sums) == gates and len(runs) == 1:
        return sums, sums.clone()
    each = sums.unflatten(0, (len(cell.sums), -1))
    recurrent = [each[run.sums : run.sums + run.number] for run in runs]
    return each[:gates].flatten(), torch.cat(recurrent).flatten()


def of_input(sums: Tensor, rows: int) -> Tensor:
    """Return the columns of the sums that have a part from the input, of a tensor [tokens, 4H].

    Args:
        sums: The sums, or their gradients.
        rows: The rows of the input weights, G * H with H rounded up.
    """
    return sums if sums.shape[1] == rows else sums.narrow(1, 0, rows)
