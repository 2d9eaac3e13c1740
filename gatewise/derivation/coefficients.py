"""The values that the backward pass of a cell reads: coefficients of its gradient graph, and values of the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gatewise.cells.cell import Cell
from gatewise.derivation.gradient_graph import GradientGraph
from gatewise.derivation.normalized import normalized
from gatewise.derivation.pointwise import written
from gatewise.derivation.printing import printer
from gatewise.derivation.stages import given_values
from gatewise.derivation.trace import literal, traced
from gatewise.derivation.wide import Stage, Writer

if TYPE_CHECKING:
    import sympy

Reads = dict[str, None]
"""The variables that a function reads and that change from step to step, in the order in which it unpacks them."""


class Coefficients:
    """The code that computes the coefficients of a gradient graph, as far as they are asked for.

    Args:
        cell: The cell.
        masks: The number of parameters, the last ones, that are masks of steps.
        graph: The graph.

    Attributes:
        writer: The code.
        after: The names of the states after the step that the code reads.
    """

    def __init__(self, cell: Cell, masks: int, graph: GradientGraph) -> None:
        import sympy

        every = [edges for table in (graph.edges, graph.bulk_edges) for edges in table.values()]
        factors = list(dict.fromkeys(factor for edges in every for factor in edges.values()))
        shared: Any
        shared, entries = sympy.cse(_compared_once(factors), symbols=sympy.numbered_symbols("shared"))
        self._entries: dict[Any, Any] = dict(zip(factors, entries, strict=True))
        symbols = {str(symbol) for one in [*entries, *[one for _, one in shared]] for symbol in one.free_symbols}
        through = [own for own in graph.order if not isinstance(own, str)]
        results = [name for _, one in [*through, *graph.bulk] for name in one.results]
        # The statistics of a normalization are needed even where its result is a state after the step.
        self.after = tuple(name for name in traced(cell).after if name not in results)
        given = given_values(cell, masks, Stage.STEP, self.after)
        self.writer = Writer(normalized(cell), given, {*(symbols - {str(name) for name, _ in shared}), *results})
        self._printed = printer(self.writer.value)
        for name, expression in shared:
            self.writer.define(str(name), self._printed.doprint(expression), self._stage(expression))

    def read(self, variable: str, reads: Reads) -> str:
        """Return a variable, and add it to the variables that a function reads."""
        if self.writer.is_changing(variable):
            reads[variable] = None
        return self.writer.read(variable)

    def value(self, factor: sympy.Expr, reads: Reads) -> str:
        """Return the variable of a coefficient, or the number."""
        return self.read(self._value_of(self._entries[factor]), reads)

    def pack(self, factors: Sequence[sympy.Expr | None], reads: Reads) -> str:
        """Return the variable of a pack of coefficients, with zeros for None."""
        entries = [None if factor is None else self._entries[factor] for factor in factors]
        known = [entry for entry in entries if entry is not None]
        are_own = all(entry.is_Symbol and self._stage(entry) is Stage.ONCE for entry in known)
        if are_own and len(known) == len(entries):
            return self.writer.stacked([str(entry) for entry in known])
        return self.read(self._new_pack(entries), reads)

    def lane(self, factor: sympy.Expr) -> tuple[str, int] | None:
        """Return the pack and the lane of a coefficient that is a value of the step; None for others."""
        found = self.writer.lane(str(self._entries[factor]))
        return (found.pack, found.lane) if found is not None and self.writer.is_changing(found.pack) else None

    def _stage(self, expression: sympy.Expr) -> Stage:
        return self.writer.stage_of(map(str, expression.free_symbols))

    def _value_of(self, entry: sympy.Expr) -> str:
        if entry.is_Number:
            return literal(float(entry))
        if entry.is_Symbol:
            return self.writer.value(str(entry))
        name = f"factor {entry}"
        if not self.writer.knows(name):
            self.writer.define(name, self._printed.doprint(entry), self._stage(entry))
        return self.writer.value(name)

    def _new_pack(self, entries: Sequence[sympy.Expr | None]) -> str:
        shape = f"(*inputs.shape[:-2], {len(entries)}, inputs.shape[-1])"
        pack = self.writer.emit(Stage.STEP, f"inputs.new_empty({shape})")
        for lane, entry in enumerate(entries):
            into, name = f"{pack}.select(-2, {lane})", f"factor {entry}"
            if entry is None:
                self.writer.add(Stage.STEP, f"{into}.zero_()")
            elif entry.is_Number or entry.is_Symbol or self.writer.knows(name) or self._stage(entry) is Stage.ONCE:
                text = self._value_of(entry)
                self.writer.add(Stage.STEP, f"{into}.{'fill_' if entry.is_Number else 'copy_'}({text})")
            else:
                self.writer.define(name, into, Stage.STEP)
                self.writer.add(Stage.STEP, written(entry, self.writer.value(name), self._printed, ()))
        return pack


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
