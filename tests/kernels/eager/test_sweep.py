"""Cells that combine hidden units or have several states: the generated steps and their gradients against autograd."""

import itertools
from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch

import gatewise
from gatewise import cells
from gatewise.cells import Cell, LayerNormGRU, LayerNormLSTM, Regularised, standardized
from gatewise.derivation.trace import traced
from gatewise.kernels.eager import blocks, unroll
from gatewise.kernels.eager.blocks import has_adjoint, is_swept
from gatewise.kernels.eager.masks import DirectionMasks
from tests.derivation.random_cells import seeded
from tests.kernels.eager.test_unroll import (
    assert_all_close,
    build,
    gradients_of,
    leaves_of,
    outputs_of,
    resets_of,
)
from tests.pairwise import each_value, one_in

LAYER_NORM = [LayerNormLSTM.of(form) for form in cells.layer_norm_lstm.FORMS]
SHIPPED = [cell for cell in cells.SHIPPED if is_swept(cell)]
CELLS = [*SHIPPED, *LAYER_NORM, LayerNormLSTM(hidden=True, gates="joint"), LayerNormGRU(gates="apart", centered=False)]
TOGETHER = 10  # the number of random cells of a test


class Repeated(Cell):
    """A cell that normalizes the same value twice in one normalization."""

    gates = ("a", "b")

    def step(self, gate, state):
        one, other, last = standardized(gate.a, gate.a, gate.b)
        return torch.tanh(one + other * last), {}


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Make blocks of few steps, so that small sequences have several."""
    monkeypatch.setitem(blocks._BLOCKS, "cpu", (4, 1))


def random_numbers(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda count: int(torch.randint(0, count, (1,), generator=generator))


def assert_gradients_agree(cell, seed, masked=None):
    """Compare a direction of random sizes and options with autograd of the cell's own step."""
    below, generator = random_numbers(seed), torch.Generator().manual_seed(seed)
    time, batch, size = below(14), 1 + below(4), (2, 3, 31)[below(3)]
    reads_hidden = traced(cell if masked is None else masked.masked).reads_hidden
    proj_size = 0 if reads_hidden or below(3) else 1
    lengths = None if below(2) else [below(time + 1) for _ in range(batch)]
    x, h0, states0, weights, lengths = build(cell, time, batch, 3, size, proj_size, below(2) > 0, lengths, generator)
    states0 = tuple(state.abs() + 0.1 for state in states0)  # a normaliser state must not be near zero
    options = {"reverse": below(2) > 0, "lengths": lengths, "resets": resets_of(x, seed) if below(2) else None}
    if masked is not None:
        options["masks"] = DirectionMasks(
            torch.rand(batch, proj_size or size, generator=generator).gt(0.3) / 0.7,
            tuple(torch.rand(time, batch, size, generator=generator) < share for share in masked.of_steps.values()),
        )
    leaves, cell = leaves_of(x, h0, states0, weights), masked or cell
    recorded = outputs_of(unroll.forward(cell, x, h0, states0, weights, keep=True, **options))
    above = [torch.randn(output.shape, dtype=output.dtype, generator=generator) for output in recorded]
    expected = torch.autograd.grad(recorded, leaves, above, materialize_grads=True)
    recorded = [output.detach() for output in recorded]
    with torch.no_grad():
        assert_all_close(outputs_of(unroll.forward(cell, x, h0, states0, weights, **options)), recorded)
        plain = unroll.forward(cell, x, h0, states0, weights, keep=True, **options)
        found = gradients_of(cell, x, h0, states0, weights, plain, above, **options)
    assert_all_close(outputs_of(plain), recorded)
    assert_all_close(found, expected)


@pytest.mark.parametrize("cell", one_in(3, CELLS), ids=repr)
def test_steps_and_gradients_agree_with_autograd(cell):
    assert is_swept(cell)
    for seed in range(4):
        assert_gradients_agree(cell, seed)


