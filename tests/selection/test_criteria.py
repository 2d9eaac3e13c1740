"""For every device and dtype, some kernel accepts the problem."""

import itertools

import pytest
import torch

from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels import ALL
from gatewise.selection.admit import verdict
from tests.pairwise import each_value

PLAIN = Problem(time=20, batch=8, input_size=64, hidden_size=64, needs_grad=True)


@pytest.mark.parametrize(
    ("name", "dtype"),
    each_value(
        [*itertools.product(Device.names(), [torch.float64, torch.float32, torch.float16, torch.bfloat16])], most=6
    ),
    ids=str,
)
def test_some_kernel_takes_every_problem(name, dtype):
    for problem in (PLAIN, PLAIN.replace(time=0), PLAIN.replace(batch=0), PLAIN.replace(time=70000)):
        verdicts = [verdict(kernel, problem.replace(dtype=dtype), Device.named(name)) for kernel in ALL]
        assert any(answer.accepted for answer in verdicts)
