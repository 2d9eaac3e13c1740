"""The widths of loads, and the units, sequences and warps of a block, for which single.cu is compiled."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gatewise.cells import Cell
from gatewise.kernels.cuda import formats
from gatewise.kernels.stepwise.single_criteria import MOST_PARAMETERS, MOST_TILED_WARPS, TILED_UNITS, is_tiled

LANES = 32
"""The threads of a warp."""

VECTOR_BYTES = 16
"""The most bytes that one instruction of a thread loads."""

_MOST_WARPS = 4  # without tensor cores
_TILE_ROWS, _TILE_DEPTH = 8, 32  # of products on tensor cores


class Form(NamedTuple):
    """What single.cu is compiled for, besides the cell and the dtype.

    Attributes:
        input_width: The number of values of a row of the input weights that one instruction loads.
        width: The same of the recurrent weights.
        units: The number of units of a block: one, or several whose products tensor cores compute.
        rows: The number of sequences.
        warps: The number of warps of a block.
    """

    input_width: int
    width: int
    units: int
    rows: int
    warps: int

    @classmethod
    def of(
        cls, cell: Cell, itemsize: int, batch: int, input_weights: tuple[int, int], recurrent_weights: tuple[int, int]
    ) -> Form:
        """Return the form for a step of a layer.

        Args:
            cell: The cell.
            itemsize: The size of a value in bytes.
            batch: The number of sequences.
            input_weights: The address of the input weights, and the number of input features.
            recurrent_weights: The address of the recurrent weights, and the number of units.
        """
        (_, inputs), (_, units) = input_weights, recurrent_weights
        input_width, width = (
            width_of(pointer, size * itemsize, itemsize) for pointer, size in (input_weights, recurrent_weights)
        )
        if is_tiled(cell, itemsize, inputs, units):
            rows = max(_TILE_ROWS, rows_of(batch))
            depths = -(-max(inputs, units) // _TILE_DEPTH)
            # Each thread computes the step of one unit of a sequence.
            warps = max(warps_of(depths, 1, MOST_TILED_WARPS), -(-TILED_UNITS * rows // LANES))
            return cls(input_width, width, TILED_UNITS, rows, warps)
        loads = max(inputs // input_width, units // width)
        return cls(input_width, width, 1, rows_of(batch), warps_of(loads, LANES, _MOST_WARPS))

    def macros(self, dtype: torch.dtype) -> dict[str, int]:
        """Return the macros with which single.cu is compiled."""
        sizes = {"INPUT_WIDTH": self.input_width, "WIDTH": self.width, "UNITS": self.units, "ROWS": self.rows}
        return formats.macros(dtype) | sizes | {"WARPS": self.warps, "MOST_PARAMETERS": MOST_PARAMETERS}


def width_of(pointer: int, row_bytes: int, itemsize: int) -> int:
    """Return the number of values of a row that one instruction can load.

    Args:
        pointer: The address of the first row.
        row_bytes: The size of a row in bytes.
        itemsize: The size of a value in bytes.
    """
    width = VECTOR_BYTES // itemsize
    while width > 1 and (pointer | row_bytes) % (width * itemsize):
        width //= 2
    return width


def rows_of(batch: int) -> int:
    """Return the number of sequences for which the kernel is compiled: the next power of two."""
    return 1 << (batch - 1).bit_length()


def warps_of(loads: int, of_warp: int, most: int) -> int:
    """Return the number of warps of a block, which share the rows of its units: as many as have something to load.

    Args:
        loads: The number of loads of a row.
        of_warp: The number of them that a warp does at once.
        most: The largest number of warps.
    """
    warps = 1
    while warps < most and loads > warps * of_warp:
        warps *= 2
    return warps
