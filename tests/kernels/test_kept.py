"""`kept()` returns the shapes and dtypes of the tensors that the forward pass keeps."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from gatewise import testing
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.eager import eager
from tests.pairwise import one_in


def compare(kernel, problem, device):
    result, _ = testing.run_kernel(kernel, problem, testing.make_inputs(problem, device))
    specs = kernel.kept(problem, Device.probe(device))
    if not all(spec.exact for spec in specs):
        pytest.skip(f"a library decides what {kernel.name} keeps")
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in result.kept] == [tuple(spec[:2]) for spec in specs]


@pytest.mark.parametrize("case", one_in(3, testing.CASES), ids=lambda case: case.name)
def test_shapes_and_dtypes(kernel, case, device, admitted):
    problem = admitted(case.problem())
    if problem.layout not in kernel.layouts:
        pytest.skip(f"{kernel.name} does not read {problem.layout.value}")
    compare(kernel, problem, device)


@pytest.mark.parametrize("case", one_in(3, testing.CASES), ids=lambda case: case.name)
def test_inference_keeps_nothing(kernel, case, device, admitted):
    problem = admitted(case.problem(needs_grad=False))
    result, _ = testing.run_kernel(kernel, problem, testing.make_inputs(problem, device))
    assert result.kept == ()
    assert kernel.kept(problem, Device.probe(device)) == ()


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    sizes=st.tuples(*[st.integers(0, 4)] * 2, *[st.integers(1, 4)] * 2),
    proj_size=st.integers(0, 2),
    num_layers=st.integers(1, 3),
    bidirectional=st.booleans(),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    layout=st.sampled_from([Layout.DENSE, Layout.HOST_LENGTHS, Layout.DEVICE_LENGTHS]),
)
def test_eager_on_any_problem(sizes, proj_size, num_layers, bidirectional, bias, dtype, layout):
    hypothesis.assume(proj_size < sizes[3])
    problem = Problem(*sizes, proj_size, num_layers, bidirectional, bias, dtype, layout, needs_grad=True)
    compare(eager, problem, "cpu")
