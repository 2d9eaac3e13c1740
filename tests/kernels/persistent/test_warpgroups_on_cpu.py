"""The products of warpgroups in the CUDA sources of the persistent kernel, run on the CPU, agree with float64."""

import pytest
import torch

from gatewise.cells import GRU
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.sizes import tilings
from tests.kernels.persistent.sources_on_cpu import launch_on_cpu
from tests.kernels.persistent.test_sources_on_cpu import check

DEVICE = Device.named("h200").replace(multiprocessors=6)
RAGGED = {"layout": Layout.DEVICE_LENGTHS}
PROBLEM = Problem(5, 9, 5, 40, dtype=torch.bfloat16, needs_grad=True)
REMEMBERED = tilings._of_one_group, tilings.tiling


@pytest.fixture
def by_warpgroups(monkeypatch):
    """Have the forward pass cut for warpgroups: so many units and rows of a block, and so many warps."""
    real = tilings.fits

    def of(units, rows, warps):
        def fits(cut, device):
            is_wanted = cut.split == 1
            if not cut.backward:
                is_wanted = cut.warpgroups and (cut.units, cut.rows, cut.warps) == (units, rows, warps)
            return is_wanted and real(cut, device)

        monkeypatch.setattr(tilings, "fits", fits)
        for one in REMEMBERED:
            one.cache_clear()
        return launch_on_cpu(monkeypatch, DEVICE)

    yield of
    for one in REMEMBERED:
        one.cache_clear()


@pytest.mark.parametrize(
    ("cut", "options"),
    [
        ((16, 8, 4), {}),
        ((16, 16, 8), {"hidden_size": 72, "dtype": torch.float16, "resets": True}),
        ((32, 16, 8), {"hidden_size": 72, "bidirectional": True, **RAGGED}),
        ((24, 24, 8), {"hidden_size": 66, "batch": 20, "cell": GRU(), **RAGGED}),
        ((8, 8, 16), {"hidden_size": 33, "time": 3}),
        ((32, 24, 16), {"hidden_size": 136, "batch": 70, "time": 2}),
    ],
    ids=str,
)
def test_gradients(by_warpgroups, cut, options):
    sources, problem = by_warpgroups(*cut), PROBLEM.replace(**options)
    sizes = problem.hidden_size, problem.batch, problem.num_directions
    chosen = tilings.tiling(*sizes, DEVICE, False)
    assert chosen is not None
    assert chosen.warpgroups
    check(sources, problem, 1e-2 if problem.dtype == torch.float16 else 5e-2)
