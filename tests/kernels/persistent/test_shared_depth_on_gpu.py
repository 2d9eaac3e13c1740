"""Wide layers on a device: blocks that share the depth of a forward product, and sums of one step in shared memory."""

import pytest
import torch

from gatewise import testing
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.sizes import tiling_choice
from gatewise.kernels.persistent.sizes.exactness import exact_products
from gatewise.testing.trials import Setting, trial

RAGGED = {"layout": Layout.DEVICE_LENGTHS}
TF32 = {"dtype": torch.float32, "allow_tf32": True}
# By whether the forward pass shares the depth, whether it has one buffer, and whether the backward pass has one.
PROBLEMS = {
    (False, True, False): Problem(9, 61, 64, 900, dtype=torch.bfloat16, needs_grad=True),
    (False, True, True): Problem(7, 61, 40, 1788, dtype=torch.float16, needs_grad=True, resets=True, **RAGGED),
    (True, False, False): Problem(8, 9, 64, 1020, needs_grad=True, **TF32),
    (True, True, True): Problem(9, 300, 64, 1566, needs_grad=True, **TF32, **RAGGED),
}


def kind(problem, device):
    def cut(backward):
        sizes = problem.hidden_size, problem.batch, problem.num_directions, device, backward
        return tiling_choice.tiling(*sizes, problem.element_bytes, exact_products(problem))

    forward, backward = cut(False), cut(True)
    return forward.split > 1, forward.buffers == 1, backward.buffers == 1


@pytest.mark.parametrize("wanted", PROBLEMS, ids=str)
def test_they_are_chosen(wanted):
    assert kind(PROBLEMS[wanted], Device.named("h200")) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", PROBLEMS, ids=str)
def test_values_and_gradients(wanted):
    testing.check_kernel(persistent, PROBLEMS[wanted], "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("hidden_size", "batch", "dtype", "tf32"),
    [
        (1148, 77, "bfloat16", False),
        (1899, 33, "float16", False),
        (1020, 64, "float32", True),
        (1501, 20, "float32", True),
        (1500, 19, "bfloat16", False),
        (904, 77, "float16", False),
    ],
)
def test_many_steps_and_calls_between_walls_of_nan(hidden_size, batch, dtype, tf32):
    """Blocks of a cluster that run ahead of each other, groups of rows whose values arrive late, calls that replay, and
    nothing read beyond a tensor.
    """
    trial(
        Setting(
            time=300,
            batch=batch,
            input_size=7,
            hidden_size=hidden_size,
            dtype=dtype,
            allow_tf32=tf32,
            device="cuda",
            kernel="persistent",
            states="given",
            weights="walls",
            above="y h c",
            calls=4,
            seed=hidden_size,
        )
    )
