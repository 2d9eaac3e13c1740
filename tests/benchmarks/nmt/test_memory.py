"""Memory at the peak is assigned to the part that allocated it."""

from __future__ import annotations

import pytest
import torch

from gatewise.benchmarks.nmt import memory
from gatewise.benchmarks.nmt.cases import IWSLT
from gatewise.benchmarks.nmt.largest import MULTIPLE, largest_batch
from gatewise.benchmarks.nmt.memory import parts_at_peak
from gatewise.benchmarks.nmt.scopes import Allocation


def took(address: int, size: int, part: str) -> Allocation:
    return Allocation(address, size, part)


def gave_back(address: int, size: int) -> Allocation:
    return Allocation(address, -size, "backward")


def test_the_largest_moment_by_part() -> None:
    seen = [
        took(1, 40960, "attention"),
        took(2, 30720, "LSTM"),
        took(3, 20480, "output"),
        gave_back(1, 40960),
        took(1, 51200, "backward"),
        gave_back(2, 30720),
        took(4, 25600, "backward"),
    ]
    expected = {"attention": 0, "LSTM": 30, "output": 20, "other": 0, "backward": 50, "weights": 7}
    assert parts_at_peak(seen, before=7 * 1024) == {part: 1024 * size for part, size in expected.items()}


def test_what_was_there_before_can_be_released() -> None:
    seen = [gave_back(9, 5120), took(1, 6144, "attention")]
    parts = parts_at_peak(seen, before=7 * 1024)
    assert (parts["weights"], parts["attention"]) == (2 * 1024, 6 * 1024)
    assert parts_at_peak(seen[:1], before=7 * 1024)["weights"] == 7 * 1024


def test_there_is_no_count_on_a_cpu() -> None:
    assert memory.parts_of_step(lambda: None, torch.device("cpu")) is None


@pytest.mark.parametrize("budget", [999, 1000, 1740, 5000, 12_345])
def test_the_largest_batch_fits_and_the_next_does_not(budget: int) -> None:
    measured = []

    def peak(batch: int) -> int:
        measured.append(batch)
        return round(360 + 10 * batch + 0.01 * batch**1.5)  # slightly more than linear

    batch = largest_batch(peak, budget)
    if peak(64) > budget:
        assert batch is None
    else:
        assert batch is not None
        assert batch % MULTIPLE == 0
        assert peak(batch) <= budget < peak(batch + MULTIPLE)
        assert len(set(measured)) <= 7


@pytest.mark.parametrize("guess", [50, 470, 1024])
def test_a_guess_is_where_the_search_begins(guess: int) -> None:
    measured = []

    def peak(batch: int) -> int:
        measured.append(batch)
        return 10 * batch

    batch = largest_batch(peak, 4500, guess=guess)
    assert batch == {50: None, 470: 448, 1024: 448}[guess]
    assert measured[:1] == {50: [], 470: [448], 1024: [1024]}[guess]


def test_no_more_than_the_most() -> None:
    assert largest_batch(lambda batch: batch, 10**9, most=256) == 256


@pytest.mark.gpu
def test_the_parts_of_a_real_step() -> None:
    from gatewise.benchmarks.nmt.peaks import step_parts, step_peak
    from gatewise.benchmarks.nmt.sentences import draw
    from gatewise.benchmarks.nmt.side import Side
    from gatewise.benchmarks.nmt.ways import PLAIN, starting_weights
    from gatewise.benchmarks.precision import PRECISIONS

    device, case = torch.device("cuda"), IWSLT.with_batch(32)
    before = torch.cuda.memory_allocated(device)
    side = Side(PLAIN, case, PRECISIONS["tf32"], draw(case, 1, device), starting_weights(case, device))
    peak = step_peak(side, device) - before
    parts = step_parts(side, device, before)
    assert sum(parts.values()) == pytest.approx(peak, rel=0.01)
    maps = case.source * case.target * case.batch * case.hidden_size * 4
    assert maps <= parts["attention"] <= 4 * maps
    assert all(parts[part] > 0 for part in ("LSTM", "output", "other", "weights"))
