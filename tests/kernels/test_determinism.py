"""The same inputs give bit-identical results."""

import pytest
import torch

from gatewise import testing
from tests.pairwise import one_in


@pytest.mark.parametrize("case", one_in(3, testing.CASES), ids=lambda case: case.name)
def test_twice_the_same(kernel, case, device, admitted):
    problem = admitted(case.problem())
    inputs = testing.make_inputs(problem, device)
    gradients = testing.make_gradients(problem, inputs)
    first = testing.named(problem, *testing.run_kernel(kernel, problem, inputs, gradients))
    second = testing.named(problem, *testing.run_kernel(kernel, problem, inputs, gradients))
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor), name
