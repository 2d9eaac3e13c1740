"""Write PyTorch code for the operations of a step, with one operator for several gates wherever they are alike.

The values of several gates form a pack, a tensor [..., n, H] with a lane for each gate. Where a step applies the same
function to lanes of a pack, such as an activation, or the gain and the shift of a layer normalization, the code calls
one operator for all of them. Operations that depend on parameters alone, or on parameters and input sums alone, are
separate, because they can be computed once, or for many steps at once.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.derivation.normalized import LOG_SIGMOID, Computed, Normalization, operands_of, results_of
from gatewise.derivation.trace import Operand, Operation, is_number, literal

_SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
# The functions that may be computed for lanes that nothing reads, between lanes that are read.
_CHEAP = frozenset({"add", "sub", "mul", "neg", "relu", "sigmoid"})


class Stage(enum.IntEnum):
    """The time at which a value is computed: once, ahead of the steps for many of them, or in each step."""

    ONCE = 0
    AHEAD = 1
    STEP = 2


class Lane(NamedTuple):
    """The place of a value: a variable that is a pack, and a lane of it."""

    pack: str
    lane: int


class NormalizedPack(NamedTuple):
    """The variables of a normalization: the values as a pack, the normalized values, the mean and 1 / deviation."""

    values: str
    results: str
    mean: str
    scale: str


class Given(NamedTuple):
    """The values that are computed elsewhere.

    Attributes:
        packs: The names of the values of each pack, by variable.
        values: The variable of each other value, by name.
        stages: The stage of each variable.
    """

    packs: Mapping[str, Sequence[str]]
    values: Mapping[str, str]
    stages: Mapping[str, Stage]


class Writer:
    """The code that computes values of a step.

    Args:
        operations: The operations of the step, in the order of execution.
        given: The values that are computed elsewhere.
        wanted: The names of the values that are read elsewhere.

    Attributes:
        normalizations: The variables of each normalization that is computed, by its first result.
    """

    def __init__(self, operations: Sequence[Computed], given: Given, wanted: Collection[str]) -> None:
        self._lanes = {
            name: Lane(pack, index) for pack, names in given.packs.items() for index, name in enumerate(names)
        }
        self._sizes = {pack: len(names) for pack, names in given.packs.items()}
        self._single, self._stages = dict(given.values), dict(given.stages)
        self._lines: dict[Stage, list[str]] = {stage: [] for stage in Stage}
        self._crossing: dict[Stage, dict[str, None]] = {stage: {} for stage in Stage}
        self._stacked: dict[tuple[str, ...], str] = {}
        self._selections: dict[str, dict[int, str]] = {}
        self._selecting: dict[str, int] = {}  # the line that selects lanes of a pack
        self.normalizations: dict[str, NormalizedPack] = {}
        remaining = self._fused(self._needed(operations, wanted), wanted)
        while remaining:
            ready = [one for one in remaining if all(self.knows(operand) for operand in operands_of(one))]
            for group in self._alike(ready):
                self._write(group)
            remaining = [one for one in remaining if one not in ready]

    def lines(self, stage: Stage) -> list[str]:
        """Return the lines of a stage."""
        return [f"    {line}" for line in self._lines[stage]]

    def crossing(self, stage: Stage) -> tuple[str, ...]:
        """Return the variables of a stage that later stages read."""
        return tuple(self._crossing[stage])

    def emit(self, stage: Stage, expression: str) -> str:
        """Add a line that computes a new variable, and return the variable."""
        variable = f"x{len(self._stages)}"
        self._stages[variable] = stage
        self._lines[stage].append(f"{variable} = {expression}")
        return variable

    def define(self, name: str, expression: str, stage: Stage) -> None:
        """Add a value that no operation of the step computes."""
        self._single[name] = self.emit(stage, expression)

    def knows(self, name: Operand) -> bool:
        """Return whether a value is computed."""
        return is_number(name) or name in self._single or name in self._lanes

    def is_changing(self, variable: str) -> bool:
        """Return whether a variable changes from step to step."""
        return self._stages.get(variable, Stage.ONCE) is not Stage.ONCE

    def add(self, stage: Stage, line: str) -> None:
        """Add a line that changes a variable."""
        self._lines[stage].append(line)

    def read(self, variable: str, stage: Stage = Stage.STEP) -> str:
        """Return a variable, or a number, as code of a stage reads it."""
        if variable in self._stages and self._stages[variable] < stage:
            self._crossing[self._stages[variable]][variable] = None
        return variable

    def stage_of(self, names: Iterable[Operand]) -> Stage:
        """Return the stage in which a function of these values can be computed."""
        stages = [self._stages[self._variable(str(name))] for name in names if not is_number(name)]
        return max(stages, default=Stage.ONCE)

    def lane(self, name: str) -> Lane | None:
        """Return the place of a value in a pack; None if it is in no pack."""
        return self._lanes.get(name)

    def pack(self, variable: str, first: int, count: int, stage: Stage = Stage.STEP) -> str:
        """Return the expression of consecutive lanes of a pack, as code of a stage reads it."""
        text = self.read(variable, stage)
        return text if count == self._sizes[variable] else f"{text}.narrow(-2, {first}, {count})"

    def value(self, name: Operand, stage: Stage = Stage.STEP) -> str:
        """Return the expression of a value, as code of a stage reads it."""
        if is_number(name):
            return literal(name)
        if name not in self._single:
            self._single[str(name)] = self._selected(*self._lanes[str(name)])
        return self.read(self._single[str(name)], stage)

    def _selected(self, pack: str, lane: int) -> str:
        """Return the variable of a lane; one operator selects all lanes of a pack that are read by themselves."""
        stage, known = self._stages[pack], self._selections.setdefault(pack, {})
        if not known:
            variable = self.emit(stage, f"{pack}.select(-2, {lane})")
            known[lane], self._selecting[pack] = variable, len(self._lines[stage]) - 1
            return variable
        known[lane] = variable = f"x{len(self._stages)}"
        self._stages[variable] = stage
        names = ", ".join(known.get(place, "_") for place in range(self._sizes[pack]))
        self._lines[stage][self._selecting[pack]] = f"{names} = {pack}.unbind(-2)"
        return variable

    def stacked(self, names: Sequence[str], stage: Stage = Stage.STEP) -> str:
        """Return the variable of a pack of values that depend on parameters alone."""
        key = tuple(names)
        if key not in self._stacked:
            each = ", ".join(self.value(name, Stage.ONCE) for name in key)
            self._stacked[key] = self.emit(Stage.ONCE, f"torch.stack([{each}])")
        return self.read(self._stacked[key], stage)

    def _variable(self, name: str) -> str:
        return self._single[name] if name in self._single else self._lanes[name].pack

    def _needed(self, operations: Sequence[Computed], wanted: Collection[str]) -> list[Computed]:
        needed, found = {name for name in wanted if not self.knows(name)}, []
        for one in reversed(operations):
            if needed.isdisjoint(results_of(one)):
                continue
            needed.update(str(operand) for operand in operands_of(one) if not self.knows(operand))
            found.append(one)
        return found[::-1]

    def _fused(self, operations: list[Computed], wanted: Collection[str]) -> list[Computed]:
        """Return the operations with products and the sums that alone read them joined, as `torch.addcmul`."""
        uses = Counter(str(operand) for one in operations for operand in operands_of(one))
        stages: dict[str, Stage] = {}
        products: dict[str, Operation] = {}
        for one in operations:
            names = [str(operand) for operand in operands_of(one) if not is_number(operand)]
            stage = max((stages[name] if name in stages else self.stage_of([name]) for name in names), default=0)
            stages |= dict.fromkeys(results_of(one), Stage(stage))
            if isinstance(one, Operation) and one.function == "mul" and len(names) == 2:
                products[one.name] = one
        found: list[Computed] = []
        dropped: set[str] = set()
        for one in operations:
            if isinstance(one, Operation) and one.function in ("add", "sub"):
                pairs = [one.operands[::-1], one.operands] if one.function == "add" else [one.operands[::-1]]
                for name, other in pairs:
                    fits = name in products and uses[str(name)] == 1 and name not in wanted and not is_number(other)
                    if fits and stages[str(name)] == stages[one.name] and str(name) not in dropped:
                        dropped.add(str(name))
                        operands = (other, *products[str(name)].operands)
                        one = Operation(one.name, f"{one.function}cmul", operands)
                        break
            found.append(one)
        return [one for one in found if dropped.isdisjoint(results_of(one))]

    def _alike(self, ready: Sequence[Computed]) -> Iterator[list[Computed]]:
        """Yield groups of operations; those of a group with several operations apply the same function to lanes."""
        groups: dict[tuple[object, ...], list[dict[int, Operation]]] = {}
        for one in ready:
            if isinstance(one, Normalization):
                yield [one]
                continue
            lanes = {self._lanes[str(each)].lane for each in one.operands if self._is_lane(each)}
            if len(lanes) != 1:
                yield [one]
                continue
            (lane,) = lanes
            key = (one.function, *map(self._kind, one.operands))
            places = groups.setdefault(key, [])
            place = next((known for known in places if lane not in known), None)
            if place is None:
                places.append(place := {})
            place[lane] = one
        for key, places in groups.items():
            for place in places:
                yield from self._runs(str(key[0]), place, whole="own" in key)

    def _runs(self, function: str, place: dict[int, Operation], *, whole: bool) -> Iterator[list[Computed]]:
        lanes = sorted(place)
        span = lanes[-1] - lanes[0] + 1
        if span > len(lanes) and not (span <= 2 * len(lanes) and function in _CHEAP and not whole):
            # Consecutive lanes are computed together, and others by themselves.
            cut = next(index for index in range(1, len(lanes)) if lanes[index] != lanes[index - 1] + 1)
            for part in (lanes[:cut], lanes[cut:]):
                yield from self._runs(function, {lane: place[lane] for lane in part}, whole=whole)
            return
        yield [place[lane] for lane in lanes]

    def _is_lane(self, operand: Operand) -> bool:
        return not is_number(operand) and operand in self._lanes

    def _kind(self, operand: Operand) -> object:
        if is_number(operand):
            return operand
        if operand in self._lanes:
            return self._lanes[str(operand)].pack, "lane"
        return "own" if self.stage_of([operand]) is Stage.ONCE else operand

    def _write(self, group: list[Computed]) -> None:
        first = group[0]
        if isinstance(first, Normalization):
            self._write_normalization(first)
            return
        operations = [one for one in group if isinstance(one, Operation)]
        stage = self.stage_of(first.operands)
        if len(operations) == 1:
            operands = [self.value(operand, stage) for operand in first.operands]
            self._single[first.name] = self.emit(stage, _expression(first.function, operands))
            return
        index = next(place for place, each in enumerate(first.operands) if self._is_lane(each))
        lanes = [self._lanes[str(one.operands[index])].lane for one in operations]
        count = lanes[-1] - lanes[0] + 1
        texts = []
        for operand, *others in zip(*(one.operands for one in operations), strict=True):
            kind = self._kind(operand)
            if is_number(operand):
                texts.append(self.value(operand))
            elif self._is_lane(operand):
                texts.append(self.pack(self._lanes[str(operand)].pack, lanes[0], count, stage))
            elif kind == "own":
                texts.append(self.stacked([str(operand), *map(str, others)], stage))
            else:
                texts.append(f"{self.value(operand, stage)}.unsqueeze(-2)")
        pack = self.emit(stage, _expression(first.function, texts))
        self._sizes[pack] = count
        self._lanes |= {one.name: Lane(pack, at - lanes[0]) for one, at in zip(operations, lanes, strict=True)}

    def _write_normalization(self, one: Normalization) -> None:
        stage = self.stage_of(one.values)
        places = [self._lanes.get(name) for name in one.values]
        start = places[0]
        if start is not None and places == [Lane(start.pack, start.lane + lane) for lane in range(len(places))]:
            values = self.pack(start.pack, start.lane, len(places), stage)
        elif len(places) == 1:
            values = f"{self.value(one.values[0], stage)}.unsqueeze(-2)"
        else:
            values = f"torch.stack([{', '.join(self.value(name, stage) for name in one.values)}], -2)"
        values = self.emit(stage, values)
        found = [self.emit(stage, "None") for _ in range(3)]
        arguments = f"{values}, {one.eps!r}, {one.centered}, {one.together}"
        self._lines[stage][-3:] = [f"{', '.join(found)} = standardized({arguments})"]
        self._sizes |= {values: len(places), found[0]: len(places)}
        self._lanes |= {name: Lane(found[0], lane) for lane, name in enumerate(one.results)}
        self.normalizations[one.results[0]] = NormalizedPack(values, *found)


def _expression(function: str, operands: Sequence[str]) -> str:
    if function in _SYMBOLS:
        return f" {_SYMBOLS[function]} ".join(operands)
    if function in ("addcmul", "subcmul"):
        return f"torch.addcmul({', '.join(operands)}{', value=-1' if function == 'subcmul' else ''})"
    return f"{'' if function == LOG_SIGMOID else 'torch.'}{function}({', '.join(operands)})"


def standardized(values: Tensor, eps: float, centered: bool, together: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return a pack [..., n, H] normalized over hidden units, the means or None, and 1 / deviations.

    Args:
        values: The pack.
        eps: The number that is added to variances.
        centered: Whether means are subtracted.
        together: Whether the lanes share a mean and a variance; otherwise each lane has its own.
    """
    flat = values.flatten(-2) if together else values
    if centered and values.dtype != torch.float64:
        found, mean, scale = torch.native_layer_norm(flat, flat.shape[-1:], None, None, eps)
        return found.view(values.shape), mean, scale
    # PyTorch's operator loses digits where the variance is far below eps, as `cells.standardized` says.
    mean = flat.mean(-1, keepdim=True) if centered else None
    flat = flat if mean is None else flat - mean
    scale = torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    return (flat * scale).view(values.shape), mean, scale


def standardized_backward(
    above: Tensor, values: Tensor, found: Tensor, mean: Tensor | None, scale: Tensor, together: bool
) -> Tensor:
    """Return the gradient of a pack from that of the normalized pack; the arguments are those of `standardized`.

    Args:
        above: The gradient of the normalized pack [..., n, H].
        values: The pack.
        found: The normalized pack.
        mean: The means, or None.
        scale: The values of 1 / deviation.
        together: Whether the lanes share a mean and a variance.
    """
    shape = above.shape
    if together:
        above, values, found = above.flatten(-2), values.flatten(-2), found.flatten(-2)
    # The operator does not broadcast, as the values of a parameter would need it.
    if mean is not None and values.dtype != torch.float64 and values.shape == above.shape:
        size, mask = above.shape[-1:], [True, False, False]
        arguments = above, values, size, mean, scale, None, None, mask
        return torch.ops.aten.native_layer_norm_backward(*arguments)[0].view(shape)
    through = (above * found).mean(-1, keepdim=True)
    rest = above if mean is None else above - above.mean(-1, keepdim=True)
    return (torch.addcmul(rest, found, through, value=-1) * scale).view(shape)
