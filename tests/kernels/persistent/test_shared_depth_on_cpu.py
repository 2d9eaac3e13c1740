"""Blocks that share the depth of a product, and partial sums of one step, in the CUDA sources run on the CPU."""

from __future__ import annotations

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU, RNN
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.ranking import weights
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.sizes import exactness, tiling_choice
from tests.kernels.persistent.sources_on_cpu import launch_on_cpu
from tests.kernels.persistent.test_sources_on_cpu import check
from tests.pairwise import exhaustive

DEVICE = Device.named("h200").replace(multiprocessors=24)
RAGGED = {"layout": Layout.DEVICE_LENGTHS}
PROBLEM = Problem(3, 12, 5, 48, dtype=torch.bfloat16, needs_grad=True)
TF32 = {"dtype": torch.float32, "allow_tf32": True}
TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 2e-3}


def of_any_size(device, name):
    of_wide = {"least_units": 1, "least_units_of_several_groups": 1}
    return of_wide if name == "persistent wide layers" else weights(device, name)


@pytest.fixture
def cut(monkeypatch, cut_where):
    """Cut passes of any size as those of wide layers, into small blocks, so that there are several clusters."""

    def of(split, buffers):
        monkeypatch.setattr(tiling_choice, "measured_weights", of_any_size)
        for name in ("_UNROUNDED_HIDDEN", "_SMALL_HIDDEN"):  # small layers are rounded to TF32, too
            monkeypatch.setattr(exactness, name, 1)
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
        pytest.param(2, 1, {**TF32, "hidden_size": 64, "batch": 20}, marks=pytest.mark.exhaustive),
        (2, 2, {**TF32, "bidirectional": True, "resets": True}),
        (2, 1, {**TF32, "hidden_size": 42, "cell": GRU(), **RAGGED}),
        pytest.param(
            *(2, 2, {**TF32, "hidden_size": 61, "cell": RNN("relu"), "batch": 3}), marks=pytest.mark.exhaustive
        ),
        (1, 1, {"hidden_size": 40, "resets": True, **RAGGED}),
        pytest.param(1, 1, {"dtype": torch.float16, "hidden_size": 72}, marks=pytest.mark.exhaustive),
        pytest.param(1, 1, {**TF32, "hidden_size": 33, "bidirectional": True}, marks=pytest.mark.exhaustive),
        pytest.param(1, 1, {"hidden_size": 40, "num_layers": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_values_and_gradients(cut, split, buffers, options):
    sources, problem = cut(split, buffers), PROBLEM.replace(**options)
    check(sources, problem, TOLERANCES[problem.dtype])
    macros = {source: dict(macros) for source, macros in sources.compiled}
    assert macros["forward.cu"]["SPLIT"] == split
    assert macros["forward.cu"]["BUFFERS"] == macros["backward.cu"]["BUFFERS"] == buffers


@pytest.mark.parametrize("slow", [0, *exhaustive(1, 3)])
def test_a_slow_block_of_a_cluster_is_waited_for(cut, slow):
    sources = cut(2, 1)
    sources.slow = slow
    check(sources, PROBLEM.replace(**TF32), TOLERANCES[torch.float32])


def test_nan_stays_in_its_row(cut):
    cut(2, 1)
    problem = PROBLEM.replace(**TF32)
    inputs = testing.make_inputs(problem)
    clean, _ = testing.run_kernel(persistent, problem, inputs)
    inputs.h0[0, 4, 40] = torch.nan
    outputs, _ = testing.run_kernel(persistent, problem, inputs)
    assert outputs.y[:, 4].isnan().all()
    others = [row for row in range(PROBLEM.batch) if row != 4]
    assert torch.equal(outputs.y[:, others], clean.y[:, others])
