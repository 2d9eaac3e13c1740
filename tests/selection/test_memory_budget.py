"""With a memory budget, kernels that need more are passed over; the decision and one line of the log say so."""

import pytest
import torch

from gatewise import functional
from gatewise.contract.decision import format_bytes
from gatewise.contract.device import Device
from gatewise.contract.errors import OutOfMemoryPredicted
from gatewise.contract.problem import Problem
from gatewise.selection import choose, decide, use_kernel
from tests.logged import logged

PROBLEM = Problem(35, 64, 512, 512, dtype=torch.float32, needs_grad=True)
H200 = Device.named("h200")


def by_speed():
    accepted = [verdict for verdict in decide(PROBLEM, H200).verdicts if verdict.accepted]
    return sorted(accepted, key=lambda verdict: verdict.seconds)


def test_a_budget_that_fits_changes_nothing():
    free = decide(PROBLEM, H200)
    assert decide(PROBLEM, H200, memory_budget=by_speed()[0].peak_bytes) == free
    assert decide(PROBLEM, H200, memory_budget=float("inf")) == free


def test_the_fastest_kernel_that_fits_is_taken_and_one_line_names_the_figure():
    first, *others = by_speed()
    budget = first.peak_bytes - 1
    expected = next(verdict.kernel for verdict in others if verdict.peak_bytes <= budget)
    with logged() as messages:
        decision = choose(PROBLEM, H200, memory_budget=budget)
    assert decision.chosen == expected
    assert decision.passed_over == first.kernel
    (line,) = messages
    assert (
        line == f"{expected} runs: {first.kernel} needs {format_bytes(first.peak_bytes)}, budget {format_bytes(budget)}"
    )
    assert f"{first.kernel} needs {format_bytes(first.peak_bytes)}" in str(decision)


def test_nobody_fits():
    with pytest.raises(OutOfMemoryPredicted, match="no kernel fits into the memory budget") as raised:
        choose(PROBLEM, H200, memory_budget=1000)
    assert "budget 0.977 KiB" in str(raised.value)


def test_a_named_kernel_is_not_held_to_it():
    with logged() as messages, use_kernel("cudnn"):
        assert choose(PROBLEM, H200, memory_budget=1000).chosen == "cudnn"
    assert not messages


def test_the_explicit_passes_take_one():
    torch.manual_seed(0)
    module = torch.nn.LSTM(4, 6, dtype=torch.float64)
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    (y, _), saved = functional.forward(x, None, module.all_weights)
    needs = {
        verdict.kernel: verdict.peak_bytes
        for verdict in decide(saved.problem, Device.probe("cpu")).verdicts
        if verdict.accepted
    }
    least = min(needs, key=needs.__getitem__)
    (y_small, _), saved = functional.forward(x, None, module.all_weights, memory_budget=needs[least])
    assert saved.kernel == least
    torch.testing.assert_close(y_small, y)
    with pytest.raises(OutOfMemoryPredicted):
        functional.forward(x, None, module.all_weights, memory_budget=needs[least] - 1)
    functional.forward(x, None, module.all_weights)
