"""The part of a cell's backward pass that needs no loop: gradients of input sums and parameters, for many steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gatewise.derivation.coefficients import Coefficients, Reads
from gatewise.derivation.gradient_graph import Edges, GradientGraph
from gatewise.derivation.terms import are_consecutive, plus


class Bulk:
    """The code that computes the gradients from the stored rows of a block of steps.

    Args:
        graph: The gradient graph of the cell.
        places: The row of each stored gradient.
        coefficients: The values that the code reads.

    Attributes:
        lines: The lines of the code.
        reads: The variables that it reads and that change from step to step.
        inputs: The expressions of the gradients of the input sums [n, B, H].
        parameters: The expressions of the gradients of the parameters [H].
    """

    def __init__(self, graph: GradientGraph, places: Mapping[str, int], coefficients: Coefficients) -> None:
        self._graph, self._places, self._coefficients = graph, places, coefficients
        self._lanes: dict[str, str] = {}
        self.lines: list[str] = []
        self.reads: Reads = {}
        self._normalize()
        self.inputs = [self._total(graph.bulk_edges.get(name, {})) or "None" for name in graph.inputs]
        self.parameters = self._parameter_sums()

    def _total(self, own: Edges) -> str:
        text = ""
        for source, factor in sorted(own.items(), key=lambda edge: edge[1] != 1):
            above = self._lanes.get(source) or f"rows.select(-2, {self._places[source]})"
            text = plus(text, above, self._coefficients.value(factor, self.reads))
        return text

    def _normalize(self) -> None:
        """Add the lines that hand the gradients of normalized values to the values."""
        for place, one in self._graph.bulk:
            own = [self._graph.bulk_edges.get(name, {}) for name in one.results]
            rows = [self._places.get(source, -1) for each in own for source in each]
            factors = [next(iter(each.values())) for each in own if len(each) == 1]
            if len(factors) == len(own) and are_consecutive(rows):
                text = f"rows.narrow(-2, {rows[0]}, {len(rows)})"
                if any(factor != 1 for factor in factors):
                    text = f"{text} * {self._coefficients.pack(factors, self.reads)}"
            else:
                texts = [self._total(each) for each in own]
                like = next(filter(None, texts))
                text = f"torch.stack([{', '.join(one or f'torch.zeros_like({like})' for one in texts)}], -2)"
            names = self._coefficients.writer.normalizations[one.results[0]]
            variables = ", ".join(self._coefficients.read(name, self.reads) for name in names)
            self.lines.append(f"    through_{place} = standardized_backward({text}, {variables}, {one.together})")
            for lane in range(len(one.values)):
                self._lanes[f"{place}:{lane}"] = f"through_{place}.select(-2, {lane})"

    def _parameter_sums(self) -> list[str]:
        """Add the lines that add up the gradients of the parameters, and return their expressions."""
        edges = self._graph.bulk_edges
        found: dict[str, str] = {}
        for names in self._alike(self._graph.parameters):
            if len(names) == 1:
                text = self._total(edges.get(names[0], {}))
                found[names[0]] = f"({text}).sum((0, 1))" if text else "None"
                continue
            ((source, factor),) = edges[names[0]].items()
            text, lane = f"rows.narrow(-2, {self._places[source]}, {len(names)})", self._coefficients.lane(factor)
            if lane is not None:
                pack = self._coefficients.read(lane[0], self.reads)
                text = f"({text} * {pack}.narrow(-2, {lane[1]}, {len(names)}))"
            variable = f"sums_{len(self.lines)}"
            self.lines.append(f"    {variable} = {text}.sum((0, 1)).unbind(0)")
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
                row, lane = self._places.get(source), self._coefficients.lane(factor)
                if row is not None and factor == 1:
                    here = row, "", 0
                elif row is not None and lane is not None:
                    here = row, *lane
            if here and previous and here == (previous[0] + 1, previous[1], previous[2] + bool(previous[1])):
                runs[-1].append(name)
            else:
                runs.append([name])
            previous = here
        return runs
