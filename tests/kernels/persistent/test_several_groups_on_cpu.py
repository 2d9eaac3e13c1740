"""Blocks that multiply several groups of eight batch rows at a time, in the CUDA sources run on the CPU."""

from __future__ import annotations

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.sizes import exactness, tiling_choice
from tests.kernels.persistent.sources_on_cpu import launch_on_cpu
from tests.kernels.persistent.test_shared_depth_on_cpu import of_any_size
from tests.kernels.persistent.test_sources_on_cpu import check

DEVICE = Device.named("h200").replace(multiprocessors=24)
PROBLEM = Problem(3, 22, 5, 48, dtype=torch.bfloat16, needs_grad=True)
TF32 = {"dtype": torch.float32, "allow_tf32": True}
TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 2e-3}


@pytest.fixture
def cut(monkeypatch, cut_where):
    """Cut passes into blocks of three groups, some of whose weights are in shared memory."""

    def of(eights):
        monkeypatch.setattr(tiling_choice, "measured_weights", of_any_size)
        monkeypatch.setattr(tiling_choice, "_WARPS_OF_SEVERAL_GROUPS", 4)
        for name in ("_UNROUNDED_HIDDEN", "_SMALL_HIDDEN"):  # small layers are rounded to TF32, too
            monkeypatch.setattr(exactness, name, 1)
        cut_where(
            lambda cut: (
                cut.eights == eights and cut.rows == 24 and cut.warps == 4 and cut.split == 1 and cut.units <= 16
            )
        )
        return launch_on_cpu(monkeypatch, DEVICE)

    return of


@pytest.mark.parametrize(
    ("eights", "options"),
    [
        (2, {"resets": True}),
        (3, {"dtype": torch.float16, "bidirectional": True}),
        (2, {**TF32, "batch": 41}),
        (3, {**TF32, "cell": GRU()}),
        pytest.param(3, {"hidden_size": 41, "num_layers": 2}, marks=pytest.mark.exhaustive),
        pytest.param(2, {**TF32, "hidden_size": 61, "resets": True}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_values_and_gradients(cut, eights, options):
    sources, problem = cut(eights), PROBLEM.replace(**options)
    check(sources, problem, TOLERANCES[problem.dtype])
    macros = {source: dict(macros) for source, macros in sources.compiled}
    assert macros["forward.cu"]["EIGHTS"] == macros["backward.cu"]["EIGHTS"] == eights


@pytest.mark.parametrize("options", [{}, TF32], ids=["bf16", "TF32"])
def test_nan_stays_in_its_row(cut, options):
    cut(2)
    problem = PROBLEM.replace(**options)
    inputs = testing.make_inputs(problem)
    clean, _ = testing.run_kernel(persistent, problem, inputs)
    inputs.h0[0, 12, 40] = torch.nan
    outputs, _ = testing.run_kernel(persistent, problem, inputs)
    assert outputs.y[:, 12].isnan().all()
    others = [row for row in range(PROBLEM.batch) if row != 12]
    assert torch.equal(outputs.y[:, others], clean.y[:, others])
