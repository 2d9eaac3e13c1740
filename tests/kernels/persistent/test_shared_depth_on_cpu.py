"""Blocks that share the depth of a product, and partial sums of one step, in the CUDA sources run on the CPU."""

from __future__ import annotations

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU, RNN
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.kernel import persistent
from tests.kernels.persistent.sources_on_cpu import launch_on_cpu
from tests.kernels.persistent.test_sources_on_cpu import check

DEVICE = Device.named("h200").replace(multiprocessors=24)
RAGGED = {"layout": Layout.DEVICE_LENGTHS}
PROBLEM = Problem(5, 12, 5, 48, dtype=torch.bfloat16, needs_grad=True)
TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 2e-5}


@pytest.fixture
def cut(monkeypatch, cut_where):
    """Cut passes into small blocks, so that there are several clusters, and those of the forward pass as given."""

    def of(split, buffers):
        cut_where(
            lambda cut: (
                cut.buffers == buffers
                and cut.units == (8 if cut.split > 1 or not cut.backward else 16)
                and cut.warps == 4
                and cut.rows <= 16
                and (cut.backward or cut.split == split)
            )
        )
        return launch_on_cpu(monkeypatch, DEVICE)

    return of


@pytest.mark.parametrize(
    ("split", "buffers", "options"),
    [
        (2, 1, {}),
        (2, 2, {"dtype": torch.float16, "bidirectional": True, "resets": True}),
        (2, 1, {"dtype": torch.float32, "hidden_size": 42, **RAGGED}),
        (2, 1, {"dtype": torch.float32, "allow_tf32": True, "hidden_size": 64, "batch": 20}),
        (4, 1, {"hidden_size": 64, "cell": GRU(), **RAGGED}),
        (4, 2, {"dtype": torch.float32, "hidden_size": 61, "cell": RNN("relu"), "batch": 1}),
        (1, 1, {"hidden_size": 40, "resets": True, **RAGGED}),
        (1, 1, {"dtype": torch.float32, "allow_tf32": True, "hidden_size": 33, "bidirectional": True}),
        (1, 1, {"hidden_size": 40, "num_layers": 2}),  # two layers in one launch
    ],
    ids=str,
)
def test_values_and_gradients(cut, split, buffers, options):
    sources, problem = cut(split, buffers), PROBLEM.replace(**options)
    tolerance = 2e-3 if problem.allow_tf32 else TOLERANCES[problem.dtype]
    check(sources, problem, tolerance)
    macros = {source: dict(macros) for source, macros in sources.compiled}
    assert macros["forward.cu"]["SPLIT"] == split
    assert macros["forward.cu"]["BUFFERS"] == macros["backward.cu"]["BUFFERS"] == buffers


@pytest.mark.parametrize("slow", [0, 1, 3])
def test_a_slow_block_of_a_cluster_is_waited_for(cut, slow):
    sources = cut(2, 1)
    sources.slow = slow
    check(sources, PROBLEM, 5e-2)


def test_nan_stays_in_its_row(cut):
    cut(2, 1)
    inputs = testing.make_inputs(PROBLEM)
    clean, _ = testing.run_kernel(persistent, PROBLEM, inputs)
    inputs.h0[0, 4, 40] = torch.nan
    outputs, _ = testing.run_kernel(persistent, PROBLEM, inputs)
    assert outputs.y[:, 4].isnan().all()
    others = [row for row in range(PROBLEM.batch) if row != 4]
    assert torch.equal(outputs.y[:, others], clean.y[:, others])
