"""The shapes and cells that are measured."""

from __future__ import annotations

import pytest

from gatewise.benchmarks.cells import cases
from gatewise.cells import SHIPPED
from gatewise.contract.errors import ArgumentError


def test_every_cell_of_the_library_is_measured() -> None:
    names = [cell.name for cell in cases.measured_cells()]
    assert set(names) == {cell.name for cell in SHIPPED} | {"own_lstm"}
    assert len(set(names)) == len(names)


def test_cases_have_one_layer_and_one_direction() -> None:
    assert all((case.num_layers, case.directions, case.ragged) == (1, 1, False) for case in cases.CASES)
    assert max(case.hidden_size for case in cases.CASES) == 1024
    shapes = [(case.time, case.batch, case.hidden_size) for case in cases.CASES]
    assert (1024, 16, 768) in shapes
    assert len(set(shapes)) == len(shapes)
    assert [case.name for case in cases.CASES if case.time == cases.WHOLE_TIME] == ["32-64-512"]
    assert len(cases.QUICK) == 3


def test_cells_are_chosen_by_name() -> None:
    assert [cell.name for cell in cases.chosen_cells(["own_lstm", "gru"])] == ["gru", "own_lstm"]
    assert cases.chosen_cells([]) == cases.measured_cells()
    with pytest.raises(ArgumentError, match=r"`--cell` must be one of lstm, gru, .*own_lstm, got 'lstn'"):
        cases.chosen_cells(["lstn"])
