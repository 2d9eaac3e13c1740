"""Selections between nearly equal numbers: the oracle with the other choice, and the budgets that include it."""

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU, RNN, CappedLSTM
from gatewise.contract.problem import Problem
from gatewise.testing.budgets import Budget, named, relative_errors
from gatewise.testing.selections import OtherSelections

NEAR = 1e-9


def slope_at_limit():
    """Return the gradient of `torch.clamp` at its limit: 1, and 0 since PyTorch 2.15."""
    value = torch.ones((), requires_grad=True)
    torch.clamp(value, -1, 1).backward()
    return value.grad.item()


AT_LIMIT = slope_at_limit()


def gradient(function, value):
    value = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    with OtherSelections(1e-8) as selections:
        result = function(value)
    result.sum().backward()
    return result.detach(), value.grad.tolist(), selections.number


@pytest.mark.parametrize(
    ("function", "value", "slopes"),
    [
        (torch.relu, [NEAR, -NEAR, 1.0, -1.0, 0.0], [0, 1, 1, 0, 0]),
        (
            lambda a: torch.clamp(a, -1, 1),
            [1 - NEAR, 1 + NEAR, -1 - NEAR, 0.5, 3.0, 1.0],
            [0, 1, 1, 1, 0, slope_at_limit()],
        ),
        (lambda a: torch.clamp(input=a, max=1), [1 - NEAR, 1 + NEAR, 0.5, 3.0], [0, 1, 1, 0]),
        (lambda a: torch.nn.functional.relu(a), [NEAR, -NEAR, 1.0, -1.0], [0, 1, 1, 0]),
        (lambda a: torch.clamp(a, min=1), [1 - NEAR, 1 + NEAR, 0.5, 3.0], [1, 0, 0, 1]),
        (lambda a: torch.minimum(a, torch.ones_like(a)), [1 - NEAR, 1 + NEAR, 0.5, 3.0], [0, 1, 1, 0]),
        (lambda a: torch.maximum(torch.ones_like(a), a), [1 - NEAR, 1 + NEAR, 0.5, 3.0], [1, 0, 0, 1]),
    ],
    ids=["relu", "clamp", "clamp from above", "relu of functional", "clamp from below", "minimum", "maximum"],
)
def test_only_nearly_equal_operands_change_places(function, value, slopes):
    result, found, number = gradient(function, value)
    assert found == slopes
    assert number == sum(abs(abs(each) - edge) == pytest.approx(NEAR) for each in value for edge in (0, 1))
    torch.testing.assert_close(result, function(torch.tensor(value, dtype=torch.float64)), atol=2 * NEAR, rtol=0)


def test_nan_is_not_selected_away():
    with OtherSelections(1e-8):
        found = torch.minimum(torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, float("nan")]))
    assert found.isnan().all()


@pytest.mark.parametrize("cell", [RNN("relu"), GRU()], ids=lambda cell: cell.name)
def test_stated_steps_are_those_of_pytorch(cell):
    problem = Problem(5, 3, 4, 6, num_layers=2, bidirectional=True, dropout=0.5, dtype=torch.float64, needs_grad=True)
    problem = problem.replace(cell=cell)
    inputs = testing.make_inputs(problem)
    above = testing.make_gradients(problem, inputs)
    exact = named(problem, *testing.oracle(problem, inputs, above))
    stated = named(problem, *testing.oracle(problem, inputs, above, stated=True))
    assert max(relative_errors(stated, exact).values()) < 1e-14


def edge(difference):
    """Return a problem of one step, and inputs with which the input gate is nearly at its limit in one of 40 units."""
    problem = Problem(1, 2, 3, 40, dtype=torch.float32, needs_grad=True).replace(cell=CappedLSTM())
    inputs = testing.make_inputs(problem.replace(dtype=torch.float64))
    w_ih, w_hh, b_ih, b_hh = inputs.weights
    for weight in (w_ih, w_hh, b_ih, b_hh):
        weight[0] = weight[40] = 0  # unit 0 of the input gate and of the forget gate
    b_ih[0], b_ih[40] = 0.3, -0.3 + difference
    return problem, inputs, testing.make_gradients(problem.replace(dtype=torch.float64), inputs)


def test_a_budget_includes_the_other_choice_and_no_other_error():
    # With these, the limit and the gate differ in float32 by more than its rounding, but by less than the budget.
    problem, inputs, above = edge(4e-7)
    _, others, _ = edge(-4e-7)
    exact = named(problem, *testing.oracle(problem, inputs, above))
    other = named(problem, *testing.oracle(problem, others, above))
    errors = relative_errors(other, exact)
    budget = Budget(problem, inputs, above, exact, "cpu")
    before = budget.allowed
    assert errors["dbias_ih_l0"] > 100 * before["dbias_ih_l0"]
    assert budget.select_otherwise()
    assert all(errors[name] <= allowed for name, allowed in budget.allowed.items())
    assert budget.allowed["y"] < 2 * before["y"]
    wide = budget.allowed
    assert not budget.select_otherwise(), "a second call must not widen the budget again"
    assert budget.allowed == wide
    assert relative_errors({"dx": 1.5 * exact["dx"]}, exact)["dx"] > budget.allowed["dx"]


def test_a_budget_without_such_selections_does_not_change():
    problem, inputs, above = edge(0.1)
    exact = named(problem, *testing.oracle(problem, inputs, above))
    budget = Budget(problem, inputs, above, exact, "cpu")
    before = budget.allowed
    assert not budget.select_otherwise()
    assert budget.allowed == before
