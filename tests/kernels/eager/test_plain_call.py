"""Calls that `eager` computes from the caller's own tensors, compared with its passes."""

import itertools
import sys
import types
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings

import gatewise
from gatewise import testing
from gatewise.cells import SHIPPED, SLSTM
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Inputs
from gatewise.functional.plan import plan_of
from gatewise.kernels.eager import differentiable, eager, has_adjoint
from gatewise.kernels.eager.plain_call import RANKINGS, is_recorded, recorded
from gatewise.testing.trials import Setting, Wrong, trial
from tests.derivation.random_cells import sources
from tests.derivation.statements import ALL, name
from tests.kernels.test_random_cells import few, generators, problem_of
from tests.pairwise import exhaustive_unless

CPU = Device.named("cpu")
plain_call = sys.modules["gatewise.kernels.eager.plain_call"]
FORMS = {
    "one direction": {},
    "both directions": {"bidirectional": True},
    "two layers": {"num_layers": 2},
    "no bias": {"bias": False},
    "two layers in both directions": {"num_layers": 2, "bidirectional": True, "bias": False},
}


def inputs_of(problem):
    inputs = testing.make_inputs(problem)
    leaves = [tensor.clone().requires_grad_() for tensor in (inputs.x, inputs.h0, inputs.c0, *inputs.weights)]
    return leaves, Inputs(leaves[0], leaves[1], leaves[2], tuple(leaves[3:]))


def outputs_of(problem, found):
    return found[: 2 + bool(problem.cell.states)]


def check_inference(problem):
    problem = problem.replace(needs_grad=False, layout=Layout.DENSE, lean=False)
    call = eager.operator(problem, CPU)
    assert (call is not None) == has_adjoint(problem.cell)
    if call is None:
        return
    _, inputs = inputs_of(problem)
    before = [tensor.detach().clone() for tensor in (inputs.x, inputs.h0, inputs.c0, *inputs.weights)]
    with torch.no_grad():
        expected = eager.forward(problem, inputs)
        found = call(inputs.x, inputs.h0, inputs.c0, inputs.weights, None)
    for mine, theirs in zip(outputs_of(problem, found), expected, strict=False):
        assert mine.is_contiguous()
        torch.testing.assert_close(mine, theirs)
    for tensor, value in zip((inputs.x, inputs.h0, inputs.c0, *inputs.weights), before, strict=True):
        assert torch.equal(tensor, value)
    # Each result has memory of its own, so that a program may change one in place.
    own = [tensor.untyped_storage().data_ptr() for tensor in (*outputs_of(problem, found), inputs.h0, inputs.c0)]
    assert len(set(own)) == len(own)


def check_recorded(problem):
    problem = problem.replace(needs_grad=True, layout=Layout.DENSE, lean=False)
    call = recorded(problem)
    leaves, inputs = inputs_of(problem)
    found = outputs_of(problem, call(inputs.x, inputs.h0, inputs.c0, inputs.weights, None))
    expected = outputs_of(problem, differentiable(problem, inputs))
    above = [torch.randn_like(value) for value in expected]
    of_mine = torch.autograd.grad(found, leaves, above, create_graph=True, materialize_grads=True)
    of_theirs = torch.autograd.grad(expected, leaves, above, create_graph=True, materialize_grads=True)
    for mine, theirs in zip((*found, *of_mine), (*expected, *of_theirs), strict=True):
        torch.testing.assert_close(mine, theirs)
    second = [
        torch.autograd.grad(sum(value.square().sum() for value in first), leaves, materialize_grads=True)
        for first in (of_mine, of_theirs)
    ]
    for mine, theirs in zip(*second, strict=True):
        torch.testing.assert_close(mine, theirs)


CELLS = [*ALL, *SHIPPED]


# `make test` calls every cell in one form, in turn.
@pytest.mark.parametrize(
    ("cell", "form"),
    exhaustive_unless([*zip(CELLS, itertools.cycle(FORMS), strict=False)][::2], itertools.product(CELLS, FORMS)),
    ids=lambda value: value if isinstance(value, str) else name(value),
)
def test_a_plain_call_agrees_with_the_passes(cell, form):
    torch.manual_seed(0)
    check_both(Problem(4, 3, 5, 6, dtype=torch.float64, cell=cell, **FORMS[form]))


def check_both(problem):
    check_inference(problem)
    check_recorded(problem)
    check_recorded(problem.replace(time=1))


# `make test` compares the passes of random cells with autograd: tests/kernels/test_random_cells.py.
@pytest.mark.exhaustive
@settings(few, max_examples=20)
@given(generators, sources())
def test_a_plain_call_of_a_random_cell_agrees_with_the_passes(generator, source):
    check_both(problem_of(generator, source))


@pytest.mark.exhaustive
@settings(few, max_examples=200)
@given(generators, sources())
def test_a_plain_call_of_many_random_cells_agrees_with_the_passes(generator, source):
    check_both(problem_of(generator, source))


BASE = Problem(4, 3, 5, 6)


@pytest.mark.parametrize(
    "changes",
    [
        {"needs_grad": True, "time": 100, "batch": 1, "hidden_size": 512},
        {"needs_grad": True, "time": 1, "lean": True},
        {"time": 0},
        {"proj_size": 2},
        {"resets": True},
        {"dtype": torch.bfloat16},
        {"layout": Layout.HOST_LENGTHS},
        {"dropout": 0.5, "num_layers": 2},
    ],
    ids=str,
)
def test_what_needs_more_than_operators_is_left_to_the_passes(changes):
    assert eager.operator(BASE, CPU) is not None
    assert eager.operator(BASE.replace(**changes), CPU) is None


