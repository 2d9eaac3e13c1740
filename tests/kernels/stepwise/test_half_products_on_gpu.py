"""Float16 factors of the products after the loop on a device: no less precise than TF32 products."""

import pytest

from gatewise import testing
from gatewise.cells import GRU
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.cuda.deep_products import widens
from gatewise.kernels.factors import choice
from gatewise.kernels.stepwise import stepwise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not widens(), reason="needs products that widen their factors")]

PROBLEMS = {
    "plain": Problem(30, 128, 512, 1024),
    "both-directions": Problem(20, 64, 200, 512, bidirectional=True, num_layers=2, layout=Layout.DEVICE_LENGTHS),
    "resets": Problem(20, 64, 31, 512, bidirectional=True, resets=True),
    "gru": Problem(30, 64, 3000, 512, cell=GRU()),
    "deep": Problem(289, 8, 264, 264),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_less_precise_than_tf32_products(name, monkeypatch):
    problem = PROBLEMS[name].replace(allow_tf32=True, needs_grad=True)
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    exact = testing.named(problem, *testing.oracle(problem, inputs, gradients))
    errors = []
    for halves in (False, True):
        monkeypatch.setattr(choice, "save_time", lambda *given, halves=halves, x, weights: halves and (x or weights))
        found = testing.named(problem, *testing.run_kernel(stepwise, problem, inputs, gradients))
        errors.append({key: testing.relative_error(found[key], exact[key]) for key in exact})
    for key, error in errors[1].items():
        assert error <= 1.2 * errors[0][key], key
