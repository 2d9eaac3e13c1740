"""The numbers in README and on the page about translation are those of the records of translation models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def records(name):
    return [json.loads(line) for line in (ROOT / f"benchmarks/results/{name}.jsonl").read_text("utf-8").splitlines()]


def prose(page):
    return " ".join((ROOT / page).read_text("utf-8").split())


def test_the_readme_compares_training_with_plain_pytorch():
    newest = {
        each["way"]: each
        for each in records("nmt")
        if (each["case"], each["dtype"], each["status"]) == ("iwslt-50-50-128", "bf16", "measured")
    }
    ours, plain = newest["fused, gatewise"], newest["plain PyTorch"]

    def pairs(record, how):
        return f"{128 / record['times'][how]['median']:,.0f}"

    def memory(record, how):
        return f"{record['peak_bytes'][how] / 1e9:.2f} GB"

    smaller = plain["parts"]["attention"] / ours["parts"]["attention"]
    assert (
        f"trains {pairs(ours, 'graph')} sentence pairs a second in {memory(ours, 'eager')}, where plain PyTorch "
        f"trains {pairs(plain, 'eager')} in {memory(plain, 'eager')}, and {pairs(plain, 'graph')} as a CUDA graph; "
        f"attention's share of the memory is {smaller:.0f} times smaller"
    ) in prose("README.md")


def test_the_score_of_tatoeba():
    *_, run = records("train_nmt")
    bleu = f"{run['test_bleu']:.1f}"
    assert f"{run['minutes']:.1f} minutes and ends at {bleu} BLEU" in prose("README.md")
    cells = f"| {bleu} | {run['test_chrf']:.1f} | {run['minutes']:.1f} minutes of training, "
    assert f"{cells}{run['wall_seconds'] / 60:.1f} with" in prose("docs/translation.md")


def test_the_time_of_the_first_epoch():
    *_, line = (each for each in records("starts") if each["case"] == "tatoeba")
    assert line["run"]["device"] == "NVIDIA H200"
    empty, full = line["runs"]
    whole = [f"{each['process']:.1f}" for each in line["runs"]]
    before = sorted(each["before"] for each in line["runs"])
    page = prose("docs/translation.md")
    assert (
        f"it took {empty['first_epoch']:.2f} s on an H200 with empty caches, and {full['first_epoch']:.2f} s with full "
        f"ones, in one run each"
    ) in page
    assert f"with full caches is {'missed' if full['first_epoch'] > 3 else 'met'}" in page
    assert (
        f"The whole command with one epoch took {whole[0]} and {whole[1]} s, of which {before[0]:.1f} to "
        f"{before[-1]:.1f} s passed before training."
    ) in page


def test_the_pair_of_attention_kernels():
    bleu = {each["changed"]["attention_kernel"]: each["test_bleu"] for each in records("train_nmt_pair")}
    fused, reference = (f"{bleu[kernel]:.1f}" for kernel in ("fused", "reference"))
    sentence = f"{fused} BLEU on the test set with the kernel `fused` and to {reference} with `reference`"
    assert sentence in prose("docs/translation.md")
    assert bleu["fused"] == pytest.approx(bleu["reference"], abs=0.3)