@pytest.mark.parametrize("cell", [gatewise.cells.PeepholeLSTM(), gatewise.cells.LayerNormLSTM()], ids=name)
def test_autograd_records_where_the_weights_of_the_ranking_say_so(cell, monkeypatch):
    problem = BASE.replace(cell=cell, needs_grad=True)
    for calls, expected in ((1.0, True), (-1.0, False)):
        found = {"calls": calls, "elements": 0.0, "steps": 0.0, "added": 0.0, "most elements": 1e9}
        monkeypatch.setattr(plain_call, "ranking", types.SimpleNamespace(weights=lambda device, name, own=found: own))
        assert is_recorded(problem, CPU) == expected
        assert (eager.operator(problem, CPU) is not None) == expected


def test_long_calls_of_one_sequence_take_the_explicit_passes_and_large_batches_do_not():
    for cell in (gatewise.cells.PeepholeLSTM(), gatewise.cells.LayerNormLSTM()):
        assert not is_recorded(Problem(100, 1, 512, 512, needs_grad=True, cell=cell), CPU)
        assert is_recorded(Problem(1, 64, 64, 64, needs_grad=True, cell=cell), CPU)
        # A single step adds nothing to the gradient of the recurrent weights, however large they are.
        assert is_recorded(Problem(1, 1, 1024, 1024, num_layers=2, needs_grad=True, cell=cell), CPU)
    assert len(set(RANKINGS)) == 2


def test_calls_with_many_elements_are_not_recorded_because_of_the_memory():
    problem = Problem(30, 500, 64, 64, needs_grad=True, cell=gatewise.cells.PeepholeLSTM())
    assert is_recorded(problem, CPU)
    assert not is_recorded(problem.replace(time=300), CPU)


class Unread(gatewise.Cell):
    """A cell with a parameter that the step does not read."""

    gates = ("a",)
    parameters: ClassVar = {"idle": 1.0}

    def step(self, gate, state, parameter):
        return torch.tanh(gate.a), {}


class Swapped(gatewise.Cell):
    """A cell whose hidden state is its other state before the step."""

    gates = ("a",)
    states = ("c",)

    def step(self, gate, state):
        return state.c, {"c": torch.tanh(gate.a)}


@pytest.mark.parametrize("cell", [Unread(), Swapped()], ids=name)
def test_weights_without_influence_have_gradients_of_zero(cell):
    layer = gatewise.Recurrent(cell, 3, 4)
    layer(torch.randn(1, 2, 3))[0].sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None
    assert not is_recorded(Problem(1, 2, 3, 4, needs_grad=True, cell=cell), CPU)


def test_no_gpu_computes_a_call_so():
    assert eager.operator(BASE, Device.named("h200")) is None


class Warm(gatewise.Cell):
    """A cell whose hidden state and other state begin with numbers other than zero."""

    gates = ("a",)
    states = ("slow",)
    initial_states: ClassVar = {"h": 0.5, "slow": -2.0}

    def step(self, gate, state):
        slow = 0.9 * state.slow + 0.1 * gate.a
        return torch.tanh(gate.a) + state.h / 2, {"slow": slow}


@pytest.mark.parametrize("time", [1, 3])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_layer_starts_from_the_initial_states_that_its_cell_states(time, gradients):
    torch.manual_seed(0)
    layer, x = gatewise.Recurrent(Warm(), 5, 6, dtype=torch.float64), torch.randn(time, 2, 5, dtype=torch.float64)
    states = [torch.full((1, 2, 6), value, dtype=torch.float64) for value in (0.5, -2.0)]
    with torch.set_grad_enabled(gradients):
        found, expected, other = layer(x), layer(x, tuple(states)), layer(x, tuple(map(torch.zeros_like, states)))
    for mine, theirs, zero in zip(
        (found[0], *found[1]), (expected[0], *expected[1]), (other[0], *other[1]), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
        assert not torch.equal(mine, zero)


@pytest.mark.parametrize("mode", ["eager", "no_grad", "inference"])
def test_trials_find_a_wrong_plain_call(mode, request, monkeypatch):
    request.addfinalizer(plan_of.cache_clear)
    plan_of.cache_clear()
    right = plain_call._call_of

    def wrong(*about):
        def call(*given):
            y, *finals = right(*about)(*given)
            return y * (1 + 1e-3), *finals

        return call

    setting = Setting(time=1, batch=2, hidden_size=5, cell="peephole_lstm", kernel="eager", mode=mode, above="y")
    trial(setting)
    plan_of.cache_clear()
    monkeypatch.setattr(plain_call, "_call_of", wrong)
    with pytest.raises(Wrong):
        trial(setting)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_profile_shows_the_passes_of_a_single_step(requires_grad):
    layer, x = gatewise.Recurrent(SLSTM(), 5, 6), torch.randn(1, 2, 5, requires_grad=requires_grad)
    with torch.profiler.profile() as profile, torch.set_grad_enabled(requires_grad):
        y, _ = layer(x)
        if requires_grad:
            y.sum().backward()
    names = {event.name for event in profile.events()}
    assert "gatewise::eager_forward" in names
    assert ("gatewise::eager_backward" in names) == requires_grad
