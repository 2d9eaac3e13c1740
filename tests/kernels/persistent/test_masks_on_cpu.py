"""The CUDA sources with dropout and zoneout in the recurrence, run on the CPU, agree with float64."""

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU, LSTM, SLSTM, Cell, LayerNormLSTM, Regularised, candidate
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.kernels.persistent import replay
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.sizes import exactness, tiling_choice
from gatewise.kernels.persistent.sizes.step import has_fused_passes
from tests.kernels.persistent.sources_on_cpu import launch_on_cpu
from tests.pairwise import each_value, pairwise

DEVICE = Device.named("a100").replace(multiprocessors=6)  # no clusters, which need their own instructions
RAGGED = {"layout": Layout.DEVICE_LENGTHS}
PROBLEM = Problem(6, 9, 5, 8, dtype=torch.float32, needs_grad=True)
NUMBERS = {
    "exact": ({}, 3e-5),
    "TF32": ({"allow_tf32": True}, 1e-2),
    "bfloat16": ({"dtype": torch.bfloat16}, 5e-2),
    "float16": ({"dtype": torch.float16}, 1e-2),
}
DROPOUT = {"recurrent_dropout": 0.4}
CANDIDATE = {"candidate_dropout": 0.3}
OF_CELL = {"zoneout": (0.0, 0.4)}


def zoneout(cell):
    return {"zoneout": (0.3, *[0.4] * len(cell.states))}


def masked(cell, *kinds):
    options = {}
    for kind in kinds:
        options |= zoneout(cell) if kind == "zoneout" else kind
    return Regularised(cell, **options)


ALL = "zoneout", DROPOUT, CANDIDATE


def check(sources, problem, tolerance=3e-5, **given):
    inputs = testing.make_inputs(problem, lengths=given.pop("lengths", None))._replace(**given)
    gradients = testing.make_gradients(problem, inputs) if problem.needs_grad else None
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    for name, value in testing.named(problem, *testing.oracle(problem, inputs, gradients)).items():
        assert testing.relative_error(found[name], value) < tolerance, name
    row = "" if has_fused_passes(problem.cell) else "row_"
    assert f"recurrent_{row}forward" in sources.launched
    assert problem.needs_grad == (f"recurrent_{row}backward" in sources.launched)


@pytest.fixture
def sources(monkeypatch):
    return launch_on_cpu(monkeypatch, DEVICE)


@pytest.mark.parametrize(
    "cell",
    [
        # Zoneout of one state and dropout are tested alone, and every cell with all kinds in other layouts.
        *(pytest.param(masked(LSTM(), kind), marks=pytest.mark.exhaustive) for kind in ALL),
        masked(LSTM(), OF_CELL),
        *(
            pytest.param(masked(cell, *ALL), marks=pytest.mark.exhaustive)
            for cell in (LSTM(), GRU(), SLSTM(), LayerNormLSTM())
        ),
    ],
    ids=lambda cell: cell.name,
)
def test_cells(sources, cell):
    check(sources, PROBLEM.replace(cell=cell, bias=cell.bias, bidirectional=True))


@pytest.mark.parametrize(
    ("cell", "numbers"),
    each_value(pairwise([LSTM(), GRU(), LayerNormLSTM()], [name for name in NUMBERS if name != "exact"]), most=1),
    ids=lambda value: getattr(value, "name", value),
)
def test_number_formats(monkeypatch, sources, cell, numbers):
    changes, tolerance = NUMBERS[numbers]
    for limit in ("_UNROUNDED_HIDDEN", "_SMALL_HIDDEN"):  # so that small layers round, too
        monkeypatch.setattr(exactness, limit, 0)
    check(sources, PROBLEM.replace(cell=masked(cell, *ALL), resets=True, **changes), tolerance)


