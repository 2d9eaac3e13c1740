"""The order of the products of a backward pass: first what is exchanged as a whole, and factors last."""

from types import SimpleNamespace

import pytest
import torch

from gatewise.contract import token_factors
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.persistent.schedules import layer_gradients, matrix_products


@pytest.mark.parametrize("leaves_factors", [False, True])
def test_factors_are_left_after_the_gradient_of_x(leaves_factors, monkeypatch):
    computed = []
    monkeypatch.setattr(matrix_products, "weight_gradients", lambda *given, **named: computed.append("weights"))
    monkeypatch.setattr(matrix_products, "input_gradient", lambda *given, **named: computed.append("x"))
    problem = Problem(2, 3, 8, 8, dtype=torch.bfloat16, needs_grad=True)
    layer = SimpleNamespace(weights=[None], x=torch.empty(2, 3, 8))
    tokens, scratch = SimpleNamespace(flat=lambda each: each), SimpleNamespace(device=Device.named("h200"))
    dx, into = torch.empty(2, 3, 8), (torch.empty(32, 8),) * 4

    def write(x=dx, weights=into):
        computed.clear()
        layer_gradients.write(problem, layer, None, [None], None, None, tokens, x, weights, scratch)
        return list(computed)

    token = token_factors.receiver.set(object() if leaves_factors else None)
    try:
        assert write() == (["x", "weights"] if leaves_factors else ["weights", "x"])
        assert write(x=None) == ["weights"]
        assert write(weights=()) == ["x"]
    finally:
        token_factors.receiver.reset(token)
