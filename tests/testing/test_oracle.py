"""The oracle against torch.nn.LSTM as a whole module, which it does not call."""

import itertools

import pytest
import torch
from torch.nn.utils import rnn

from gatewise import testing
from gatewise.cells import GRU, LSTM, SLSTM, Regularised
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.functional.passes import Guarded
from gatewise.selection import kernel_named
from tests.pairwise import each_value

SHAPE = Problem(6, 4, 3, 7, num_layers=2, bidirectional=True, dtype=torch.float64, needs_grad=True)


def module_of(problem, inputs):
    module = torch.nn.LSTM(3, 7, 2, bidirectional=True, proj_size=problem.proj_size, dtype=torch.float64)
    with torch.no_grad():
        for parameter, weight in zip(module.parameters(), inputs.weights, strict=True):
            parameter.copy_(weight)
    return module


@pytest.mark.parametrize("proj_size", [0, 2])
@pytest.mark.parametrize("layout", [Layout.DENSE, Layout.HOST_LENGTHS, Layout.PACKED], ids=lambda layout: layout.name)
def test_it_is_the_whole_module(layout, proj_size):
    problem = SHAPE.replace(layout=layout, proj_size=proj_size)
    lengths = (5, 6, 1, 3) if layout is Layout.HOST_LENGTHS else (6, 5, 3, 1)
    inputs = testing.make_inputs(problem, lengths=lengths)
    gradients = testing.make_gradients(problem, inputs)
    x, h0, c0 = (tensor.requires_grad_() for tensor in inputs[:3])
    module = module_of(problem, inputs)
    if layout is Layout.DENSE:
        y, (h_n, c_n) = module(x, (h0, c0))
    elif layout is Layout.HOST_LENGTHS:
        packed = rnn.pack_padded_sequence(x, inputs.lengths, enforce_sorted=False)
        out, (h_n, c_n) = module(packed, (h0, c0))
        y = rnn.pad_packed_sequence(out, total_length=problem.time)[0]
    else:
        out, (h_n, c_n) = module(rnn.PackedSequence(x, inputs.batch_sizes), (h0, c0))
        y = out.data
    leaves = [x, h0, c0, *module.parameters()]
    expected = torch.autograd.grad((y, h_n, c_n), leaves, gradients)
    result, found = testing.oracle(problem, inputs, gradients)
    for mine, theirs in zip(result[:3], (y, h_n, c_n), strict=True):
        torch.testing.assert_close(mine, theirs.detach())
    for mine, theirs in zip((*found[:3], *found.weights), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_dropout_masks_are_applied_between_the_layers():
    problem = SHAPE.replace(dropout=0.5)
    inputs = testing.make_inputs(problem)
    all_dropped = inputs._replace(masks=tuple(torch.zeros_like(mask) for mask in inputs.masks))
    above = testing.make_gradients(problem, inputs)._replace(h_n=None, c_n=None)
    result, gradients = testing.oracle(problem, all_dropped, above)
    changed, _ = testing.oracle(problem, all_dropped._replace(x=-inputs.x))
    assert torch.equal(result.y, changed.y)
    assert gradients.x.count_nonzero() == 0
    assert gradients.h0[2:].count_nonzero() > 0


@pytest.mark.parametrize(
    ("resets", "layout", "cell"),
    each_value(
        [
            *itertools.product(
                [False, True], [Layout.DENSE, Layout.HOST_LENGTHS, Layout.PACKED], [LSTM(), GRU(), SLSTM()]
            )
        ]
    ),
    ids=lambda own: getattr(own, "name", str(own)),
)
def test_masks_of_a_regularised_cell_are_those_of_the_inputs(cell, layout, resets):
    if resets and layout is Layout.PACKED:
        pytest.skip("packed batches have no resets")
    noisy = Regularised(cell, 0.3, (0.2, *(0.4 for _ in cell.states[:1]), *(0.0 for _ in cell.states[1:])), 0.3)
    problem = SHAPE.replace(cell=noisy, layout=layout, resets=resets, dropout=0.2)
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs)
    passes = Guarded(kernel_named("eager"))
    result = passes.forward(problem, inputs)
    found = passes.backward(problem, inputs, result, gradients, Needs())
    expected, of_inputs = testing.oracle(problem, inputs, gradients)
    torch.testing.assert_close(result[:3], expected[:3])
    torch.testing.assert_close([*found[:3], *found.weights], [*of_inputs[:3], *of_inputs.weights])
