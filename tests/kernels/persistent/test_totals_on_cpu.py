"""Statistics of rows of which every item has an owner among the blocks, in the CUDA sources run on the CPU."""

import itertools

import pytest
import torch

from gatewise.cells import LayerNormGRU, LayerNormLSTM, PeepholeLSTM
from gatewise.contract import ranking
from gatewise.contract.device import Device
from gatewise.kernels.persistent.launches import compiled
from gatewise.kernels.persistent.sizes import exactness
from gatewise.kernels.persistent.sizes.cell_size import cell_size_of
from gatewise.kernels.persistent.sizes.tiling_choice import tiling
from tests.kernels.persistent.sources_on_cpu import launch_on_cpu
from tests.kernels.persistent.test_rows_on_cpu import (
    DEVICE,
    NUMBERS,
    PROBLEM,
    RAGGED,
    WITH_CLUSTERS,
    ManyStatistics,
    check,
    named,
)
from tests.pairwise import exhaustive_unless

LAYER_NORM = PROBLEM.replace(cell=LayerNormLSTM())


@pytest.fixture
def sources(monkeypatch, most_bytes):
    most_bytes(0)
    return launch_on_cpu(monkeypatch, DEVICE)


def cut_of(problem, device, *, backward=True):
    number = problem.dtype.itemsize, problem.dtype == torch.float32
    sizes = problem.hidden_size, problem.batch, problem.num_directions
    found = tiling(*sizes, device, backward, *number, cell_size_of(problem.cell, backward=backward))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("cell", "options"),
    [
        (LayerNormLSTM(), {"bidirectional": True, "resets": True, **RAGGED}),
        pytest.param(LayerNormGRU(), {"bidirectional": True, **RAGGED}, marks=pytest.mark.exhaustive),
        pytest.param(LayerNormLSTM.of("tensorflow1"), {"batch": 1}, marks=pytest.mark.exhaustive),
        pytest.param(PeepholeLSTM(), {}, marks=pytest.mark.exhaustive),  # without statistics there are no totals
    ],
    ids=named,
)
def test_cells(sources, cell, options):
    check(sources, PROBLEM.replace(cell=cell, bias=cell.bias, **options))
    for _, macros in sources.compiled:
        assert dict(macros).get("MOST_BYTES", 0) == 0


# Totals are sums in float32 whatever the numbers; the layers below are computed in bfloat16 and float32.
@pytest.mark.exhaustive
@pytest.mark.parametrize("numbers", ["float16", "TF32", "bfloat16"])
def test_number_formats(monkeypatch, sources, numbers):
    changes, tolerance = NUMBERS[numbers]
    for limit in ("_UNROUNDED_HIDDEN", "_SMALL_HIDDEN"):  # so that small layers round, too
        monkeypatch.setattr(exactness, limit, 0)
    check(sources, LAYER_NORM.replace(hidden_size=13, **changes), tolerance)


# `make test` has groups in turn without totals: test_rows_on_cpu.py.
@pytest.mark.exhaustive
def test_groups_of_rows_in_turn(monkeypatch, most_bytes):
    most_bytes(0)
    two = DEVICE.replace(multiprocessors=2)
    sources, problem = launch_on_cpu(monkeypatch, two), LAYER_NORM.replace(batch=70, hidden_size=40, time=4, **RAGGED)
    assert cut_of(problem, two).rounds > 1
    check(sources, problem)


@pytest.mark.parametrize("split", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_clusters(monkeypatch, most_bytes, cut_where, split):
    most_bytes(0)
    cut_where(lambda cut: cut.split == split and cut.units == 8 if cut.backward else cut.split == 1)
    sources = launch_on_cpu(monkeypatch, WITH_CLUSTERS)
    problem = LAYER_NORM.replace(hidden_size=40, dtype=torch.bfloat16, **RAGGED)
    assert cut_of(problem, WITH_CLUSTERS).blocks > split
    check(sources, problem, 5e-2)


def test_more_blocks_than_items(monkeypatch, most_bytes, cut_where):
    most_bytes(0)
    cut_where(lambda cut: (cut.units, cut.rows, cut.warps, cut.split) == (16, 8, 4, 1))
    sources = launch_on_cpu(monkeypatch, WITH_CLUSTERS)
    problem = PROBLEM.replace(cell=LayerNormGRU(), hidden_size=136, batch=5, dtype=torch.bfloat16)
    assert cut_of(problem, WITH_CLUSTERS, backward=False).blocks == 9  # for the moments of 8 rows
    check(sources, problem, 5e-2)


def test_more_items_than_threads(monkeypatch, most_bytes, cut_where):
    most_bytes(0)
    cut_where(lambda cut: (cut.units, cut.rows, cut.warps) == ((16, 48, 8) if cut.backward else (16, 24, 4)))
    sources, cell = launch_on_cpu(monkeypatch, DEVICE), ManyStatistics()
    problem = PROBLEM.replace(cell=cell, batch=43, time=3, bias=cell.bias)
    for backward in (False, True):
        cut = cut_of(problem, DEVICE, backward=backward)
        items = cut.rows * cut.cell_size.widest
        assert items / 2 > 32 * cut.warps  # of which each loads two totals
        assert items / cut.blocks > 8 * cut.warps  # of which each combines eight at once
    check(sources, problem, 1e-4)


# A slow block is tested with other passes.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("slow", "most"), exhaustive_unless([(0, 0)], itertools.product([0, 2], [0, 1 << 20])), ids=str
)
def test_a_slow_block(monkeypatch, most_bytes, cut_where, slow, most):
    most_bytes(most)
    cut_where(lambda cut: (cut.units, cut.rows, cut.warps) == (16, 8, 4))
    sources = launch_on_cpu(monkeypatch, DEVICE)
    sources.slow = slow
    problem = LAYER_NORM.replace(time=9, batch=6, hidden_size=40, **RAGGED)
    assert cut_of(problem, DEVICE).blocks == 3
    check(sources, problem)


def test_wide_layers_of_many_rows_load_totals():
    # 100-64-1024 of `gatewise bench cells` loads up to 32 KB in an exchange, and the others up to 8 KB (loops.jsonl).
    h200 = Device.named("h200")
    most = ranking.weights(h200, "persistent statistics")["bytes"]
    for batch, is_more in ((16, False), (64, True)):
        problem = LAYER_NORM.replace(hidden_size=1024, batch=batch, dtype=torch.bfloat16)
        for backward in (False, True):
            cut = cut_of(problem, h200, backward=backward)
            assert (cut.rows * 8 * cut.blocks > most) == is_more
            launch = (compiled.backward_launch if backward else compiled.forward_launch)(problem, batch, 1, False, h200)
            assert dict(launch.source[2])["MOST_BYTES"] == most
