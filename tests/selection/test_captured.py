"""Choosing while a CUDA graph is captured: by the device's time, with the same kernels in the calls that warm it up."""

import itertools
import json
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode

import gatewise
from gatewise.cells import LSTM
from gatewise.contract import capture
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.contract.saved import Inputs
from gatewise.functional import execution, plan
from gatewise.functional.passes import Guarded
from gatewise.functional.weights import forms_of
from gatewise.kernels import operators
from gatewise.selection import autotune, decide, kernel_named, predicted, use_kernel
from gatewise.training.graph import WARMUPS, ReplayedStep
from tests.pairwise import exhaustive, pairwise

H200 = Device.named("h200")
SIZES = (1, 50, 400), (1, 64, 256), (256, 512, 1024), (torch.bfloat16, torch.float32)
several = pytest.mark.parametrize(
    "shapes", [pairwise(*SIZES), *exhaustive([*itertools.product(*SIZES)])], ids=["pairs", "all"]
)


@several
@pytest.mark.parametrize("needs_grad", [False, True])
def test_only_the_time_of_the_device_counts_in_a_graph(needs_grad, shapes):
    slow = H200.replace(operator_seconds=1.0, issue_seconds=1.0)
    differing = 0
    for time, batch, hidden_size, dtype in shapes:
        problem = Problem(time, batch, hidden_size, hidden_size, dtype=dtype, needs_grad=needs_grad)
        launched, captured = predicted(problem, H200), predicted(problem.replace(captured=True, announced=True), H200)
        on_slow_cpu = predicted(problem.replace(captured=True, announced=True), slow)
        assert [v.seconds for v in on_slow_cpu.verdicts] == [v.seconds for v in captured.verdicts]
        accepted = [
            (one, other) for one, other in zip(launched.verdicts, captured.verdicts, strict=True) if one.accepted
        ]
        assert all(one.seconds >= other.seconds for one, other in accepted)
        assert captured.verdict(captured.chosen).seconds == min(other.seconds for _, other in accepted)
        differing += launched.chosen != captured.chosen
    assert differing


@several
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_capture_that_was_not_announced_takes_what_is_set_up_or_can_be(dropout, shapes):
    able, narrower = ["persistent", "stepwise"] if dropout else ["persistent", "stepwise", "cudnn"], 0
    for time, batch, hidden_size, dtype in shapes:
        problem = Problem(
            time, batch, hidden_size, hidden_size, num_layers=2, dropout=dropout, dtype=dtype, needs_grad=True
        )
        launched = predicted(problem, H200).chosen
        noticed = predicted(problem.replace(captured=True), H200)
        announced = predicted(problem.replace(captured=True, announced=True), H200)
        assert noticed.chosen in (launched, *able)
        assert noticed.verdict(noticed.chosen).seconds >= announced.verdict(announced.chosen).seconds
        if noticed.chosen != announced.chosen:
            assert announced.chosen in (["aten", "eager", "cudnn"] if dropout else ["aten", "eager"])
            narrower += 1
    assert narrower or not dropout


@pytest.mark.parametrize(("dropout", "announced"), [(0.0, False), (0.0, True), (0.5, False)])
def test_in_a_capture_that_was_not_announced_autograd_records_no_call_of_cudnn_that_may_be_the_first(
    dropout, announced, monkeypatch
):
    monkeypatch.setattr(operators, "call", lambda problem, inputs: "recorded")
    problem = Problem(5, 2, 4, 8, num_layers=2, dropout=dropout, needs_grad=True, captured=True, announced=announced)
    inputs = Inputs(torch.zeros(5, 2, 4), *torch.zeros(2, 2, 2, 8), tuple(torch.nn.LSTM(4, 8, 2).parameters()))
    monkeypatch.setattr(sys.modules[type(kernel_named("cudnn")).__module__], "in_one_buffer", lambda *_: True)
    assert kernel_named("cudnn").recorded(problem, inputs) == ("recorded" if announced or dropout else None)


