"""Padding has no effect, and each sequence ends after its length."""

import itertools

import pytest
import torch

from gatewise import testing
from gatewise.contract.problem import Layout, Problem
from tests.pairwise import each_value

LAYOUTS = [Layout.HOST_LENGTHS, Layout.DEVICE_LENGTHS]
ALL_OPTIONS = Problem(
    6, 5, 3, 7, num_layers=2, bidirectional=True, dtype=torch.float64, layout=Layout.HOST_LENGTHS, needs_grad=True
)


def real(inputs):
    steps = torch.arange(inputs.x.shape[0], device=inputs.x.device)[:, None]
    return (steps < inputs.lengths.to(inputs.x.device)).unsqueeze(2)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_garbage_in_padding_reaches_nothing(kernel, layout, garbage, device, admitted):
    problem = admitted(ALL_OPTIONS.replace(layout=layout))
    inputs = testing.make_inputs(problem, device)
    gradients = testing.make_gradients(problem, inputs)
    clean = testing.named(problem, *testing.run_kernel(kernel, problem, inputs, gradients))
    dirty_inputs = inputs._replace(x=torch.where(real(inputs), inputs.x, garbage))
    dirty_gradients = gradients._replace(y=torch.where(real(inputs), gradients.y, garbage))
    dirty = testing.named(problem, *testing.run_kernel(kernel, problem, dirty_inputs, dirty_gradients))
    for name, tensor in clean.items():
        assert torch.equal(dirty[name], tensor), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_outputs_and_input_gradients_in_padding_are_zero(kernel, layout, device, admitted):
    problem = admitted(ALL_OPTIONS.replace(layout=layout))
    inputs = testing.make_inputs(problem, device)
    result, found = testing.run_kernel(kernel, problem, inputs, testing.make_gradients(problem, inputs))
    for tensor in (result.y, found.x):
        assert tensor.masked_select(~real(inputs)).count_nonzero() == 0
        assert tensor.masked_select(real(inputs)).count_nonzero() > 0


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_an_empty_row_hands_its_state_and_gradient_through(kernel, layout, device, admitted):
    problem = admitted(ALL_OPTIONS.replace(layout=layout))
    inputs = testing.make_inputs(problem, device)
    gradients = testing.make_gradients(problem, inputs)
    result, found = testing.run_kernel(kernel, problem, inputs, gradients)
    row = inputs.lengths.tolist().index(0)
    assert torch.equal(result.h_n[:, row], inputs.h0[:, row])
    assert torch.equal(result.c_n[:, row], inputs.c0[:, row])
    assert torch.equal(found.h0[:, row], gradients.h_n[:, row])
    assert torch.equal(found.c0[:, row], gradients.c_n[:, row])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_nan_state_of_an_empty_row_stays_there(kernel, layout, device, admitted):
    problem = admitted(ALL_OPTIONS.replace(layout=layout))
    inputs = testing.make_inputs(problem, device)
    gradients = testing.make_gradients(problem, inputs)
    row = inputs.lengths.tolist().index(0)
    clean, gradients_clean = testing.run_kernel(kernel, problem, inputs, gradients)
    inputs.h0[:, row] = float("nan")
    inputs.c0[:, row] = float("nan")
    result, found = testing.run_kernel(kernel, problem, inputs, gradients)
    assert torch.equal(result.y, clean.y)
    assert result.h_n[:, row].isnan().all()
    for mine, theirs in zip((found.x, *found.weights), (gradients_clean.x, *gradients_clean.weights), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("layout", "lengths"),
    each_value([*itertools.product(LAYOUTS, [(1, 1, 1, 1, 1), (6, 6, 6, 6, 6), (0, 0, 1, 0, 0), (5, 2, 5, 3, 1)])]),
    ids=lambda own: getattr(own, "name", str(own)),
)
def test_other_lengths(kernel, layout, lengths, device, admitted):
    testing.check_kernel(kernel, admitted(ALL_OPTIONS.replace(layout=layout)), device, lengths=lengths)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_full_lengths_are_the_dense_problem(kernel, layout, device, admitted):
    ragged = admitted(ALL_OPTIONS.replace(layout=layout))
    dense = admitted(ALL_OPTIONS.replace(layout=Layout.DENSE))
    inputs = testing.make_inputs(ragged, device, lengths=[6] * 5)
    gradients = testing.make_gradients(ragged, inputs)
    mine = testing.named(ragged, *testing.run_kernel(kernel, ragged, inputs, gradients))
    theirs = testing.named(dense, *testing.run_kernel(kernel, dense, inputs._replace(lengths=None), gradients))
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, msg=name)
