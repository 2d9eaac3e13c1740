"""Random cells on the kernels that run on the CPU, compared with autograd through a loop over the cell's own step."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import gatewise
from gatewise import testing
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.eager import eager
from gatewise.testing.loop import LoopLayer
from tests.derivation.random_cells import cell_of, sources
from tests.kernels.agreement import assert_agrees

repeatable = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow], print_blob=False
)
few, many = settings(repeatable, max_examples=20), settings(repeatable, max_examples=440)
generators = st.randoms(use_true_random=False)


def problem_of(generator, source):
    """Return a random small problem."""

    def choice(*options):
        return options[generator.randrange(len(options))]

    return Problem(
        choice(1, 3, 4),
        choice(1, 2, 3),
        choice(1, 3),
        choice(1, 3, 5),
        num_layers=choice(1, 1, 2),
        bidirectional=choice(False, False, True),
        bias=choice(True, True, False),
        layout=choice(Layout.DENSE, Layout.DENSE, Layout.HOST_LENGTHS, Layout.PACKED),
        lean=choice(False, False, True),
        dtype=torch.float64,
        needs_grad=True,
        cell=cell_of(source),
    )


def check_eager(generator, source):
    problem = problem_of(generator, source)
    if problem.layout is not Layout.PACKED and generator.randrange(3) == 0:
        problem = problem.replace(resets=True)
    assert_agrees(eager, problem)


@few
@given(generators, sources())
def test_eager_agrees_with_autograd(generator, source):
    check_eager(generator, source)


@pytest.mark.exhaustive
@many
@given(generators, sources())
def test_eager_agrees_with_autograd_on_many_cells(generator, source):
    check_eager(generator, source)


@settings(repeatable, max_examples=15)
@given(sources(smooth=True))
def test_second_derivatives_agree_with_autograd(source):
    cell, batch, size = cell_of(source), 2, 3
    layer = gatewise.Recurrent(cell, 3, size, dtype=torch.float64)
    problem = Problem(3, batch, 3, size, dtype=torch.float64, needs_grad=True, cell=cell)
    inputs = testing.make_inputs(problem)
    leaves = [own.clone().requires_grad_() for own in (inputs.x, inputs.h0, inputs.c0, *inputs.weights)]
    x, h0, c0, *weights = leaves

    def ours():
        named = dict(zip(dict(layer.named_parameters()), weights, strict=True))
        others = c0.split(size, -1) if cell.states else ()
        return torch.func.functional_call(layer, named, (x, (h0, *others) if others else h0))[0]

    def theirs():
        return LoopLayer(problem, weights)(x, h0, c0, None)[0]

    direction = testing.make_gradients(problem, inputs).y

    def second(call):
        first = torch.autograd.grad((call() * direction).sum(), leaves, create_graph=True, materialize_grads=True)
        total = sum(own.square().sum() for own in first)
        return torch.autograd.grad(total, leaves, materialize_grads=True)

    for found, expected in zip(second(ours), second(theirs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@settings(repeatable, max_examples=15)
@given(sources())
def test_states_begin_with_the_values_of_the_cell(source):
    cell = cell_of(source)
    layer = gatewise.Recurrent(cell, 3, 4, dtype=torch.float64)
    x = torch.randn(3, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    given = [x.new_full((1, 2, 4), cell.initial_states.get(name, 0.0)) for name in ("h", *cell.states)]
    torch.testing.assert_close(layer(x), layer(x, tuple(given) if cell.states else given[0]))
