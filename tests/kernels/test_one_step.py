"""One step on the CPU runs on PyTorch's native loop, because oneDNN would convert the layout of the weights."""

from __future__ import annotations

import pytest
import torch

import gatewise

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs PyTorch with oneDNN")
ONEDNN = "aten::mkldnn_rnn_layer"


def operators(call) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize(("time", "expected"), [(1, False), (9, True)])
def test_only_longer_sequences_go_through_onednn(time, expected, gradients):
    layer = gatewise.LSTM(3, 4, kernel="aten")
    x = torch.randn(time, 2, 3)
    with torch.set_grad_enabled(gradients):
        assert (ONEDNN in operators(lambda: layer(x))) == expected
    algorithm = gatewise.explain(layer, x).verdict("aten").algorithm
    assert ("oneDNN" in (algorithm or "")) == expected


@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}]
)
def test_one_step_equals_torch_forward_and_back(options):
    theirs = torch.nn.LSTM(3, 4, **options)
    ours = gatewise.LSTM(3, 4, **options)
    ours.load_state_dict(theirs.state_dict())
    shape = (2, 1, 3) if options.get("batch_first") else (1, 2, 3)
    found, expected = (torch.linspace(-1, 1, 6).view(shape).requires_grad_() for _ in range(2))
    torch.testing.assert_close(ours(found), theirs(expected))
    for layer, x in ((ours, found), (theirs, expected)):
        layer(x)[0].square().sum().backward()
    torch.testing.assert_close(found.grad, expected.grad)
    for (name, parameter), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, msg=name)


def test_the_switch_is_put_back(monkeypatch):
    layer, x = gatewise.LSTM(3, 4, kernel="aten"), torch.randn(1, 2, 3)

    def refuse(*arguments):
        assert not torch._C._get_mkldnn_enabled()
        raise RuntimeError("no")

    layer(x)
    assert torch._C._get_mkldnn_enabled()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "lstm", refuse)
        with pytest.raises(RuntimeError, match="no"):
            layer(x)
    assert torch._C._get_mkldnn_enabled()
    with torch.backends.mkldnn.flags(enabled=False):
        layer(x)
        assert not torch._C._get_mkldnn_enabled()
