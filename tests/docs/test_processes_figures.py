"""The numbers on the page about training are those of the records of one and of two GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = [json.loads(line) for line in (ROOT / "benchmarks/results/processes.jsonl").read_text("utf-8").splitlines()]
WEIGHTS = 10_000 * 1500 * 2 + 10_000 + 4 * 6000 * 1500 + 4 * 6000


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs/training.md").read_text("utf-8")


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{record['way']}, {record['settings']['batch']}")
def test_every_record_is_a_row(page, record):
    settings = record["settings"]
    cells = (
        f"{settings['gpus']}",
        f"{settings['batch']}",
        f"{1e3 * record['median']:.2f}",
        f"{round(record['words_per_second'], -3):,.0f}",
    )
    assert f"| {' | '.join(cells)} |" in page
    assert record["run"]["device"] == "NVIDIA H200"


def test_what_the_page_makes_of_them(page):
    step = {(each["settings"]["gpus"], each["settings"]["batch"]): each["median"] for each in RECORDS}
    assert f"{1e3 * (step[2, 40] - step[1, 20]):.1f} ms" in page
    assert f"{4 * WEIGHTS / 1e6:.0f} MB of gradients" in page
    assert 1.2 < 2 * step[1, 20] / step[2, 40] < 1.3
    assert step[2, 40] == pytest.approx(step[1, 40], rel=0.02)
