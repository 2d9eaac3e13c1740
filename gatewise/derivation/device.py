"""Generate the CUDA C++ code of a cell's step and adjoint, which fused kernels include.

The code computes with values of type `Real` of one hidden unit. It calls `sigmoid_of` and `tanh_of`, which
`kernels/cuda/activations.cuh` defines for each number format, and the functions of `kernels/cuda/functions.cuh`. It
defines

    SUMS, GATES          the number of sums that the step reads, and the number of gates
    input_gate(sum)      the gate whose rows of the input weights contribute to a sum; -1 for none
    recurrent_gate(sum)  the gate whose rows of the recurrent weights contribute to a sum; -1 for none
    CARRIES_HIDDEN       whether the carried state is the hidden state
    Kept                 a vector with one value for each sum
    stepped(sums, before)         the step: the kept values, the carried state and the hidden state
    slopes(kept, after, before)   the first stage of the adjoint: its coefficients, of type `Slopes`
    adjoint(slopes, dh, d)        the second stage: the gradients of the sums; `d`, the gradient of the carried state
                                  after the step, is replaced by the gradient of the carried state before it

The parameters of a cell, if it has any, are masks that change at every step. `stepped` and `slopes` then have a last
argument `masks` with a method `of_cell(index)`, which returns 0 or 1. The module `fused` describes the two stages.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
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
from gatewise.derivation.trace import before, learned, traced

if TYPE_CHECKING:
    import sympy

MOST_SUMS = 4
"""The largest number of sums that the code supports: the four elements of the vectors that kernels load."""

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


def number(value: float) -> str:
    """Return the literal of a number of type `Real`."""
    return f"Real({int(value)})" if float(value).is_integer() and abs(value) < 2**31 else f"Real({value!r})"


CUDA = Language("    const Real {} = {};", number, lambda function: _FUNCTIONS.get(function, function))


class DeviceCode(NamedTuple):
    """The CUDA code of a cell, which is generated when `text` is read.

    Attributes:
        cell: The cell.
        key: A hash that differs between cells with different code; it is computed without generating the code.
        generate: The function that generates the code.
    """

    cell: Cell
    key: str
    generate: Callable[[Cell], str]

    @property
    def text(self) -> str:
        """The code, with line breaks."""
        return self.generate(self.cell)


@functools.lru_cache(maxsize=256)
def device_code(cell: Cell) -> DeviceCode:
    """Return the code of a cell, without generating its text yet."""
    return DeviceCode(cell, key_of(cell, f"{len(cell.parameters)} masks" if cell.parameters else ""), _written)


@functools.lru_cache(maxsize=256)
def key_of(cell: Cell, form: str = "") -> str:
    """Return a hash that differs between cells with different code, and between the forms of code of a cell."""
    stated = repr((cell.gates, cell.states, cell.apart, traced(cell)))
    return hashlib.sha256(f"{form}{stated}{_derivation()}".encode()).hexdigest()


@functools.cache
def _derivation() -> str:
    # The code depends on the definition of the cell and on the sources of this package.
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
        place("input_gate", [index if index < gates else -1 for index in range(len(sums))]),
        place("recurrent_gate", [recurrent.get(index, -1) for index in range(len(sums))]),
    ]


def place(name: str, places: Sequence[int]) -> str:
    """Return the function that maps the index of a sum to one of these places."""
    if list(places) == list(range(MOST_SUMS)):
        body = "sum"
    else:
        body = "".join(f"sum == {index} ? {place} : " for index, place in enumerate(places)) + "-1"
    return f"__device__ __forceinline__ constexpr int {name}(int sum) {{ return {body}; }}"


def _masks(cell: Cell) -> tuple[str, str, list[str]]:
    """Return the text before a function that reads a cell's masks, its last argument, and the names of the masks."""
    if not cell.parameters:
        return "", "", []
    lines = [f"    const Real {learned(name)} = masks.of_cell({index});" for index, name in enumerate(cell.parameters)]
    return "template <class Masks> ", ", const Masks& masks", lines


def _forward(cell: Cell) -> list[str]:
    step, kept, (carried,) = traced(cell), kept_values(cell), carried_states(cell)
    after = after_step(step)[carried]

    def name(value: str) -> str:
        return CUDA.name(value, step.sums)

    wanted = {step.hidden, after, *kept}
    template, argument, masks = _masks(cell)
    values = ", ".join([*(name(value) for value in kept), *["Real(0)"] * (MOST_SUMS - len(kept))])
    return [
        "struct Stepped { Kept kept; Real state, hidden; };",
        f"{template}__device__ __forceinline__ Stepped stepped(const Kept sums, const Real before{argument}) {{",
        *(f"    const Real {name(own)} = sums.{field};" for own, field in zip(step.sums, FIELDS, strict=False)),
        f"    const Real {name(before(carried))} = before;",
        *masks,
        *CUDA.lines(needed(step, wanted, frozenset()), step.sums),
        f"    return {{{{{values}}}, {name(after)}, {name(step.hidden)}}};",
        "}",
    ]


def _backward(cell: Cell) -> list[str]:
    import sympy

    step, own, kept, (carried,) = traced(cell), coefficients_of(cell), kept_values(cell), carried_states(cell)

    def name(value: str) -> str:
        return CUDA.name(value, step.sums)

    through, of_state, direct = own.through[0], [row[0] for row in own.table], list(own.direct)
    slots = {"through": through}
    for index, (table, straight) in enumerate(zip(of_state, direct, strict=True)):
        slots |= {f"state_{index}": table, f"direct_{index}": straight}
    stored = {slot: value for slot, value in slots.items() if value not in (0, 1)}
    symbols = sympy.numbered_symbols("t")
    shared: Any
    shared, entries = sympy.cse(list(stored.values()), symbols=symbols, optimizations=[])
    printed = printer(name, number=number)
    given = {**dict(zip(kept, FIELDS, strict=False))}
    known = known_values(cell, kept)
    lines = [f"    const Real {name(value)} = kept.{field};" for value, field in given.items()]
    after = after_step(step)[carried]
    if after not in given:
        lines.append(f"    const Real {name(after)} = after;")
    lines.append(f"    const Real {name(before(carried))} = before;")
    template, argument, masks = _masks(cell)
    lines += masks
    lines += CUDA.lines(needed(step, wanted_values(cell), known), step.sums)
    lines += [f"    const Real {symbol} = {printed.doprint(value)};" for symbol, value in shared]
    total = _sum([_product("dh", "through", through), "d"])
    gradients = [
        _sum([_product("total", f"state_{index}", of_state[index]), _product("dh", f"direct_{index}", direct[index])])
        for index in range(len(own.targets))
    ]
    fields = ", ".join([*gradients[: len(step.sums)], *["Real(0)"] * (MOST_SUMS - len(step.sums))])
    declared = f"Real {', '.join(stored)};" if stored else ""  # none where all derivatives are 0 or 1
    return [
        f"struct Slopes {{ {declared} }};",
        f"{template}__device__ __forceinline__ Slopes slopes("
        f"const Kept kept, const Real after, const Real before{argument}) {{",
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
