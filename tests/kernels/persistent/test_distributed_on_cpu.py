"""Passes whose blocks exchange values in clusters, in the CUDA sources run on the CPU, agree with float64."""

from __future__ import annotations

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU, RNN
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.kernel import persistent
from tests.kernels.persistent.sources_on_cpu import launch_on_cpu
from tests.kernels.persistent.test_sources_on_cpu import check, check_nan_stays_in_its_row

DEVICE = Device.named("h200")
RAGGED = {"layout": Layout.DEVICE_LENGTHS}
PROBLEM = Problem(5, 11, 5, 40, dtype=torch.bfloat16, needs_grad=True)


@pytest.fixture
def sources(monkeypatch, cut_where):
    cut_where(lambda cut: cut.distributed)
    return launch_on_cpu(monkeypatch, DEVICE)


@pytest.mark.parametrize(
    "options",
    [
        {"hidden_size": 72, "dtype": torch.float16, "resets": True},
        {"hidden_size": 33, "bidirectional": True, "resets": True, **RAGGED},
        {"hidden_size": 250, "time": 3, "cell": RNN("relu"), "dtype": torch.float16},
        pytest.param({"hidden_size": 66, "cell": GRU(), **RAGGED}, marks=pytest.mark.exhaustive),
        pytest.param({"batch": 20, "bidirectional": True}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_values_and_gradients(sources, options):
    problem = PROBLEM.replace(**options)
    check(sources, problem, 1e-2 if problem.dtype == torch.float16 else 5e-2)
    assert all(dict(macros).get("DISTRIBUTED") for source, macros in sources.compiled if "ward" in source)


def test_segments_in_some_of_which_rows_have_no_steps(sources, cut):
    cut(3)
    resets = torch.zeros(7, 11, dtype=torch.bool)
    resets[[0, 3, 6]] = True
    problem = PROBLEM.replace(time=7, lean=True, bidirectional=True, resets=True, **RAGGED)
    lengths = [7, 6, 5, 4, 3, 2, 1, 0, 7, 1, 2]
    check(sources, problem, 5e-2, lengths=lengths, resets=resets)
    assert sources.launched.count("recurrent_backward") == 3


def test_a_slow_block_is_waited_for(sources):
    sources.slow = 1
    check(sources, PROBLEM.replace(time=4, batch=3), 5e-2)


def test_nan_stays_in_its_row(sources):
    check_nan_stays_in_its_row(PROBLEM)


@pytest.mark.parametrize("hidden_size", [19, 72], ids=["one block", "three blocks"])
def test_infinite_states_make_no_nan(sources, hidden_size):
    """With an odd number of blocks, half of the warps have a span of the depth that does not exist."""
    problem = PROBLEM.replace(hidden_size=hidden_size, needs_grad=False)
    inputs = testing.make_inputs(problem)
    inputs.h0[0, 1, hidden_size - 2] = torch.inf
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs))
    exact = testing.named(problem, *testing.oracle(problem, inputs))
    assert torch.equal(found["y"].isnan(), exact["y"].isnan())
    assert not found["y"].isnan().all()


def test_units_that_pad_a_row_make_no_nan_of_gradients(sources):
    problem = PROBLEM.replace(hidden_size=33)
    inputs = testing.make_inputs(problem)
    inputs.h0[0, 1, 4] = torch.inf
    gradients = testing.make_gradients(problem, inputs)
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    exact = testing.named(problem, *testing.oracle(problem, inputs, gradients))
    assert {name: int(value.isnan().sum()) for name, value in found.items()} == {
        name: int(value.isnan().sum()) for name, value in exact.items()
    }
