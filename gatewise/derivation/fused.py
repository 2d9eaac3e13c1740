"""What a fused kernel keeps of a step for its backward pass, and the adjoint in two stages.

A fused kernel keeps one value for each sum that the step reads, and the states. The adjoint then needs no function of a
sum again: for the LSTM the activated gates are kept, for the GRU r, z, n and the recurrent sum of n.

The gradients after a step arrive late, because they travel between multiprocessors. So everything that does not depend
on them is computed before, as coefficients. With s' the states after the step that are carried to the next one,

    ds' = ds + dh * dh/ds'                              (the total gradient of each carried state)
    d of a sum or of a state before = sum over s' of ds' * ds'/d(it) + dh * dh/d(it)

where dh/d(it) is the derivative of h as a function of the sums, the states before and s'. For the LSTM this is

    dc' = dc + dh o (1 - tanh(c')^2)
    dz_i = dc' g i (1 - i),  dz_f = dc' c f (1 - f),  dz_g = dc' i (1 - g^2),  dz_o = dh tanh(c') o (1 - o),  dc = dc' f
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gatewise.cells.cell import Cell
from gatewise.derivation.adjoint import backpropagated
from gatewise.derivation.trace import Operation, Step, before, is_number, traced

if TYPE_CHECKING:
    import sympy

_TRANSCENDENTAL = frozenset({"sigmoid", "tanh", "exp", "log", "sqrt", "relu"})


@dataclasses.dataclass(frozen=True, slots=True)
class Coefficients:
    """The coefficients of the adjoint in two stages, as expressions in the names of a step's operations.

    Attributes:
        targets: The names of what gradients are computed of: the sums, then the carried states before the step.
        carried: The names of the carried states, as `carried_states`.
        through: For each carried state, the derivative of the hidden state with respect to it; 0 or 1 as numbers.
        table: For each target, the derivative of each carried state after the step.
        direct: For each target, the derivative of the hidden state with the carried states after the step held fixed.
    """

    targets: tuple[str, ...]
    carried: tuple[str, ...]
    through: tuple[sympy.Expr, ...]
    table: tuple[tuple[sympy.Expr, ...], ...]
    direct: tuple[sympy.Expr, ...]


def carried_states(cell: Cell) -> tuple[str, ...]:
    """Return the names of the states that a fused kernel carries from step to step in registers.

    These are the states beside the hidden state, and the hidden state "h" itself where the step reads it other than
    through the recurrent product, or where there is no other state.
    """
    step = traced(cell)
    return (*step.states, *(["h"] if step.reads_hidden or not step.states else []))


@functools.lru_cache(maxsize=256)
def kept_values(cell: Cell) -> tuple[str, ...]:
    """Return the name of the value that is kept for each sum: the sum itself, or an activation that it alone leads to.

    The activation takes the place of the sum where the adjoint can be computed from it.
    """
    step = traced(cell)
    found = {name: _activation(step, name) for name in step.sums}
    while missing := unknown(step, wanted_values(cell), known_values(cell, found.values())):
        found |= {name: name for name in missing}
    return tuple(found.values())


def known_values(cell: Cell, kept: Iterable[str]) -> frozenset[str]:
    """Return the names of the values that the backward pass has: those that are kept, and the states."""
    step = traced(cell)
    after = after_step(step)
    states = carried_states(cell)
    return frozenset({*kept, *(after[name] for name in states), *map(before, states)})


def wanted_values(cell: Cell) -> frozenset[str]:
    """Return the names of the values that the coefficients of the adjoint are computed from."""
    own = coefficients_of(cell)
    return frozenset(
        str(symbol)
        for expression in (*own.through, *(entry for row in own.table for entry in row), *own.direct)
        for symbol in expression.free_symbols
    )


def unknown(step: Step, wanted: Iterable[str], known: frozenset[str]) -> set[str]:
    """Return the names of the sums that must be known, too, before values can be computed."""
    read = {str(operand) for operation in needed(step, wanted, known) for operand in operation.operands}
    return {name for name in step.sums if name in read.union(wanted) and name not in known}


def _activation(step: Step, name: str) -> str:
    """Return the first function on the way from a sum, as long as nothing else reads what lies on the way."""
    current, outputs = name, {step.hidden, *step.after}
    while current not in outputs:
        readers = [operation for operation in step.operations if current in operation.operands]
        if len(readers) != 1:
            break
        current = readers[0].name
        if readers[0].function in _TRANSCENDENTAL:
            return current
    return name


@functools.lru_cache(maxsize=256)
def coefficients_of(cell: Cell) -> Coefficients:
    """Return the coefficients of the adjoint of a cell's step in two stages."""
    import sympy  # it takes a third of a second, which a program without an own adjoint need not spend

    step, carried = traced(cell), carried_states(cell)
    after = after_step(step)
    targets = (*step.sums, *(before(name) for name in carried))
    cut = tuple(after[name] for name in carried)
    of_hidden = {step.hidden: sympy.Integer(1)} if step.hidden in cut else backpropagated(step, step.hidden, cut)
    of_state = [backpropagated(step, name) for name in cut]
    zero = sympy.Integer(0)
    return Coefficients(
        targets,
        carried,
        tuple(of_hidden.get(name, zero) for name in cut),
        tuple(tuple(found.get(target, zero) for found in of_state) for target in targets),
        tuple(of_hidden.get(target, zero) for target in targets),
    )


def after_step(step: Step) -> dict[str, str]:
    """Return the name of each state's value after the step, by the name of the state."""
    return {"h": step.hidden, **dict(zip(step.states, step.after, strict=True))}


def needed(step: Step, wanted: Iterable[str], known: frozenset[str]) -> list[Operation]:
    """Return the operations that compute values from known ones, in the order in which they are made.

    Args:
        step: The step.
        wanted: The names of the values.
        known: The names of values that are given.
    """
    made_by = {operation.name: operation for operation in step.operations}
    pending, taken = list(wanted), set[str]()
    while pending:
        name = pending.pop()
        operation = made_by.get(name)
        if operation is None or name in known or name in taken:
            continue
        taken.add(name)
        pending += [str(operand) for operand in operation.operands if not is_number(operand)]
    return [operation for operation in step.operations if operation.name in taken]
