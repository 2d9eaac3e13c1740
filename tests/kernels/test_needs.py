"""A gradient that was not requested is None, and the others do not depend on the request."""

import itertools

import pytest
import torch

from gatewise import testing
from gatewise.contract.problem import Problem
from gatewise.contract.saved import Needs

PROBLEM = Problem(5, 3, 3, 7, num_layers=2, bidirectional=True, dtype=torch.float64, needs_grad=True)


@pytest.mark.parametrize("needs", [Needs(*flags) for flags in itertools.product([True, False], repeat=3)], ids=str)
def test_only_what_is_wanted(kernel, needs, device, admitted):
    problem = admitted(PROBLEM)
    inputs = testing.make_inputs(problem, device)
    gradients = testing.make_gradients(problem, inputs)
    _, whole = testing.run_kernel(kernel, problem, inputs, gradients)
    _, part = testing.run_kernel(kernel, problem, inputs, gradients, needs)
    wanted = {"x": needs.x, "h0": needs.state, "c0": needs.state}
    for name, want in wanted.items():
        if want:
            assert torch.equal(getattr(part, name), getattr(whole, name)), name
        else:
            assert getattr(part, name) is None, name
    assert len(part.weights) == len(whole.weights)
    for mine, theirs in zip(part.weights, whole.weights, strict=True):
        assert torch.equal(mine, theirs) if needs.weights else mine is None
