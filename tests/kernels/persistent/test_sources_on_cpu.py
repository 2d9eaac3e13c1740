"""The CUDA sources of the persistent kernel, run on the CPU with and without resets, agree with float64."""

import functools

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.launches import compiled
from gatewise.kernels.persistent.sizes import exactness, layer_pairs, tiling, tiling_choice
from tests.kernels.persistent.sources_on_cpu import launch_on_cpu
from tests.pairwise import exhaustive

DEVICE = Device.named("a100").replace(multiprocessors=6)  # no clusters, which need their own instructions
RAGGED = {"layout": Layout.DEVICE_LENGTHS}
PROBLEM = Problem(6, 9, 5, 8, dtype=torch.float32, needs_grad=True, resets=True)
NUMBERS = {
    "exact": ({}, 3e-5),
    "TF32": ({"allow_tf32": True}, 5e-3),
    "bfloat16": ({"dtype": torch.bfloat16}, 5e-2),
    "float16": ({"dtype": torch.float16}, 1e-2),
}


def check(sources, problem, tolerance=3e-5, **given):
    inputs = testing.make_inputs(problem, lengths=given.pop("lengths", None))._replace(**given)
    gradients = testing.make_gradients(problem, inputs)
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    for name, value in testing.named(problem, *testing.oracle(problem, inputs, gradients)).items():
        assert testing.relative_error(found[name], value) < tolerance, name
    assert {"recurrent_forward", "recurrent_backward"} <= set(sources.launched)


def check_nan_stays_in_its_row(problem):
    """Check that a NaN in the initial hidden state of row 4 reaches the outputs of that row, and no others."""
    inputs = testing.make_inputs(problem)
    clean, _ = testing.run_kernel(persistent, problem, inputs)
    inputs.h0[0, 4, 3] = torch.nan
    found, _ = testing.run_kernel(persistent, problem, inputs)
    others = [row for row in range(problem.batch) if row != 4]
    assert found.y[:, 4].isnan().all()
    assert torch.equal(found.y[:, others], clean.y[:, others])


@pytest.fixture
def sources(monkeypatch):
    return launch_on_cpu(monkeypatch, DEVICE)


# All single layers below are exact and have resets.
@pytest.mark.parametrize(
    ("numbers", "resets"),
    [
        pytest.param("exact", True, marks=pytest.mark.exhaustive),
        *(
            pytest.param(name, True, marks=() if name == "bfloat16" else pytest.mark.exhaustive)
            for name in NUMBERS
            if name != "exact"
        ),
        ("exact", False),
    ],
)
def test_number_formats(monkeypatch, sources, numbers, resets):
    changes, tolerance = NUMBERS[numbers]
    for limit in ("_UNROUNDED_HIDDEN", "_SMALL_HIDDEN"):  # so that small layers round, too
        monkeypatch.setattr(exactness, limit, 0)
    check(sources, PROBLEM.replace(bidirectional=True, resets=resets, **changes), tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {"bidirectional": True, "num_layers": 2, **RAGGED},
        {"bidirectional": True, "hidden_size": 13, "cell": GRU()},
        {"time": 1},
        *exhaustive({"bidirectional": True, "proj_size": 3, **RAGGED}, {"batch": 1, "time": 9}),
    ],
    ids=str,
)
def test_single_layers(sources, options):
    check(sources, PROBLEM.replace(**options))


@pytest.mark.parametrize(
    "numbers", ["exact", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("bfloat16", "TF32"))]
)
def test_more_loads_than_are_in_flight(monkeypatch, numbers):
    """Each poll loads several spans, in float32 the last one of a row fewer, and a step has many polls."""
    sources = launch_on_cpu(monkeypatch, DEVICE.replace(multiprocessors=32))
    changes, tolerance = NUMBERS[numbers]
    problem = PROBLEM.replace(time=2, batch=44, hidden_size=192, needs_grad=False, resets=False, **changes)
    monkeypatch.setattr(compiled, "tiling", functools.partial(_with_many_loads, compiled.tiling))
    compiled.launch_of.cache_clear()
    inputs = testing.make_inputs(problem)
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs))
    compiled.launch_of.cache_clear()
    for name, value in testing.named(problem, *testing.oracle(problem, inputs)).items():
        assert testing.relative_error(found[name], value) < tolerance, name
    assert "recurrent_forward" in sources.launched


