"""The selection of test cases: any two values occur together, in few cases."""

import itertools

import pytest

from tests.pairwise import each_value, exhaustive, one_in, pairwise


@pytest.mark.parametrize("sizes", [(3, 2), (4, 4, 4), (14, 2, 4, 3), (2, 2, 2, 2, 2, 2), (1, 5, 1)], ids=str)
def test_any_two_values_are_in_one_case(sizes):
    parameters = [[f"{column}{value}" for value in range(size)] for column, size in enumerate(sizes)]
    cases = pairwise(*parameters)
    for one, other in itertools.combinations(range(len(sizes)), 2):
        met = {(case[one], case[other]) for case in cases}
        assert met == set(itertools.product(parameters[one], parameters[other]))
    largest, second = sorted(sizes)[:-3:-1]
    assert len(cases) <= 2 * largest * second
    assert len(set(cases)) == len(cases)
    assert cases == pairwise(*parameters)


def usual(parameters):
    return [each.values for each in parameters if not each.marks]


@pytest.mark.parametrize("times", [1, 2])
def test_each_value_is_met_so_often_and_no_case_is_lost(times):
    columns = ["a", "b", "c"], [*range(9)], [False, True]
    cases = pairwise(*columns)
    chosen = each_value(cases, times=times)
    assert [each.values for each in chosen] == cases
    assert len(usual(chosen)) <= 9 * times
    for column, values in enumerate(columns):
        for value in values:
            there = sum(case[column] is value for case in cases)
            assert sum(case[column] is value for case in usual(chosen)) >= min(times, there)


def test_values_of_columns_are_met_together():
    columns = ["a", "b", "c"], [*range(9)], [False, True]
    found = usual(each_value(pairwise(*columns), (0, 2)))
    assert {(name, flag) for name, _, flag in found} == {(name, flag) for name in columns[0] for flag in columns[2]}


def test_the_first_cases_are_those_that_meet_the_most():
    columns = ["a", "b", "c"], [*range(9)], [False, True]
    cases = pairwise(*columns)
    chosen = each_value(cases, most=3)
    assert [each.values for each in chosen] == cases
    assert [each.values for each in chosen if each.marks] == [case for case in cases if case not in usual(chosen)]
    names, numbers, flags = (set(values) for values in zip(*usual(chosen), strict=True))
    assert (names, len(numbers), flags) == ({"a", "b", "c"}, 3, {False, True})


def test_values_that_are_exhaustive_are_marked():
    assert [(each.values, [mark.name for mark in each.marks]) for each in exhaustive(3, None)] == [
        ((3,), ["exhaustive"]),
        ((None,), ["exhaustive"]),
    ]


def test_one_value_in_some_is_usual():
    assert [each.values for each in one_in(3, "abcdefgh")] == [(letter,) for letter in "abcdefgh"]
    assert usual(one_in(3, "abcdefgh")) == [("a",), ("d",), ("g",)]
