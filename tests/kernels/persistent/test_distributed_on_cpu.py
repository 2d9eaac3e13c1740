"""Passes that exchange values in clusters, in the CUDA sources run on the CPU, agree with float64."""

from __future__ import annotations

import pytest
import torch

from gatewise.cells import GRU, RNN
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.launches import compiled
from gatewise.kernels.persistent.sizes.padding import hidden_of
from gatewise.kernels.persistent.sizes.tiling import Tiling
from tests.kernels.persistent.sources_on_cpu import launch_on_cpu
from tests.kernels.persistent.test_sources_on_cpu import check

DEVICE = Device.named("h200")
RAGGED = {"layout": Layout.DEVICE_LENGTHS}
PROBLEM = Problem(5, 11, 5, 40, dtype=torch.bfloat16, needs_grad=True)


@pytest.fixture
def in_clusters(monkeypatch):
    def of(rows):
        def tiling(hidden_size, batch, directions, device, backward, *rest, **options):
            groups = -(-batch // rows)
            return Tiling(hidden_of(hidden_size), 32, rows, 8, 2 if backward else 8, 1, backward, groups=groups, together=groups, directions=directions, distributed=True)

        monkeypatch.setattr(compiled, "tiling", tiling)
        compiled.launch_of.cache_clear()
        return launch_on_cpu(monkeypatch, DEVICE)

    yield of
    compiled.launch_of.cache_clear()


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (8, {}),
        (8, {"hidden_size": 72, "dtype": torch.float16, "resets": True}),
        (8, {"hidden_size": 66, "cell": GRU(), **RAGGED}),
        (8, {"hidden_size": 33, "bidirectional": True, "resets": True, **RAGGED}),
        (16, {"hidden_size": 136, "time": 2, "dtype": torch.float16, "cell": RNN("relu")}),
        (16, {"hidden_size": 20, "batch": 20, "bidirectional": True, **RAGGED}),
        (8, {"hidden_size": 13, "time": 1}),
        (8, {"hidden_size": 264, "time": 3}),
    ],
    ids=str,
)
def test_values_and_gradients(in_clusters, rows, options):
    problem = PROBLEM.replace(**options)
    check(in_clusters(rows), problem, 1e-2 if problem.dtype == torch.float16 else 5e-2)
