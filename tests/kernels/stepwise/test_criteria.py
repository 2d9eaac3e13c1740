"""The criteria of the kernel, and what it reports for devices that this machine does not have."""

import pytest
import torch

import gatewise
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.stepwise import stepwise

H200 = Device.named("h200")
PROBLEM = Problem(50, 256, 1024, 1024, dtype=torch.bfloat16, needs_grad=True)
FREE_CHOICES = {
    "dtype": [torch.bfloat16, torch.float16, torch.float32, torch.float64],
    "hidden_size": [1, 31, 8192],
    "batch": [1, 3, 4096],
    "proj_size": [0, 3],
    "bidirectional": [False, True],
    "num_layers": [1, 4],
}


def refusals(problem, device=H200):
    return [str(refusal) for criterion in stepwise.criteria() if (refusal := criterion.check(problem, device))]


@pytest.mark.parametrize("field", FREE_CHOICES)
def test_takes_every_size_dtype_and_option(field):
    for value in FREE_CHOICES[field]:
        assert refusals(PROBLEM.replace(**{field: value})) == []


@pytest.mark.parametrize("criterion", stepwise.criteria(), ids=lambda criterion: criterion.quantity)
def test_each_criterion_rejects_its_violation(criterion):
    refusal = criterion.check(*criterion.violation(PROBLEM, H200))
    assert refusal is not None
    assert refusal.actual
    assert refusal.allowed == criterion.allowed


def test_missing_packages_are_a_refusal_with_the_command():
    (refusal,) = refusals(PROBLEM, H200.replace(compiles=False))
    assert "pip install 'gatewise[cuda]'" in refusal


def test_reports_the_kept_tensors():
    assert [spec.shape for spec in stepwise.kept(PROBLEM, H200)] == [(1, 50, 256, 4096), (1, 50, 256, 1024)]
    projected = PROBLEM.replace(proj_size=64, num_layers=2)
    assert [spec.shape[-1] for spec in stepwise.kept(projected, H200)] == [64, 4096, 1024, 1024, 4096, 1024, 1024]
    assert stepwise.kept(PROBLEM.replace(needs_grad=False), H200) == ()


def test_explain_names_the_layout_without_a_gpu():
    module = gatewise.LSTM(4096, 4096, device="meta", dtype=torch.float32)
    decision = gatewise.explain(module, (100, 64, 4096), device="h200")
    assert decision.verdict("stepwise").accepted
    assert "row-major" in str(decision)
    assert not decision.verdict("persistent").accepted