@pytest.mark.parametrize(
    ("cell", "options"),
    [
        (LSTM(), {"bidirectional": True, "num_layers": 2, "dropout": 0.3, "resets": True, **RAGGED}),
        pytest.param(
            *(LSTM(), {"bidirectional": True, "hidden_size": 13, "num_layers": 2, **RAGGED}),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            *(LSTM(), {"num_layers": 2, "hidden_size": 21, "resets": True, "bias": False}),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(LSTM(), {"batch": 1, "time": 9}, marks=pytest.mark.exhaustive),
        pytest.param(LSTM(), {"time": 1, "bidirectional": True}, marks=pytest.mark.exhaustive),
        pytest.param(LSTM(), {"needs_grad": False, "hidden_size": 13, "num_layers": 3}, marks=pytest.mark.exhaustive),
        pytest.param(
            *(LSTM(), {"traced": True, "bidirectional": True, "num_layers": 2, "hidden_size": 13}),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(GRU(), {"bidirectional": True, "resets": True, **RAGGED}, marks=pytest.mark.exhaustive),
        pytest.param(GRU(), {"batch": 1, "hidden_size": 13, "num_layers": 2}, marks=pytest.mark.exhaustive),
        pytest.param(
            *(SLSTM(), {"bidirectional": True, "hidden_size": 13, "resets": True, "bias": True, **RAGGED}),
            marks=pytest.mark.exhaustive,
        ),
        (LayerNormLSTM(), {"bidirectional": True, "num_layers": 2, "hidden_size": 13, "resets": True, **RAGGED}),
        pytest.param(LayerNormLSTM.of("icefall"), {"time": 1}, marks=pytest.mark.exhaustive),
        (LayerNormLSTM.of("returnn_joined"), {"needs_grad": False}),
    ],
    ids=str,
)
def test_layouts(sources, cell, options):
    check(sources, PROBLEM.replace(cell=masked(cell, *ALL), **options))


@pytest.mark.parametrize(
    "kind",
    [DROPOUT, *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("zoneout", CANDIDATE))],
    ids=str,
)
def test_groups_of_rows_in_turn(monkeypatch, kind):
    one = DEVICE.replace(multiprocessors=1)
    sources = launch_on_cpu(monkeypatch, one)
    cut = tiling_choice.tiling(8, 70, 1, one, True, 4, True)
    assert cut is not None
    assert cut.groups > cut.together
    check(sources, PROBLEM.replace(cell=masked(LSTM(), kind), batch=70, time=4, resets=True, **RAGGED))


# Of sizes that the layouts above are compiled for.
@pytest.mark.parametrize(("cell", "size"), [(LSTM(), 8), (LayerNormLSTM(), 13)], ids=str)
def test_lengths_of_zero(sources, cell, size):
    problem = PROBLEM.replace(cell=masked(cell, *ALL), hidden_size=size, bidirectional=True, resets=True, **RAGGED)
    check(sources, problem, lengths=[6, 3, 4, 2, 0, 6, 1, 2, 5])


def test_rows_first(sources):
    problem = PROBLEM.replace(cell=masked(LSTM(), *ALL), bidirectional=True)
    x = testing.make_inputs(problem).x
    check(sources, problem, x=x.transpose(0, 1).contiguous().transpose(0, 1))


@pytest.mark.parametrize(
    "cell", [LSTM(), pytest.param(LayerNormLSTM(), marks=pytest.mark.exhaustive)], ids=lambda cell: cell.name
)
def test_memory_is_as_predicted(sources, cell):
    problem = PROBLEM.replace(cell=masked(cell, *ALL), num_layers=2, dropout=0.3, hidden_size=13)
    replay._replays.cache_clear()
    replay.stack_of.cache_clear()
    check(sources, problem)
    masks = sum(mask.nbytes for mask in testing.make_inputs(problem).masks)
    taken = replay._replays("backward", problem, False, Needs()).scratch_bytes
    assert taken is not None
    assert persistent.workspace_bytes(problem, DEVICE) == taken + masks
    plain = problem.replace(cell=masked(cell, "zoneout"))
    entered = 2 * (6 * 9 * 16 + 9 * 13) * 4  # the hidden states as they enter the product, and the first of them
    (more,), (less,) = persistent.kept(problem, DEVICE), persistent.kept(plain, DEVICE)
    assert 0 <= more.nbytes - less.nbytes - entered < 4 * 256


def test_a_recording_belongs_to_the_addresses_of_its_masks(sources, monkeypatch):
    """A call with masks elsewhere in memory is no replay of an earlier one; masks with gaps are copied."""
    problem = PROBLEM.replace(cell=masked(LSTM(), *ALL))
    inputs, keys = testing.make_inputs(problem), []
    gradients = testing.make_gradients(problem, inputs)

    class Played:
        scratch_bytes = 1 << 16

        def play(self, settings, tensors, device, issue):
            every = (*tensors.read, *tensors.written, tensors.scratch)
            keys.append([None if tensor is None else tensor.data_ptr() for tensor in every])
            issue(tensors)

    monkeypatch.setattr(replay, "_replays", lambda *given: Played())
    replay.stack_of.cache_clear()
    copies = tuple([mask.clone() for mask in inputs.masks])
    apart = tuple([torch.stack([mask, mask], -1)[..., 0] for mask in inputs.masks])
    results = []
    for masks in (inputs.masks, copies, apart):
        given = inputs._replace(masks=masks)
        results.append(testing.named(problem, *testing.run_kernel(persistent, problem, given, gradients)))
    replay.stack_of.cache_clear()
    for own, key in zip((inputs.masks, inputs.masks, copies, copies), keys, strict=False):
        assert all(mask.data_ptr() in key for mask in own)
    assert len(keys) == 6
    assert not any(mask.data_ptr() in key for mask in apart for key in keys)
    for found in results[1:]:
        assert all(torch.equal(found[name], value) for name, value in results[0].items())


@pytest.mark.parametrize(
    "cell",
    [
        *(
            pytest.param(masked(LSTM(), kind), marks=pytest.mark.exhaustive)
            for kind in ({"zoneout": (0.5, 0.0)}, "zoneout")
        ),
        masked(GRU(), "zoneout"),
    ],
    ids=lambda cell: cell.name,
)
@pytest.mark.parametrize("step", [0, 2, 5])
def test_nan_is_where_the_oracle_has_it(sources, cell, step):
    """A unit that keeps its hidden state is NaN, too, where the new one is."""
    problem = PROBLEM.replace(cell=cell, batch=4)
    inputs = testing.make_inputs(problem)
    inputs.x[step, 1, 0] = torch.nan
    inputs.masks[0][step, 1] = torch.tensor([True, False, True, *[True] * 5])
    gradients = testing.make_gradients(problem, inputs)
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    expected = testing.named(problem, *testing.oracle(problem, inputs, gradients))
    assert expected["y"][step:, 1].isnan().all()
    for name, value in expected.items():
        assert torch.equal(found[name].isnan(), value.isnan()), name
        assert testing.relative_error(found[name], value) < 3e-5, name


class _BeginsAtOne(Cell):
    """An LSTM without output gate, whose state c is one where an episode begins."""

    name = "a cell whose c begins at one"
    gates = ("i", "f", "g")
    states = ("c",)
    initial_states = {"c": 1.0}  # noqa: RUF012

    def step(self, gate, state):
        c = torch.sigmoid(gate.f) * state.c + torch.sigmoid(gate.i) * candidate(torch.tanh(gate.g))
        return torch.tanh(c), {"c": c}


def test_initial_states_at_resets(sources):
    cell = masked(_BeginsAtOne(), *ALL)
    assert not has_fused_passes(cell)
    check(sources, PROBLEM.replace(cell=cell, resets=True))


@pytest.mark.parametrize(
    "cell",
    [GRU(), *(pytest.param(cell, marks=pytest.mark.exhaustive) for cell in (LSTM(), LayerNormLSTM()))],
    ids=lambda cell: cell.name,
)
def test_masks_that_keep_everything(sources, cell):
    """All units keep their states at every step, so that outputs and gradients are those of the initial states."""
    problem = PROBLEM.replace(cell=masked(cell, "zoneout"))
    inputs = testing.make_inputs(problem)
    inputs = inputs._replace(masks=tuple(torch.ones_like(mask) for mask in inputs.masks))
    gradients = testing.make_gradients(problem, inputs)
    result, found = testing.run_kernel(persistent, problem, inputs, gradients)
    assert found is not None
    assert torch.equal(result.y, inputs.h0.expand_as(result.y))
    assert torch.equal(result.h_n, inputs.h0)
    assert torch.equal(result.c_n, inputs.c0)
    torch.testing.assert_close(found.h0, (gradients.y.sum(0) + gradients.h_n))
    torch.testing.assert_close(found.c0, gradients.c_n)
    assert not found.x.any()
