"""The choice on invented devices, and the precedence of preferences."""

import pytest
import torch

import gatewise
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, KernelRefused
from gatewise.contract.problem import Layout, Problem
from gatewise.selection import choose, decide, use_kernel

PROBLEM = Problem(time=100, batch=64, input_size=512, hidden_size=512, dtype=torch.bfloat16, needs_grad=True)
H200, CPU = Device.named("h200"), Device.named("cpu")


def test_the_least_predicted_time_wins_among_those_that_accept():
    decision = decide(PROBLEM, H200)
    accepted = [verdict for verdict in decision.verdicts if verdict.accepted]
    assert decision.verdict(decision.chosen).seconds == min(verdict.seconds for verdict in accepted)
    assert decision.reason == "least predicted time"


def test_a_slower_device_changes_the_prediction_not_the_work():
    slow = H200.replace(issue_seconds=50e-6)
    fast_verdict, slow_verdict = (decide(PROBLEM, device).verdict("cudnn") for device in (H200, slow))
    assert fast_verdict.work == slow_verdict.work
    assert slow_verdict.seconds > 5 * fast_verdict.seconds


def test_precedence_argument_then_block_then_environment(monkeypatch):
    monkeypatch.setenv("GATEWISE_KERNEL", "aten")
    assert decide(PROBLEM, H200).chosen == "aten"
    with use_kernel("eager"):
        assert decide(PROBLEM, H200).chosen == "eager"
        assert decide(PROBLEM, H200, "cudnn").chosen == "cudnn"
        with use_kernel("auto"):
            assert decide(PROBLEM, H200).chosen == "persistent"
    assert decide(PROBLEM, H200).reason == "named by GATEWISE_KERNEL"


def test_a_named_kernel_that_cannot_run_raises_with_the_decision():
    with pytest.raises(KernelRefused) as raised:
        choose(PROBLEM, CPU, "cudnn")
    message = str(raised.value)
    assert "'cudnn' cannot run this call" in message
    assert "device is a CPU with 8 cores, allowed: a CUDA GPU" in message
    assert str(decide(PROBLEM, CPU, "cudnn")) in message


def by_argument(monkeypatch):
    decide(PROBLEM, H200, "cuddn")


def by_block(monkeypatch):
    use_kernel("cuddn").__enter__()


def by_environment(monkeypatch):
    monkeypatch.setenv("GATEWISE_KERNEL", "cuddn")
    decide(PROBLEM, H200)


@pytest.mark.parametrize("ask", [by_argument, by_block, by_environment])
def test_an_unknown_name_lists_the_known(monkeypatch, ask):
    known = ", ".join(map(repr, ("auto", *gatewise.kernel_names())))
    with pytest.raises(KernelRefused, match=f"one of {known}, got 'cuddn'"):
        ask(monkeypatch)


def test_an_unknown_policy_is_named(monkeypatch):
    with pytest.raises(ArgumentError, match=r"`policy` must be 'predict' or 'measure', got 'guess'"):
        use_kernel("auto", policy="guess").__enter__()
    monkeypatch.setenv("GATEWISE_POLICY", "guess")
    with pytest.raises(ArgumentError, match=r"`GATEWISE_POLICY` must be"):
        decide(PROBLEM, H200)


def test_lengths_on_the_gpu_leave_the_kernels_that_need_no_sync():
    problem = PROBLEM.replace(layout=Layout.DEVICE_LENGTHS)
    assert decide(problem, H200).chosen == "persistent"
    decision = decide(problem, H200.replace(compiles=False))
    assert decision.chosen == "eager"
    assert "lengths.cpu()" in str(decision)
    assert "pip install 'gatewise[cuda]'" in str(decision)


def test_a_block_ends_with_its_exception():
    with pytest.raises(ZeroDivisionError), use_kernel("eager"):
        1 / 0  # noqa: B018
    assert decide(PROBLEM, H200).chosen == "persistent"


def test_memory_counts_outputs_kept_and_gradients():
    training, inference = (decide(PROBLEM.replace(needs_grad=grad), H200).verdict("eager") for grad in (True, False))
    outputs = (100 * 64 * 512 + 2 * 64 * 512) * 2
    assert inference.peak_bytes >= outputs
    assert training.peak_bytes > inference.peak_bytes + PROBLEM.parameter_count * 2


def test_two_blocks_in_two_threads_do_not_see_each_other():
    from concurrent.futures import ThreadPoolExecutor

    with use_kernel("eager"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: decide(PROBLEM, H200).chosen).result() == "persistent"


def test_names_are_in_the_order_they_are_asked():
    assert gatewise.kernel_names() == tuple(verdict.kernel for verdict in decide(PROBLEM, H200).verdicts)
