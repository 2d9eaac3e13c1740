from __future__ import annotations

from gatewise.benchmarks.cases import LANGUAGE_MODELS, LSTM_GRID


def test_names_tell_cases_apart() -> None:
    names = [case.name for case in LSTM_GRID]
    assert len(set(names)) == len(names)
    assert len(set(LSTM_GRID)) == len(LSTM_GRID)


def test_the_grid_holds_the_language_models() -> None:
    grid = {case.name: case for case in LSTM_GRID}
    for model in LANGUAGE_MODELS.values():
        case = grid[model.name]
        assert (case.time, case.batch, case.hidden_size, case.num_layers) == (
            model.time,
            model.batch,
            model.hidden_size,
            model.num_layers,
        )
