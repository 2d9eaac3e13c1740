"""Cells whose steps are computed by generated functions, some of whose values are computed for a block of steps."""

from __future__ import annotations

import functools

from torch import Tensor

from gatewise.cells.cell import Cell
from gatewise.derivation.normalized import counted_twice
from gatewise.derivation.trace import is_pointwise, refusal_of

# For each kind of device: the smallest number of steps of a block, and the number of elements [steps, B, H] up to which
# a block may have more steps. On a CPU, the values of a block should fit into the cache.
_BLOCKS = {"cpu": (4, 1 << 15), "cuda": (32, 1 << 20)}


@functools.lru_cache(maxsize=256)
def is_swept(cell: Cell) -> bool:
    """Return whether `sweep` computes a cell: one that combines hidden units, or that has several other states."""
    if refusal_of(cell):
        return False
    return not counted_twice(cell) and (not is_pointwise(cell) or len(cell.states) > 1)


@functools.lru_cache(maxsize=256)
def has_adjoint(cell: Cell) -> bool:
    """Return whether the explicit backward pass computes a cell; autograd repeats the forward pass of others."""
    return is_swept(cell) or is_pointwise(cell)


def block_of(device: str, batch: int, hidden_size: int) -> int:
    """Return the number of steps of a block on a kind of device ("cpu" or "cuda")."""
    steps, elements = _BLOCKS.get(device, _BLOCKS["cuda"])
    return max(steps, elements // max(1, batch * hidden_size))


def divided(cell: Cell, sums: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the sums of the gates, or their input sums [..., G*H], and the recurrent sums of the gates in `apart`.

    Args:
        cell: The cell.
        sums: All sums [..., S*H].
    """
    if not cell.apart:
        return sums, None
    width = sums.shape[-1] // len(cell.sums) * len(cell.gates)
    return sums[..., :width], sums[..., width:]
