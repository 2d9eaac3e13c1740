"""The caller may overwrite the final states: they share no memory, and the backward pass does not read them."""

import pytest
import torch

from gatewise import testing
from gatewise.contract.saved import Needs
from gatewise.functional.passes import Guarded
from tests.pairwise import one_in


def flat(found):
    return [found.x, found.h0, found.c0, *found.weights]


@pytest.mark.parametrize("case", one_in(3, testing.CASES), ids=lambda case: case.name)
def test_backward_without_them(kernel, case, device, admitted):
    problem = admitted(case.problem())
    inputs = testing.make_inputs(problem, device)
    gradients = testing.make_gradients(problem, inputs)

    def backward(overwritten):
        result = Guarded(kernel).forward(problem, inputs)
        y = result.y.clone()
        if overwritten:
            result.h_n.fill_(torch.nan)
            result.c_n.fill_(torch.nan)
        torch.testing.assert_close(result.y, y, rtol=0, atol=0)
        return flat(Guarded(kernel).backward(problem, inputs, result, gradients, Needs()))

    for found, expected in zip(backward(True), backward(False), strict=True):
        torch.testing.assert_close(found, expected)
