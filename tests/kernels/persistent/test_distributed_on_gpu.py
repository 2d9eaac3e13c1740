"""Narrow layers on a device, whose blocks exchange values through distributed shared memory."""

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU, LSTM, Regularised
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.launches.builds import launches_of
from gatewise.kernels.persistent.sizes import tiling_choice

RAGGED = {"layout": Layout.DEVICE_LENGTHS}
SPEECH = Problem(40, 32, 80, 256, dtype=torch.bfloat16, needs_grad=True)
# By the blocks of a cluster, and those of a multiprocessor.
PROBLEMS = {
    "speech": (8, 1, SPEECH),
    "one row": (8, 1, SPEECH.replace(batch=1)),
    "odd": (4, 1, Problem(30, 19, 33, 101, dtype=torch.float16, needs_grad=True, resets=True)),
    "both directions": (7, 1, Problem(31, 21, 40, 218, dtype=torch.bfloat16, needs_grad=True, bidirectional=True)),
    "many rows": (8, 2, SPEECH.replace(batch=235)),
    "gru": (5, 1, Problem(25, 60, 64, 160, dtype=torch.bfloat16, needs_grad=True, cell=GRU(), **RAGGED)),
    "ragged": (6, 2, Problem(25, 90, 64, 190, dtype=torch.float16, needs_grad=True, bidirectional=True, **RAGGED)),
    "two blocks": (2, 1, Problem(50, 70, 12, 60, dtype=torch.float16, needs_grad=True, resets=True, **RAGGED)),
    "inference": (8, 1, SPEECH.replace(needs_grad=False)),
    "one block": (1, 1, Problem(50, 70, 12, 29, dtype=torch.bfloat16, **RAGGED)),
}
DEVICE = Device.named("h200").replace(compiles=True)


@pytest.fixture
def in_clusters(cut_where):
    cut_where(lambda cut: cut.distributed)


@pytest.mark.parametrize("name", PROBLEMS)
def test_they_are_chosen(name):
    blocks, resident, problem = PROBLEMS[name]
    for launch in launches_of(problem, DEVICE):
        cut = launch.tiling
        assert cut.groups == cut.together  # see distributed.cuh
        assert (cut.distributed, cut.cluster, cut.resident_blocks) == (True, blocks, resident)
        assert launch.shape.cluster == blocks
        # Blocks that are not to share a multiprocessor take more than half of its memory.
        assert (2 * launch.shape.shared_bytes > tiling_choice.shared_memory(DEVICE)) == (resident == 1)


@pytest.mark.parametrize("reserved", [1, 16])
def test_multiprocessors_stay_free(reserved):
    """In backward passes, of which blocks never share a multiprocessor then."""
    for batch in (16, 100, 150, 208):
        launch = launches_of(SPEECH.replace(batch=batch, reserved=reserved), DEVICE)[1]
        x, y, z = launch.shape.grid
        assert launch.tiling.resident_blocks == 1
        assert x * y * z <= DEVICE.multiprocessors - reserved
    assert launches_of(SPEECH.replace(batch=100, reserved=reserved), DEVICE)[1].tiling.distributed


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 264},
        {"time": 1},
        {"batch": 241},
        {"dtype": torch.float32, "allow_tf32": True},
        {"cell": Regularised(LSTM(), recurrent_dropout=0.2)},
    ],
    ids=str,
)
def test_where_they_are_not(changes):
    """More blocks than a cluster has, nothing to exchange, more rows than run at once, float32, masks."""
    assert not any(launch.tiling.distributed for launch in launches_of(SPEECH.replace(**changes), DEVICE))


def test_a_single_block_is_one_in_forward_passes_alone():
    forward, backward = launches_of(SPEECH.replace(hidden_size=32), DEVICE)
    assert (forward.tiling.distributed, forward.shape.cluster) == (True, 1)
    assert (backward.tiling.distributed, backward.shape.cluster) == (False, 0)


@pytest.mark.parametrize("device", ["a100", "rtx4090"])
def test_gpus_without_clusters(device):
    assert not any(launch.tiling.distributed for launch in launches_of(SPEECH, Device.named(device)))


def test_a_small_part_of_a_gpu():
    part = DEVICE.replace(multiprocessors=10)
    assert not any(launch.tiling.distributed for launch in launches_of(SPEECH, part))


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROBLEMS)
def test_values_and_gradients(name, in_clusters):
    testing.check_kernel(persistent, PROBLEMS[name][2], "cuda")


@pytest.mark.gpu
def test_segments(in_clusters, cut):
    cut(4)
    problem = SPEECH.replace(time=90, hidden_size=100, lean=True, bidirectional=True, resets=True, **RAGGED)
    testing.check_kernel(persistent, problem, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [5, 64, 200])
def test_hundreds_of_steps(batch, in_clusters):
    problem = Problem(700, batch, 16, 200, dtype=torch.bfloat16, needs_grad=True)
    for seed in range(3):
        testing.check_kernel(persistent, problem, "cuda", seed=seed)


@pytest.mark.gpu
def test_calls_are_equal(in_clusters):
    problem = SPEECH.replace(time=200, batch=100, bidirectional=True)
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    first = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    for _ in range(10):
        again = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
        assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.gpu
def test_beside_another_kernel(in_clusters):
    """Clusters for which another stream leaves no room begin one by one, when there is some."""
    problem = SPEECH.replace(time=100, batch=200)
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    alone = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    matrix, stream = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(100):
            matrix @ matrix
    beside = testing.run_kernel(persistent, problem, inputs, gradients)
    assert not stream.query()  # still at work
    torch.cuda.synchronize()
    assert all(torch.equal(value, alone[name]) for name, value in testing.named(problem, *beside).items())
