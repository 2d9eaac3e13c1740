"""Every launch of a CUDA kernel in `cuda/`.

On the device "meta", whose tensors have no memory, a launch does nothing but return tensors of the right shapes, like
PyTorch's operators there. So a dry run finds the memory of a call (`persistent.dry_run`).

Schedules call the functions of this package by its name (`launches.forward_pass`), so that tests can substitute all
launches in one place.
"""

from gatewise.kernels.persistent.launches.auxiliary import (
    activate,
    fill_unwritten,
    halved,
    longest_first,
    resized,
)
from gatewise.kernels.persistent.launches.compiled import (
    SOURCES,
    Launch,
    backward_launch,
    forward_launch,
    launch_of,
    pair_launch,
)
from gatewise.kernels.persistent.launches.failure import raise_if_given_up
from gatewise.kernels.persistent.launches.half_products import (
    Columns,
    HalfResult,
    Part,
    Rows,
    halve_rows,
    scale_columns,
    write_results,
)
from gatewise.kernels.persistent.launches.masks import Masks
from gatewise.kernels.persistent.launches.operands import Operand, Scale, write_operands
from gatewise.kernels.persistent.launches.passes import (
    BetweenLayers,
    LayerWeights,
    Pair,
    address,
    aligned,
    backward_pass,
    columns,
    forward_pass,
    pair,
    planes,
)
from gatewise.kernels.persistent.launches.row_passes import (
    KeptRows,
    RowWeights,
    row_backward_pass,
    row_forward_pass,
)
from gatewise.kernels.persistent.launches.tokens import Tokens

__all__ = [
    "SOURCES",
    "BetweenLayers",
    "Columns",
    "HalfResult",
    "KeptRows",
    "Launch",
    "LayerWeights",
    "Masks",
    "Operand",
    "Pair",
    "Part",
    "RowWeights",
    "Rows",
    "Scale",
    "Tokens",
    "activate",
    "address",
    "aligned",
    "backward_launch",
    "backward_pass",
    "columns",
    "fill_unwritten",
    "forward_launch",
    "forward_pass",
    "halve_rows",
    "halved",
    "launch_of",
    "longest_first",
    "pair",
    "pair_launch",
    "planes",
    "raise_if_given_up",
    "resized",
    "row_backward_pass",
    "row_forward_pass",
    "scale_columns",
    "write_operands",
    "write_results",
]
