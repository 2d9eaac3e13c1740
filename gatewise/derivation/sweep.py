"""PyTorch functions of the backward pass of a cell, one time step after another, with few operators in each step.

What does not depend on the gradients is computed for a block of steps at once: values of the forward pass, and the
coefficients of the graph (`gradient_graph`). The function of a step follows the edges of the graph to the states before
the step and the recurrent sums. What the next step does not need is computed after the steps of a block, at once.

The gradients of a step that are needed later are stored as a pack [n, H] with one row each: first the states before the
step, then the values at which gradients of parameters or input sums branch off, then the recurrent sums.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from gatewise.cells.cell import Cell
from gatewise.derivation.gradient_graph import Edges, GradientGraph, gradient_graph
from gatewise.derivation.normalized import Normalization, normalized
from gatewise.derivation.pointwise import written
from gatewise.derivation.printing import printer
from gatewise.derivation.stages import (
    compiled,
    given_values,
    listed,
    mask_variables,
    once_source,
    state_variables,
    unpacked,
)
from gatewise.derivation.trace import traced
from gatewise.derivation.wide import Stage, Writer

if TYPE_CHECKING:
    import sympy

Tensors = tuple[Tensor, ...]


class Sweep(NamedTuple):
    """The functions of a cell's backward pass.

    Attributes:
        rows: The names of the rows of the stored gradients.
        empty: The indices of rows that are always zero, to which `step` does not write.
        spans: The rows that `step` reads or writes, as pairs of the first row and the number of rows.
        once: A function that computes from the parameters [H] what depends on nothing else.
        values: A function that computes the values of a block of n steps. Its arguments are the sums of the gates or
            the input sums [n, B, G*H], the recurrent sums of the gates in `apart` or None, a sequence of the states
            before the steps [n, B, H], a sequence of the other states after the steps, the masks, and the result of
            `once`. It returns the values that change from step to step, and those that `bulk` reads.
        step: A function that computes the gradients of a step from those of the states after it, the hidden state
            first, from the values of the step, the result of `once`, and the rows in `spans`, to which it writes.
        bulk: A function that computes the gradients of the input sums and of the parameters. Its arguments are the rows
            of a block [n, B, rows, H], the second result of `values` and that of `once`. It returns a sequence with the
            gradient of each sum in `inputs` [n, B, H], and one with that of each parameter [H]; None for zero.
        inputs: The names of the sums whose gradients `bulk` computes.
        source: The Python source of the functions.
    """

    rows: tuple[str, ...]
    empty: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    once: Callable[[Sequence[Tensor]], Tensors]
    values: Callable[..., tuple[Tensors, Tensors]]
    step: Callable[..., None]
    bulk: Callable[..., tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]]
    inputs: tuple[str, ...]
    source: str


@functools.lru_cache(maxsize=256)
def sweep_of(cell: Cell, masks: int = 0) -> Sweep:
    """Return the functions of a cell's backward pass.

    Args:
        cell: The cell.
        masks: The number of parameters, the last ones, that are masks of steps.
    """
    return _Author(cell, masks).sweep()


class _Author:
    """The generator of the functions of one cell."""

    def __init__(self, cell: Cell, masks: int) -> None:
        import sympy

        self._cell, self._masks = cell, masks
        self._graph: GradientGraph = gradient_graph(cell, masks)
        graph, step = self._graph, traced(cell)
        self._operations = normalized(cell)
        gates = len(cell.gates)
        # A state after the step often hands its gradient to the state before it and to stored values.
        self._rows = (*graph.leaves[:-gates], *graph.stored, *graph.leaves[-gates:])
        self._places = {name: row for row, name in enumerate(self._rows)}
        every = [edges for table in (graph.edges, graph.bulk_edges) for edges in table.values()]
        factors = list(dict.fromkeys(factor for edges in every for factor in edges.values()))
        shared: Any
        shared, entries = sympy.cse(_compared_once(factors), symbols=sympy.numbered_symbols("shared"))
        self._factors: dict[Any, Any] = dict(zip(factors, entries, strict=True))
        symbols = {str(symbol) for one in [*entries, *[one for _, one in shared]] for symbol in one.free_symbols}
        through = [own for own in graph.order if not isinstance(own, str)]
        results = [name for _, one in [*through, *graph.bulk] for name in one.results]
        # The statistics of a normalization are needed even where its result is a state after the step.
        self._after = tuple(name for name in step.after if name not in results)
        given = given_values(cell, masks, Stage.STEP, self._after)
        self._writer = Writer(self._operations, given, {*(symbols - {str(name) for name, _ in shared}), *results})
        self._printed = printer(self._writer.value)
        for name, expression in shared:
            self._writer.define(str(name), self._text(expression), self._stage(expression))
        self._per_step: dict[str, None] = {}
        self._per_block: dict[str, None] = {}
        self._own: dict[str, None] = {}
        self._spans: dict[tuple[int, int], None] = {}
        self._written: set[int] = set()
        self._done: set[tuple[str, str]] = set()
        self._lines: list[str] = []
        self._variables: dict[str, str] = {}

    def sweep(self) -> Sweep:
        """Return the functions."""
        steps = self._step_lines()
        self._spans = {span: None for span in self._spans if re.search(rf"\b{_span(*span)}\b", "\n".join(steps))}
        bulk, inputs, parameters = self._bulk_lines()
        once, rows = self._writer.crossing(Stage.ONCE), self._rows
        given, apart, after = self._graph.given, self._cell.apart, traced(self._cell).after
        source = "\n".join(
            [
                once_source(self._cell, self._masks, self._writer),
                "def values(inputs, recurrent, states, after, masks, own):",
                *(f"    after_{index} = after[{after.index(name)}]" for index, name in enumerate(self._after)),
                *unpacked("inputs", len(self._cell.gates)),
                *(unpacked("recurrent", len(apart)) if apart else ()),
                f"    {listed(state_variables(self._cell))} = states",
                f"    {listed(mask_variables(self._masks))} = masks",
                f"    {listed(once)} = own",
                *self._writer.lines(Stage.STEP),
                f"    return ({listed(list(self._per_step))}), ({listed(list(self._per_block))})",
                "",
                f"def step({', '.join(given)}, values, own, spans):",
                f"    {listed(list(self._per_step))} = values",
                f"    {listed(once)} = own",
                f"    {listed([_span(*span) for span in self._spans])} = spans",
                *steps,
                "",
                "def bulk(rows, values, own):",
                f"    {listed(list(self._per_block))} = values",
                f"    {listed(once)} = own",
                *bulk,
                f"    return ({listed(inputs)}), ({listed(parameters)})",
            ]
        )
        made = compiled(source)
        empty = tuple(row for row in range(len(rows)) if row not in self._written)
        functions = made["once"], made["values"], made["step"], made["bulk"]
        return Sweep(rows, empty, tuple(self._spans), *functions, self._graph.inputs, source)

    # The gradients of a step.

    def _step_lines(self) -> list[str]:
        self._variables |= {name: name for name in self._graph.given}
        for name in self._graph.given:
            self._look_ahead(name)
        for place in self._graph.order:
            if isinstance(place, str):
                self._settle(place)
                self._look_ahead(place)
            else:
                self._normalize(*place)
        return self._lines or ["    pass"]

    def _settle(self, name: str) -> None:
        """Write the lines that complete the gradient of a value."""
        edges = {source: factor for source, factor in self._edges(name).items() if (source, name) not in self._done}
        plain = [source for source, factor in edges.items() if factor == 1]
        rest = [(source, factor) for source, factor in edges.items() if factor != 1]
        row = self._places.get(name)
        if row is None:
            total = self._variables[plain.pop(0)] if plain else ""
            for source in plain:
                total = f"{total} + {self._variables[source]}"
            for source, factor in rest:
                total = _plus(total, self._variables[source], self._coefficient(factor))
            self._variables[name] = variable = f"d_{len(self._variables)}"
            self._lines.append(f"    {variable} = {total}")
            return
        into = self._variables[name] = self._span(row, 1)
        terms = [(self._variables[source], "1") for source in plain]
        terms += [(self._variables[source], self._coefficient(factor)) for source, factor in rest]
        if terms and row not in self._written:
            self._written.add(row)
            (first, coefficient), *terms = terms
            if coefficient != "1":
                self._lines.append(f"    torch.mul({first}, {coefficient}, out={into})")
            elif terms:
                (above, coefficient), *terms = terms
                self._lines.append(f"    {_plus(first, above, coefficient, into)}")
            else:
                self._lines.append(f"    {into}.copy_({first})")
        self._lines += [f"    {_plus(into, above, coefficient, into)}" for above, coefficient in terms]

    def _look_ahead(self, source: str) -> None:
        """Write one operator for the rows to which a gradient is handed with coefficients, where there are several."""
        own = {
            self._places[name]: edges[source]
            for name, edges in self._graph.edges.items()
            if name in self._places and source in edges and edges[source] not in (1, -1)
        }
        for first, last in _runs(sorted(own), len(self._rows), self._written):
            count = last - first + 1
            if count < 2:
                continue
            pack = self._packed([own.get(row) for row in range(first, last + 1)])
            above, into = f"{self._variables[source]}.unsqueeze(-2)", self._span(first, count)
            if first in self._written:
                self._lines.append(f"    {into}.addcmul_({above}, {pack})")
            else:
                self._lines.append(f"    torch.mul({above}, {pack}, out={into})")
            self._written.update(range(first, last + 1))
            self._done.update((source, self._rows[row]) for row in own if first <= row <= last)

    def _normalize(self, place: int, one: Normalization) -> None:
        """Write the lines that hand the gradient of normalized values to the values."""
        lanes = [self._edges(name) for name in one.results]
        rows = [self._places.get(source, -1) for edges in lanes for source in edges]
        singles = [next(iter(edges.values())) for edges in lanes if len(edges) == 1]
        if len(singles) == len(lanes) > 1 and _are_consecutive(rows):
            above = self._span(rows[0], len(rows))
            if any(factor != 1 for factor in singles):
                above = f"{above} * {self._packed(singles)}"
        else:
            texts = [self._total(edges) for edges in lanes]
            like = next(filter(None, texts))
            texts = [text or f"torch.zeros_like({like})" for text in texts]
            above = f"({texts[0]}).unsqueeze(-2)" if len(texts) == 1 else f"torch.stack([{', '.join(texts)}], -2)"
        pack = self._writer.normalizations[one.results[0]]
        values, found, scale = (self._read(name) for name in (pack.values, pack.results, pack.scale))
        mean = self._read(pack.mean) if one.centered else "None"
        variable = f"through_{place}"
        arguments = f"{above}, {values}, {found}, {mean}, {scale}, {one.together}"
        self._lines.append(f"    {variable} = standardized_backward({arguments})")
        sources = [f"{place}:{lane}" for lane in range(len(one.values))]
        self._variables |= {name: f"{variable}.select(-2, {lane})" for lane, name in enumerate(sources)}
        rows = [self._places.get(name, -1) for name in one.values]
        is_plain = all(self._edges(name).get(source) == 1 for name, source in zip(one.values, sources, strict=True))
        states = {row in self._written for row in rows}
        if len(rows) > 1 and is_plain and len(states) == 1 and _are_consecutive(rows):
            into = self._span(rows[0], len(rows))
            self._lines.append(f"    {into}.{'add_' if states.pop() else 'copy_'}({variable})")
            self._written.update(rows)
            self._done.update(zip(sources, one.values, strict=True))

    def _total(self, edges: Edges) -> str:
        total = ""
        for source, factor in sorted(edges.items(), key=lambda edge: edge[1] != 1):
            total = _plus(total, self._variables[source], self._coefficient(factor))
        return total

    def _edges(self, name: str) -> Edges:
        return self._graph.edges.get(name, {})

    def _span(self, first: int, count: int) -> str:
        self._spans[first, count] = None
        return _span(first, count)

    # Values that are computed ahead of the steps.

    def _text(self, expression: sympy.Expr) -> str:
        return self._printed.doprint(expression)

    def _stage(self, expression: sympy.Expr) -> Stage:
        return self._writer.stage_of(map(str, expression.free_symbols))

    def _value(self, factor: sympy.Expr) -> str:
        """Return the variable of a coefficient, which is computed where it has none."""
        return self._value_of(self._factors[factor])

    def _value_of(self, entry: sympy.Expr) -> str:
        if entry.is_Number:
            return repr(int(entry)) if entry == int(entry) else repr(float(entry))
        if entry.is_Symbol:
            return self._writer.value(str(entry))
        name = f"factor {entry}"
        if not self._writer.knows(name):
            self._writer.define(name, self._text(entry), self._stage(entry))
        return self._writer.value(name)

    def _coefficient(self, factor: sympy.Expr) -> str:
        """Return the variable of a coefficient as a step reads it."""
        return self._read(self._value(factor))

    def _read(self, variable: str) -> str:
        if self._writer.is_changing(variable):
            self._per_step[variable] = None
        return self._writer.read(variable)

    def _packed(self, factors: Sequence[sympy.Expr | None]) -> str:
        """Return the variable of a pack of coefficients, with zeros for None, as a step reads it."""
        entries = [None if factor is None else self._factors[factor] for factor in factors]
        known = [entry for entry in entries if entry is not None]
        are_own = all(entry.is_Symbol and self._stage(entry) is Stage.ONCE for entry in known)
        if are_own and len(known) == len(entries):
            return self._writer.stacked([str(entry) for entry in known])
        return self._read(self._new_pack(entries))

    def _new_pack(self, entries: Sequence[sympy.Expr | None]) -> str:
        shape = f"(*inputs.shape[:-2], {len(entries)}, inputs.shape[-1])"
        pack = self._writer.emit(Stage.STEP, f"inputs.new_empty({shape})")
        for lane, entry in enumerate(entries):
            into, name = f"{pack}.select(-2, {lane})", f"factor {entry}"
            if entry is None:
                self._writer.add(Stage.STEP, f"{into}.zero_()")
            elif entry.is_Number or entry.is_Symbol or self._writer.knows(name) or self._stage(entry) is Stage.ONCE:
                text = self._value_of(entry)
                self._writer.add(Stage.STEP, f"{into}.{'fill_' if entry.is_Number else 'copy_'}({text})")
            else:
                self._writer.define(name, into, Stage.STEP)
                self._writer.add(Stage.STEP, written(entry, self._writer.value(name), self._printed, ()))
        return pack

    # The gradients of input sums and parameters.

    def _bulk_lines(self) -> tuple[list[str], list[str], list[str]]:
        lines: list[str] = []
        edges, lanes = self._graph.bulk_edges, {}

        def above(source: str) -> str:
            return lanes.get(source) or f"rows.select(-2, {self._places[source]})"

        def total(own: Edges) -> str:
            text = ""
            for source, factor in sorted(own.items(), key=lambda edge: edge[1] != 1):
                text = _plus(text, above(source), self._of_block(self._value(factor)))
            return text

        for place, one in self._graph.bulk:
            own = [edges.get(name, {}) for name in one.results]
            rows = [self._places.get(source, -1) for each in own for source in each]
            factors = [next(iter(each.values())) for each in own if len(each) == 1]
            if len(factors) == len(own) and _are_consecutive(rows):
                text = f"rows.narrow(-2, {rows[0]}, {len(rows)})"
                if any(factor != 1 for factor in factors):
                    text = f"{text} * {self._pack_of_block(factors)}"
            else:
                texts = [total(each) for each in own]
                like = next(filter(None, texts))
                text = f"torch.stack([{', '.join(one or f'torch.zeros_like({like})' for one in texts)}], -2)"
            pack = self._writer.normalizations[one.results[0]]
            names = [pack.values, pack.results, pack.mean, pack.scale]
            values, found, mean, scale = (self._of_block(name) for name in names)
            arguments = f"{text}, {values}, {found}, {mean}, {scale}, {one.together}"
            lines.append(f"    through_{place} = standardized_backward({arguments})")
            lanes |= {f"{place}:{lane}": f"through_{place}.select(-2, {lane})" for lane in range(len(one.values))}
        inputs = [total(edges.get(name, {})) or "None" for name in self._graph.inputs]
        parameters = self._parameter_sums(lines, total)
        return lines, inputs, parameters

    def _parameter_sums(self, lines: list[str], total: Callable[[Edges], str]) -> list[str]:
        """Add the lines that add up the gradients of the parameters, and return their expressions."""
        edges = self._graph.bulk_edges
        found: dict[str, str] = {}
        for names in self._alike(self._graph.parameters):
            own = [edges.get(name, {}) for name in names]
            if len(names) == 1:
                text = total(own[0])
                found[names[0]] = f"({text}).sum((0, 1))" if text else "None"
                continue
            ((source, factor),) = own[0].items()
            text = f"rows.narrow(-2, {self._places[source]}, {len(names)})"
            if factor != 1:
                lane = self._writer.lane(str(self._factors[factor]))
                assert lane is not None  # for the type checker: `_alike` says so
                text = f"({text} * {self._of_block(lane.pack)}.narrow(-2, {lane.lane}, {len(names)}))"
            variable = f"sums_{len(lines)}"
            lines.append(f"    {variable} = {text}.sum((0, 1)).unbind(0)")
            found |= {name: f"{variable}[{index}]" for index, name in enumerate(names)}
        return [found[name] for name in self._graph.parameters]

    def _alike(self, names: Iterable[str]) -> list[list[str]]:
        """Divide parameters into runs whose gradients are products of consecutive rows and lanes, or sums of rows."""
        runs: list[list[str]] = []
        previous: tuple[Any, ...] | None = None
        for name in names:
            own, here = self._graph.bulk_edges.get(name, {}), None
            if len(own) == 1:
                ((source, factor),) = own.items()
                row, lane = self._places.get(source), self._writer.lane(str(self._factors[factor]))
                if row is not None and factor == 1:
                    here = row, "", 0
                elif row is not None and lane is not None and self._writer.is_changing(lane.pack):
                    here = row, lane.pack, lane.lane
            if here and previous and here == (previous[0] + 1, previous[1], previous[2] + bool(previous[1])):
                runs[-1].append(name)
            else:
                runs.append([name])
            previous = here
        return runs

    def _of_block(self, variable: str) -> str:
        if self._writer.is_changing(variable):
            self._per_block[variable] = None
        return self._writer.read(variable)

    def _pack_of_block(self, factors: Sequence[sympy.Expr]) -> str:
        if all(self._factors[one].is_Symbol and self._stage(self._factors[one]) is Stage.ONCE for one in factors):
            return self._writer.stacked([str(self._factors[one]) for one in factors])
        return self._of_block(self._new_pack([self._factors[factor] for factor in factors]))


def _compared_once(factors: Sequence[sympy.Expr]) -> list[sympy.Expr]:
    """Return expressions in which of two comparisons of the same values, in both orders, one is 1 minus the other."""
    from sympy.core.function import AppliedUndef

    compared = {one for factor in factors for one in factor.atoms(AppliedUndef)}
    known: set[Any] = set()
    replaced: dict[Any, Any] = {}
    for one in sorted((one for one in compared if one.func.__name__ == "larger"), key=str):
        reverse = one.func(*one.args[::-1])
        if reverse in known:
            replaced[one] = 1 - reverse
        known.add(one)
    return [factor.xreplace(replaced) for factor in factors]  # type: ignore[misc]


def _span(first: int, count: int) -> str:
    return f"row_{first}" if count == 1 else f"rows_{first}_{count}"


def _are_consecutive(rows: Sequence[int]) -> bool:
    return rows[0] >= 0 and list(rows) == list(range(rows[0], rows[0] + len(rows)))


def _plus(total: str, above: str, coefficient: str, out: str = "") -> str:
    """Return the expression of a total plus a product; both factors are variables, or the coefficient is a number."""
    into = f", out={out}" if out else ""
    if not total:
        return above if coefficient == "1" else f"{above} * {coefficient}"
    if coefficient.isidentifier():
        return f"torch.addcmul({total}, {above}, {coefficient}{into})"
    return f"torch.add({total}, {above}, alpha={coefficient}{into})"


def _runs(rows: list[int], count: int, written: set[int]) -> list[tuple[int, int]]:
    """Return the first and last row of each run of rows that one operator can write to."""
    if not rows:
        return []
    first, last = rows[0], rows[-1]
    # Rows between them get zeros, if nothing has been written to them, or have zeros added.
    if last - first + 1 <= 2 * len(rows) and len({row in written for row in range(first, last + 1)}) == 1:
        return [(first, last)]
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row - 1 and (row in written) == (row - 1 in written):
            runs[-1] = runs[-1][0], row
        else:
            runs.append((row, row))
    return runs
