"""The memory that the passes need for a cell that is not fused."""

from __future__ import annotations

import dataclasses
import functools

from gatewise.cells import Cell, masks_of_steps, step_cell
from gatewise.derivation.device import MOST_SUMS
from gatewise.derivation.fused import carried_states
from gatewise.derivation.row import combinations_of_adjoint, combinations_of_step
from gatewise.derivation.trace import traced
from gatewise.kernels.persistent.sizes.step import has_fused_passes


@dataclasses.dataclass(frozen=True, slots=True)
class CellSize:
    """The memory that a pass needs for a cell that is not fused, in numbers of 32 bits.

    Attributes:
        unit: The shared memory for each hidden unit of a block.
        row: The shared memory for each batch row of a block.
        value: The shared memory for each hidden unit of each batch row.
        registers: The estimated registers for each hidden unit that a thread computes.
        places: The number of times in a step that blocks exchange statistics.
        exchanged: The number of pairs of numbers for each batch row in all these exchanges.
        widest: The largest number of pairs in one of them.
    """

    unit: int
    row: int
    value: int
    registers: int
    places: int
    exchanged: int
    widest: int


@functools.lru_cache(maxsize=256)
def cell_size_of(cell: Cell, *, backward: bool) -> CellSize | None:
    """Return the memory that a pass needs for a cell; None for a fused cell, which needs what tilings count."""
    if has_fused_passes(cell):
        return None
    own, masks = step_cell(cell), masks_of_steps(cell)
    places, widest = combinations_of_adjoint(own, solved=True) if backward else combinations_of_step(own)
    sums, parameters, carried = len(cell.sums), len(cell.parameters), len(carried_states(own))
    statistics = len(traced(own).statistics)
    exchanged = places * max(1, widest)
    given = sums + parameters + carried + masks
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
