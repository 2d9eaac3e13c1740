"""The cells for which PyTorch has layers, and the names that PyTorch and cuDNN have for them."""

from __future__ import annotations

from typing import NamedTuple

from gatewise.cells import GRU, LSTM, RNN, Cell


class PyTorchLayer(NamedTuple):
    """The layer of PyTorch that computes a cell.

    Attributes:
        cell: The cell.
        name: The name of the layer's class in `torch.nn`, and of the drop-in for it in `gatewise`.
        mode: The layer's attribute `mode`, in lower case also the name of its operator in `torch`.
        cudnn_mode: The number of the cell in cuDNN's enumeration `cudnnRNNMode_t`.
    """

    cell: Cell
    name: str
    mode: str
    cudnn_mode: int


LAYERS = (
    PyTorchLayer(LSTM(), "LSTM", "LSTM", 2),
    PyTorchLayer(GRU(), "GRU", "GRU", 3),
    PyTorchLayer(RNN("tanh"), "RNN", "RNN_TANH", 1),
    PyTorchLayer(RNN("relu"), "RNN", "RNN_RELU", 0),
)
"""The layers of PyTorch, one for each cell."""

MODES = {layer.mode: layer for layer in LAYERS}
"""The layers of PyTorch by their `mode`."""

# Calls look up their cell. The comparison of two cells takes longer than that of these keys.
_BY_CELL = {(type(layer.cell), layer.cell.name): layer for layer in LAYERS}


def cell_of_mode(cell: Cell | str) -> Cell:
    """Return the cell of a layer of PyTorch, given the layer's `mode`; a cell is returned unchanged.

    Calls of the drop-ins for PyTorch's layers give the mode, because the key of a look-up hashes it in C, and a cell by
    a function of Python.
    """
    return MODES[cell].cell if isinstance(cell, str) else cell


def in_pytorch(cell: Cell) -> bool:
    """Return whether PyTorch has a layer that computes the cell."""
    return (type(cell), cell.name) in _BY_CELL


def pytorch_layer(cell: Cell) -> PyTorchLayer:
    """Return the layer of PyTorch that computes a cell; there must be one."""
    return _BY_CELL[type(cell), cell.name]


def cell_of(layer: object, training: bool) -> Cell | None:
    """Return the cell that a recurrent layer of gatewise or PyTorch calls.

    Args:
        layer: A layer with a method `cell_in`, or with a `mode` as PyTorch's layers have; a layer without either is
            taken for an LSTM.
        training: Whether the layer is in training mode.

    Returns:
        The cell; None if the mode is unknown.
    """
    known = MODES.get(getattr(layer, "mode", "LSTM"))
    cell_in = getattr(layer, "cell_in", None)
    return cell_in(training) if cell_in else known and known.cell
