"""The properties of the kernel `eager` alone: its matrix products, operators and differentiable forward pass."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gatewise import testing
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.kernels.eager import differentiable, eager

PROBLEM = Problem(6, 3, 5, 7, proj_size=2, num_layers=2, bidirectional=True, dtype=torch.float64, needs_grad=True)
CPU = Device.named("cpu")
WAITS = {"_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal", "unique"}


class Operators(TorchDispatchMode):
    """Records the name of every operator that computes something, and the operations of matrix products."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.flops = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        if not operator.is_view:
            self.names.append(name)
        if name in ("mm", "addmm", "addmm_"):
            left, right = args[-2:]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return operator(*args, **(kwargs or {}))


def record(problem):
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs) if problem.needs_grad else None
    with Operators() as operators:
        testing.run_kernel(eager, problem, inputs, gradients)
    return operators.names


def flops(problem, needs=None):
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs) if needs else None
    with Operators() as operators:
        testing.run_kernel(eager, problem, inputs, gradients, needs or Needs())
    return operators.flops


@pytest.mark.parametrize("case", testing.CASES[:15], ids=lambda case: case.name)
def test_work_states_the_flops_that_are_executed(case):
    problem = case.problem()
    inference = problem.replace(needs_grad=False)
    assert flops(inference) == eager.work(inference, CPU).matmul_flops
    assert flops(problem, Needs()) == eager.work(problem, CPU).matmul_flops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("proj_size", [0, 2])
@pytest.mark.parametrize("needs_grad", [False, True], ids=["inference", "training"])
def test_work_states_the_operators_per_step_that_are_executed(dtype, proj_size, needs_grad):
    short = Problem(5, 3, 5, 7, proj_size=proj_size, dtype=dtype, needs_grad=needs_grad)
    long = short.replace(time=15)
    stated = eager.work(long, CPU).launches - eager.work(short, CPU).launches
    assert len(record(long)) - len(record(short)) == stated


def test_products_of_gradients_that_are_not_requested_are_skipped():
    tokens, gates = PROBLEM.time * PROBLEM.batch, 4 * PROBLEM.hidden_size
    everything = flops(PROBLEM, Needs())
    input_products = 2 * 2 * tokens * gates * PROBLEM.input_size
    assert everything - flops(PROBLEM, Needs(x=False)) == input_products
    state_products = 4 * 2 * PROBLEM.batch * gates * PROBLEM.state_size
    assert everything - flops(PROBLEM, Needs(state=False)) == state_products
    assert everything - flops(PROBLEM, Needs(weights=False)) == everything / 3


@pytest.mark.parametrize("layout", [Layout.DENSE, Layout.HOST_LENGTHS, Layout.DEVICE_LENGTHS], ids=lambda it: it.name)
def test_no_synchronization_with_the_device(layout):
    assert not WAITS & set(record(PROBLEM.replace(layout=layout)))


@pytest.mark.parametrize("layout", [Layout.DENSE, Layout.HOST_LENGTHS], ids=lambda layout: layout.name)
def test_autograd_of_the_differentiable_pass_gives_the_kernels_gradients(layout):
    problem = PROBLEM.replace(layout=layout, dropout=0.3)
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs)
    result, found = testing.run_kernel(eager, problem, inputs, gradients)
    leaves = [tensor.requires_grad_() for tensor in (inputs.x, inputs.h0, inputs.c0, *inputs.weights)]
    replayed = differentiable(problem, inputs)
    assert replayed.kept == ()
    for mine, theirs in zip(replayed[:3], result[:3], strict=True):
        torch.testing.assert_close(mine.detach(), theirs)
    derived = torch.autograd.grad(replayed[:3], leaves, gradients)
    for mine, theirs in zip(derived, (found.x, found.h0, found.c0, *found.weights), strict=True):
        torch.testing.assert_close(mine, theirs)


# In `make test` derivatives of second order are checked in test_unroll.py and tests/functional/test_autograd.py.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout",
    [pytest.param(Layout.DENSE, marks=pytest.mark.exhaustive), Layout.HOST_LENGTHS],
    ids=lambda layout: layout.name,
)
def test_the_differentiable_pass_has_second_derivatives(layout):
    problem = Problem(3, 3, 2, 2, num_layers=2, bidirectional=True, dropout=0.3, dtype=torch.float64, layout=layout)
    inputs = testing.make_inputs(problem)
    leaves = [tensor.requires_grad_() for tensor in (inputs.x, inputs.h0, inputs.c0, *inputs.weights)]

    def replay(x, h0, c0, *weights):
        return differentiable(problem, inputs._replace(x=x, h0=h0, c0=c0, weights=weights))[:3]

    assert torch.autograd.gradcheck(replay, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(replay, leaves, fast_mode=True)
