"""The selection of test cases: any two values occur together, in few cases."""

import itertools

import pytest

from tests.pairwise import pairwise


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
