"""A call on a GPU that only the slow kernel accepts says so, once for each place in a program."""

import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode

import gatewise
from gatewise.contract.device import Device
from gatewise.functional import execution, plan


@pytest.fixture
def prepared(monkeypatch):
    """Prepare training calls on an H200, with tensors that have no values."""
    monkeypatch.setattr(plan.Device, "probe", lambda device: Device.named("h200"))
    monkeypatch.setattr(execution, "state_of_capture", lambda: "")

    def prepare(hidden_size, kernel="auto", memory="lean", time=5):
        with FakeTensorMode():
            shapes = (time, 2, 4), (4 * hidden_size, 4), (4 * hidden_size, hidden_size)
            x, w_ih, w_hh = (torch.empty(shape, device="cuda") for shape in shapes)
            biases = [torch.empty(4 * hidden_size, device="cuda") for _ in range(2)]
            options = None, None, False, 0.0, True, kernel, memory, gatewise.cells.LSTM()
            return execution.prepare(x, None, (w_ih, w_hh, *biases), *options)

    return prepare


def test_a_call_that_only_eager_accepts_warns(prepared):
    with pytest.warns(gatewise.SlowerKernelWarning, match=r"`eager` computes this call .* every other kernel"):
        found, _ = prepared(2500)
    assert found.kernel == "eager"


@pytest.mark.parametrize(
    "options", [{}, {"hidden_size": 2500, "memory": "normal"}, {"kernel": "eager"}, {"time": 0}], ids=str
)
def test_other_calls_do_not(prepared, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared(**{"hidden_size": 9, **options})


def test_on_a_cpu_nothing_is_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gatewise.LSTM(4, 5, memory="lean")(torch.randn(3, 2, 4))
