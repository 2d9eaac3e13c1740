"""The loops in plain PyTorch compute what the cells' layers do, and are compiled as seldom as possible."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from gatewise.benchmarks.cases import LSTMCase
from gatewise.benchmarks.cells import loop
from gatewise.benchmarks.cells.call import CellCall, draw
from gatewise.benchmarks.cells.cases import TINY, chosen_cells, measured_cells
from gatewise.benchmarks.cells.loop import compiled, loop_of, step_of
from gatewise.benchmarks.cells.side import layer_side, loop_side
from gatewise.benchmarks.lstm.side import Side
from gatewise.cells import Cell
from tests.pairwise import each_value

CPU = torch.device("cpu")
CELLS = pytest.mark.parametrize("cell", measured_cells(), ids=lambda cell: cell.name)


def assert_the_same(ours: Side, theirs: Side, training: bool = True) -> None:
    found, expected = ours.evidence(training), theirs.evidence(training)
    assert list(found) == list(expected)
    for name, tensor in found.items():
        reference = expected[name]
        torch.testing.assert_close(tensor.reshape(reference.shape), reference, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("cell", "case", "resets"),
    each_value([*itertools.product(measured_cells(), TINY, [False, True])]),
    ids=lambda own: getattr(own, "name", str(own)),
)
def test_layer_and_loop_agree_in_float64(cell: Cell, case: LSTMCase, resets: bool) -> None:
    call = draw(cell, case, CPU)
    call.resets[0, 0] = True
    call.resets[-1, 1] = True
    found = loop_side(call, torch.float64, loop_of(cell, step_of(cell)), resets=resets)
    assert_the_same(layer_side(call, torch.float64, resets=resets), found)


def test_the_loop_of_an_lstm_is_that_of_pytorch() -> None:
    call = draw(*chosen_cells(["own_lstm"]), TINY[0], CPU)
    library = torch.nn.LSTM(8, 8, dtype=torch.float64)
    library.load_state_dict(call.weights)
    states = tuple(state.double().unsqueeze(0) for state in call.states)
    expected, (h_n, c_n) = library(call.x.double(), states)
    found = loop_side(call, torch.float64, loop_of(call.cell, step_of(call.cell))).evidence(training=False)
    torch.testing.assert_close(found["y"], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["c_n"], c_n[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["h_n"], h_n[0], rtol=1e-12, atol=1e-12)


def test_a_reset_starts_anew_from_the_initial_states_of_the_cell() -> None:
    (cell,) = chosen_cells(["slstm"])
    call = draw(cell, TINY[0], CPU)
    call.resets[:] = False
    call.resets[4] = True
    run = loop_of(cell, step_of(cell))
    whole = loop_side(call, torch.float64, run, resets=True).evidence(training=False)
    initial = tuple(torch.full((3, 8), cell.initial_value(name)) for name in ("h", *cell.states))
    tail = CellCall(cell, TINY[0], call.x[4:], initial, call.weights, call.dy[4:], call.dstates, call.resets[4:])
    rest = loop_side(tail, torch.float64, run).evidence(training=False)
    torch.testing.assert_close(whole["y"][4:], rest["y"])


# `make test` compiles whole loops below, and the step of a normalized cell in test_run.py.
@pytest.mark.exhaustive
@CELLS
def test_the_step_can_be_compiled(cell: Cell, traced_only: None) -> None:
    call = draw(cell, TINY[0], CPU)
    eager = loop_side(call, torch.float64, loop_of(cell, step_of(cell)))
    assert_the_same(loop_side(call, torch.float64, loop_of(cell, compiled(step_of(cell)), dynamic_batch=True)), eager)


@pytest.mark.parametrize("name", ["gru", pytest.param("slstm", marks=pytest.mark.exhaustive)])
def test_the_whole_loop_can_be_compiled(name: str, traced_only: None) -> None:
    (cell,) = chosen_cells([name])
    call, plain = draw(cell, TINY[0], CPU), loop_of(cell, step_of(cell))
    assert_the_same(loop_side(call, torch.float64, compiled(plain)), loop_side(call, torch.float64, plain))


def test_a_step_is_compiled_once_for_all_times_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()  # what was compiled before changes which sizes are dynamic
    graphs: list[torch.fx.GraphModule] = []

    def counted(graph: torch.fx.GraphModule, example: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(loop.torch, "compile", functools.partial(torch.compile, backend=counted))
    (cell,) = chosen_cells(["lstm"])
    run = loop_of(cell, compiled(step_of(cell)), dynamic_batch=True)
    for time, batch, count in ((4, 3, 1), (6, 5, 1), (2, 7, 1), (2, 1, 2), (3, 1, 2), (3, 9, 2)):
        call = draw(cell, LSTMCase("", time, batch, 8), CPU)
        loop_side(call, torch.float32, run).evidence(training=True)
        assert len(graphs) == count  # PyTorch takes a size of 1 for special


# It compiles many functions.
@pytest.mark.exhaustive
def test_cells_do_not_share_the_limit_of_compilations(traced_only: None) -> None:
    config: Any = torch._dynamo.config
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    with config.patch({limit: 1}):
        for cell in chosen_cells(["lstm", "mgu", "rnn_relu"]):
            run = loop_of(cell, compiled(step_of(cell)), dynamic_batch=True)
            loop_side(draw(cell, TINY[0], CPU), torch.float32, run).evidence(training=False)


# What Inductor generates is PyTorch's to test; what it is given is traced above.
@pytest.mark.slow
@pytest.mark.exhaustive
def test_generated_code_agrees() -> None:
    (found,) = chosen_cells(["peephole_lstm"])
    call = draw(found, TINY[0], CPU)
    run = loop_of(found, compiled(step_of(found)), dynamic_batch=True)
    assert_the_same(loop_side(call, torch.float64, run), loop_side(call, torch.float64, loop_of(found, step_of(found))))
