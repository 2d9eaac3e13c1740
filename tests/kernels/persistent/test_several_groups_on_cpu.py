"""Blocks that multiply several groups of eight batch rows at a time, in the CUDA sources run on the CPU."""

from __future__ import annotations

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU, RNN
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
    """Cut passes into blocks of several groups, some of whose weights are in shared memory."""

    def of(eights, rows=24):
        monkeypatch.setattr(tiling_choice, "measured_weights", of_any_size)
        monkeypatch.setattr(tiling_choice, "_WARPS_OF_SEVERAL_GROUPS", 4)
        for name in ("_UNROUNDED_HIDDEN", "_SMALL_HIDDEN"):  # small layers are rounded to TF32, too
            monkeypatch.setattr(exactness, name, 1)
        cut_where(
            lambda cut: (
                cut.eights == eights and cut.rows == rows and cut.warps == 4 and cut.split == 1 and cut.units <= 16
            )
        )
        return launch_on_cpu(monkeypatch, DEVICE)

    return of


@pytest.mark.parametrize(
    ("eights", "rows", "options"),
    [
        (2, 24, {"resets": True}),
        (3, 24, {"dtype": torch.float16, "bidirectional": True}),
        (3, 40, {"batch": 37}),
        (2, 24, {**TF32, "batch": 41}),
        (3, 24, {**TF32, "cell": GRU()}),
        pytest.param(5, 40, {"batch": 39}, marks=pytest.mark.exhaustive),
        pytest.param(4, 32, {"hidden_size": 41, "batch": 30}, marks=pytest.mark.exhaustive),
        pytest.param(2, 24, {**TF32, "hidden_size": 61, "resets": True}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_values_and_gradients(cut, eights, rows, options):
    sources, problem = cut(eights, rows), PROBLEM.replace(**options)
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


@pytest.mark.parametrize("factor", [2.0**40, 2.0**-40])
def test_rows_of_any_size_are_rounded_alike(cut, factor):
    """In TF32 a product is repeated with another scale where a row does not fit; a ReLU multiplies by any factor."""
    cut(3)
    problem = PROBLEM.replace(**TF32, cell=RNN("relu"), bias=False, needs_grad=False)
    inputs = testing.make_inputs(problem)
    plain, _ = testing.run_kernel(persistent, problem, inputs)
    for tensor in (inputs.x, inputs.h0):
        tensor[..., 3:20, :] *= factor  # rows of all three groups
    outputs, _ = testing.run_kernel(persistent, problem, inputs)
    plain.y[:, 3:20] *= factor
    torch.testing.assert_close(outputs.y, plain.y, rtol=1e-3, atol=0)
