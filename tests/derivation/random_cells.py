"""Random cells: classes whose step is a random expression of every operation that can be traced.

A cell is drawn as the source of its class, so that a failing test prints a program. Values are bounded by construction:
of each expression an interval is known that contains it, denominators and arguments of logarithms and square roots stay
above a positive number, exponentials have small arguments, and each state after the step is bounded, so that sequences
neither overflow nor lose all digits.

The gradient jumps at the kinks of relu, maximum, minimum and clamp. Operands that are equal by construction are drawn,
such as two values that are both clamped to 1: every kernel follows PyTorch's convention there, so that its gradient is
the one of autograd. In float64 no operand comes so close to another that rounding exchanges them. Coarse dtypes move
values across kinks: there, cells without kinks are drawn (`smooth`).
"""

from __future__ import annotations

import functools
import math
import random
from typing import NamedTuple

import hypothesis.strategies as st
import torch

from gatewise.cells import Cell, standardized

_NUMBERS = ("-1.5", "-1", "-0.75", "0.1", "0.25", "0.5", "1", "2", "3")
_LARGEST = 8.0  # the largest value of a state that is returned as it is
_HIGHEST_EXPONENT = 2.5
_LEAST_DENOMINATOR = 0.1

_SMOOTH = ("add", "sub", "mul", "div", "neg", "number", "sigmoid", "tanh", "exp", "log", "sqrt", "logsigmoid")
_KINKED = ("relu", "maximum", "minimum", "clamp")
_BINARY = ("add", "sub", "mul", "div", "maximum", "minimum")


class Value(NamedTuple):
    """An expression: its source, bounds of its values, and whether it depends on gates or states."""

    text: str
    low: float = -math.inf
    high: float = math.inf
    of_step: bool = True


@functools.cache
def cell_of(source: str) -> Cell:
    """Return the cell whose class has this source, which is its attribute `source`, too."""
    names = {"Cell": Cell, "torch": torch, "standardized": standardized, "logsigmoid": torch.nn.functional.logsigmoid}
    exec(compile(source, "<random cell>", "exec"), names)
    return type("Drawn", (names["Drawn"],), {"source": source})()


def sources(**options: bool) -> st.SearchStrategy[str]:
    """Return the strategy that draws sources of cells, with the options of `drawn`."""
    return st.randoms(use_true_random=False).map(lambda generator: drawn(generator, **options))


def seeded(seeds: range, **options: bool) -> list[Cell]:
    """Return one cell for each seed, which is the same on every machine."""
    return [cell_of(drawn(random.Random(seed), **options)) for seed in seeds]


def drawn(generator: random.Random, *, smooth: bool = False, fused: bool = False, resets: bool = False) -> str:
    """Return the source of a random cell.

    Args:
        generator: The random number generator.
        smooth: Whether no operation has a kink.
        fused: Whether fused kernels compute the cell: it has one carried state, at most four sums, no parameters, and
            no normalization over units.
        resets: Whether every state begins at zero, as kernels other than `eager` require for resets.
    """
    return _Writer(generator, smooth=smooth, fused=fused, zeros=resets).source()


