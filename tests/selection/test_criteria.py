"""Every demand of every kernel: stated, met somewhere, and refused with both values where it is violated."""

import pytest
import torch

from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels import ALL
from gatewise.selection.admit import verdict

PLAIN = Problem(time=20, batch=8, input_size=64, hidden_size=64, needs_grad=True)
DEMANDS = [(kernel, criterion) for kernel in ALL for criterion in kernel.criteria()]


@pytest.mark.parametrize(
    ("kernel", "criterion"), DEMANDS, ids=lambda value: getattr(value, "name", None) or value.quantity
)
def test_each_demand_can_be_met_and_violated(kernel, criterion):
    device = Device.named("h200")
    assert criterion.check(PLAIN, device) is None
    problem, elsewhere = criterion.violation(PLAIN, device)
    refusal = criterion.check(problem, elsewhere)
    assert refusal is not None
    assert criterion.quantity in str(refusal)
    assert criterion.actual(problem, elsewhere) in str(refusal)
    assert criterion.allowed in str(refusal)
    assert refusal in verdict(kernel, problem, elsewhere).refusals


@pytest.mark.parametrize("name", Device.names())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_some_kernel_takes_every_problem(name, dtype):
    for problem in (PLAIN, PLAIN.replace(time=0), PLAIN.replace(batch=0), PLAIN.replace(time=70000)):
        verdicts = [verdict(kernel, problem.replace(dtype=dtype), Device.named(name)) for kernel in ALL]
        assert any(answer.accepted for answer in verdicts)
