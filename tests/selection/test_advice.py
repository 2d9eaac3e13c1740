"""Advice on faster calls and the largest batch: predictions on described devices."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch

from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.selection import decide, predicted, use_kernel
from gatewise.selection.advice import advise, largest_batch, memory
from tests.pairwise import each_value, exhaustive

PTB = Problem(35, 20, 1500, 1500, num_layers=2, needs_grad=True, allow_tf32=True)
H200 = Device.named("h200")


def texts(problem, device, kernel="auto"):
    return [str(advice) for advice in advise(problem, device, kernel)]


def test_the_large_ptb_model_is_told_of_its_dtype_and_batch():
    found = {str(advice): advice for advice in advise(PTB, H200)}
    assert "fp32 -> bf16" in found
    assert "B 20 -> 24" in found
    narrow = found["fp32 -> bf16"]
    assert narrow.decision.problem == PTB.replace(dtype=torch.bfloat16, allow_tf32=False)
    assert narrow.decision == predicted(narrow.decision.problem, H200)


def test_gains_are_ratios_of_predicted_times_a_sequence():
    now = predicted(PTB, H200)
    before = now.verdict(now.chosen).seconds / PTB.batch
    for advice in advise(PTB, H200):
        decision = advice.decision
        after = decision.verdict(decision.chosen).seconds / decision.problem.batch
        assert advice.gain == pytest.approx(before / after)
        assert advice.gain >= 1.05


def test_singles_come_first_and_each_list_begins_with_its_best():
    found = advise(PTB, H200)
    singles = [advice.gain for advice in found if len(advice.changes) == 1]
    together = [advice.gain for advice in found if len(advice.changes) > 1]
    assert [advice.gain for advice in found] == singles + together
    assert singles == sorted(singles, reverse=True)
    assert together == sorted(together, reverse=True)
    assert 1 <= len(together) <= 2


def test_demands_that_must_be_met_together_are_named_together():
    # cuDNN's persistent algorithm needs float16 and every size aligned; no single change meets all conditions.
    problem = Problem(100, 12, 500, 500, needs_grad=True, captured=True, announced=True)
    found = {str(advice): advice for advice in advise(problem, Device.named("v100"))}
    aligned = found["fp32 -> fp16, B 12 -> 16, H 500 -> 512, I 500 -> 512"]
    assert aligned.decision.verdict("cudnn").algorithm == "PERSIST_STATIC"
    assert aligned.gain > 1.5 * found["fp32 -> fp16"].gain


SHORT = Problem(35, 20, 200, 200, num_layers=2, dtype=torch.bfloat16, needs_grad=True)


@pytest.mark.parametrize(("needs_grad", "expected"), [(True, "gatewise.make_graphed_step"), (False, "in a CUDA graph")])
def test_small_calls_are_told_to_be_replayed(needs_grad, expected):
    problem = SHORT.replace(needs_grad=needs_grad)
    found = {str(advice): advice for advice in advise(problem, H200)}
    replayed = problem.replace(captured=True, announced=True)
    assert found[expected].decision == predicted(replayed, H200)
    assert found[expected].gain > 1.2


def test_what_is_or_cannot_be_replayed_is_not_told_so():
    captured = SHORT.replace(captured=True, announced=True)
    packed, host = (SHORT.replace(layout=layout) for layout in (Layout.PACKED, Layout.HOST_LENGTHS))
    for problem, device in ((captured, H200), (packed, H200), (host, H200), (SHORT, Device.named("cpu"))):
        assert not any("graph" in text for text in texts(problem, device))
    lengths = texts(SHORT.replace(layout=Layout.DEVICE_LENGTHS), H200.replace(compiles=False))
    assert any("graph" in text for text in lengths)
    assert not any("graph" in text and "lengths" in text for text in lengths)


def test_a_smaller_layer_must_gain_more_than_its_smaller_work():
    device = dataclasses.replace(H200, issue_seconds=0.0, launch_seconds=0.0, operator_seconds=0.0)
    problem = PTB.replace(hidden_size=2030, dtype=torch.float64, num_layers=1)
    for advice in advise(problem, device):
        sizes = [dict(change.problem)["hidden_size"] for change in advice.changes if change.quantity == "hidden_size"]
        assert all(size > problem.hidden_size for size in sizes)


@pytest.mark.parametrize(
    ("changes", "device", "expected"),
    [
        ({"proj_size": 128}, H200, "P 128 -> 0"),
        ({"layout": Layout.PACKED}, H200.replace(compiles=False), "pip install 'gatewise[cuda]'"),
        ({"layout": Layout.DEVICE_LENGTHS}, H200.replace(compiles=False), "lengths.cpu() once a batch"),
        ({"dtype": torch.float32, "allow_tf32": False}, H200, "torch.backends.cudnn.allow_tf32 = True"),
        ({"dtype": torch.float64}, Device.named("cpu"), "fp64 -> fp32"),
    ],
)
def test_every_kind_of_change_is_found_where_it_helps(changes, device, expected):
    problem = Problem(100, 64, 512, 512, dtype=torch.bfloat16, needs_grad=True).replace(**changes)
    assert expected in texts(problem, device)


def test_a_kernel_that_was_named_is_helped_to_run():
    exact = PTB.replace(allow_tf32=False)
    found = advise(exact, H200, "persistent")
    assert predicted(exact, H200).verdict("persistent").refusals
    assert found
    for advice in found:
        assert advice.decision.chosen == "persistent"
        assert advice.gain == float("inf")


def test_advice_never_measures_and_never_runs(monkeypatch):
    monkeypatch.setenv("GATEWISE_POLICY", "measure")
    assert advise(PTB, H200)
    with use_kernel("cudnn"):
        assert {advice.decision.chosen for advice in advise(PTB, H200)} == {"cudnn"}


@pytest.mark.parametrize("empty", [{"time": 0}, {"batch": 0}])
def test_nothing_helps_an_empty_call(empty):
    assert advise(PTB.replace(**empty), H200) == ()


@pytest.mark.parametrize("device", [*exhaustive("h200"), "t4", "cpu"])
def test_the_largest_batch_fits_and_one_more_does_not(device):
    device = Device.named(device)
    largest = largest_batch(PTB, device)
    room = 0.9 * device.memory_bytes
    assert memory(predicted(PTB.replace(batch=largest), device)).total <= room
    assert memory(predicted(PTB.replace(batch=largest + 1), device)).total > room


def fitting(problem, device, sizes):
    return {
        size: memory(predicted(problem.replace(batch=size), device)).total <= 0.9 * device.memory_bytes
        for size in sizes
    }


SMALL = [
    Problem(35, 1, 31, 31, dtype=torch.float32, needs_grad=True),
    Problem(35, 1, 128, 128, num_layers=2, dtype=torch.bfloat16, needs_grad=True),
]


@pytest.mark.parametrize("problem", [SMALL[0], pytest.param(SMALL[1], marks=pytest.mark.exhaustive)], ids=str)
def test_small_budgets_agree_with_brute_force(problem):
    for size in (1, 8, 17):
        device = H200.replace(memory_bytes=int(memory(predicted(problem.replace(batch=size), H200)).total / 0.9) + 1)
        fits = fitting(problem, device, range(1, 33))
        expected = next((size - 1 for size, does in fits.items() if not does), None)
        found = {largest_batch(problem.replace(batch=start), device) for start in (1, 9, 64)}
        assert len(found) == 1
        if expected is not None:
            assert found == {expected}


class Invented:
    """Decisions between a kernel that needs 2 bytes a sequence and others, which are chosen for some batches."""

    def __init__(self, problem, chosen, bytes_each):
        self.problem, self.chosen, self._bytes = problem, chosen(problem.batch), bytes_each
        self.verdicts = [SimpleNamespace(kernel=name, accepted=True) for name in bytes_each]

    def verdict(self, kernel):
        return SimpleNamespace(peak_bytes=self._bytes[kernel] * self.problem.batch)


@pytest.mark.parametrize(
    ("room", "chosen"),
    each_value(
        [
            *itertools.product(
                [60, 500, 3000, 100_000],
                [
                    lambda batch: "small",
                    lambda batch: "large",
                    lambda batch: "large" if batch < 1000 else "small",
                    lambda batch: "small" if batch < 200 else "large",
                    lambda batch: "small" if batch % 8 else "large",
                    lambda batch: "large" if batch % 8 else "small",
                    lambda batch: "large" if 20 <= batch < 40 else "small",
                    lambda batch: "small" if batch > 10_000 and batch % 8 else "large",
                ],
            )
        ]
    ),
)
def test_the_largest_batch_is_the_one_up_to_which_every_one_fits(monkeypatch, chosen, room):
    nothing = Problem(0, 1, 0, 0)
    sizes = {"small": 2, "large": 3, "never": 9}
    monkeypatch.setattr(
        "gatewise.selection.advice.decide_by_prediction",
        lambda problem, device, kernel: Invented(problem, chosen, sizes),
    )
    device = H200.replace(memory_bytes=room / 0.9 + 1e-6)
    expected = next(batch for batch in range(room + 2) if batch and sizes[chosen(batch)] * batch > room) - 1
    for start in (1, 7, expected, room):
        assert largest_batch(nothing.replace(batch=start), device) == expected


# Budgets are compared with brute force, too.
@pytest.mark.exhaustive
def test_half_the_memory_holds_about_half_the_batch():
    whole, half = (largest_batch(PTB, H200.replace(memory_bytes=size << 30)) for size in (64, 32))
    assert 0.45 < half / whole < 0.52


def test_no_batch_fits_where_the_weights_do_not():
    assert largest_batch(PTB, H200.replace(memory_bytes=1 << 20)) == 0
    assert largest_batch(PTB.replace(dtype=torch.float64), H200, "persistent") == 0


def test_memory_is_weights_inputs_and_the_predicted_peak():
    decision = predicted(PTB, H200)
    found = memory(decision)
    assert found.weights == 4 * PTB.parameter_count
    assert found.inputs == 4 * (35 * 20 * 1500 + 2 * 20 * 3000)
    assert found.peak == decision.verdict(decision.chosen).peak_bytes
    assert found.total == found.weights + found.inputs + found.peak
    assert memory(decide(PTB.replace(dtype=torch.float64), H200, "persistent")) is None
