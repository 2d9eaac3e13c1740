"""The step of a cell and its adjoint as functions in CUDA C++, which fused kernels include.

The code reads and writes values of type `Real` of one hidden unit, and calls `sigmoid_of` and `tanh_of`, which the
kernel defines for its number format, and the functions of `kernels/cuda/functions.cuh`. It defines

    SUMS, GATES          the numbers of sums that a step reads and of gates, each of which has H rows in the weights
    input_gate(sum)      the gate whose rows of the input weights give part of a sum; -1 if none do
    recurrent_gate(sum)  the same for the recurrent weights
    CARRIES_HIDDEN       whether the carried state is the hidden state
    Kept                 one value for each sum
    stepped(sums, before)         what is kept, the carried state and the hidden state
    Slopes, slopes(kept, after, before), adjoint(slopes, dh, d)  the adjoint in two stages, as in `fused`
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
from gatewise.derivation.printing import Language, printer
from gatewise.derivation.trace import before, traced

if TYPE_CHECKING:
    import sympy

MOST_SUMS = 4
"""The most sums of a cell that the code is written for: four neighbours in a vector, as kernels load them."""

FIELDS = "xyzw"
_FUNCTIONS = {
    "sigmoid": "sigmoid_of",
    "tanh": "tanh_of",
    "relu": "relu_of",
    "maximum": "larger_of",
    "minimum": "smaller_of",
    "clamp_min": "larger_of",
    "clamp_max": "smaller_of",
}


def _number(value: float) -> str:
    return f"Real({int(value)})" if float(value).is_integer() and abs(value) < 2**31 else f"Real({value!r})"


_CUDA = Language("    const Real {} = {};", _number, lambda function: _FUNCTIONS.get(function, function))


class DeviceCode(NamedTuple):
    """The code of a cell.

    Attributes:
        cell: The cell.
        key: A text that differs between cells whose code differs; it takes no derivation to know.
    """

    cell: Cell
    key: str

    @property
    def text(self) -> str:
        """The code, on several lines."""
        return _written(self.cell)


@functools.lru_cache(maxsize=256)
def device_code(cell: Cell) -> DeviceCode:
    """Return the code of a cell, whose text is made where it is read."""
    stated = repr((cell.gates, cell.states, cell.apart, traced(cell)))
    return DeviceCode(cell, hashlib.sha256(f"{stated}{_derivation()}".encode()).hexdigest())


@functools.cache
def _derivation() -> str:
    # The code follows from the statement and from these sources, so it is as old as the newest of both.
    return "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))


@functools.lru_cache(maxsize=64)
def _written(cell: Cell) -> str:
    return "\n".join([*_structure(cell), *_forward(cell), *_backward(cell)])


def _structure(cell: Cell) -> list[str]:
    sums, gates = cell.sums, len(cell.gates)
    recurrent = dict(zip(cell.recurrent_sums, range(gates), strict=True))
    return [
        f"constexpr int SUMS = {len(sums)}, GATES = {gates};",
        f"constexpr bool CARRIES_HIDDEN = {str(carried_states(cell) == ('h',)).lower()};",
        f"struct Kept {{ Real {', '.join(FIELDS)}; }};",
        _place("input_gate", [place if place < gates else -1 for place in range(len(sums))]),
        _place("recurrent_gate", [recurrent.get(place, -1) for place in range(len(sums))]),
    ]


def _place(name: str, places: Sequence[int]) -> str:
    if list(places) == list(range(MOST_SUMS)):
        body = "sum"
    else:
        body = "".join(f"sum == {index} ? {place} : " for index, place in enumerate(places)) + "-1"
    return f"__device__ __forceinline__ constexpr int {name}(int sum) {{ return {body}; }}"


def _forward(cell: Cell) -> list[str]:
    step, kept, (carried,) = traced(cell), kept_values(cell), carried_states(cell)
    after = after_step(step)[carried]

    def name(value: str) -> str:
        return _CUDA.name(value, step.sums)

    wanted = {step.hidden, after, *kept}
    values = ", ".join([*(name(value) for value in kept), *["Real(0)"] * (MOST_SUMS - len(kept))])
    return [
        "struct Stepped { Kept kept; Real state, hidden; };",
        "__device__ __forceinline__ Stepped stepped(const Kept sums, const Real before) {",
        *(f"    const Real {name(own)} = sums.{field};" for own, field in zip(step.sums, FIELDS, strict=False)),
        f"    const Real {name(before(carried))} = before;",
        *_CUDA.lines(needed(step, wanted, frozenset()), step.sums),
        f"    return {{{{{values}}}, {name(after)}, {name(step.hidden)}}};",
        "}",
    ]


def _backward(cell: Cell) -> list[str]:
    import sympy

    step, own, kept, (carried,) = traced(cell), coefficients_of(cell), kept_values(cell), carried_states(cell)

    def name(value: str) -> str:
        return _CUDA.name(value, step.sums)

    through, of_state, direct = own.through[0], [row[0] for row in own.table], list(own.direct)
    slots = {"through": through}
    for index, (table, straight) in enumerate(zip(of_state, direct, strict=True)):
        slots |= {f"state_{index}": table, f"direct_{index}": straight}
    stored = {slot: value for slot, value in slots.items() if value not in (0, 1)}
    symbols = sympy.numbered_symbols("t")
    shared: Any
    shared, entries = sympy.cse(list(stored.values()), symbols=symbols, optimizations=[])
    printed = printer(name, number=_number)
    given = {**dict(zip(kept, FIELDS, strict=False))}
    known = known_values(cell, kept)
    lines = [f"    const Real {name(value)} = kept.{field};" for value, field in given.items()]
    after = after_step(step)[carried]
    if after not in given:
        lines.append(f"    const Real {name(after)} = after;")
    lines.append(f"    const Real {name(before(carried))} = before;")
    lines += _CUDA.lines(needed(step, wanted_values(cell), known), step.sums)
    lines += [f"    const Real {symbol} = {printed.doprint(value)};" for symbol, value in shared]
    total = _sum([_product("dh", "through", through), "d"])
    gradients = [
        _sum([_product("total", f"state_{index}", of_state[index]), _product("dh", f"direct_{index}", direct[index])])
        for index in range(len(own.targets))
    ]
    fields = ", ".join([*gradients[: len(step.sums)], *["Real(0)"] * (MOST_SUMS - len(step.sums))])
    return [
        f"struct Slopes {{ Real {', '.join(stored)}; }};",
        "__device__ __forceinline__ Slopes slopes(const Kept kept, const Real after, const Real before) {",
        *lines,
        f"    return {{{', '.join(printed.doprint(entry) for entry in entries)}}};",
        "}",
        "__device__ __forceinline__ Kept adjoint(const Slopes& slope, const Real dh, Real& d) {",
        f"    const Real total = {total};",
        f"    d = {gradients[-1]};",
        f"    return {{{fields}}};",
        "}",
    ]


def _product(factor: str, slot: str, coefficient: sympy.Expr) -> str:
    if coefficient == 0:
        return ""
    return factor if coefficient == 1 else f"{factor} * slope.{slot}"


def _sum(terms: Sequence[str]) -> str:
    return " + ".join(filter(None, terms)) or "Real(0)"
