"""The products of warpgroups in the CUDA source of the forward pass, run on the CPU, agree with float64."""

from __future__ import annotations

import pytest
import torch

from gatewise.cells import GRU, RNN, Regularised
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.ranking import weights
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.sizes import tiling_choice
from tests.kernels.persistent.sources_on_cpu import launch_on_cpu
from tests.kernels.persistent.test_sources_on_cpu import check, check_nan_stays_in_its_row

DEVICE = Device.named("h200").replace(multiprocessors=12)
RAGGED = {"layout": Layout.DEVICE_LENGTHS}
PROBLEM = Problem(5, 20, 5, 40, dtype=torch.bfloat16, needs_grad=True)
REMEMBERED = tiling_choice._of_one_group, tiling_choice.tiling


def of_any_size(device, name):
    return {"least_units": 1, "most_units": 512} if name == "persistent warpgroups" else weights(device, name)


@pytest.fixture
def by_warpgroups(monkeypatch):
    """Have forward passes of any size cut for warpgroups, into blocks of so many rows."""
    real = tiling_choice.fits

    def of(rows):
        def fits(cut, device):
            return (cut.backward or (cut.warpgroups and cut.rows == rows)) and real(cut, device)

        monkeypatch.setattr(tiling_choice, "fits", fits)
        monkeypatch.setattr(tiling_choice, "measured_weights", of_any_size)
        for one in REMEMBERED:
            one.cache_clear()
        return launch_on_cpu(monkeypatch, DEVICE)

    yield of
    for one in REMEMBERED:
        one.cache_clear()


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        pytest.param(24, {}, marks=pytest.mark.exhaustive),  # with a NaN and values that arrive late below
        (24, {"hidden_size": 72, "dtype": torch.float16, "resets": True}),
        pytest.param(24, {"hidden_size": 66, "batch": 30, "cell": GRU(), **RAGGED}, marks=pytest.mark.exhaustive),
        (32, {"hidden_size": 33, "batch": 40, "bidirectional": True, **RAGGED}),
        pytest.param(
            *(48, {"hidden_size": 136, "batch": 50, "time": 2, "cell": RNN("relu")}), marks=pytest.mark.exhaustive
        ),
        pytest.param(64, {"hidden_size": 40, "batch": 150, "time": 3}, marks=pytest.mark.exhaustive),
        pytest.param(
            *(64, {"hidden_size": 40, "batch": 70, "time": 3, "resets": True, **RAGGED}), marks=pytest.mark.exhaustive
        ),
    ],
    ids=str,
)
def test_values_and_gradients(by_warpgroups, rows, options):
    sources, problem = by_warpgroups(rows), PROBLEM.replace(**options)
    chosen = tiling_choice.tiling(problem.hidden_size, problem.batch, problem.num_directions, DEVICE, False)
    assert chosen is not None
    assert chosen.warpgroups
    check(sources, problem, 1e-2 if problem.dtype == torch.float16 else 5e-2)
    assert any(dict(macros).get("WARPGROUPS") for source, macros in sources.compiled if source == "forward.cu")


def test_values_that_arrive_late_are_copied_again(by_warpgroups):
    sources = by_warpgroups(24)
    sources.slow = 1
    check(sources, PROBLEM.replace(hidden_size=72, batch=30, time=3), 5e-2)


def test_nan_stays_in_its_row(by_warpgroups):
    by_warpgroups(24)
    check_nan_stays_in_its_row(PROBLEM)


@pytest.mark.parametrize(
    ("device", "sizes", "wanted"),
    [
        ("h200", (512, 256, 1, False, 2), True),
        ("h200", (512, 128, 2, False, 2), True),
        ("h200", (512, 256, 1, True, 2), False),
        ("h200", (512, 256, 1, False, 4), False),
        ("h200", (512, 64, 1, False, 2), False),
        ("h200", (520, 256, 1, False, 2), False),
        ("b200", (512, 256, 1, False, 2), False),
        ("a100", (512, 256, 1, False, 2), False),
    ],
)
def test_where_they_are_chosen(device, sizes, wanted):
    """Forward passes in 16 bits on Hopper, where each block has many rows."""
    chosen = tiling_choice.tiling(*sizes[:3], Device.named(device), *sizes[3:])
    assert chosen is not None
    assert chosen.warpgroups == wanted


def test_not_with_masks():
    problem = Problem(50, 256, 512, 512, dtype=torch.bfloat16, cell=Regularised(GRU(), recurrent_dropout=0.2))
    device = Device.named("h200").replace(compiles=True)
    assert "by warpgroups" not in persistent.algorithm(problem, device)
    assert "by warpgroups" in persistent.algorithm(problem.replace(cell=GRU()), device)
