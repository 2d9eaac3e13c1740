"""The memory that the passes need for a cell that is not fused."""

from __future__ import annotations

import functools

from gatewise.cells import Cell
from gatewise.derivation.device import MOST_SUMS
from gatewise.derivation.fused import carried_states
from gatewise.derivation.row import combinations_of
from gatewise.derivation.trace import traced
from gatewise.kernels.criteria import is_fused
from gatewise.kernels.persistent.sizes.tilings import CellSize


@functools.lru_cache(maxsize=256)
def cell_size_of(cell: Cell, *, backward: bool) -> CellSize | None:
    """Return the memory that a pass needs for a cell; None for a fused cell, which needs what tilings count."""
    if is_fused(cell):
        return None
    places, widest = combinations_of(cell)
    sums, parameters, carried = len(cell.sums), len(cell.parameters), len(carried_states(cell))
    statistics = len(traced(cell).statistics)
    exchanged = places * max(1, widest)
    given = sums + parameters + carried
    registers = 12 + 2 * given + 2 * carried if backward else 10 + given + carried
    return CellSize(
        unit=sums + parameters,
        row=2 * exchanged + 2 * statistics,
        value=parameters + sums if backward else 0,
        registers=registers,
        places=places,
        exchanged=exchanged,
        widest=widest,
    )


def has_two_tensors(cell: Cell) -> bool:
    """Return whether the sums of a cell, and their gradients, are stored in two tensors, as row_sums.cuh describes."""
    return len(cell.sums) > MOST_SUMS
