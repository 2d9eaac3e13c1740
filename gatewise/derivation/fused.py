"""The values that a fused kernel keeps for its backward pass, and the adjoint in two stages.

A fused kernel keeps one value for each sum that the step reads, and the states. The values are chosen so that the
adjoint needs no transcendental function of a sum: for the LSTM they are the activated gates, for the GRU r, z, n and
the recurrent sum of n.

The gradients of a step's outputs arrive late in a backward pass, because they are exchanged between multiprocessors. In
the first stage, everything that does not depend on them is computed, as coefficients. The second stage applies the
coefficients to the gradients. With s' the states after the step that are carried to the next step, and u a sum or a
state before the step, the gradients are

    ds' <- ds' + dh * dh/ds'                               (the total gradient of each carried state)
    du = sum over s' of ds' * ds'/du + dh * dh/du

where dh/du is the derivative of h as a function of the sums, the states before the step and s'. For the LSTM this is

    dc' <- dc' + dh o (1 - tanh(c')^2)
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
    """The coefficients of the adjoint in two stages, as expressions in the names of a step's values.

    Attributes:
        targets: The names of the values whose gradients are computed: the sums, then the carried states before the
            step.
        carried: The names of the carried states, as returned by `carried_states`.
        through: For each carried state s', the derivative dh/ds'.
        table: For each target u, the derivative ds'/du of each carried state.
        direct: For each target u, the derivative dh/du with the carried states after the step held fixed.
    """

    targets: tuple[str, ...]
    carried: tuple[str, ...]
    through: tuple[sympy.Expr, ...]
    table: tuple[tuple[sympy.Expr, ...], ...]
    direct: tuple[sympy.Expr, ...]


@functools.lru_cache(maxsize=256)
def carried_states(cell: Cell) -> tuple[str, ...]:
    """Return the names of the states that a fused kernel carries from step to step in registers.

    These are the states other than the hidden state. The hidden state "h" is among them if the step reads it element by
    element, in addition to the recurrent product, or if the cell has no other state.
    """
    step = traced(cell)
    return (*step.states, *(["h"] if step.reads_hidden or not step.states else []))


@functools.lru_cache(maxsize=256)
def kept_values(cell: Cell) -> tuple[str, ...]:
    """Return the name of the value that is kept for each sum: an activation of the sum, or the sum itself.

    An activation is kept if the adjoint can be computed from it without the sum.
    """
    step = traced(cell)
    found = {name: _activation(step, name) for name in step.sums}
    while missing := unknown(step, wanted_values(cell), known_values(cell, found.values())):
        found |= {name: name for name in missing}
    return tuple(found.values())


def known_values(cell: Cell, kept: Iterable[str]) -> frozenset[str]:
    """Return the names of the values available in the backward pass: the kept values and the carried states."""
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
    """Return the names of the sums that are missing from the known values to compute the wanted values."""
    read = {str(operand) for operation in needed(step, wanted, known) for operand in operation.operands}
    return {name for name in step.sums if name in read.union(wanted) and name not in known}


def _activation(step: Step, name: str) -> str:
    """Return the first activation after a sum if nothing else reads the values between them, otherwise the sum.

    The activation must depend on sums alone, because training in little memory computes it from them again.
    """
    current, outputs = name, {step.hidden, *step.after}
    of_states = _dependent(step, map(before, ("h", *step.states)))
    while current not in outputs:
        readers = [operation for operation in step.operations if current in operation.operands]
        if len(readers) != 1:
            break
        current = readers[0].name
        if current in of_states:
            break
        if readers[0].function in _TRANSCENDENTAL:
            return current
    return name


def _dependent(step: Step, given: Iterable[str]) -> set[str]:
    """Return the names of the given values and of all values that are computed from them."""
    found = set(given)
    for operation in step.operations:
        if not found.isdisjoint(operation.operands):
            found.add(operation.name)
    return found


@functools.lru_cache(maxsize=256)
def coefficients_of(cell: Cell) -> Coefficients:
    """Return the coefficients of the adjoint of a cell's step in two stages."""
    import sympy  # imported here because the import takes a third of a second

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
    """Return a mapping from the name of each state to the name of its value after the step."""
    return {"h": step.hidden, **dict(zip(step.states, step.after, strict=True))}


def needed(step: Step, wanted: Iterable[str], known: frozenset[str]) -> list[Operation]:
    """Return the operations that are needed to compute values from known values, in their order in the step.

    Args:
        step: The step.
        wanted: The names of the values to compute.
        known: The names of the known values.
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
