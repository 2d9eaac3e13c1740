"""What is built ahead of calls is what calls launch."""

import types

import pytest
import torch

from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.cuda import toolchain
from gatewise.kernels.persistent.launches import builds, forward_launch, launch_of

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

    def launch(name):
        return types.SimpleNamespace(compile=lambda: found.append(name))

    monkeypatch.setattr(builds, "forward_launch", lambda *given: launch("forward"))
    monkeypatch.setattr(builds, "backward_launch", lambda *given: launch("backward"))
    monkeypatch.setattr(builds, "pair_launch", lambda name, *given: launch(f"stacked {name}"))
    builds.build_launches(PROBLEM.replace(**changes), torch.device("cuda", 0))
    assert found == expected


def test_a_pass_is_compiled_when_it_is_first_launched(monkeypatch):
    compiled = []
    monkeypatch.setattr(toolchain, "compile_source", lambda source, *given: compiled.append(source.stem) or b"code")
    launch_of.cache_clear()
    launch = forward_launch(PROBLEM, 4, 1, False, Device.named("a100"))
    assert launch.tiling.units
    assert not compiled
    assert launch.binary == launch.binary == b"code"
    assert compiled == ["forward"]
    launch_of.cache_clear()
