"""The check finds and names every kind of wrong result."""

import itertools

import pytest
import torch

from gatewise import testing
from gatewise.contract.errors import ArgumentError
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.aten import aten
from gatewise.kernels.eager import eager
from gatewise.testing import check
from tests.pairwise import exhaustive_unless

PROBLEM = Problem(5, 3, 3, 7, proj_size=2, num_layers=2, needs_grad=True)


class Wrong:
    """The eager kernel with one tensor changed."""

    name, summary, layouts = "wrong", "", eager.layouts

    def __init__(self, target, change):
        self.target, self.change = target, change

    def factor_widths(self, problem):
        return ()

    def single_use(self, problem):
        return False

    def criteria(self):
        return ()

    def forward(self, problem, inputs):
        result = eager.forward(problem, inputs)
        if self.target in ("y", "h_n", "c_n"):
            return result._replace(**{self.target: self.change(getattr(result, self.target))})
        return result

    def backward(self, problem, inputs, result, gradients, needs):
        result = eager.forward(problem, inputs)
        found = eager.backward(problem, inputs, result, gradients, needs)
        if self.target in ("x", "h0", "c0"):
            return found._replace(**{self.target: self.change(getattr(found, self.target))})
        if self.target.startswith("weight"):
            names = [
                name for name in testing.named(problem, result, found) if name[1:7] in ("weight", "bias_i", "bias_h")
            ]
            index = names.index(f"d{self.target}")
            changed = [self.change(w) if i == index else w for i, w in enumerate(found.weights)]
            return found._replace(weights=tuple(changed))
        return found


def touched(tensor):
    tensor = tensor.clone()
    tensor.flatten()[-1] += 1e-4 * tensor.norm()
    return tensor


TARGETS = ["y", "h_n", "c_n", "x", "h0", "c0", "weight_ih_l0", "weight_hh_l1", "weight_hr_l1"]


CHANGES = [touched, lambda tensor: tensor * float("nan"), torch.zeros_like, torch.Tensor.double, lambda t: t[:1]]


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.fixture
def budgets_once(monkeypatch, known):
    """Compute the oracle and the budgets of the problem once: they do not depend on what a kernel computes."""

    def once(name):
        compute = getattr(check, name)

        def remembered(*given):
            if name not in known:
                known[name] = compute(*given)
            return known[name]

        monkeypatch.setattr(check, name, remembered)

    once("oracle")
    once("budgets")


# Each tensor is changed a little, and an output and a gradient in every way.
@pytest.mark.parametrize(
    ("target", "change"),
    exhaustive_unless(
        [*((name, touched) for name in TARGETS), *itertools.product(("y", "weight_hh_l1"), CHANGES[1:])],
        itertools.product(TARGETS, CHANGES),
    ),
)
@pytest.mark.usefixtures("budgets_once")
def test_one_wrong_tensor_is_named(target, change):
    name = target if target in ("y", "h_n", "c_n") else f"d{target}"
    with pytest.raises(testing.Disagreement, match=rf"\n  {name}: [^\n]*$"):
        testing.check_kernel(Wrong(target, change), PROBLEM)


def test_a_missing_gradient_is_named():
    with pytest.raises(testing.Disagreement, match="dx: missing"):
        testing.check_kernel(Wrong("x", lambda tensor: None), PROBLEM)


def test_a_right_kernel_passes_with_its_errors_and_budgets():
    measured = testing.check_kernel(Wrong("", touched), PROBLEM)
    assert set(measured) >= {"y", "h_n", "c_n", "dx", "dh0", "dc0", "dweight_ih_l0", "dbias_hh_l1", "dweight_hr_l0"}
    assert all(0 < budget < 1e-5 for _, budget in measured.values())


def test_a_refusal_is_not_a_pass():
    with pytest.raises(ArgumentError, match="aten refuses"):
        testing.check_kernel(aten, PROBLEM.replace(layout=Layout.DEVICE_LENGTHS))


@pytest.mark.parametrize(
    ("value", "exact", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([0.0], [0.0], 0.0),
        ([1.0], [0.0], float("inf")),
        ([float("nan"), 4.0], [float("nan"), 4.0], 0.0),
        ([float("nan"), 4.0], [3.0, 4.0], float("inf")),
        ([3.0, 4.0], [float("nan"), 4.0], float("inf")),
        ([float("inf")], [1.0], float("inf")),
        ([], [], 0.0),
    ],
)
def test_relative_error(value, exact, error):
    assert testing.relative_error(torch.tensor(value), torch.tensor(exact)) == pytest.approx(error)


def test_relative_error_of_another_shape_is_infinite():
    assert testing.relative_error(torch.ones(2), torch.ones(1)) == float("inf")


def test_inputs_come_from_their_seed_and_have_mean_zero():
    problem = Problem(50, 20, 10, 10)
    one, same, other = (testing.make_inputs(problem, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.x, same.x)
    assert not torch.equal(one.x, other.x)
    assert abs(one.x.mean().item()) < 5 / one.x.numel() ** 0.5


@pytest.mark.parametrize("layout", [Layout.HOST_LENGTHS, Layout.DEVICE_LENGTHS], ids=lambda layout: layout.name)
def test_default_lengths_have_a_one_a_zero_and_the_longest(layout):
    assert {0, 1, 7} <= set(testing.lengths_of(Problem(7, 5, 1, 1, layout=layout)))


@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_is_on_only_where_the_problem_allows_it(allowed):
    seen = []

    def look(tensor):
        seen.append(torch.backends.cudnn.allow_tf32)
        return tensor

    before = torch.backends.cudnn.allow_tf32
    testing.check_kernel(Wrong("y", look), PROBLEM.replace(allow_tf32=allowed))
    assert seen == [allowed]
    assert torch.backends.cudnn.allow_tf32 == before


def test_the_budget_of_float64_includes_the_error_of_the_oracle_itself():
    def budgets(dtype):
        problem = PROBLEM.replace(dtype=dtype)
        inputs = testing.make_inputs(PROBLEM)
        exact = testing.named(problem, *testing.oracle(problem, inputs))
        found = testing.budgets(problem, inputs, None, exact, "cpu")
        return {name: budget / torch.finfo(dtype).eps for name, budget in found.items()}

    single, double = budgets(torch.float32), budgets(torch.float64)
    assert all(1.05 * single[name] < double[name] < 1.5 * single[name] for name in single)
