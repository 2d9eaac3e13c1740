"""The code of the step for rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from gatewise.derivation.levels import averaged, moments_and_others
from gatewise.derivation.row_text import LOOP, RowText, share
from gatewise.derivation.trace import MEAN, Operation


def step_lines(text: RowText) -> list[str]:
    """Return the function `step_of_row`."""
    places = itertools.count()

    def computed(statistics: Sequence[Operation]) -> Iterator[str]:
        means, others = moments_and_others(statistics)
        if means:
            yield from _moments(text, next(places), means, statistics)
        if others:
            yield from _about_numbers(text, next(places), others)

    return [
        "template <int N, class Units>",
        "__device__ __forceinline__ void step_of_row("
        "const Given (&given)[N], Returned (&returned)[N], Real (&statistics)[N][STATISTICS + 1], Units& row) {",
        *text.forward(computed),
        LOOP,
        *(f"        returned[u].{field} = {text.value(name)};" for field, name in text.returned),
        *(f"        statistics[u][{index}] = {name}[u];" for name, index in text.of_row.items()),
        "    }",
        "}",
    ]


def _moments(text: RowText, place: int, means: Sequence[Operation], statistics: Sequence[Operation]) -> Iterator[str]:
    """Yield the code that computes the means of a level, and the deviations from them."""
    yield f"    Moments combined_{place}[N][{len(means)}];"
    yield LOOP
    for index, operation in enumerate(means):
        values = ", ".join(map(text.value, operation.operands))
        yield f"        combined_{place}[u][{index}] = moments_of({values});"
    yield "    }"
    yield f"    row.template merge<{place}>(combined_{place});"
    yield LOOP
    for index, operation in enumerate(means):
        yield f"        {operation.name}[u] = combined_{place}[u][{index}].mean;"
        for own in statistics:
            if own.function != MEAN and own.operands[1] == operation.name:
                variance = f"combined_{place}[u][{index}].variance"
                yield f"        {own.name}[u] = reciprocal_root({variance} + {text.value(own.operands[0])});"
    yield "    }"


def _about_numbers(text: RowText, place: int, deviations: Sequence[Operation]) -> Iterator[str]:
    """Yield the code that computes deviations from given numbers."""
    yield f"    Real combined_{place}[N][{len(deviations)}];"
    yield LOOP
    for index, operation in enumerate(deviations):
        mean = text.value(operation.operands[1])
        terms = [f"({term} - {mean}) * ({term} - {mean})" for term in map(text.value, averaged(operation))]
        yield f"        combined_{place}[u][{index}] = {' + '.join(terms)};"
    yield "    }"
    yield f"    row.template add_up<{place}>(combined_{place});"
    yield LOOP
    for index, operation in enumerate(deviations):
        average = f"combined_{place}[u][{index}] * {share(operation)}"
        yield f"        {operation.name}[u] = reciprocal_root({average} + {text.value(operation.operands[0])});"
    yield "    }"