def test_the_decision_says_so():
    lstm = gatewise.LSTM(512, 512, device="meta")
    decision = gatewise.explain(lstm, (50, 128, 512), device="h200", captured=True)
    assert "training, in a CUDA graph" in " ".join(str(decision).split())
    assert decision.reason == "least predicted time of the device"
    plain = gatewise.explain(lstm, (50, 128, 512), device="h200")
    assert "graph" not in str(plain)
    assert plain.reason == "least predicted time"


def test_what_is_announced_holds_until_the_block_ends(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert capture.state() == "noticed"
    with gatewise.for_cuda_graph():
        assert capture.state() == "announced"
        with gatewise.for_cuda_graph(False):
            assert capture.state() == ""
        assert capture.state() == "announced"
    assert capture.state() == "noticed"
    with pytest.raises(ZeroDivisionError), gatewise.for_cuda_graph():
        raise ZeroDivisionError
    assert capture.state() == "noticed"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert capture.state() == ""


def test_on_a_cpu_nothing_is_captured():
    lstm = gatewise.LSTM(4, 8)
    with gatewise.for_cuda_graph():
        assert not gatewise.explain(lstm, (5, 2, 4)).problem.captured
        lstm(torch.randn(5, 2, 4))


def test_named_devices_are_not_captured_unless_said():
    lstm = gatewise.LSTM(4, 8, device="meta")
    with gatewise.for_cuda_graph():
        assert not gatewise.explain(lstm, (5, 2, 4), device="h200").problem.captured


def test_plans_of_both_kinds_are_kept_apart():
    forms = *forms_of([torch.zeros(5, 2, 4)]), None, forms_of(list(gatewise.LSTM(4, 8).parameters()))
    options = (False, 0.0, True, "normal", LSTM(), None)
    found = [plan.plan_of(*forms, *options, plan.Settings(capture=state)) for state in ("", "noticed", "announced")]
    assert [own.problem.captured for own in found] == [False, True, True]
    assert [own.problem.announced for own in found] == [False, False, True]
    # In PyTorch's own graph of operators, a library could not be initialised during the capture.
    aten = kernel_named("aten")
    assert [own.passes for own in found] == [aten, Guarded(aten), Guarded(aten)]


def test_compiled_calls_have_one_choice(monkeypatch):
    monkeypatch.setattr(execution, "state_of_capture", lambda: pytest.fail("asked"))
    monkeypatch.setattr(plan.Device, "probe", lambda device: H200)
    with FakeTensorMode():
        x, *weights = (torch.empty(shape, device="cuda") for shape in ((5, 2, 4), (32, 4), (32, 8), (32,), (32,)))
        options = None, None, False, 0.0, True, "eager", "normal", LSTM()
        found, _ = execution.prepare(x, None, tuple(weights), *options, plan.Particulars(traced=True))
        assert not found.problem.captured
        with pytest.raises(pytest.fail.Exception, match="asked"):
            execution.prepare(x, None, tuple(weights), *options)


def test_nothing_is_measured_during_a_capture(tmp_path, monkeypatch):
    monkeypatch.setenv("GATEWISE_CACHE", str(tmp_path))
    autotune._measured.cache_clear()
    problem = Problem(3, 2, 4, 5)
    cpu = Device.probe("cpu")
    with use_kernel("auto", policy="measure"):
        with monkeypatch.context() as patched:
            patched.setattr(autotune, "_time", lambda *_: pytest.fail("measured"))
            assert "predicted" in decide(problem.replace(captured=True), cpu).reason
        decide(problem, cpu)
        monkeypatch.setattr(autotune, "_time", lambda *_: pytest.fail("measured again"))
        decision = decide(problem.replace(captured=True), cpu)
    assert decision.reason == "least measured time"
    assert len(json.loads((tmp_path / "measured.json").read_text())) == 1


def test_a_training_step_and_its_graph_choose_as_launched_steps_do():
    seen = []

    def step(batch, state):
        seen.append(capture._announced.get())
        return batch.sum(), state

    def recorded(work):
        work()
        return work

    train = ReplayedStep(step, recorded, lambda sentence: None)
    for _ in range(WARMUPS + 1):
        train(torch.ones(3), None)
    assert len(seen) > WARMUPS
    assert all(wanted is False for wanted in seen)
    assert capture._announced.get() is None
