"""float32 products as exact as float32's own: no less precise than cuDNN without TF32."""

import pytest
import torch

from gatewise import testing
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.kernel import persistent

pytestmark = pytest.mark.gpu

SHAPES = {
    "chars": Problem(200, 16, 128, 128),
    "ptb-small": Problem(20, 20, 200, 200, num_layers=2),
    "ptb-medium": Problem(35, 20, 650, 650),
    "many-tokens": Problem(101, 64, 16, 512),
    "one-row": Problem(30, 1, 64, 1024),
    "one-step": Problem(1, 64, 512, 512),
    "many-steps": Problem(300, 8, 64, 512),
    "many-steps-of-one-row": Problem(200, 1, 64, 1024),
    "clusters": Problem(9, 64, 128, 1024),
    "both-directions": Problem(40, 64, 256, 256, bidirectional=True),
    "padded-rows": Problem(17, 9, 40, 328, bidirectional=True),
    "projected": Problem(12, 20, 64, 256, 128),
    "ragged": Problem(17, 70, 40, 256, layout=Layout.DEVICE_LENGTHS, bidirectional=True),
}


def errors(problem, allow_tf32=False):
    problem = problem.replace(dtype=torch.float32, allow_tf32=allow_tf32, needs_grad=True)
    assert testing.why_not(persistent, problem, "cuda") == []
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    exact = testing.named(problem, *testing.oracle(problem, inputs, gradients))
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=allow_tf32):
        there = testing.reference(problem, inputs, gradients, dtype=torch.float32, device="cuda")
    theirs = testing.named(problem, *there)
    return {
        name: (testing.relative_error(found[name], exact[name]), testing.relative_error(theirs[name], exact[name]))
        for name in exact
    }


@pytest.mark.parametrize("name", SHAPES)
def test_as_precise_as_cudnn(name):
    for tensor, (error, theirs) in errors(SHAPES[name]).items():
        # Where cuDNN's happens to be exact to the last place, one rounding of the result is allowed.
        assert error <= 1.2 * theirs + torch.finfo(torch.float32).eps / 4, tensor


@pytest.mark.parametrize("problem", [Problem(30, 1, 64, 512), Problem(100, 16, 128, 128)], ids=["one-row", "small"])
def test_exact_where_cudnn_is_although_tf32_is_allowed(problem):
    for tensor, (error, _) in errors(problem, allow_tf32=True).items():
        assert error < 5e-6, tensor
