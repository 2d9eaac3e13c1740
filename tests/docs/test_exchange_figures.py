"""The numbers on the page about training are those of the record of exchanges of gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "benchmarks/results/exchange.jsonl").read_text("utf-8").splitlines()[-1])


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs/training.md").read_text("utf-8")


@pytest.mark.parametrize("way", RECORD["ways"])
def test_every_way_is_a_row(page, way):
    found = RECORD["ways"][way]
    assert f"| {way} | {found['median_ms']:.0f} | {found['over_gatewise']:.2f} | {found['sent_mb']:.1f} |" in page


def test_what_the_page_says_of_them(page):
    settings, ways = RECORD["settings"], RECORD["ways"]
    sizes = (
        f"{settings['num_layers']} x {settings['hidden_size']} units, 10,000 words, {settings['batch']} columns each"
    )
    assert sizes in page
    assert f"{RECORD['gradients_mb']:.1f} MB of gradients" in page
    assert f"load average of {RECORD['load']:.0f}" in page
    assert RECORD["run"]["command"].startswith("torchrun --nproc-per-node 2 benchmarks/exchange.py")
    assert f"commit {RECORD['run']['commit'][:10]}" in page
    static = ways["DDP, static graph and views"]
    assert static["sent_mb"] == ways["gatewise"]["sent_mb"]
    assert abs(static["over_gatewise"] - 1) < 0.05
    assert ways["gatewise, bfloat16"]["over_gatewise"] > 1
