"""The CUDA sources for cells that are not fused, run on the CPU, agree with float64."""

import functools

import pytest
import torch

from gatewise import testing
from gatewise.cells import SLSTM, Cell, LayerNormGRU, LayerNormLSTM, PeepholeLSTM, standardized
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.launches.compiled import forward_launch
from gatewise.kernels.persistent.schedules import row_cell
from gatewise.kernels.persistent.sizes import exactness, tiling, tiling_choice
from gatewise.kernels.persistent.sizes.cell_size import cell_size_of
from tests.kernels.persistent.sources_on_cpu import launch_on_cpu
from tests.pairwise import exhaustive

DEVICE = Device.named("a100").replace(multiprocessors=8)  # no clusters
WITH_CLUSTERS = Device.named("h200").replace(multiprocessors=16)
RAGGED = {"layout": Layout.DEVICE_LENGTHS}
PROBLEM = Problem(5, 9, 5, 20, dtype=torch.float32, needs_grad=True)
CELLS = [PeepholeLSTM(), SLSTM(), LayerNormLSTM(), LayerNormLSTM.of("tensorflow1"), LayerNormGRU()]
NUMBERS = {
    "exact": ({}, 3e-5),
    "TF32": ({"allow_tf32": True}, 1e-2),
    "bfloat16": ({"dtype": torch.bfloat16}, 5e-2),
    "float16": ({"dtype": torch.float16}, 1e-2),
}


def named(value):
    return getattr(value, "name", None) or str(value)


def check(sources, problem, tolerance=3e-5, **given):
    inputs = testing.make_inputs(problem, lengths=given.pop("lengths", None))._replace(**given)
    gradients = testing.make_gradients(problem, inputs) if problem.needs_grad else None
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    for name, value in testing.named(problem, *testing.oracle(problem, inputs, gradients)).items():
        assert testing.relative_error(found[name], value) < tolerance, name
    assert "recurrent_row_forward" in sources.launched
    assert problem.needs_grad == ("recurrent_row_backward" in sources.launched)


@pytest.fixture
def sources(monkeypatch):
    return launch_on_cpu(monkeypatch, DEVICE)


# The layouts and clusters below have all of these cells.
@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", CELLS, ids=named)
def test_cells(sources, cell):
    check(sources, PROBLEM.replace(cell=cell, bias=cell.bias))


def test_rows_of_exchanged_states_that_are_padded(monkeypatch, sources):
    monkeypatch.setattr(tiling, "_LEAST_PADDED_BYTES", 0)
    problem = PROBLEM.replace(cell=LayerNormLSTM(), hidden_size=24, bidirectional=True, **RAGGED)
    launch = forward_launch(problem, problem.batch, 2, True, DEVICE)
    assert launch.tiling.row_width > launch.tiling.hidden
    check(sources, problem)


# In bfloat16 in clusters, too.
@pytest.mark.parametrize("numbers", ["float16", *exhaustive("TF32", "bfloat16")])
def test_number_formats(monkeypatch, sources, numbers):
    changes, tolerance = NUMBERS[numbers]
    for limit in ("_UNROUNDED_HIDDEN", "_SMALL_HIDDEN"):  # so that small layers round, too
        monkeypatch.setattr(exactness, limit, 0)
    check(sources, PROBLEM.replace(cell=LayerNormLSTM(), hidden_size=13, **changes), tolerance)


@pytest.mark.parametrize(
    ("cell", "options"),
    [
        (LayerNormLSTM(), {"bidirectional": True, "num_layers": 2, "hidden_size": 13, **RAGGED}),
        pytest.param(LayerNormGRU(), {"bidirectional": True, "resets": True, **RAGGED}, marks=pytest.mark.exhaustive),
        (SLSTM(), {"bidirectional": True, "bias": False, "resets": True}),
        pytest.param(PeepholeLSTM(), {"batch": 1, "time": 9, "resets": True}, marks=pytest.mark.exhaustive),
        (LayerNormLSTM(), {"bidirectional": True, "time": 1, "hidden_size": 13, **RAGGED}),  # compiled for the first
        pytest.param(LayerNormLSTM.of("icefall"), {"time": 1}, marks=pytest.mark.exhaustive),
        (LayerNormLSTM.of("returnn_joined"), {"needs_grad": False}),
    ],
    ids=named,
)
def test_layouts(sources, cell, options):
    check(sources, PROBLEM.replace(cell=cell, **options))


def test_groups_of_rows_in_turn(monkeypatch):
    two = DEVICE.replace(multiprocessors=2)
    sources, cell = launch_on_cpu(monkeypatch, two), LayerNormLSTM()
    cut = tiling_choice.tiling(40, 70, 1, two, True, 4, True, cell_size_of(cell, backward=True))
    assert cut is not None
    assert cut.groups > cut.together
    assert cut.blocks > 1
    check(sources, PROBLEM.replace(batch=70, hidden_size=40, time=4, cell=cell, **RAGGED))


