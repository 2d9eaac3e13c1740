"""gatewise.LSTMCell against torch.nn.LSTMCell."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from gatewise.nn import LSTMCell


def twins(seed: int = 0, **options) -> tuple[nn.LSTMCell, LSTMCell]:
    torch.manual_seed(seed)
    theirs = nn.LSTMCell(5, 3, **options)
    torch.manual_seed(seed)
    return theirs, LSTMCell(5, 3, **options)


@pytest.mark.parametrize("bias", [True, False])
def test_parameters_are_those_of_torch(bias):
    theirs, ours = twins(bias=bias)
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    if not bias:
        assert ours.bias_ih is None
        assert ours.bias_hh is None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [None, 1, 31])
@pytest.mark.parametrize("with_state", [True, False])
def test_outputs_and_gradients_equal_torch(bias, batch, with_state):
    theirs, ours = twins(bias=bias, dtype=torch.float64)
    lead = () if batch is None else (batch,)
    x = torch.randn(*lead, 5, dtype=torch.float64)
    state = (torch.randn(*lead, 3, dtype=torch.float64), torch.randn(*lead, 3, dtype=torch.float64))
    found = []
    for cell in (theirs, ours):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, *state)]
        h, c = cell(leaves[0], tuple(leaves[1:]) if with_state else None)
        (h.square().sum() + c.sin().sum()).backward()
        found.append([h, c, *(leaf.grad for leaf in leaves), *(p.grad for p in cell.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("bias", [True, False])
def test_vmap_maps_over_steps_and_weights(bias):
    _, ours = twins(bias=bias)
    x, h, c = torch.randn(4, 2, 5), torch.randn(4, 2, 3), torch.randn(4, 2, 3)
    found = torch.func.vmap(lambda x, h, c: ours(x, (h, c)))(x, h, c)
    rows = [ours(*each) for each in zip(x, zip(h, c, strict=True), strict=True)]
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*rows, strict=True))))

    cells = [twins(seed, bias=bias)[1] for seed in range(3)]
    weights, _ = torch.func.stack_module_state(cells)
    found = torch.func.vmap(lambda weights: torch.func.functional_call(ours, weights, (x[0],)))(weights)
    rows = [cell(x[0]) for cell in cells]
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*rows, strict=True))))


def test_transforms_keep_the_dtypes_of_autocast():
    _, ours = twins()
    x = torch.randn(4, 2, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = ours(x[0]), torch.func.vmap(ours)(x)
    assert [each.dtype for each in found] == [each.dtype for each in expected]


def test_copies_and_conversions():
    theirs, ours = twins()
    x = torch.randn(2, 5)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.testing.assert_close(other(x), theirs(x))
    assert ours.double()(x.double())[0].dtype == torch.float64


def test_autocast_takes_other_dtypes():
    _, ours = twins()
    with torch.autocast("cpu", torch.bfloat16):
        h, _ = ours(torch.randn(2, 5).bfloat16())
    assert h.shape == (2, 3)


def test_a_loop_of_cells_equals_the_layer():
    from gatewise.nn import LSTM

    _, cell = twins(dtype=torch.float64)
    layer = LSTM(5, 3, dtype=torch.float64)
    layer.load_state_dict({f"{name}_l0": value for name, value in cell.state_dict().items()})
    x = torch.randn(7, 2, 5, dtype=torch.float64)
    state, outputs = None, []
    for step in x:
        state = cell(step, state)
        outputs.append(state[0])
    y, (h_n, c_n) = layer(x)
    torch.testing.assert_close(torch.stack(outputs), y)
    torch.testing.assert_close(state, (h_n[0], c_n[0]))
