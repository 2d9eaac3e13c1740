"""Backward passes note the gradient of each matrix when it is computed, for its exchange on another stream."""

from __future__ import annotations

import pytest
import torch

import gatewise
from gatewise.contract import early_gradients
from gatewise.contract.early_gradients import EarlyGradients

pytestmark = pytest.mark.gpu


def run(layer, x, repeats=1):
    """Run backward passes in a `noted` block, and read each noted gradient on another stream after its event alone."""
    side, read = torch.cuda.Stream(), {}
    for _ in range(repeats):
        layer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        with early_gradients.noted() as noted, torch.autograd.set_multithreading_enabled(False):
            layer(x)[0].square().sum().backward()
            for name, weight in layer.named_parameters():
                event = noted.event_of(weight.grad)
                if event is not None:
                    side.wait_event(event)
                    with torch.cuda.stream(side):
                        read[name] = weight.grad.clone()
        torch.cuda.synchronize()
        for name, found in read.items():
            torch.testing.assert_close(found, dict(layer.named_parameters())[name].grad, rtol=0, atol=0, msg=name)
    return set(read)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", [gatewise.LSTM, gatewise.GRU])
def test_what_is_noted_is_computed(kind, bidirectional, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for size in (510, 1024):
        layer = kind(size, size, bidirectional=bidirectional, kernel="persistent", device="cuda", dtype=dtype)
        x = torch.randn(20, 16, size, device="cuda", dtype=dtype, requires_grad=True)
        names = run(layer, x)
        assert names == {name for name in layer.state_dict() if name.startswith("weight")}


def test_nothing_is_noted_while_a_pass_is_captured_for_its_replay():
    layer = gatewise.LSTM(64, 64, kernel="persistent", device="cuda")
    x = torch.randn(20, 16, 64, device="cuda", requires_grad=True)
    run(layer, x, repeats=6)


def test_nothing_is_noted_outside_of_a_block():
    gradient = torch.zeros(3, device="cuda")
    early_gradients.note(gradient)
    with early_gradients.noted() as noted:
        assert noted.event_of(gradient) is None


def test_a_gradient_elsewhere_in_memory_that_was_freed_has_no_event():
    noted, addresses = EarlyGradients(), set()
    for _ in range(3):
        gradient = torch.zeros(1 << 20, device="cuda")
        assert noted.event_of(gradient) is None, "its memory belonged to a noted gradient"
        noted.note(gradient)
        addresses.add(gradient.data_ptr())
        assert noted.event_of(gradient) is not None
        assert noted.event_of(gradient[1:]) is None
        assert noted.event_of(gradient.view(1 << 10, 1 << 10)) is None
        del gradient
    assert len(addresses) == 3
