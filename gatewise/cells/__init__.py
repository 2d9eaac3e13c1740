"""The recurrent cells: for each, one definition of the arithmetic of a hidden unit in one time step."""

from gatewise.cells.capped_lstm import CappedLSTM
from gatewise.cells.cell import Cell
from gatewise.cells.coupled_lstm import CoupledLSTM
from gatewise.cells.gru import GRU
from gatewise.cells.lstm import LSTM
from gatewise.cells.rnn import RNN

SHIPPED: tuple[Cell, ...] = (LSTM(), GRU(), RNN("tanh"), RNN("relu"), CoupledLSTM(), CappedLSTM())
"""The cells of the library."""


def cell_named(name: str) -> Cell:
    """Return the cell in `SHIPPED` with the given name."""
    return next(cell for cell in SHIPPED if cell.name == name)


__all__ = ["GRU", "LSTM", "RNN", "SHIPPED", "CappedLSTM", "Cell", "CoupledLSTM", "cell_named"]