@pytest.fixture
def in_clusters(monkeypatch, cut_where):
    """Have the backward pass cut for clusters of so many blocks, each with eight units."""

    def of(split):
        cut_where(lambda cut: cut.split == split and cut.units == 8 if cut.backward else cut.split == 1)
        return launch_on_cpu(monkeypatch, WITH_CLUSTERS)

    return of


@pytest.mark.parametrize(
    ("cell", "split", "options"),
    [
        (LayerNormLSTM(), 2, {"bidirectional": True, "resets": True, **RAGGED}),
        pytest.param(
            *(LayerNormLSTM.of("tensorflow1", hidden=True), 4, {"dtype": torch.bfloat16}), marks=pytest.mark.exhaustive
        ),
        pytest.param(LayerNormLSTM(), 2, {"batch": 40, "time": 3}, marks=pytest.mark.exhaustive),
        (SLSTM(), 2, {}),
    ],
    ids=named,
)
def test_clusters(in_clusters, cell, split, options):
    sources, problem = in_clusters(split), PROBLEM.replace(cell=cell, bias=cell.bias, hidden_size=40, **options)
    number = problem.dtype.itemsize, problem.dtype == torch.float32
    sizes = problem.hidden_size, problem.batch, problem.num_directions
    cut = tiling_choice.tiling(*sizes, WITH_CLUSTERS, True, *number, cell_size_of(cell, backward=True))
    assert cut is not None
    assert cut.split == split
    assert cut.blocks > split
    check(sources, problem, 3e-5 if problem.dtype == torch.float32 else 5e-2)


def test_nan_stays_in_its_row(sources):
    problem = PROBLEM.replace(cell=LayerNormLSTM(), needs_grad=False)
    inputs = testing.make_inputs(problem)
    inputs.x[2, 4, 0] = torch.nan
    y, h_n, _, _ = testing.run_kernel(persistent, problem, inputs)[0]
    others = torch.arange(9) != 4
    assert y[2:, 4].isnan().all()
    assert not y[:2].isnan().any()
    assert not y[:, others].isnan().any()
    assert h_n[0, 4].isnan().all()


def test_rows_are_copied_to_neighbours_in_buffers_of_their_own():
    memory = torch.zeros(8)
    apart = [torch.frombuffer(memory.numpy().data, dtype=torch.float32, count=4, offset=16 * row) for row in range(2)]
    assert apart[0].data_ptr() + apart[0].nbytes == apart[1].data_ptr()
    row_cell._copy_rows(torch.arange(8.0).view(2, 4), apart)
    assert memory.tolist() == list(range(8))


class ManyStatistics(Cell):
    """A cell with eleven normalizations."""

    gates = ("a", "b", "c", "d")
    apart = ("a", "b", "c", "d")
    states = ("m", "n")

    def step(self, gate, state):
        sums = [standardized(sum) for each in vars(gate).values() for sum in (each.input, each.recurrent)]
        states = [standardized(value) for value in (state.h, state.m, state.n)]
        total = functools.reduce(torch.add, [*sums, *states])
        return torch.tanh(total), {"m": total * state.m, "n": total + state.n}


@pytest.mark.parametrize("exact", [False, True])
def test_tilings_have_room_for_all_statistics(exact):
    size = cell_size_of(ManyStatistics(), backward=True)
    assert size is not None
    assert size.widest == 11
    for batch in (1, 16, 64):
        cut = tiling_choice.tiling(64, batch, 1, Device.named("h200"), True, 4 if exact else 2, exact, size)
        assert cut is None or 11 * cut.units // 2 <= cut.warps * (cut.tiles * 16 + 4)


def test_several_units_of_a_thread_let_all_rows_be_computed_at_once():
    # In two rounds every step waits twice for the statistics of the other blocks.
    cell = LayerNormLSTM()
    cut = tiling_choice.tiling(1024, 64, 1, Device.named("h200"), True, 2, False, cell_size_of(cell, backward=True))
    assert cut is not None
    assert cut.rounds == 1
    assert cut.cells == 2


def test_several_units_of_a_thread_leave_weights_of_many_tiles_in_shared_memory():
    # With two of four tiles in registers, the assembler spills, and a step takes twice as long (loops.jsonl).
    cell = LayerNormLSTM()
    cut = tiling_choice.tiling(512, 128, 1, Device.named("h200"), True, 2, False, cell_size_of(cell, backward=True))
    assert cut is not None
    assert (cut.cells, cut.tiles, cut.resident) == (2, 4, 1)


def test_several_units_of_a_thread_in_clusters(monkeypatch, cut_where):
    cut_where(lambda cut: not cut.backward or (cut.units, cut.rows, cut.split, cut.cells) == (16, 32, 2, 2))
    sources = launch_on_cpu(monkeypatch, WITH_CLUSTERS)
    cell = LayerNormLSTM()
    cut = tiling_choice.tiling(32, 40, 1, WITH_CLUSTERS, True, 2, False, cell_size_of(cell, backward=True))
    assert cut is not None
    assert (cut.units, cut.rows, cut.split, cut.cells) == (16, 32, 2, 2)
    problem = PROBLEM.replace(batch=40, hidden_size=32, time=3, cell=cell, dtype=torch.bfloat16, bias=cell.bias)
    check(sources, problem, 5e-2)
