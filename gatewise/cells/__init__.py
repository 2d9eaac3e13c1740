"""The recurrent cells: for each, one definition of the arithmetic of a hidden unit in one time step."""

import ast

from gatewise.cells.candidate import candidate, candidate_changed
from gatewise.cells.capped_lstm import CappedLSTM
from gatewise.cells.cell import Cell
from gatewise.cells.coupled_lstm import CoupledLSTM
from gatewise.cells.gru import GRU
from gatewise.cells.layer_norm_gru import LayerNormGRU
from gatewise.cells.layer_norm_lstm import LayerNormLSTM
from gatewise.cells.lstm import LSTM
from gatewise.cells.mgu import MGU
from gatewise.cells.normalization import standardized
from gatewise.cells.peephole_lstm import PeepholeLSTM
from gatewise.cells.regularised import (
    Averaged,
    Regularised,
    in_evaluation,
    in_training,
    masks_of_steps,
    named,
    stated,
    step_cell,
)
from gatewise.cells.rnn import RNN
from gatewise.cells.slstm import SLSTM
from gatewise.cells.statement import StatementError, check_statement

SHIPPED: tuple[Cell, ...] = (
    LSTM(),
    GRU(),
    RNN("tanh"),
    RNN("relu"),
    CoupledLSTM(),
    CappedLSTM(),
    PeepholeLSTM(),
    MGU(),
    SLSTM(),
    LayerNormLSTM(),
    LayerNormGRU(),
)
"""The cells of the library."""


def cell_named(name: str) -> Cell:
    """Return the cell in `SHIPPED` with the given name, or such a cell with options, dropout or zoneout by its name."""
    if (regularised := named(name, cell_named)) is not None:
        return regularised
    plain, has_options, _ = name.partition("(")
    cell = next(cell for cell in SHIPPED if cell.name == plain)
    if not has_options:
        return cell
    call = ast.parse(name, mode="eval").body
    return type(cell)(**{option.arg: ast.literal_eval(option.value) for option in call.keywords})  # type: ignore[attr-defined]


def is_shipped(cell: Cell) -> bool:
    """Return whether a cell is in `SHIPPED`, or is such a cell with options, so that `cell_named` finds it."""
    return any(type(cell) is type(shipped) for shipped in SHIPPED)


__all__ = [
    "GRU",
    "LSTM",
    "MGU",
    "RNN",
    "SHIPPED",
    "SLSTM",
    "Averaged",
    "CappedLSTM",
    "Cell",
    "CoupledLSTM",
    "LayerNormGRU",
    "LayerNormLSTM",
    "PeepholeLSTM",
    "Regularised",
    "StatementError",
    "candidate",
    "candidate_changed",
    "cell_named",
    "check_statement",
    "in_evaluation",
    "in_training",
    "is_shipped",
    "masks_of_steps",
    "standardized",
    "stated",
    "step_cell",
]
