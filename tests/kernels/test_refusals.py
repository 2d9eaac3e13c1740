"""Every criterion of every kernel can be violated, and the refusal names it."""

import pytest
import torch

from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels import ALL

DEVICES = [Device.named("h200"), Device.named("v100"), Device.named("cpu")]
PROBLEMS = [
    Problem(10, 8, 64, 64, needs_grad=True),
    Problem(10, 8, 64, 64, dtype=torch.float16),
    Problem(10, 8, 64, 64, dtype=torch.bfloat16, needs_grad=True),
    Problem(10, 8, 64, 64, dtype=torch.float64),
]
CRITERIA = [(kernel, criterion) for kernel in ALL for criterion in kernel.criteria()]


@pytest.mark.parametrize(
    ("kernel", "criterion"), CRITERIA, ids=[f"{kernel.name}-{criterion.quantity}" for kernel, criterion in CRITERIA]
)
def test_its_violation_is_refused_by_name(kernel, criterion):
    for problem in PROBLEMS:
        for device in DEVICES:
            violated = criterion.violation(problem, device)
            refusal = criterion.check(*violated)
            assert refusal is not None, f"{problem} on {device.name}"
            assert refusal.quantity == criterion.quantity
            assert refusal.actual == criterion.actual(*violated)
            assert refusal.actual in str(refusal)
            assert criterion.allowed in str(refusal)


@pytest.mark.parametrize("kernel", ALL, ids=lambda kernel: kernel.name)
def test_each_kernel_takes_something(kernel):
    taken = [
        problem
        for problem in PROBLEMS
        for device in DEVICES
        if all(criterion.check(problem, device) is None for criterion in kernel.criteria())
    ]
    assert taken


def test_some_kernel_has_no_criteria():
    assert [kernel.name for kernel in ALL if not kernel.criteria()] == ["eager"]
