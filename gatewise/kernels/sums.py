"""The relation of gate sums to the rows of weights and biases, from which they are computed.

A gate sum is a pre-activation that the cell's step reads; its tensor has H columns for each sum. The first G sums
contain the product of the input weights, in the order of the gates. For an LSTM, the product of the recurrent weights
is added to the same sums. For a GRU, it is added to the sums of r and z only. The recurrent product of n is a sum of
its own, in a fourth block of columns, because r multiplies it before the input product is added.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.cells import Cell

SUMS = 4
"""The number of sums for which the tensors of the kernel `persistent` have columns."""


class Run(NamedTuple):
    """Consecutive sums that are computed from consecutive gates of a weight matrix, so that one product computes all.

    Attributes:
        sums: The index of the first sum.
        gates: The index of the first gate.
        number: The number of sums, and of gates.
        adds: Whether the product is added to the product of the input.
    """

    sums: int
    gates: int
    number: int
    adds: bool

    def columns_of(self, sums: Tensor, hidden: int) -> Tensor:
        """Return the columns of a tensor [..., S*H] that belong to these sums."""
        columns = self.number * hidden
        return sums if columns == sums.shape[-1] else sums.narrow(-1, self.sums * hidden, columns)

    def rows_of(self, matrix: Tensor, size: int) -> Tensor:
        """Return the rows of a matrix [G * size, columns] that belong to these gates."""
        rows = self.number * size
        return matrix if rows == matrix.shape[0] else matrix.narrow(0, self.gates * size, rows)


@functools.lru_cache(maxsize=256)
def input_runs(cell: Cell) -> tuple[Run, ...]:
    """Return the runs of sums that the product of the input weights contributes to: a single run with all gates."""
    return (Run(0, 0, len(cell.gates), adds=False),)


@functools.lru_cache(maxsize=256)
def recurrent_runs(cell: Cell) -> tuple[Run, ...]:
    """Return the runs of sums that the product of the recurrent weights contributes to."""
    runs: list[Run] = []
    for gate, place in enumerate(cell.recurrent_sums):
        adds = place < len(cell.gates)
        last = runs[-1] if runs else None
        if last is not None and last.sums + last.number == place and last.adds == adds:
            runs[-1] = last._replace(number=last.number + 1)
        else:
            runs.append(Run(place, gate, 1, adds))
    return tuple(runs)


def has_scattered_sums(cell: Cell) -> bool:
    """Return whether the sums with a recurrent product are not next to each other, as those of a GRU."""
    return len(recurrent_runs(cell)) > 1


def bias_of_sums(cell: Cell, b_ih: Tensor | None, b_hh: Tensor | None) -> Tensor | None:
    """Return the bias of each gate sum [S*H] from both bias vectors [G*H]; None without biases."""
    if b_ih is None or b_hh is None:
        return None
    gates, runs = len(cell.gates), recurrent_runs(cell)
    if len(cell.sums) == gates and len(runs) == 1:
        return b_ih + b_hh
    size = b_ih.shape[0] // gates
    # Sums without an input product follow those with one, and each is the recurrent product of a gate.
    recurrent = sorted(run for run in runs if not run.adds)
    found = torch.cat([b_ih, *(run.rows_of(b_hh, size) for run in recurrent)])
    for run in runs:
        if run.adds:
            found.narrow(0, run.sums * size, run.number * size).add_(run.rows_of(b_hh, size))
    return found


def bias_gradients(cell: Cell, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of both bias vectors [G*H] from those of the gate sums [S*H]."""
    gates, runs = len(cell.gates), recurrent_runs(cell)
    if len(cell.sums) == gates and len(runs) == 1:
        return sums, sums.clone()
    each = sums.unflatten(0, (len(cell.sums), -1))
    recurrent = [each[run.sums : run.sums + run.number] for run in runs]
    return each[:gates].flatten(), torch.cat(recurrent).flatten()


def of_input(sums: Tensor, rows: int) -> Tensor:
    """Return the columns of those sums that contain the product of the input.

    Args:
        sums: The sums of all tokens, or their gradients [tokens, S*H].
        rows: The number of rows of the input weights, G*H, with H as it is padded in `sums`.
    """
    return sums if sums.shape[1] == rows else sums.narrow(1, 0, rows)
