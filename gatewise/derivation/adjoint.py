"""The adjoint (vector-Jacobian product) of a cell's step, derived from its operations.

The gradients of a step's inputs are linear in the gradients of its outputs, with coefficients that depend on the
forward pass alone. The adjoint is therefore a table: for each sum and each state before the step (rows), one
coefficient for the gradient of each state after the step (columns). Learned parameters are rows too; their gradients
are added up over steps and sequences. For the LSTM, with c and c' the cell state before
and after the step, and a = o (1 - tanh(c')^2), it is

               dh'                     dc'
    i    a g i (1 - i)            g i (1 - i)
    f    a c f (1 - f)            c f (1 - f)
    g    a i (1 - g^2)            i (1 - g^2)
    o    tanh(c') o (1 - o)       0
    c    a f                      f
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
    """The coefficients of a step's adjoint, as expressions in the names of the step's values.

    Attributes:
        rows: The names of the inputs of the step, whose gradients are computed: the sums, the states before the step,
            if the step reads it element by element the hidden state before the step, and the parameters.
        columns: The names of the outputs of the step, whose gradients are given: the hidden state after the step, then
            the other states.
        shared: Names and expressions of common subexpressions.
        table: The coefficient for each row and column.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    shared: tuple[tuple[str, sympy.Expr], ...]
    table: tuple[tuple[sympy.Expr, ...], ...]


@functools.lru_cache(maxsize=256)
def adjoint_of(cell: Cell) -> Adjoint:
    """Return the adjoint of a cell's step."""
    import sympy  # imported here because the import takes a third of a second

    step = traced(cell)
    rows = (*step.sums, *map(before, step.states), *([before("h")] if step.reads_hidden else []), *step.parameters)
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
    """Return the derivative of a value with respect to every value that it depends on, by name (reverse mode).

    Args:
        step: The step.
        output: The name of the value.
        cut: The names of values that are treated as independent variables: their operands are not differentiated.
    """
    import sympy

    found: dict[str, Any] = {output: sympy.Integer(1)}
    for operation in reversed(step.operations):
        above = found.get(operation.name)
        if above is None or operation.name in cut:
            continue
        for operand, slope in zip(operation.operands, slopes(operation), strict=True):
            if not is_number(operand):
                found[str(operand)] = found.get(str(operand), 0) + above * slope
    return found


def slopes(operation: Operation) -> tuple[Any, ...]:
    """Return the derivative of an operation with respect to each operand, if possible as a function of its result.

    As a function of the result, the derivative of an activation needs no value but the kept activation.
    """
    import sympy

    def value(operand: Operand) -> Any:
        return sympy.Float(operand) if is_number(operand) else sympy.Symbol(str(operand))

    result, given = sympy.Symbol(operation.name), [value(operand) for operand in operation.operands]
    return _SLOPES[operation.function](result, *given)


def _compared(function: str, first: Any, second: Any) -> Any:
    """Return a comparison as a number 0, 1/2 or 1, with PyTorch's convention for derivatives at equal operands.

    "larger" is 1 if the first operand is larger, 1/2 if both are equal, and 0 otherwise. "at_least" is 1 if the first
    operand is larger or both are equal, and 0 otherwise.
    """
    import sympy

    return sympy.Function(function)(first, second)


def _function(name: str, *operands: Any) -> Any:
    import sympy

    return sympy.Function(name)(*operands)


_SLOPES: dict[str, Callable[..., tuple[Any, ...]]] = {
    "neg": lambda r, a: (-1,),
    "sigmoid": lambda r, a: (r * (1 - r),),
    "tanh": lambda r, a: (1 - r * r,),
    "logsigmoid": lambda r, a: (_function("sigmoid_of_opposite", a),),
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
    "clamp_min": lambda r, a, b: (_compared("at_least", a, b), 1 - _compared("at_least", a, b)),
    "clamp_max": lambda r, a, b: (_compared("at_least", b, a), 1 - _compared("at_least", b, a)),
}
