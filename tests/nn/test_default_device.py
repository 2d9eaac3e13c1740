"""A default device, set by `torch.set_default_device` or `with torch.device(...)`, affects only what users create."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from gatewise.nn import LSTM


@pytest.mark.parametrize("kernel", ["aten", "eager"])
@pytest.mark.parametrize("lengths", ["none", "list", "tensor", "packed"])
def test_a_call_on_the_cpu_stays_there(kernel, lengths):
    torch.manual_seed(0)
    layer, x = LSTM(4, 8, num_layers=2, kernel=kernel), torch.randn(5, 3, 4)
    options = {"list": {"lengths": [5, 2, 0]}, "tensor": {"lengths": torch.tensor([5, 2, 0])}}.get(lengths, {})
    given = pack_padded_sequence(x, torch.tensor([5, 1, 3]), enforce_sorted=False) if lengths == "packed" else x

    def results():
        layer.zero_grad()
        y, state = layer(given, **options)
        (y.data if lengths == "packed" else y).sum().backward()
        return [y.data if lengths == "packed" else y, *state, *(weight.grad for weight in layer.parameters())]

    expected = results()
    with torch.device("meta"):
        found = results()
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
def test_a_program_whose_default_is_the_gpu():
    # In a separate process, because a device is initialised in the first call.
    program = """
import torch, gatewise
torch.set_default_device("cuda")
for kernel in ("persistent", "stepwise", "cudnn", "eager"):
    layer = gatewise.LSTM(24, 64, num_layers=2, kernel=kernel, dtype=torch.bfloat16)
    x = torch.randn(9, 3, 24, dtype=torch.bfloat16)
    for options in ({}, {"lengths": [9, 1, 4]}, {"lengths": torch.tensor([9, 1, 4], device="cpu")}):
        layer(x, **options)[0].sum().backward()
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([9, 1, 4], device="cpu"), enforce_sorted=False)
    layer(packed)[0].data.sum().backward()
    print(kernel, all(weight.grad.isfinite().all() for weight in layer.parameters()))
"""
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=90)
    assert found.stdout.split() == ["persistent", "True", "stepwise", "True", "cudnn", "True", "eager", "True"], (
        found.stderr
    )