def _with_many_loads(usual, hidden_size, batch, directions, device, *asked, **options):
    """Return a tiling of few warps with several spans in a poll, and more polls in a step than are in flight."""
    assert usual(hidden_size, batch, directions, device, *asked, **options) is not None
    found = tiling_choice.candidates(hidden_size, batch, directions, device, *asked)
    found = [cut for cut in found if cut.chunk > 1 and cut.rows // 8 * -(-cut.spans // cut.chunk) > cut.ahead]
    return min(found, key=lambda cut: (cut.spans % cut.chunk == 0, cut.blocks * cut.rows * cut.warps))


def test_groups_of_rows_in_turn(monkeypatch):
    one = DEVICE.replace(multiprocessors=1)
    sources = launch_on_cpu(monkeypatch, one)
    cut = tiling_choice.tiling(8, 70, 1, one, True, 4, True)
    assert cut is not None
    assert cut.groups > cut.together
    check(sources, PROBLEM.replace(batch=70, time=4, **RAGGED))


def test_layers_in_pairs(monkeypatch, sources):
    monkeypatch.setattr(layer_pairs, "stacked_cut", layer_pairs.room_for_two)
    problem = PROBLEM.replace(num_layers=2, dropout=0.4)
    assert layer_pairs.room_for_two(problem, DEVICE, backward=True)
    check(sources, problem)
    assert sources.launched.count("recurrent_forward") == sources.launched.count("recurrent_backward") == 1


@pytest.mark.parametrize(
    "options",
    [
        {"bidirectional": True, **RAGGED, "dtype": torch.bfloat16},
        {"num_layers": 2, "dropout": 0.4},
        {"lean": True, "hidden_size": 20, "bidirectional": True},
        *exhaustive({"hidden_size": 20, "bidirectional": True}, {"lean": True, "hidden_size": 20, **RAGGED}),
    ],
    ids=str,
)
def test_rows_of_exchanged_states_that_are_padded(monkeypatch, sources, cut, options):
    """Outputs lie beside the states that blocks exchange, whose rows are whole loads."""
    monkeypatch.setattr(tiling, "_LEAST_PADDED_BYTES", 0)
    monkeypatch.setattr(layer_pairs, "stacked_cut", layer_pairs.room_for_two)
    cut(3)
    problem = PROBLEM.replace(**options)
    launch = compiled.forward_launch(problem, problem.batch, 1, False, DEVICE)
    assert launch.tiling.row_width > launch.tiling.hidden
    check(sources, problem, 5e-2 if problem.dtype == torch.bfloat16 else 3e-5)


@pytest.mark.parametrize("count", [(3,), (1, 1)], ids=str)
def test_rows_that_end_where_segments_do(sources, cut, count):
    """A mark in the padding, right behind a row's end, is no border, even where a launch ends there."""
    cut(*count)
    resets = torch.zeros(6, 9, dtype=torch.bool)
    resets[2:5] = True
    problem = PROBLEM.replace(lean=True, bidirectional=True, **RAGGED)
    check(sources, problem, lengths=[6, 3, 4, 2, 0, 6, 4, 2, 5], resets=resets)
    assert "recurrent_activate" in sources.launched


def test_nan_stays_in_its_episode(sources):
    problem = PROBLEM.replace(bidirectional=True)
    resets = torch.zeros(6, 9, dtype=torch.bool)
    resets[[0, 2, 5], 4] = True
    inputs = testing.make_inputs(problem)._replace(resets=resets)
    inputs.h0[0, 4] = inputs.c0[0, 4] = torch.nan  # which the first step does not read
    gradients = testing.make_gradients(problem, inputs)
    clean, of_clean = testing.run_kernel(persistent, problem, inputs, gradients)
    assert of_clean is not None
    assert all(weight.isfinite().all() for weight in of_clean.weights if weight is not None)
    broken = torch.zeros_like(resets)
    broken[2:5, 4] = True
    dirty = inputs._replace(x=inputs.x.masked_fill(broken.unsqueeze(2), torch.nan))
    result, found = testing.run_kernel(persistent, problem, dirty, gradients)
    assert found is not None
    assert result.y[broken].isnan().all()
    assert torch.equal(result.y[~broken], clean.y[~broken])
    assert torch.equal(found.x[~broken], of_clean.x[~broken])
    assert all(torch.equal(*both) for both in zip(result[1:3], clean[1:3], strict=True))
    assert all(torch.equal(*both) for both in zip(found[1:3], of_clean[1:3], strict=True))
