"""Wide layers on a device whose blocks multiply several groups of eight batch rows at a time."""

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU, LSTM, Regularised
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.launches.builds import launches_of

TF32 = {"dtype": torch.float32, "allow_tf32": True}
# By the groups of eight batch rows that the forward and the backward pass multiply at a time.
PROBLEMS = {
    (3, 3): Problem(12, 20, 64, 1500, dtype=torch.bfloat16, needs_grad=True),
    (2, 2): Problem(9, 80, 64, 1150, dtype=torch.float16, needs_grad=True),
    (3, 5): Problem(7, 193, 40, 552, dtype=torch.bfloat16, needs_grad=True, resets=True),
    (2, 4): Problem(9, 64, 64, 1024, dtype=torch.bfloat16, needs_grad=True, cell=GRU(), bidirectional=True),
    (4, 4): Problem(8, 128, 33, 760, dtype=torch.float16, needs_grad=True, num_layers=2, dropout=0.25),
    (5, 2): Problem(9, 80, 64, 1500, dtype=torch.bfloat16, needs_grad=True),
    (4, 1): Problem(9, 61, 64, 1020, needs_grad=True, **TF32),
    (3, 1): Problem(9, 200, 64, 768, needs_grad=True, **TF32),
}


def groups(problem):
    launches = launches_of(problem, Device.named("h200").replace(compiles=True))
    return tuple(launch.tiling.eights for launch in launches)


@pytest.mark.parametrize("wanted", PROBLEMS, ids=str)
def test_they_are_chosen(wanted):
    assert groups(PROBLEMS[wanted]) == wanted


def test_rows_that_end_at_different_steps_are_multiplied_one_group_at_a_time():
    assert groups(PROBLEMS[3, 3].replace(layout=Layout.DEVICE_LENGTHS)) == (1, 1)


def test_a_cell_with_masks_multiplies_one_group_at_a_time():
    assert groups(PROBLEMS[3, 3].replace(cell=Regularised(LSTM(), recurrent_dropout=0.2))) == (1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", PROBLEMS, ids=str)
def test_values_and_gradients(wanted):
    testing.check_kernel(persistent, PROBLEMS[wanted], "cuda")
