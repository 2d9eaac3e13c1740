"""Which cases of a test `make test` runs, such as every pair of values of two parameters; the others are exhaustive."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet


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


def exhaustive_unless(usual: Sequence[tuple[Any, ...]], cases: Iterable[tuple[Any, ...]]) -> list[ParameterSet]:
    """Return the cases as parameters of a test, of which `make test` runs the usual ones; the others are exhaustive."""
    run = {tuple(map(id, case)) for case in usual}
    marks = {True: (), False: pytest.mark.exhaustive}
    return [pytest.param(*case, marks=marks[tuple(map(id, case)) in run]) for case in cases]


def every_pair(*parameters: Iterable[Any]) -> list[ParameterSet]:
    """Return all combinations as parameters of a test; those that no pair of two values needs are exhaustive."""
    values = [[*own] for own in parameters]
    return exhaustive_unless(pairwise(*values), itertools.product(*values))


def exhaustive(*values: Any) -> list[ParameterSet]:
    """Return values of one parameter of a test, which `make exhaustive-test` runs and `make test` does not."""
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]


def one_in(step: int, values: Iterable[Any]) -> list[ParameterSet]:
    """Return values of one parameter of a test, of which `make test` runs the first and every `step`-th after it."""
    return [
        pytest.param(each, marks=pytest.mark.exhaustive if place % step else ()) for place, each in enumerate(values)
    ]


def each_value(
    cases: Sequence[tuple[Any, ...]], *together: tuple[int, ...], times: int = 1, most: int | None = None
) -> list[ParameterSet]:
    """Return the cases as parameters of a test; those without which each value is met often enough are exhaustive.

    The algorithm is greedy: each case that is usual is the first of those that meet most of what is not yet met.

    Args:
        cases: The cases.
        together: Columns of which all combinations of values that are in the cases are met, too.
        times: The least number of usual cases with each value, if so many cases have it.
        most: The greatest number of usual cases, if some values need not be met, because they are names, sizes or
            formats that take the same code. The first cases meet the most values.
    """
    groups = [*((column,) for column in range(len(cases[0]))), *together]
    met = [(case, {(group, *(id(case[column]) for column in group)) for group in groups}) for case in cases]
    left = {each: min(times, count) for each, count in Counter(each for _, own in met for each in own).items()}
    usual = []
    while any(left.values()) and len(usual) != most:
        place = max(range(len(met)), key=lambda place: sum(left[each] > 0 for each in met[place][1]))
        case, own = met.pop(place)
        usual.append(case)
        left |= {each: max(left[each] - 1, 0) for each in own}
    return exhaustive_unless(usual, cases)
