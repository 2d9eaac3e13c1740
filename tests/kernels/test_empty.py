"""No steps or an empty batch: empty outputs, final states equal to the initial ones, gradients of zero."""

import pytest
import torch

from gatewise import testing
from gatewise.contract.problem import Layout, Problem

PROBLEM = Problem(4, 3, 5, 7, proj_size=2, num_layers=2, bidirectional=True, dtype=torch.float64, needs_grad=True)
LAYOUTS = [Layout.DENSE, Layout.HOST_LENGTHS, Layout.DEVICE_LENGTHS, Layout.PACKED]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_no_steps(kernel, layout, device, admitted):
    problem = admitted(PROBLEM.replace(time=0, batch=0 if layout is Layout.PACKED else 3, layout=layout))
    inputs = testing.make_inputs(problem, device)
    gradients = testing.make_gradients(problem, inputs)
    result, found = testing.run_kernel(kernel, problem, inputs, gradients)
    assert result.y.shape == gradients.y.shape
    assert torch.equal(result.h_n, inputs.h0)
    assert torch.equal(result.c_n, inputs.c0)
    assert found.x.shape == inputs.x.shape
    assert torch.equal(found.h0, gradients.h_n)
    assert torch.equal(found.c0, gradients.c_n)
    for gradient, weight in zip(found.weights, inputs.weights, strict=True):
        assert torch.equal(gradient, torch.zeros_like(weight))


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=lambda layout: layout.name)
def test_no_rows(kernel, layout, device, admitted):
    problem = admitted(PROBLEM.replace(batch=0, layout=layout))
    inputs = testing.make_inputs(problem, device)
    result, found = testing.run_kernel(kernel, problem, inputs, testing.make_gradients(problem, inputs))
    assert result.y.shape == (problem.time, 0, problem.output_size)
    assert result.h_n.shape == found.h0.shape == inputs.h0.shape
    assert result.c_n.shape == found.c0.shape == inputs.c0.shape
    assert found.x.shape == inputs.x.shape
    for gradient, weight in zip(found.weights, inputs.weights, strict=True):
        assert torch.equal(gradient, torch.zeros_like(weight))
