"""What is built ahead of calls is what calls launch."""

import pytest
import torch

from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.persistent.launches import builds

PROBLEM = Problem(8, 4, 64, 64, dtype=torch.bfloat16, needs_grad=True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["forward", "backward"]),
        ({"needs_grad": False}, ["forward"]),
        ({"num_layers": 2}, ["stacked forward", "stacked backward"]),
        ({"num_layers": 3}, ["stacked forward", "forward", "stacked backward", "backward"]),
        ({"num_layers": 2, "bidirectional": True}, ["forward", "backward"]),
    ],
)
def test_each_pass_is_built_as_it_runs(monkeypatch, changes, expected):
    found = []
    monkeypatch.setattr(Device, "probe", classmethod(lambda cls, device: Device.named("h200")))
    monkeypatch.setattr(builds, "forward_launch", lambda *given: found.append("forward"))
    monkeypatch.setattr(builds, "backward_launch", lambda *given: found.append("backward"))
    monkeypatch.setattr(builds, "pair_launch", lambda name, *given: found.append(f"stacked {name}"))
    builds.build_launches(PROBLEM.replace(**changes), torch.device("cuda", 0))
    assert found == expected
