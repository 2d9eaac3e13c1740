"""Generate PyTorch functions for a cell's step and its two-stage adjoint, equivalent to the CUDA code of fused kernels.

Loops that also run on the CPU use them to keep the same values as the CUDA code (`fused.kept_values`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gatewise.cells.cell import Cell
from gatewise.derivation.fused import (
    after_step,
    carried_states,
    coefficients_of,
    kept_values,
    known_values,
    needed,
    wanted_values,
)
from gatewise.derivation.pointwise import at_least, larger
from gatewise.derivation.printing import Language, printer
from gatewise.derivation.trace import before, literal, traced

_PYTHON = Language("    {} = {}", literal, lambda name: f"torch.{name}")


class Unit(NamedTuple):
    """The PyTorch functions of a cell with one carried state.

    Attributes:
        stepped: A function that computes a step. Its arguments are one tensor for each sum, and the carried state
            before the step. It returns a tuple of the kept values, the carried state and the hidden state after the
            step.
        adjoint: A function that computes the gradients of a step. Its arguments are one tensor for each kept value, the
            carried state after and before the step, the gradient of the hidden state, and the gradient of the carried
            state after the step. It returns a tuple of the gradients of the sums, and the gradient of the carried state
            before the step.
    """

    stepped: Callable[..., tuple[tuple[Tensor, ...], Tensor, Tensor]]
    adjoint: Callable[..., tuple[tuple[Tensor, ...], Tensor]]


@functools.lru_cache(maxsize=64)
def unit_of(cell: Cell) -> Unit:
    """Return the functions of a cell, generated once."""
    step, own, kept, (carried,) = traced(cell), coefficients_of(cell), kept_values(cell), carried_states(cell)
    after, earlier = after_step(step)[carried], before(carried)

    def name(value: str) -> str:
        return _PYTHON.name(value, step.sums)

    printed = printer(name)
    given = ", ".join(map(name, step.sums))
    saved = ", ".join(f"kept_{index}" for index in range(len(kept)))
    known = known_values(cell, kept)
    gradients = [
        f"total * ({printed.doprint(row[0])}) + dh * ({printed.doprint(direct)})"
        if row[0] != 0 and direct != 0
        else f"total * ({printed.doprint(row[0])})"
        if row[0] != 0
        else f"dh * ({printed.doprint(direct)})"
        for row, direct in zip(own.table, own.direct, strict=True)
    ]
    source = "\n".join(
        [
            f"def stepped({given}, {earlier}):",
            *_PYTHON.lines(needed(step, {step.hidden, after, *kept}, frozenset()), step.sums),
            f"    return ({', '.join(map(name, kept))},), {name(after)}, {name(step.hidden)}",
            "",
            f"def adjoint({saved}, after, {earlier}, dh, d):",
            *[f"    {name(value)} = kept_{index}" for index, value in enumerate(kept)],
            *([] if after in kept else [f"    {name(after)} = after"]),
            *_PYTHON.lines(needed(step, wanted_values(cell), known), step.sums),
            f"    total = d + dh * ({printed.doprint(own.through[0])})",
            f"    return ({', '.join(gradients[:-1])},), {gradients[-1]}",
        ]
    )
    made: dict[str, Any] = {"torch": torch, "larger": larger, "at_least": at_least}
    exec(compile(source, "<functions of one unit of a recurrent cell>", "exec"), made)
    return Unit(made["stepped"], made["adjoint"])
