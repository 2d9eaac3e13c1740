"""The passes with marks, run on the CPU, compute the same as without and count every phase of every step."""

import ctypes

import pytest
import torch

from benchmarks.loops import above_floor, rows
from benchmarks.loops.phases import OF_EXCHANGE, OF_TOTALS, PHASES, counting_sources, counts_of
from gatewise import testing
from gatewise.benchmarks.cases import LSTMCase
from gatewise.benchmarks.lstm.floor import Floor
from gatewise.benchmarks.precision import PRECISIONS
from gatewise.cells import LSTM, LayerNormLSTM, Regularised
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.cuda import toolchain
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.launches import compiled
from tests.kernels.persistent import sources_on_cpu

DEVICE = Device.named("h200").replace(multiprocessors=16)
TIME = 5
EXCHANGES = {f"{place} {phase}" for place in ("first", "second") for phase in OF_EXCHANGE}
TOTALS = {f"{place} {phase}" for place in ("first", "second") for phase in OF_TOTALS}


@pytest.fixture
def in_clusters(cut_where):
    """Have the backward pass cut for clusters of two blocks, each with eight units."""
    cut_where(lambda cut: cut.split == 2 and cut.units == 8 if cut.backward else cut.split == 1)


def run(monkeypatch, capfd, folder, cell, left_out=()):
    sources_on_cpu.launch_on_cpu(monkeypatch, DEVICE)
    monkeypatch.setattr(compiled, "SOURCES", counting_sources(folder, left_out))
    monkeypatch.setitem(sources_on_cpu._STATEMENTS, "%%globaltimer", "{0} = clock64()")
    problem = Problem(TIME, 9, 5, 20, cell=cell, dtype=torch.float32, needs_grad=True, bias=cell.bias)
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs)
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    for name, value in testing.named(problem, *testing.oracle(problem, inputs, gradients)).items():
        assert testing.relative_error(found[name], value) < 3e-5, name
    ctypes.CDLL(None).fflush(None)
    return counts_of(capfd.readouterr().out)