class _Writer:
    """The writer of the source of one cell."""

    def __init__(self, generator: random.Random, *, smooth: bool, fused: bool, zeros: bool) -> None:
        self._generator, self._fused = generator, fused
        number = generator.randrange
        if fused:
            self._gates, self._states, self._parameters = list("abcd")[: 1 + number(4)], ["m"][: number(2)], []
            spare = 4 - len(self._gates)
            self._apart = self._gates[: number(1 + min(spare, len(self._gates)))]
        else:
            self._gates, self._states = list("abcde")[: 1 + number(5)], ["m", "n", "s"][: number(4)]
            self._parameters = ["p", "q", "r"][: number(4)]
            self._apart = [gate for gate in self._gates if self._chance(25)]
        names = ["h", *self._states]
        self._initial = {} if zeros else {name: self._choice((-0.5, 0.25, 1)) for name in names if self._chance(15)}
        self._kinds = (*_SMOOTH, *(() if smooth else _KINKED), *(() if fused else ("standardized", "standardized")))
        self._kinked = not smooth
        self._lines: list[str] = []
        self._shared: list[Value] = []
        self._leaves = [Value(f"gate.{name}") for name in self._gates if name not in self._apart]
        self._leaves += [Value(f"gate.{name}.{part}") for name in self._apart for part in ("input", "recurrent")]
        self._leaves += [Value(f"state.{name}") for name in self._states]
        if not fused or not self._states:
            self._leaves.append(Value("state.h"))  # a fused cell carries h or another state

    def source(self) -> str:
        for _ in range(self._generator.randrange(4)):
            self._shared.append(self._named(self._value(2)))
        after = {}
        for name in self._states:
            after[name] = self._state(name)
            self._shared.append(after[name])
        hidden = self._state("h")
        attributes = {"gates": tuple(self._gates), "states": tuple(self._states), "apart": tuple(self._apart)}
        parameters = dict.fromkeys(self._parameters, 0.5)
        lines = [f"    {name} = {value!r}" for name, value in attributes.items() if value]
        lines += [f"    parameters = {parameters!r}"] if parameters else []
        lines += [f"    initial_states = {self._initial!r}"] if self._initial else []
        returned = ", ".join(f"{name!r}: {value.text}" for name, value in after.items())
        arguments = "self, gate, state, parameter" if parameters else "self, gate, state"
        lines += ["", f"    def step({arguments}):", *(f"        {line}" for line in self._lines)]
        return "\n".join(["class Drawn(Cell):", *lines, f"        return {hidden.text}, {{{returned}}}", ""])

    def _chance(self, percent: int) -> bool:
        return self._generator.randrange(100) < percent

    def _choice(self, options):
        return options[self._generator.randrange(len(options))]

    def _named(self, value: Value) -> Value:
        name = f"v{len(self._lines)}"
        self._lines.append(f"{name} = {value.text}")
        return value._replace(text=name)

    def _state(self, name: str) -> Value:
        """Return a bounded value after the step, which depends on a gate or a state."""
        before = Value(f"state.{name}")
        carried = before in self._leaves
        if carried and name != "h" and self._chance(5):
            return before
        value = self._value(3)
        if not value.of_step or self._chance(50):
            value = self._add(value, self._choice(self._leaves))
        value = self._bounded(value)
        if carried and self._chance(50):
            keep = self._named(self._sigmoid(self._value(1)))
            return self._named(Value(f"{keep.text} * {before.text} + (1 - {keep.text}) * {_inner(value)}"))
        return self._named(value)

    def _bounded(self, value: Value) -> Value:
        if value.low >= -_LARGEST and value.high <= _LARGEST and not self._chance(30):
            return value
        kind = self._choice(("tanh", "tanh", "sigmoid", "clamp", "standardized"))
        if kind == "standardized" and not self._fused:
            return Value(f"standardized({value.text}, eps=0.1)", of_step=value.of_step)
        if kind == "clamp" and self._kinked:
            return Value(f"torch.clamp({value.text}, -2, 1.5)", -2, 1.5, value.of_step)
        low, function = (0.0, "sigmoid") if kind == "sigmoid" else (-1.0, "tanh")
        return Value(f"torch.{function}({value.text})", low, 1.0, value.of_step)

    def _positive(self, value: Value) -> Value:
        """Return a value above zero."""
        if value.low >= _LEAST_DENOMINATOR:
            return value
        kind = self._choice(("sigmoid", "square", "exp", "clamp" if self._kinked else "sigmoid"))
        if kind == "square":
            value = self._named(value)
            return Value(f"(1 + {value.text} * {value.text})", 1.0, math.inf, value.of_step)
        if kind == "exp":
            return Value(f"torch.exp(torch.tanh({value.text}))", math.exp(-1), math.exp(1), value.of_step)
        if kind == "clamp":
            return Value(f"torch.clamp({value.text}, min=0.25)", 0.25, max(value.high, 0.25), value.of_step)
        return Value(f"(0.5 + torch.sigmoid({value.text}))", 0.5, 1.5, value.of_step)

    def _exponent(self, value: Value) -> Value:
        """Return a value whose exponential is neither large nor without digits."""
        if value.low >= -20 and value.high <= _HIGHEST_EXPONENT:
            return value
        if self._kinked and self._chance(50):
            return Value(f"torch.clamp({value.text}, -3, 2)", -3.0, 2.0, value.of_step)
        return Value(f"torch.tanh({value.text})", -1.0, 1.0, value.of_step)

    def _value(self, depth: int) -> Value:
        if depth == 0 or self._chance(15):
            return self._leaf()
        kind = self._choice(self._kinds)
        operands = [self._value(depth - 1) for _ in range(1 + (kind in _BINARY))]
        return getattr(self, f"_{kind}")(*operands)

    def _leaf(self) -> Value:
        if self._shared and self._chance(35):
            return self._choice(self._shared)
        if self._parameters and self._chance(25):
            return Value(f"parameter.{self._choice(self._parameters)}", of_step=False)
        return self._choice(self._leaves)

    def _add(self, a: Value, b: Value) -> Value:
        return Value(f"({a.text} + {b.text})", a.low + b.low, a.high + b.high, a.of_step or b.of_step)

    def _sub(self, a: Value, b: Value) -> Value:
        return Value(f"({a.text} - {b.text})", a.low - b.high, a.high - b.low, a.of_step or b.of_step)

    def _mul(self, a: Value, b: Value) -> Value:
        ends = [x * y for x in a[1:3] for y in b[1:3]] if math.isfinite(sum(map(abs, (*a[1:3], *b[1:3])))) else []
        low, high = (min(ends), max(ends)) if ends else (-math.inf, math.inf)
        return Value(f"{_inner(a)} * {_inner(b)}", low, high, a.of_step or b.of_step)

    def _div(self, a: Value, b: Value) -> Value:
        b = self._positive(b)
        size = max(abs(a.low), abs(a.high)) / b.low
        sign = "-" if self._chance(20) else ""
        return Value(f"{_inner(a)} / {sign}{_inner(b)}", -size, size, a.of_step or b.of_step)

    def _neg(self, a: Value) -> Value:
        return Value(f"(-{_inner(a)})", -a.high, -a.low, a.of_step)

    def _number(self, a: Value) -> Value:
        text = self._choice(_NUMBERS)
        number, kind = float(text), self._generator.randrange(6)
        if kind == 0:
            return Value(f"({a.text} + {text})", a.low + number, a.high + number, a.of_step)
        if kind == 1:
            return Value(f"({text} - {_inner(a)})", number - a.high, number - a.low, a.of_step)
        if kind == 2:
            a = self._positive(a)
            ends = sorted((number / a.low, number / a.high))
            return Value(f"{text} / {_inner(a)}", *ends, a.of_step)
        if kind == 3:
            ends = sorted((a.low / number, a.high / number))
            return Value(f"{_inner(a)} / {text}", *ends, a.of_step)
        ends = sorted((a.low * number, a.high * number))
        text = f"{text} * {_inner(a)}" if kind == 4 else f"{_inner(a)} * {text}"
        return Value(text, *ends, a.of_step)

    def _sigmoid(self, a: Value) -> Value:
        return Value(f"torch.sigmoid({a.text})", 0.0, 1.0, a.of_step)

    def _tanh(self, a: Value) -> Value:
        return Value(f"torch.tanh({a.text})", -1.0, 1.0, a.of_step)

    def _logsigmoid(self, a: Value) -> Value:
        return Value(f"logsigmoid({a.text})", -math.inf, 0.0, a.of_step)

    def _exp(self, a: Value) -> Value:
        a = self._exponent(a)
        return Value(f"torch.exp({a.text})", math.exp(a.low), math.exp(a.high), a.of_step)

    def _log(self, a: Value) -> Value:
        a = self._positive(a)
        return Value(f"torch.log({a.text})", math.log(a.low), math.log(a.high), a.of_step)

    def _sqrt(self, a: Value) -> Value:
        a = self._positive(a)
        return Value(f"torch.sqrt({a.text})", math.sqrt(a.low), math.sqrt(a.high), a.of_step)

    def _relu(self, a: Value) -> Value:
        return Value(f"torch.relu({a.text})", max(a.low, 0.0), max(a.high, 0.0), a.of_step)

    def _maximum(self, a: Value, b: Value) -> Value:
        ends = max(a.low, b.low), max(a.high, b.high)
        return Value(f"torch.maximum({a.text}, {b.text})", *ends, a.of_step or b.of_step)

    def _minimum(self, a: Value, b: Value) -> Value:
        ends = min(a.low, b.low), min(a.high, b.high)
        return Value(f"torch.minimum({a.text}, {b.text})", *ends, a.of_step or b.of_step)

    def _clamp(self, a: Value) -> Value:
        if self._chance(30):
            limit, name = self._leaf(), self._choice(("min", "max"))
            end = max if name == "min" else min
            ends = end(a.low, limit.low), end(a.high, limit.high)
            return Value(f"torch.clamp({a.text}, {name}={limit.text})", *ends, a.of_step or limit.of_step)
        limits, low, high = self._choice(
            (("-0.5, 1", -0.5, 1.0), ("min=-1", -1.0, math.inf), ("max=1", -math.inf, 1.0))
        )
        return Value(f"torch.clamp({a.text}, {limits})", *(min(max(end, low), high) for end in a[1:3]), a.of_step)

    def _standardized(self, a: Value) -> Value:
        count = 1 + self._generator.randrange(3) if a.of_step else 1
        values = [a, *[self._choice(self._leaves) for _ in range(count - 1)]]
        options = self._choice(("", ", eps=0.1")) + self._choice(("", "", ", centered=False"))
        joined = ", ".join(value.text for value in values)
        names = [f"v{len(self._lines)}{suffix}" for suffix in ("", "_1", "_2")[:count]]
        self._lines.append(f"{', '.join(names)} = standardized({joined}{options})")
        self._shared += [Value(name) for name in names[1:]]
        return Value(names[0], of_step=a.of_step)


def _inner(value: Value) -> str:
    """Return the source of a value as an operand of `*` and `/`, in parentheses where it needs them."""
    depth = 0
    for character in value.text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == " " and not depth:
            return f"({value.text})"
    return value.text
