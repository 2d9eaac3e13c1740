"""`gatewise train nmt --memory-budget`: the report before the first step, and unchanged results."""

from __future__ import annotations

import re

import pytest
import torch

from gatewise.training import RunFolder, read_tensors
from gatewise.training.loop import MODEL

pytest.importorskip("tokenizers")
pytest.importorskip("sacrebleu")
pytest.importorskip("babel")

SMALL = ("train", "nmt", "--set", "data.phrases=300", "--epochs", 1, "--hidden-size", 16, "--embedding-size", 16)


def test_the_plan_is_printed_before_the_first_step(gatewise):
    answer = gatewise(*SMALL, "--memory-budget", "1GB")
    assert answer.status == 0, answer.err
    plan, epochs = answer.out.index("memory plan  "), answer.out.index("train ppl")
    assert plan < epochs
    assert re.search(r"predicted of 954 MiB\s+\(1GB\)", answer.out)
    assert max(map(len, answer.out[plan:epochs].splitlines())) <= 80


# The planner says so in tests/planning/test_planner.py.
@pytest.mark.exhaustive
def test_a_budget_that_cannot_be_met_says_what_would_and_nothing_is_written(gatewise, tmp_path):
    answer = gatewise(*SMALL, "--memory-budget", "1MB", "--output", tmp_path / "run")
    assert answer.refused
    error = " ".join(answer.err.split())
    found = re.search(
        r"`--memory-budget` must be at least ([\d.]+) MiB for these batches \(S \d+, T \d+, B \d+\), "
        r"got 977 KiB \(1MB\)\. "
        r"Raise it, or lower `--batch-tokens` from [\d,]+ to ([\d,]+), the most that fits\.",
        error,
    )
    assert found, error
    assert not RunFolder(tmp_path / "run").exists()
    # Both remedies in the error work.
    answer = gatewise(*SMALL, "--memory-budget", f"{found[1]}MiB", "--output", tmp_path / "more")
    assert answer.status == 0, answer.err
    answer = gatewise(
        *SMALL, "--memory-budget", "1MB", "--batch-tokens", found[2].replace(",", ""), "--output", tmp_path / "smaller"
    )
    assert answer.status == 0, answer.err


def test_what_is_no_budget_is_one_sentence(gatewise):
    answer = gatewise(*SMALL, "--memory-budget", "plenty")
    assert answer.refused
    assert "`--memory-budget` must be 'auto' or a size" in " ".join(answer.err.split())


def test_weights_are_the_same_but_for_rounding(gatewise, tmp_path):
    # Without a feature map, only the scores of all tokens can be saved.
    words = (*SMALL, "--score", "dot", "--batch-tokens", 4000)

    def trained(name, budget):
        answer = gatewise(*words, "--memory-budget", budget, "--output", tmp_path / name)
        assert answer.status == 0, answer.err
        return answer.out, read_tensors(RunFolder(tmp_path / name).model, MODEL)[0]

    least = re.search(r"at least ([\d.]+) MiB", " ".join(gatewise(*words, "--memory-budget", "100KB").err.split()))
    assert least
    (small_plan, small), (large_plan, large) = trained("small", f"{least[1]}MiB"), trained("large", "8GB")
    assert "chunks of" in small_plan
    assert "chunks of" not in large_plan
    for name, weight in large.items():
        torch.testing.assert_close(small[name], weight, rtol=1e-3, atol=1e-4)
