"""Steps of cells that are not smooth, whose gradients can differ by more than rounding errors do.

At a kink, such as that of `relu` at zero or of `maximum` where both arguments are equal, the gradient jumps. Where an
argument is nearer to a kink than its rounding error, two correct computations can take different sides, and the whole
gradient of that element differs.
"""

from __future__ import annotations

import math

import torch

from gatewise.benchmarks.cells.loop import step_of
from gatewise.cells import Cell

_KINKS = ("Abs", "Clamp", "Hardtanh", "LeakyRelu", "Maximum", "Minimum", "Relu", "Where")
_DENSITY = 4.0  # an upper bound of the probability density of an argument at a kink, where values are of order 1
_NEARLY_SURELY = 4.0


def has_kinks(cell: Cell) -> bool:
    """Return whether the step of a cell has operators whose derivative is not continuous."""
    size = 2

    def leaf(*shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float64, requires_grad=True)

    with torch.enable_grad():
        states = tuple([leaf(1, size) for _ in ("h", *cell.states)])
        rows = len(cell.gates) * size
        parameters = tuple([leaf(size) for _ in cell.parameters])
        after = step_of(cell)(leaf(1, rows), states, leaf(size, rows), leaf(rows), parameters)
    nodes, seen = [each.grad_fn for each in after], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().startswith(_KINKS):
            return True
        nodes += [following for following, _ in node.next_functions]
    return False


def slack(elements: int, error: float) -> float:
    """Return the relative error of a gradient that may come from elements on other sides of kinks.

    Of N elements, the number of those within the error of a kink is distributed as Poisson's with a mean of at most
    lambda = N * density * error. The number in one computation exceeds that in another by less than
    4 sqrt(lambda) + 4 nearly surely, and each such element adds 1 / N to the square of the relative error.

    Args:
        elements: N, the number of values of a gate in all steps: T*B*H.
        error: The relative error of these values.
    """
    if not math.isfinite(error):
        return 0.0
    mean = elements * _DENSITY * error
    return math.sqrt((_NEARLY_SURELY * math.sqrt(mean) + 4) / elements)