@pytest.mark.parametrize(
    ("cell", "passes", "most"),
    [
        pytest.param(LSTM(), ("forward", "backward"), 0, marks=pytest.mark.exhaustive),  # without some marks below
        pytest.param(Regularised(LSTM(), zoneout=(0.1, 0.1)), ("forward", "backward"), 0, marks=pytest.mark.exhaustive),
        (LayerNormLSTM(), ("row_forward", "row_backward"), 0),
        pytest.param(LayerNormLSTM(), ("row_forward", "row_backward"), 1 << 20, marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_every_phase_is_counted(monkeypatch, capfd, tmp_path, in_clusters, most_bytes, cell, passes, most):
    most_bytes(most)
    counts = run(monkeypatch, capfd, tmp_path, cell)
    assert set(counts) == set(passes)
    for name in passes:
        of_exchanges = EXCHANGES - (TOTALS if most else set()) if name.startswith("row") else set()
        first, second = counts[name]
        assert first.thread == 0 < second.thread
        assert set(first.phases) == {*PHASES[name], *of_exchanges}
        of_all = of_exchanges - (set() if most else {"first wait", "second wait"})  # for pairs that the warp combines
        for own in (first, second):
            assert {"product", "barrier", "begin", *of_all} <= set(own.phases) <= set(first.phases)
            # The clock of the emulation moves only when it is read, so that every phase takes whole readings of it.
            assert own.steps in (TIME, TIME + 1)
            assert own.waits >= 1000
            assert all(round(cycles * own.steps) % 1000 == 0 for cycles in own.phases.values())
            assert 1000 * own.steps <= sum(own.phases.values()) * own.steps < own.cycles


def test_a_phase_without_a_mark_counts_to_the_next_one(monkeypatch, capfd, tmp_path):
    counts = run(monkeypatch, capfd, tmp_path, LSTM(), ("waits", "loads"))
    for name in ("forward", "backward"):
        first, _ = counts[name]
        assert "loads" not in first.phases
        assert "masks" in first.phases
        assert first.waits == 0


def test_phases_of_blocks_in_clusters_are_counted(monkeypatch, capfd, tmp_path, cut_where):
    cut_where(lambda cut: cut.distributed)
    sources_on_cpu.launch_on_cpu(monkeypatch, Device.named("h200"))
    monkeypatch.setattr(compiled, "SOURCES", counting_sources(tmp_path))
    monkeypatch.setitem(sources_on_cpu._STATEMENTS, "%%globaltimer", "{0} = clock64()")
    problem = Problem(TIME, 9, 5, 40, dtype=torch.bfloat16, needs_grad=True)
    inputs = testing.make_inputs(problem)
    testing.run_kernel(persistent, problem, inputs, testing.make_gradients(problem, inputs))
    ctypes.CDLL(None).fflush(None)
    counts = counts_of(capfd.readouterr().out)
    absent = {"forward": set(), "backward": {"send", "await", "pause"}}
    for name, phases in absent.items():
        first, _ = counts[name]
        assert set(first.phases) == set(PHASES[name]) - phases
        assert first.steps in (TIME, TIME + 1)


def test_a_source_that_has_changed_is_refused(monkeypatch, tmp_path):
    changed = tmp_path / "changed"
    changed.mkdir()
    for path in compiled.SOURCES.glob("*.cu*"):
        (changed / path.name).write_text(
            path.read_text().replace("masks.advance(ends, first_unit, cell, reverse", "skip(")
        )
    monkeypatch.setattr(compiled, "SOURCES", changed)
    with pytest.raises(ValueError, match=r"once, which has it 0 times: .*masks.advance"):
        counting_sources(tmp_path)


# `make test` counts every phase of the rows' passes above.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way == "lstm" else pytest.mark.exhaustive) for way in rows.WAYS]
)
def test_rows_are_counted_and_recorded(monkeypatch, capfd, way):
    sources = sources_on_cpu.launch_on_cpu(monkeypatch, DEVICE)
    row, longer = (rows.Row(LSTMCase("tiny", time, 9, 16), way, rows.TRAINING) for time in (TIME, TIME + 2))

    def compile_afresh(source, architecture, macros, code=None):
        spills = source.parent.name == "0" and source.stem.endswith("forward")  # the first folder has all marks
        return sources.compile(source, architecture, macros, code), toolchain.Resources(32, 8 * spills, 0)

    monkeypatch.setattr(toolchain, "compile_afresh", compile_afresh)
    monkeypatch.setitem(sources_on_cpu._STATEMENTS, "%%globaltimer", "{0} = clock64()")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    rows.count([row, longer], torch.device("cpu"))
    found = rows.read([row, longer], capfd.readouterr().out)
    counts, left_out = found[row]
    forward, backward = counts
    assert [{own.steps for own in each[forward]} for each, _ in found.values()] == [{TIME}, {TIME + 2}]
    assert left_out == {forward: ["waits"], backward: []}
    assert counts[forward][0].waits == 0 < counts[backward][0].waits
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    times = {"all": 4.0, f"recurrent_{forward}": 1.0, f"recurrent_{backward}": 2.5, "of others": 0.25}
    of_row, *of_threads = rows.lines_of(row, times, counts, left_out)
    assert of_row["case"] == [TIME, 9, 16, False, "bf16"]
    assert of_row["us_a_step"] == times
    assert [(line["pass"], line["us_a_step"]) for line in of_threads] == 2 * [(forward, 1.0)] + 2 * [(backward, 2.5)]
    title, *passes = rows.table({row: times}, {row: (counts, left_out)})
    assert f"4.00 us a step (1.00 of plain); {forward} 1.00, {backward} 2.50, other kernels 0.25" in title
    assert [line.partition(":")[0] for line in passes] == [forward, backward]


def test_parts_of_the_loops_of_a_stack_are_recorded(monkeypatch, capfd):
    sources, precision = sources_on_cpu.launch_on_cpu(monkeypatch, DEVICE), PRECISIONS["fp32"]
    case = LSTMCase("tiny", TIME, 9, 16, num_layers=2, directions=2)

    def compile_afresh(source, architecture, macros, code=None):
        return sources.compile(source, architecture, macros, code), toolchain.Resources(32, 0, 0)

    monkeypatch.setattr(toolchain, "compile_afresh", compile_afresh)
    monkeypatch.setitem(sources_on_cpu._STATEMENTS, "%%globaltimer", "{0} = clock64()")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    above_floor.count([case], precision, torch.device("cpu"))
    found = rows.read([case], capfd.readouterr().out)[case]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    times = {"all": 8.0, "recurrent_forward": 2.0, "recurrent_backward": 3.5, "recurrent_fit": 0.5, "a product": 1.5}
    line = above_floor.line_of(case, precision, times, Floor(TIME * 1e-6, TIME * 2e-6), found)
    loops = {"forward": 2.0, "backward": 3.5, "fit": 0.5}
    assert line["us_a_step"] == {"all": 8.0, **loops, "other kernels": 1.5}
    assert line["floor"] == {"loops": 1.0, "products": 2.0}
    for name in ("forward", "backward"):
        counts = found[0][name][0]
        parts = line["loops"][name]
        assert set(parts) == {*above_floor.PARTS, "reloads"}
        assert abs(sum(parts[part] for part in above_floor.PARTS) - sum(counts.phases.values())) <= len(parts)
        assert parts["arrival"] == round(counts.waits) > 0