@pytest.mark.parametrize(
    "chunk", [0, *(pytest.param(chunk, marks=pytest.mark.exhaustive) for chunk in range(1, 500 // TOGETHER))]
)
def test_steps_and_gradients_of_random_cells_agree_with_autograd(chunk):
    found = [cell for cell in seeded(range(TOGETHER * chunk, TOGETHER * (chunk + 1))) if is_swept(cell)]
    assert found
    for cell in found:
        try:
            assert_gradients_agree(cell, chunk)
        except Exception as error:
            raise AssertionError(cell.source) from error


@pytest.mark.parametrize(
    ("cell", "zoned"),
    each_value(
        [
            *itertools.product(
                [cells.SLSTM(), LayerNormLSTM(), LayerNormLSTM.of("icefall"), LayerNormGRU()], [False, True]
            )
        ]
    ),
    ids=repr,
)
def test_masks_of_a_regularised_cell(cell, zoned):
    # Keeping n of an sLSTM without m brings it near zero, by which the step divides.
    rates = [0.3, 0.2 * (len(cell.states) == 1)] if zoned else []
    masked = Regularised(cell, 0.3, rates, 0.2)
    for seed in range(2):
        assert_gradients_agree(cell, seed, masked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("cell", [cells.SLSTM(), LayerNormLSTM(), LayerNormLSTM.of("lingvo"), LayerNormGRU()], ids=repr)
def test_gradients_in_lower_precision_agree_with_autograd_in_it(cell, dtype):
    torch.manual_seed(0)
    layer = gatewise.Recurrent(cell, 5, 31, dtype=dtype, kernel="eager")
    x = torch.randn(9, 3, 5, dtype=dtype)
    found, expected = [], []
    for into, whole in ((found, True), (expected, False)):
        for parameter in layer.parameters():
            parameter.grad = None
        y = layer(x)[0] if whole else layer(x, return_steps=True)[0]
        y.float().square().sum().backward()
        into += [y.detach(), *(parameter.grad for parameter in layer.parameters())]
    for mine, theirs in zip(found, expected, strict=True):
        scale = theirs.abs().max().item() + 1e-3
        torch.testing.assert_close(mine, theirs, rtol=0, atol=scale * torch.finfo(dtype).eps * 32)


@pytest.mark.parametrize("cell", one_in(3, CELLS), ids=repr)
def test_autograd_records_the_layer_as_one_operation(cell):
    layer = gatewise.Recurrent(cell, 3, 4, kernel="eager")
    y, _ = layer(torch.randn(100, 1, 3))  # autograd would take longer for so many steps
    assert y.grad_fn.name() == "_RecurrenceBackward"
    assert all(function is None or "AccumulateGrad" in function.name() for function, _ in y.grad_fn.next_functions)


def test_a_value_that_is_normalized_twice_has_the_gradients_of_autograd():
    cell = Repeated()
    assert not is_swept(cell)
    assert not has_adjoint(cell)
    torch.manual_seed(0)
    layer = gatewise.Recurrent(cell, 3, 4, kernel="eager", dtype=torch.float64)
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda given: layer(given)[0], (x,), fast_mode=True)


class NormalizedParameter(Cell):
    """A cell that normalizes a parameter, which has no dimension of the batch."""

    gates = ("a",)
    parameters: ClassVar[Mapping[str, float]] = {"p": 1.0, "q": 0.5}

    def step(self, gate, state, own):
        return torch.tanh(standardized(gate.a) * standardized(own.p) + own.q * state.h), {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_parameter_can_be_normalized(dtype):
    torch.manual_seed(0)
    layer = gatewise.Recurrent(NormalizedParameter(), 3, 4, dtype=dtype)
    torch.nn.init.normal_(layer.p_l0)
    x = torch.randn(5, 2, 3, dtype=dtype)
    y, _ = layer(x)
    found = torch.autograd.grad(y.square().sum(), [*layer.parameters()])
    h, expected = x.new_zeros(2, 4), []
    for x_t in x:
        total = x_t @ layer.weight_ih_l0.t() + layer.bias_ih_l0 + h @ layer.weight_hh_l0.t() + layer.bias_hh_l0
        h = torch.tanh(standardized(total) * standardized(layer.p_l0) + layer.q_l0 * h)
        expected.append(h)
    theirs = torch.autograd.grad(torch.stack(expected).square().sum(), [*layer.parameters()])
    torch.testing.assert_close(found, theirs)
