"""The cells: one statement of each, from which everything that computes it is derived.

A cell's file states what a hidden unit computes in one step (`cell`). `trace` records the statement as a list of
operations, `adjoint` derives the gradients, and `pointwise` writes both as operators of PyTorch.
"""

from gatewise.cells.cell import Cell
from gatewise.cells.gru import GRU
from gatewise.cells.lstm import LSTM

SHIPPED: tuple[Cell, ...] = (LSTM(), GRU())
"""The cells of the library."""


def cell_named(name: str) -> Cell:
    """Return a shipped cell by its name."""
    return next(cell for cell in SHIPPED if cell.name == name)


__all__ = ["GRU", "LSTM", "SHIPPED", "Cell", "cell_named"]
