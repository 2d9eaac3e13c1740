"""Weights that a loss does not depend on: cuDNN returns zeros as their gradients, and so do all kernels on a GPU."""

import pytest
import torch

import gatewise

WIDTH = 16
CASES = {
    "the first layer's states": ({"num_layers": 2}, lambda y, h_n, c_n: h_n[0]),
    "one direction's states": ({"bidirectional": True}, lambda y, h_n, c_n: c_n[1]),
    "states before the projection": ({"proj_size": 8}, lambda y, h_n, c_n: c_n),
    "a single layer's states": ({}, lambda y, h_n, c_n: c_n),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["auto", "aten", "cudnn", "eager", "persistent", "stepwise"])
@pytest.mark.parametrize("case", CASES)
def test_every_weight_has_the_gradient_that_it_has_on_cudnn(case, kernel):
    options, used = CASES[case]
    torch.manual_seed(0)
    theirs = torch.nn.LSTM(WIDTH, WIDTH, **options).cuda()
    ours = gatewise.LSTM(WIDTH, WIDTH, **options, kernel=kernel).cuda()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 3, WIDTH, device="cuda")
    for layer in (theirs, ours):
        y, (h_n, c_n) = layer(x)
        used(y, h_n, c_n).sum().backward()
    for (name, weight), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert weight.grad is not None, name
        assert expected.grad is not None, name
        torch.testing.assert_close(weight.grad, expected.grad, rtol=2e-3, atol=2e-3)
