"""Test cases that contain every pair of values of two parameters, but not all combinations of more."""

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return cases, with one value of each parameter, such that any two values of two parameters are in one of them.

    The algorithm is greedy: each case starts with the first pair of values that no case has yet, and adds the values
    that form the most new pairs. The same parameters give the same cases in each process, as xdist requires.
    """
    places = [range(len(values)) for values in parameters]
    columns = list(itertools.combinations(range(len(parameters)), 2))
    apart = {(one, a, other, b): None for one, other in columns for a in places[one] for b in places[other]}
    cases = []
    while apart:
        one, a, other, b = next(iter(apart))
        case = {one: a, other: b}
        for column in (own for own in range(len(parameters)) if own not in case):
            case[column] = max(places[column], key=lambda own: sum(pair in apart for pair in _met(case, column, own)))
        for column in case:
            for pair in _met(case, column, case[column]):
                apart.pop(pair, None)
        cases.append(tuple(values[case[column]] for column, values in enumerate(parameters)))
    return cases


def _met(case: dict[int, int], column: int, value: int) -> list[tuple[int, int, int, int]]:
    return [
        (own, place, column, value) if own < column else (column, value, own, place)
        for own, place in case.items()
        if own != column
    ]
