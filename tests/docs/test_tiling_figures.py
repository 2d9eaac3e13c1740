"""The page about the kernels states how good the choices of tilings are, as the record of timed loops has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.loops import tiling_weights
from gatewise.contract.device import Device
from gatewise.contract.ranking import weights

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs" / "kernel-internals.md").read_text("utf-8").split())
LINES = [json.loads(line) for line in (ROOT / "benchmarks/results/tilings.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize(
    ("ranking", "told"),
    [
        (
            "persistent backward 16-bit",
            "In the {} cases of 16 bits with several timed tilings, the chosen loops take {:.3f}",
        ),
        ("persistent backward TF32", "and in the {} of TF32 {:.3f}"),
    ],
)
def test_how_much_longer_the_chosen_loops_take(ranking, told):
    present = weights(Device.named("h200"), ranking)
    cases = tiling_weights.cases_of([line for line in LINES if line["ranking"] == ranking])
    choices = [tiling_weights.choice_of(case, rows, present, 1.98) for case, rows in cases.items()]
    ratios = [choice.clocks[choice.presently] / min(choice.clocks) for choice in choices]
    assert told.format(len(ratios), tiling_weights.geometric(ratios)) in PAGE
