"""The graph along which the gradients of a step flow, contracted to few edges.

The gradient of each value is a sum over edges: the gradient of a later value times a coefficient, which depends on the
forward pass alone. The loop over time of a backward pass follows the edges to the states before the step and to the
recurrent sums. The gradients of parameters and of input sums need no loop: they are computed for many steps at once
from the stored gradients of the values at which they branch off. Values with a single edge are left out: their
coefficient is multiplied into the next ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gatewise.cells.cell import Cell
from gatewise.cells.statement import before, learned
from gatewise.derivation.adjoint import slopes
from gatewise.derivation.normalized import Computed, Normalization, normalized, operands_of, results_of
from gatewise.derivation.trace import is_number, traced

if TYPE_CHECKING:
    import sympy

Edges = dict[str, "sympy.Expr"]
"""The coefficients of the gradients that add up to a gradient, by the name of the later value."""


@dataclasses.dataclass(slots=True)
class GradientGraph:
    """The graph of a cell's step. The gradient of value k of normalization n has the name "n:k".

    Attributes:
        given: For each state after the step, the hidden state first, the name of its given gradient.
        order: The names of the values whose gradients the loop computes, and the normalizations that it goes through,
            later values first.
        edges: The edges to each of these values, and to the results of normalizations.
        stored: The names of values whose gradients are stored for all steps, in the order of the trace.
        bulk: The normalizations that are no part of the loop, later ones first.
        bulk_edges: The edges to the parameters, the input sums and the results of `bulk`, from stored values and the
            values of normalizations in `bulk`.
        leaves: The states before the step, then the recurrent sums in the order of the gates.
        inputs: The sums that the recurrent product does not reach.
        parameters: The names of the learned parameters.
    """

    given: tuple[str, ...]
    order: list[str | tuple[int, Normalization]]
    edges: dict[str, Edges]
    stored: tuple[str, ...]
    bulk: list[tuple[int, Normalization]]
    bulk_edges: dict[str, Edges]
    leaves: tuple[str, ...]
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]


@functools.lru_cache(maxsize=256)
def gradient_graph(cell: Cell, constants: int = 0) -> GradientGraph:
    """Return the graph of a cell's step.

    Args:
        cell: The cell.
        constants: The number of parameters, the last ones, that have no gradient.
    """
    return _Contraction(cell, constants).graph


class _Contraction:
    """The contraction of the graph of a cell's step, from the states after it to the values that it reads."""

    def __init__(self, cell: Cell, constants: int) -> None:
        import sympy

        self._one = sympy.Integer(1)
        step, operations = traced(cell), normalized(cell)
        states = [*map(before, step.states), *([before("h")] if step.reads_hidden else [])]
        parameters = tuple(map(learned, cell.parameters))
        leaves = (*states, *(step.sums[place] for place in cell.recurrent_sums))
        inputs = tuple(name for name in step.sums if name not in leaves)
        parameters = parameters[: len(parameters) - constants]
        self._leaves = frozenset(leaves)
        self._live = _reaching(operations, leaves)
        self._bulk = _reaching(operations, (*inputs, *parameters)) - self._live
        self._results = {name for one in operations if isinstance(one, Normalization) for name in one.results}
        given = tuple(f"given_{index}" for index in range(1 + len(step.states)))
        self._edges: dict[str, Edges] = {}
        self._bulk_edges: dict[str, Edges] = {}
        self._stored: set[str] = set()
        order: list[str | tuple[int, Normalization]] = []
        bulk: list[tuple[int, Normalization]] = []
        self._order = order
        for name, source in zip((step.hidden, *step.after), given, strict=True):
            if name in self._bulk:
                self._store(f"{source}:stored", source, name)
            else:
                self._add(self._edges, name, {source: self._one})
        for place, one in reversed(list(enumerate(operations))):
            if isinstance(one, Normalization):
                self._through_normalization(place, one, bulk)
                continue
            toward = [
                (str(operand), slope)
                for operand, slope in zip(one.operands, slopes(one), strict=True)
                if not is_number(operand) and slope != 0
            ]
            if one.name in self._bulk:
                own = self._bulk_edges.get(one.name, {})
                for operand, slope in toward:
                    self._add(self._bulk_edges, operand, {name: factor * slope for name, factor in own.items()})
            elif one.name in self._live:
                self._settle(one.name, toward)
        for name in leaves:
            if self._edges.get(name):
                order.append(name)
        trace = [name for one in operations for name in results_of(one)]
        ranks = {name: rank for rank, name in enumerate(trace)}
        wanted = {*leaves, *self._results, *(name for name in order if isinstance(name, str))}
        bulk_wanted = {*inputs, *parameters, *(name for _, one in bulk for name in one.results)}
        self.graph = GradientGraph(
            given,
            order,
            {name: edges for name, edges in self._edges.items() if name in wanted},
            tuple(sorted(self._stored - self._leaves, key=lambda name: ranks.get(name.partition(":")[0], len(trace)))),
            bulk,
            {name: edges for name, edges in self._bulk_edges.items() if name in bulk_wanted},
            leaves,
            inputs,
            parameters,
        )

    def _settle(self, name: str, toward: list[tuple[str, Any]]) -> None:
        """Hand the gradient of a value to the operands of its operation, with a place of its own or without."""
        own = self._edges.get(name, {})
        if not own or name in self._results:
            return
        live = [(operand, slope) for operand, slope in toward if operand in self._live]
        bulk = [(operand, slope) for operand, slope in toward if operand in self._bulk]
        (source, factor), *others = own.items()
        is_same = not others and factor == 1
        if is_same and (not bulk or source in self._edges):
            own, name = {source: self._one}, source
        elif bulk or (others and len(live) > 1):
            self._order.append(name)
            own = {name: self._one}
        for operand, slope in live:
            self._add(self._edges, operand, {other: factor * slope for other, factor in own.items()})
        for operand, slope in bulk:
            self._stored.add(name)
            self._add(self._bulk_edges, operand, {name: slope})

    def _through_normalization(self, place: int, one: Normalization, bulk: list[tuple[int, Normalization]]) -> None:
        is_live = not self._live.isdisjoint(one.values)
        edges = self._edges if is_live else self._bulk_edges
        if not any(edges.get(name) for name in one.results):
            return
        (self._order if is_live else bulk).append((place, one))
        for index, value in enumerate(one.values):
            source = f"{place}:{index}"
            if is_live and value in self._live:
                self._add(self._edges, value, {source: self._one})
            elif is_live and value in self._bulk:
                self._store(f"{value}:{place}", source, value)
            elif not is_live:
                self._add(self._bulk_edges, value, {source: self._one})

    def _store(self, stored: str, source: str, value: str) -> None:
        """Store a gradient of a step that the loop hands to a value outside of it."""
        self._order.append(stored)
        self._edges[stored] = {source: self._one}
        self._stored.add(stored)
        self._add(self._bulk_edges, value, {stored: self._one})

    @staticmethod
    def _add(edges: dict[str, Edges], name: str, more: Edges) -> None:
        import sympy

        own = edges.setdefault(name, {})
        for source, factor in more.items():
            own[source] = own[source] + factor if source in own else sympy.sympify(factor)


def _reaching(operations: tuple[Computed, ...], leaves: tuple[str, ...]) -> frozenset[str]:
    """Return the leaves and the names of all values that depend on them."""
    found = set(leaves)
    for one in operations:
        if not found.isdisjoint(_with_slope(one)):
            found.update(results_of(one))
    return frozenset(found)


def _with_slope(one: Computed) -> Iterator[str]:
    every = [1] * len(one.values) if isinstance(one, Normalization) else slopes(one)
    for operand, slope in zip(operands_of(one), every, strict=True):
        if not is_number(operand) and slope != 0:
            yield str(operand)
