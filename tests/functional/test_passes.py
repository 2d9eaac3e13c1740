"""What is done around a kernel's passes: first calls are permitted inside a capture, and layouts are converted."""

import ctypes

import pytest
import torch

import gatewise
from gatewise.functional import passes


class FakeDriver:
    """Exchanges the mode of the thread, as the CUDA driver does."""

    def __init__(self):
        self.mode = 0

    def cuThreadExchangeStreamCaptureMode(self, reference):  # noqa: N802
        given = ctypes.cast(reference, ctypes.POINTER(ctypes.c_int)).contents
        self.mode, given.value = given.value, self.mode


def test_setting_up_is_permitted_in_the_block_only(monkeypatch):
    driver = FakeDriver()
    monkeypatch.setattr(passes, "_driver", lambda: driver)
    with pytest.raises(ZeroDivisionError), passes.first_calls_permitted():
        raise ZeroDivisionError(driver.mode)
    assert driver.mode == 0
    with passes.first_calls_permitted():
        assert driver.mode == passes._RELAXED
    assert driver.mode == 0
    monkeypatch.setattr(passes, "_driver", lambda: None)
    with passes.first_calls_permitted():
        assert driver.mode == 0


def _nodes(tensor):
    """Return the names of the functions in the autograd graph of a tensor."""
    found, left = set(), [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [following for following, _ in node.next_functions]
    return {node.name() for node in found}


@pytest.mark.parametrize("kernel", ["aten", "eager"])
def test_autograd_records_calls_with_lengths_that_are_packed_on_a_cpu(kernel):
    layer = gatewise.LSTM(3, 4, num_layers=2, kernel=kernel)
    y, (h_n, _) = layer(torch.randn(5, 3, 3), lengths=[5, 0, 2])
    assert ("_RecurrenceBackward" in _nodes(y)) == (kernel == "eager")
    assert not y[2:, 2].any()
    (y.sum() + h_n.sum()).backward()
    assert layer.weight_hh_l1.grad.any()
