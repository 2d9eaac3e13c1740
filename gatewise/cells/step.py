"""The call of a cell's step with values given by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gatewise.cells.cell import Cell
from gatewise.cells.statement import check_returned


class Values:
    """The values that a step reads, as attributes; `torch.compile` can trace it, unlike `types.SimpleNamespace`."""

    def __init__(self, /, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def next_states(
    cell: Cell, sums: Mapping[str, Any], states: Mapping[str, Any], parameters: Mapping[str, Any] | None = None
) -> tuple[Any, tuple[Any, ...]]:
    """Return the hidden state and the other states, in the order of `cell.states`, after one step of a cell.

    Args:
        cell: The cell.
        sums: The value of each name in `cell.sums`.
        states: The value of "h", if the step reads it, and of each name in `cell.states`.
        parameters: The value of each name in `cell.parameters`; None for a cell that has none.

    Raises:
        StatementError: The step returns something else than a hidden state and a mapping of the other states.
    """
    gate = Values()
    for name in cell.gates:
        if name in cell.apart:
            value = Values(input=sums[f"{name}_input"], recurrent=sums[f"{name}_recurrent"])
        else:
            value = sums[name]
        setattr(gate, name, value)
    learned = [Values(**(parameters or {}))] if cell.parameters else []
    hidden, after = check_returned(cell, cell.step(gate, Values(**states), *learned))
    return hidden, tuple(after[name] for name in cell.states)
