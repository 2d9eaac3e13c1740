"""Which passes compute the step of a cell, and how they apply the masks of a regularised cell."""

from __future__ import annotations

import functools

from gatewise.cells import Cell, Regularised, masks_of_steps
from gatewise.contract.problem import Problem
from gatewise.derivation.device import MOST_SUMS, DeviceCode, device_code
from gatewise.derivation.fused import carried_states
from gatewise.derivation.row import row_code
from gatewise.derivation.trace import is_pointwise
from gatewise.kernels import carried, criteria


@functools.lru_cache(maxsize=256)
def has_fused_passes(cell: Cell) -> bool:
    """Return whether forward.cu and backward.cu compute a cell; row_forward.cu and row_backward.cu compute all others.

    All four apply recurrent dropout. The first two also apply zoneout of the hidden state. All other masks are part of
    the code of the cell. For the first two this code carries one state, which begins at zero, also after resets.
    """
    if not isinstance(cell, Regularised):
        return criteria.is_fused(cell)
    own = cell.masked_beside_hidden
    if cell.parameters or len(cell.sums) > MOST_SUMS or not is_pointwise(own):
        return False
    return len(carried_states(own)) == 1 and not any(cell.initial_value(name) for name in ("h", *cell.states))


def code_of(cell: Cell) -> DeviceCode:
    """Return the code of a cell's step that its passes include."""
    return device_code(_fused_cell(cell)) if has_fused_passes(cell) else row_code(cell, solved=True)


def macros_of(cell: Cell) -> dict[str, int]:
    """Return the template parameters of masks.cuh; none for a cell without masks, which is compiled without them."""
    if not isinstance(cell, Regularised):
        return {}
    return {
        "DROPS_HIDDEN": int(cell.recurrent_dropout > 0),
        "STEP_MASKS": masks_of_steps(cell),
        "ZONES_HIDDEN": int(has_fused_passes(cell) and any(cell.zoneout[:1])),
    }


def drops_hidden(cell: Cell) -> bool:
    """Return whether a cell has recurrent dropout, so that blocks exchange other hidden states than the outputs."""
    return isinstance(cell, Regularised) and cell.recurrent_dropout > 0


def carried_size(problem: Problem) -> int:
    """Return the number of values of a sequence's carried states, C*H with C carried states."""
    return problem.hidden_size if has_fused_passes(problem.cell) else carried.carried_size(problem)


def carries_hidden(problem: Problem) -> bool:
    """Return whether the hidden state is one of the carried states."""
    if not has_fused_passes(problem.cell):
        return carried.carries_hidden(problem)
    return "h" in carried_states(_fused_cell(problem.cell))


def _fused_cell(cell: Cell) -> Cell:
    return cell.masked_beside_hidden if isinstance(cell, Regularised) else cell
