"""The cells: one statement of each, of what a hidden unit computes in one step."""

from gatewise.cells.cell import Cell
from gatewise.cells.gru import GRU
from gatewise.cells.lstm import LSTM

SHIPPED: tuple[Cell, ...] = (LSTM(), GRU())
"""The cells of the library."""


def cell_named(name: str) -> Cell:
    """Return a shipped cell by its name."""
    return next(cell for cell in SHIPPED if cell.name == name)


__all__ = ["GRU", "LSTM", "SHIPPED", "Cell", "cell_named"]
