"""The selection of test cases: any two values occur together, in few cases."""

import itertools

import pytest

from tests.pairwise import each_value, pairwise


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
