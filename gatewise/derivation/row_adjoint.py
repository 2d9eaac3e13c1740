"""The code of the adjoint for rows: level by level, or with all units combined in one place (`jacobian`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from gatewise.derivation.device import number
from gatewise.derivation.jacobian import Totals
from gatewise.derivation.levels import averaged, statistics_of
from gatewise.derivation.row_text import LOOP, RowText
from gatewise.derivation.trace import STATISTICS, Operand, Operation

_ADJOINT = (
    "template <int N, class Units>",
    "__device__ __forceinline__ void adjoint_of_row("
    "const Given (&given)[N], const Returned (&returned)[N], Given (&to)[N],"
    " const Real (&statistics)[N][STATISTICS + 1], Units& row) {",
)


def adjoint_lines(text: RowText) -> list[str]:
    """Return the function `adjoint_of_row`, which combines units level by level."""
    places = itertools.count()
    declared = ", ".join(f"d_{operation.name}[N] = {{}}" for operation in text.step.operations)
    return [
        *_ADJOINT,
        *text.forward(text.known),
        f"    Real {declared};",
        LOOP,
        *(f"        to[u].{field} = 0;" for field in text.given.values()),
        *(f"        d_{name}[u] += returned[u].{field};" for field, name in text.returned),
        "    }",
        *itertools.chain.from_iterable(_level(text, places, operations) for operations in reversed(text.levels)),
        "}",
    ]


def _level(text: RowText, places: Iterator[int], operations: Sequence[Operation]) -> Iterator[str]:
    """Yield the code that hands the gradients of the results of a level to the operands."""

    def gradient(name: str) -> str:
        return f"to[u].{text.given[name]}" if name in text.given else f"d_{name}[u]"

    yield LOOP
    for operation in reversed(operations):
        if operation.function not in STATISTICS:
            for name, term in text.shares(operation, f"d_{operation.name}[u]"):
                yield f"        {gradient(name)} += {term};"
    yield "    }"
    statistics = statistics_of(operations)
    if not statistics:
        return
    place = next(places)
    yield f"    Real combined_{place}[N][{len(statistics)}];"
    yield LOOP
    for index, operation in enumerate(statistics):
        yield f"        combined_{place}[u][{index}] = d_{operation.name}[u];"
    yield "    }"
    yield f"    row.template add_up<{place}>(combined_{place});"
    yield LOOP
    for index, operation in enumerate(statistics):
        yield f"        d_{operation.name}[u] = {text.scaled(operation, f'combined_{place}[u][{index}]')};"
    for operation in statistics:
        for name, term in text.shares_of_statistic(operation, f"d_{operation.name}[u]"):
            yield f"        {gradient(name)} += {term};"
    yield "    }"


def jacobian_lines(text: RowText, totals: Totals | None) -> list[str]:
    """Return the function `jacobian_of_units`; without equations, it returns nothing."""
    return [
        "template <int N, class Units>",
        "__device__ __forceinline__ void jacobian_of_units("
        "const Given (&given)[N], const Real (&statistics)[N][STATISTICS + 1], Real (&entries)[N][JACOBIAN + 1],"
        " const Units& row) {",
        *(_jacobian(text, totals) if totals else ()),
        "}",
    ]


def _jacobian(text: RowText, totals: Totals) -> Iterator[str]:
    yield from text.forward(text.known)
    yield LOOP
    own = {name: [place for place, entry in enumerate(totals.entries) if entry[0] == name] for name in text.of_row}
    swept = dict[Operand, _Sums]()
    for place, statistic in enumerate(text.step.operations):
        if not own.get(statistic.name):
            continue
        scaled, values = f"scaled_{statistic.name}", averaged(statistic)
        yield f"        const Real {scaled} = {text.scaled(statistic, number(1.0))};"
        # The mean and the deviation of one value have the same derivatives but for a factor.
        is_single = len(values) == 1
        sums = swept.get(values[0]) if is_single else None
        if sums is None:
            sums = _Sums(text, f"{statistic.name}_")
            sums.add([(str(values[0]), number(1.0))] if is_single else text.shares_of_statistic(statistic, scaled))
            for operation in reversed(text.step.operations[:place]):
                if operation.function not in STATISTICS:
                    yield from sums.through(operation)
        if is_single:
            swept[values[0]] = sums
        factor = "".join(f" * ({term})" for _, term in text.shares_of_statistic(statistic, scaled) if is_single)
        for index in own[statistic.name]:
            yield f"        entries[u][{index}] = ({sums.total(totals.entries[index][1])}){factor};"
    yield "    }"


def solved_adjoint_lines(text: RowText, totals: Totals) -> list[str]:
    """Return the function `adjoint_of_row`, which combines all units in one place."""
    return [*_ADJOINT, *text.forward(text.known), *_partial(text, totals), *_solved(text, totals), "}"]


def _partial(text: RowText, totals: Totals) -> Iterator[str]:
    """Yield the code of the partial derivatives by statistics, and of their sums over units."""
    sums = _Sums(text, "p_", crossing=True)
    sums.add((name, f"returned[u].{field}") for field, name in text.returned)
    lines = list[str]()
    for operation in reversed(text.step.operations):
        if operation.function not in STATISTICS:
            lines += sums.through(operation)
    yield f"    Real {', '.join(f'p_{operation.name}[N]' for operation in text.step.operations)};"
    yield f"    Real partial[N][{max(1, len(totals.partial))}], entries[N][JACOBIAN + 1];"
    yield LOOP
    yield from lines
    yield from (f"        partial[u][{index}] = {sums.total(name)};" for index, name in enumerate(totals.partial))
    yield "    }"
    yield "    row.template add_up_with_offered<0>(partial, entries);"


def _solved(text: RowText, totals: Totals) -> Iterator[str]:
    """Yield the code that computes the total derivatives, and with them the gradients of what the step reads."""
    yield LOOP
    for name in totals.total:
        terms = [f"partial[u][{totals.partial.index(name)}]"] if name in totals.partial else []
        for index, (later, earlier) in enumerate(totals.entries):
            if earlier == name:
                terms.append(f"total_{later} * entries[u][{index}]")
        yield f"        const Real total_{name} = {' + '.join(terms)};"
    sums = _Sums(text, "d_", known=_unchanged(text, totals))
    sums.add((name, f"returned[u].{field}") for field, name in text.returned)
    for operation in reversed(text.step.operations):
        if operation.function not in STATISTICS:
            yield from sums.through(operation)
        elif operation.name in totals.total:
            scaled = f"scaled_{operation.name}"
            yield f"        const Real {scaled} = {text.scaled(operation, f'total_{operation.name}')};"
            sums.add(text.shares_of_statistic(operation, scaled))
    yield from (f"        to[u].{field} = {sums.total(name)};" for name, field in text.given.items())
    yield "    }"


def _unchanged(text: RowText, totals: Totals) -> dict[str, str]:
    """Return the gradients of values that no statistic averages, on which none depends that one averages."""
    changed = set[str]()
    for operation in reversed(text.step.operations):
        if operation.name in totals.total:
            changed.update(name for name, _ in text.shares_of_statistic(operation, ""))
        elif operation.name in changed:
            changed.update(name for name, _ in text.shares(operation, ""))
    names = {operation.name for operation in text.step.operations}
    return {name: f"p_{name}[u]" for name in names - changed}


class _Sums:
    """The gradients of the values of a unit in reverse mode: the terms of each, and the code that adds them up.

    Args:
        text: The texts of the values.
        prefix: The prefix of the names of gradients.
        crossing: Whether gradients are elements of arrays, which are read after the loop over units as well.
        known: The gradients that have been computed before, by name.
    """

    def __init__(
        self, text: RowText, prefix: str, *, crossing: bool = False, known: dict[str, str] | None = None
    ) -> None:
        self._text, self._prefix, self._crossing = text, prefix, crossing
        self._known = {} if known is None else known
        self._terms: dict[str, list[str]] = {}

    def add(self, terms: Iterable[tuple[str, str]]) -> None:
        """Add terms to gradients."""
        for name, term in terms:
            self._terms.setdefault(name, []).append(term)

    def total(self, name: str) -> str:
        """Return the expression of a gradient."""
        return " + ".join(self._terms.get(name, [])) or "Real(0)"

    def through(self, operation: Operation) -> Iterator[str]:
        """Yield the code of the gradient of an operation's result, and hand it to the operands."""
        name = operation.name
        if name not in self._terms:
            return
        above = self._known.get(name)
        if above is None:
            above = f"{self._prefix}{name}{'[u]' if self._crossing else ''}"
            yield f"        {'' if self._crossing else 'const Real '}{above} = {self.total(name)};"
        self.add(self._text.shares(operation, above))
