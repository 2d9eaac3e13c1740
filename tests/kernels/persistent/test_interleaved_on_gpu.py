"""Wide layers on a device whose blocks exchange values in interleaved rows."""

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU, LSTM, Regularised
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.launches.builds import launches_of

RAGGED = {"layout": Layout.DEVICE_LENGTHS}
HALF = {"dtype": torch.bfloat16, "needs_grad": True}
TF32 = {"dtype": torch.float32, "allow_tf32": True, "needs_grad": True}
ZONEOUT = Regularised(LSTM(), zoneout=(0.2, 0.3))
PROBLEMS = {
    "whole groups": Problem(20, 16, 64, 1024, **HALF),
    "odd size, both directions": Problem(13, 21, 33, 650, bidirectional=True, **HALF, **RAGGED),
    "rows beyond the batch": Problem(9, 33, 64, 1024, **HALF),
    "few rows": Problem(8, 3, 40, 400, **HALF, **RAGGED),
    "five rows": Problem(6, 5, 777, 777, dtype=torch.float16, needs_grad=True, bidirectional=True, **RAGGED),
    "many groups in turn": Problem(5, 300, 64, 520, **HALF, **RAGGED),
    "resets": Problem(12, 40, 64, 704, cell=GRU(), resets=True, **HALF),
    "masks": Problem(12, 24, 64, 512, cell=ZONEOUT, **HALF),
    "layers in pairs": Problem(12, 20, 64, 650, num_layers=2, dropout=0.25, **HALF),
    "projection": Problem(9, 20, 64, 512, proj_size=40, **HALF),
    "TF32": Problem(9, 70, 64, 1500, bidirectional=True, **TF32),
    "TF32 of few rows": Problem(9, 6, 64, 777, **TF32, **RAGGED),
    "exact": Problem(9, 20, 64, 400, dtype=torch.float32, needs_grad=True),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_rows_are_interleaved(name):
    launches = launches_of(PROBLEMS[name], Device.named("h200").replace(compiles=True))
    backward = PROBLEMS[name].dtype != torch.float32 and PROBLEMS[name].batch > 4
    assert [launch.interleaved for launch in launches] == [True, backward]


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROBLEMS)
def test_values_and_gradients(name):
    testing.check_kernel(persistent, PROBLEMS[name], "cuda")
