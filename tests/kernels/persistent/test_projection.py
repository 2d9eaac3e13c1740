"""Layers with projection by emulated launches: every result and gradient is the oracle's."""

import pytest
import torch

from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.criteria import CRITERIA
from gatewise.kernels.persistent.kernel import persistent
from tests.kernels.persistent.emulation import assert_agrees, emulate


@pytest.mark.parametrize("layout", [Layout.DENSE, Layout.HOST_LENGTHS], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"bidirectional": True, "num_layers": 2}, {"bias": False}, {"hidden_size": 13}], ids=str
)
def test_projection_is_the_oracles(monkeypatch, layout, options):
    emulate(monkeypatch)
    problem = Problem(7, 5, 8, 16, proj_size=8, dtype=torch.float64, layout=layout, needs_grad=True)
    assert_agrees(problem.replace(**options), calls=1)


def test_projection_is_stated():
    problem = Problem(20, 8, 64, 256, 64, dtype=torch.bfloat16, needs_grad=True)
    device = Device.named("h200")
    assert [criterion.check(problem, device) for criterion in persistent.criteria()].count(None) == len(CRITERIA)
    (refusal,) = [found for own in CRITERIA if (found := own.check(problem.replace(lean=True), device)) is not None]
    assert "proj_size is 64" in str(refusal)
    assert [spec.shape for spec in persistent.kept(problem, device)] == [
        (1, 20, 8, 1024),
        (1, 20, 8, 256),
        (20, 8, 256),
    ]
    plain_work = persistent.work(problem.replace(proj_size=0), device)
    assert persistent.work(problem, device).launches > plain_work.launches
