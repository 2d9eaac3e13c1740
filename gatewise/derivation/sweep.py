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
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from gatewise.cells.cell import Cell
from gatewise.derivation.bulk import Bulk
from gatewise.derivation.coefficients import Coefficients, Reads
from gatewise.derivation.gradient_graph import Edges, GradientGraph, gradient_graph
from gatewise.derivation.normalized import Normalization
from gatewise.derivation.stages import (
    compiled,
    listed,
    mask_variables,
    once_source,
    state_variables,
    unpacked,
)
from gatewise.derivation.terms import are_consecutive, plus, runs_of
from gatewise.derivation.trace import traced
from gatewise.derivation.wide import Stage

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
        self._cell, self._masks = cell, masks
        self._graph: GradientGraph = gradient_graph(cell, masks)
        graph = self._graph
        gates = len(cell.gates)
        # A state after the step often hands its gradient to the state before it and to stored values.
        self._rows = (*graph.leaves[:-gates], *graph.stored, *graph.leaves[-gates:])
        self._places = {name: row for row, name in enumerate(self._rows)}
        self._coefficients = Coefficients(cell, masks, graph)
        self._reads: Reads = {}
        self._spans: dict[tuple[int, int], None] = {}
        self._written: set[int] = set()
        self._done: set[tuple[str, str]] = set()
        self._lines: list[str] = []
        self._variables: dict[str, str] = {}

    def sweep(self) -> Sweep:
        """Return the functions."""
        steps = self._step_lines()
        self._spans = {span: None for span in self._spans if re.search(rf"\b{_span(*span)}\b", "\n".join(steps))}
        bulk, writer = Bulk(self._graph, self._places, self._coefficients), self._coefficients.writer
        once, rows = writer.crossing(Stage.ONCE), self._rows
        given, apart, after = self._graph.given, self._cell.apart, traced(self._cell).after
        read = self._coefficients.after
        source = "\n".join(
            [
                once_source(self._cell, self._masks, writer),
                "def values(inputs, recurrent, states, after, masks, own):",
                *(f"    after_{index} = after[{after.index(name)}]" for index, name in enumerate(read)),
                *unpacked("inputs", len(self._cell.gates)),
                *(unpacked("recurrent", len(apart)) if apart else ()),
                f"    {listed(state_variables(self._cell))} = states",
                f"    {listed(mask_variables(self._masks))} = masks",
                f"    {listed(once)} = own",
                *writer.lines(Stage.STEP),
                f"    return ({listed(list(self._reads))}), ({listed(list(bulk.reads))})",
                "",
                f"def step({', '.join(given)}, values, own, spans):",
                f"    {listed(list(self._reads))} = values",
                f"    {listed(once)} = own",
                f"    {listed([_span(*span) for span in self._spans])} = spans",
                *steps,
                "",
                "def bulk(rows, values, own):",
                f"    {listed(list(bulk.reads))} = values",
                f"    {listed(once)} = own",
                *bulk.lines,
                f"    return ({listed(bulk.inputs)}), ({listed(bulk.parameters)})",
            ]
        )
        made = compiled(source)
        empty = tuple(row for row in range(len(rows)) if row not in self._written)
        functions = made["once"], made["values"], made["step"], made["bulk"]
        return Sweep(rows, empty, tuple(self._spans), *functions, self._graph.inputs, source)

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
                total = plus(total, self._variables[source], self._coefficients.value(factor, self._reads))
            self._variables[name] = variable = f"d_{len(self._variables)}"
            self._lines.append(f"    {variable} = {total}")
            return
        into = self._variables[name] = self._span(row, 1)
        terms = [(self._variables[source], "1") for source in plain]
        terms += [(self._variables[source], self._coefficients.value(factor, self._reads)) for source, factor in rest]
        if terms and row not in self._written:
            self._written.add(row)
            (first, coefficient), *terms = terms
            if coefficient != "1":
                self._lines.append(f"    torch.mul({first}, {coefficient}, out={into})")
            elif terms:
                (above, coefficient), *terms = terms
                self._lines.append(f"    {plus(first, above, coefficient, into)}")
            else:
                self._lines.append(f"    {into}.copy_({first})")
        self._lines += [f"    {plus(into, above, coefficient, into)}" for above, coefficient in terms]

    def _look_ahead(self, source: str) -> None:
        """Write one operator for the rows to which a gradient is handed with coefficients, where there are several."""
        own = {
            self._places[name]: edges[source]
            for name, edges in self._graph.edges.items()
            if name in self._places and source in edges and edges[source] not in (1, -1)
        }
        for first, last in runs_of(sorted(own), self._written):
            count = last - first + 1
            if count < 2:
                continue
            pack = self._coefficients.pack([own.get(row) for row in range(first, last + 1)], self._reads)
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
        if len(singles) == len(lanes) > 1 and are_consecutive(rows):
            above = self._span(rows[0], len(rows))
            if any(factor != 1 for factor in singles):
                above = f"{above} * {self._coefficients.pack(singles, self._reads)}"
        else:
            texts = [self._total(edges) for edges in lanes]
            like = next(filter(None, texts))
            texts = [text or f"torch.zeros_like({like})" for text in texts]
            above = f"({texts[0]}).unsqueeze(-2)" if len(texts) == 1 else f"torch.stack([{', '.join(texts)}], -2)"
        pack = self._coefficients.writer.normalizations[one.results[0]]
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
        if len(rows) > 1 and is_plain and len(states) == 1 and are_consecutive(rows):
            into = self._span(rows[0], len(rows))
            self._lines.append(f"    {into}.{'add_' if states.pop() else 'copy_'}({variable})")
            self._written.update(rows)
            self._done.update(zip(sources, one.values, strict=True))

    def _total(self, edges: Edges) -> str:
        total = ""
        for source, factor in sorted(edges.items(), key=lambda edge: edge[1] != 1):
            total = plus(total, self._variables[source], self._coefficients.value(factor, self._reads))
        return total

    def _edges(self, name: str) -> Edges:
        return self._graph.edges.get(name, {})

    def _read(self, variable: str) -> str:
        return self._coefficients.read(variable, self._reads)

    def _span(self, first: int, count: int) -> str:
        self._spans[first, count] = None
        return _span(first, count)


def _span(first: int, count: int) -> str:
    return f"row_{first}" if count == 1 else f"rows_{first}_{count}"
