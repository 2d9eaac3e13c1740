"""The adjoint of a cell's step, derived from its operations.

The gradients before a step are linear in the gradients after it, with coefficients that depend on the forward pass
alone. So the adjoint is a table: for each sum that the step reads and each state before it, one coefficient for the
gradient of each state after it. For the LSTM, with a = o (1 - tanh(c)^2),

                dh                      dc
    i     a g i (1 - i)             g i (1 - i)
    f     a c' f (1 - f)            c' f (1 - f)
    g     a i (1 - g^2)             i (1 - g^2)
    o     tanh(c) o (1 - o)         0
    c'    a f                       f
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from gatewise.cells.cell import Cell
from gatewise.derivation.trace import Operand, Operation, Step, before, is_number, traced

if TYPE_CHECKING:
    import sympy


@dataclasses.dataclass(frozen=True, slots=True)
class Adjoint:
    """The coefficients of a step's adjoint, as expressions in the names of its operations.

    Attributes:
        rows: The names of what gradients are computed of: the sums, the states before the step, and the hidden state
            before it where the step reads it other than through the recurrent product.
        columns: The names of what gradients are given of: the hidden state after the step, then the other states.
        shared: Names and expressions that several coefficients read.
        table: The coefficient of each row and column; 0 where there is none.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    shared: tuple[tuple[str, sympy.Expr], ...]
    table: tuple[tuple[sympy.Expr, ...], ...]


@functools.lru_cache(maxsize=256)
def adjoint_of(cell: Cell) -> Adjoint:
    """Return the adjoint of a cell's step."""
    import sympy  # it takes a third of a second, which a program without an own adjoint need not spend

    step = traced(cell)
    rows = (*step.sums, *map(before, step.states), *([before("h")] if step.reads_hidden else []))
    columns = ("h", *step.states)
    table: list[list[Any]] = [[] for _ in rows]
    for output in (step.hidden, *step.after):
        derivatives = backpropagated(step, output)
        for row, name in enumerate(rows):
            table[row].append(derivatives.get(name, sympy.Integer(0)))
    flat = [entry for row in table for entry in row]
    found: tuple[Any, ...] = sympy.cse(flat, symbols=sympy.numbered_symbols("t"))
    shared, entries = found
    width = len(columns)
    return Adjoint(
        rows,
        columns,
        tuple((str(name), expression) for name, expression in shared),
        tuple(tuple(entries[row * width : (row + 1) * width]) for row in range(len(rows))),
    )


def backpropagated(step: Step, output: str, cut: Collection[str] = ()) -> dict[str, Any]:
    """Return the derivative of a value with respect to every value that it depends on, by name.

    Args:
        step: The step.
        output: The name of the value.
        cut: The names of values that count as given: the derivative does not go on to what they are computed from.
    """
    found: dict[str, Any] = {output: 1}
    for operation in reversed(step.operations):
        above = found.get(operation.name)
        if above is None or operation.name in cut:
            continue
        for operand, slope in zip(operation.operands, _slopes(operation), strict=True):
            if not is_number(operand):
                found[str(operand)] = found.get(str(operand), 0) + above * slope
    return found


def _slopes(operation: Operation) -> tuple[Any, ...]:
    """Return the derivative of an operation with respect to each operand, where possible in terms of its result.

    In terms of the result, an activation that was kept is all that the adjoint needs.
    """
    import sympy

    def value(operand: Operand) -> Any:
        return sympy.Float(operand) if is_number(operand) else sympy.Symbol(str(operand))

    result, given = sympy.Symbol(operation.name), [value(operand) for operand in operation.operands]
    return _SLOPES[operation.function](result, *given)


def _compared(function: str, first: Any, second: Any) -> Any:
    """Return a comparison as a number, which has the value where both are equal that PyTorch's derivatives have.

    "larger" is 1 where the first is larger, 1/2 where both are equal, otherwise 0; "at_least" is 1 in both cases.
    """
    import sympy

    return sympy.Function(function)(first, second)


_SLOPES: dict[str, Callable[..., tuple[Any, ...]]] = {
    "neg": lambda r, a: (-1,),
    "sigmoid": lambda r, a: (r * (1 - r),),
    "tanh": lambda r, a: (1 - r * r,),
    "relu": lambda r, a: (1 - _compared("at_least", 0, a),),
    "exp": lambda r, a: (r,),
    "log": lambda r, a: (1 / a,),
    "sqrt": lambda r, a: (1 / (2 * r),),
    "add": lambda r, a, b: (1, 1),
    "sub": lambda r, a, b: (1, -1),
    "mul": lambda r, a, b: (b, a),
    "div": lambda r, a, b: (1 / b, -r / b),
    "maximum": lambda r, a, b: (_compared("larger", a, b), _compared("larger", b, a)),
    "minimum": lambda r, a, b: (_compared("larger", b, a), _compared("larger", a, b)),
    "clamp_min": lambda r, a, b: (_compared("at_least", a, b), 0),
    "clamp_max": lambda r, a, b: (_compared("at_least", b, a), 0),
}
