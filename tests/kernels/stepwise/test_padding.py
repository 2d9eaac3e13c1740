"""Sizes that are rounded up to multiples of 16 bytes: the same results, from the tensors of a wider problem."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import gatewise
from gatewise import testing
from gatewise.cells import GRU, LSTM, MGU, RNN, Cell, CoupledLSTM, PeepholeLSTM, Regularised
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.kernels.eager import eager
from gatewise.kernels.stepwise import stepwise
from gatewise.kernels.stepwise.padding import Padding, padded
from tests.pairwise import each_value

CELLS = [LSTM(), GRU(), RNN("relu"), CoupledLSTM(), MGU()]
H200 = Device.named("h200")
LEAST_UNITS = 256
ODD = Problem(15, 10, LEAST_UNITS + 3, LEAST_UNITS + 5, allow_tf32=True, needs_grad=True)


class Restless(Cell):
    """A cell whose units do not stay at zero, and whose gradients are not zero there."""

    gates = ("a",)

    def step(self, gate: Any, state: Any) -> tuple[Any, Mapping[str, Any]]:
        return torch.sigmoid(gate.a) + 0.5 * state.h, {}


def tensors(result, gradients):
    return *result[:3], gradients.x, gradients.h0, gradients.c0, *gradients.weights


@pytest.mark.parametrize(
    ("cell", "bidirectional"), each_value([*itertools.product([*CELLS, Restless()], [False, True])]), ids=repr
)
def test_the_wider_problem_has_the_same_results(cell, bidirectional):
    problem = ODD.replace(cell=cell, bidirectional=bidirectional, num_layers=2, dropout=0.3)
    wide = padded(problem, H200)
    assert (wide.input_size, wide.hidden_size) == (LEAST_UNITS + 4, LEAST_UNITS + 8)
    problem, wide = (each.replace(dtype=torch.float64) for each in (problem, wide))
    between = Padding(problem, wide)
    inputs = testing.make_inputs(problem, "cpu")
    above = testing.make_gradients(problem, inputs)
    result = eager.forward(problem, inputs)
    expected = tensors(result, eager.backward(problem, inputs, result, above, Needs()))
    wider = between.inputs(inputs)
    found = between.result(eager.forward(wide, wider))
    gradients = eager.backward(wide, wider, between.kept(found, wider), between.above(above), Needs())
    for one, other in zip(tensors(found, between.gradients(gradients)), expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("value", "name", "cell"),
    each_value([*itertools.product([torch.inf, -torch.inf, torch.nan], ["x", "h0", "c0"], [LSTM(), GRU()])]),
    ids=repr,
)
def test_values_that_are_not_finite_have_the_same_results(cell, name, value):
    problem = ODD.replace(cell=cell, needs_grad=False)
    wide = padded(problem, H200)
    problem, wide = (each.replace(dtype=torch.float64) for each in (problem, wide))
    between, inputs = Padding(problem, wide), testing.make_inputs(problem, "cpu")
    if not getattr(inputs, name).numel():
        pytest.skip("the cell has no such state")
    for place in (0, 17, -1):  # the last unit is the one that is repeated
        getattr(inputs, name)[0, 1, place] = value
        found = between.result(eager.forward(wide, between.inputs(inputs)))
        for one, other in zip(found[:3], eager.forward(problem, inputs)[:3], strict=True):
            if name == "x" or cell == LSTM():
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12, equal_nan=True)
            assert torch.equal(one.isfinite()[:, 2:], other.isfinite()[:, 2:])


def test_what_is_not_wanted_is_not_computed():
    wide, inputs = padded(ODD, H200), testing.make_inputs(ODD, "cpu")
    between = Padding(ODD, wide)
    wider = between.inputs(inputs)
    above = between.above(testing.make_gradients(ODD, inputs)._replace(h_n=None))
    assert above.h_n is None
    result = eager.forward(wide, wider)
    found = between.gradients(eager.backward(wide, wider, result, above, Needs(x=False, weights=False)))
    assert found.x is None
    assert set(found.weights) == {None}
    assert between.result(result).kept[0] is result.y
    assert Padding(ODD.replace(needs_grad=False), wide).result(result).kept == ()


def test_which_calls_are_padded():
    half = ODD.replace(dtype=torch.bfloat16)
    assert (padded(half, H200).input_size, padded(half, H200).hidden_size) == (LEAST_UNITS + 8, LEAST_UNITS + 8)
    only_x = ODD.replace(hidden_size=LEAST_UNITS, time=200)
    assert (padded(only_x, H200).input_size, padded(only_x, H200).hidden_size) == (LEAST_UNITS + 4, LEAST_UNITS)
    for same in (
        ODD.replace(hidden_size=LEAST_UNITS, input_size=LEAST_UNITS),
        ODD.replace(hidden_size=LEAST_UNITS - 1),
        ODD.replace(time=14),
        ODD.replace(time=4, batch=200),
        only_x.replace(time=100),
        only_x.replace(input_size=LEAST_UNITS - 1),
        ODD.replace(traced=True),
        ODD.replace(allow_tf32=False),
        ODD.replace(dtype=torch.float64),
        ODD.replace(proj_size=7),
        ODD.replace(cell=PeepholeLSTM()),
        ODD.replace(cell=Regularised(LSTM(), zoneout=(0.1, 0.1))),
    ):
        assert padded(same, H200) is None


def test_the_decision_names_the_sizes():
    assert stepwise.algorithm(ODD, H200).endswith("sizes rounded up to 260 and 264")
    plain, work = stepwise.work(padded(ODD, H200), H200), stepwise.work(ODD, H200)
    assert work.matmul_flops == plain.matmul_flops
    assert work.bytes_moved > plain.bytes_moved
    assert work.launches > plain.launches
    assert stepwise.workspace_bytes(ODD, H200) > stepwise.workspace_bytes(padded(ODD, H200), H200)
    assert stepwise.kept(ODD, H200)[0].shape == (15, 10, LEAST_UNITS + 8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("cell", CELLS, ids=repr)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_layers": 3, "dropout": 0.3},
        {"bidirectional": True, "layout": Layout.DEVICE_LENGTHS},
        {"layout": Layout.HOST_LENGTHS, "num_layers": 2},
        {"resets": True},
        {"bias": False, "time": 5, "batch": 40},
        {"hidden_size": 1501, "batch": 130, "input_size": 37},
        {"needs_grad": False, "time": 40, "num_layers": 2},
    ],
    ids=str,
)
def test_agrees_with_the_oracle(changes, cell, dtype):
    problem = ODD.replace(**({"time": 15, "batch": 20, "dtype": dtype, "cell": cell} | changes))
    assert padded(problem, H200) is not None
    testing.check_kernel(stepwise, problem, "cuda")


@pytest.mark.gpu
def test_three_calls_in_a_row_in_a_graph_and_compiled():
    torch.manual_seed(0)
    layer = gatewise.LSTM(261, 301, 2, kernel="stepwise", device="cuda", dtype=torch.bfloat16)
    x = torch.randn(12, 30, 261, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    free = torch.full((1 << 26,), torch.nan, device="cuda")
    del free  # memory that is used again is full of NaN

    def step(call=layer):
        y, _ = call(x)
        return y, *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = step()
        for found in (step(), step(), step(torch.compile(layer))):
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
        for _ in range(3):
            graph.replay()
            stream.synchronize()
            for one, other in zip(captured, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(300, 261), (264, 512), (37, 1500)], ids=str)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", [LSTM(), GRU(), PeepholeLSTM()], ids=repr)
def test_float32_gradients_of_16_bit_weights(cell, bidirectional, sizes):
    features, hidden = sizes
    options = {"bidirectional": bidirectional, "dtype": torch.bfloat16, "needs_grad": True, "cell": cell}
    problem = Problem(15, 20, features, hidden, num_layers=2, **options)
    testing.check_kernel(stepwise, problem.replace(float32_gradients=True), "cuda")
    inputs = testing.make_inputs(problem, "cuda")
    above = testing.make_gradients(problem, inputs)
    narrow, wide = (
        testing.run_kernel(stepwise, problem.replace(float32_gradients=given), inputs, above)[1].weights
        for given in (False, True)
    )
    for one, other in zip(narrow, wide, strict=True):
        if other.dim() > 1:
            assert (one.dtype, other.dtype) == (torch.bfloat16, torch.float32)
            assert (one - other).norm() <= 2.0**-8 * other.norm()
            assert not torch.equal(other, other.bfloat16().float())
