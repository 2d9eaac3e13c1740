"""Backward passes leave the factors of the gradients of weights, from which those of all processes are computed."""

from __future__ import annotations

import functools

import pytest
import torch

import gatewise
from gatewise.contract.token_factors import FactorReceiver

pytestmark = pytest.mark.gpu


def gradients(layer, x, state, lengths, processes):
    """Return the gradients of a backward pass; with processes, those from factors that all processes have alike."""
    layer.zero_grad(set_to_none=True)
    x.grad = None
    with (
        torch.autocast("cuda", dtype=torch.bfloat16),
        gatewise.for_data_parallel(),
        torch.autograd.set_multithreading_enabled(False),
    ):
        y, _ = layer(x, state, lengths=lengths)
    receiver, told = None, []
    if processes:
        node = y.grad_fn
        ready = functools.partial(told.append, "left")
        receiver = node.factor_receiver = FactorReceiver(node.token_factors, processes - 1, processes, ready)
    with gatewise.for_data_parallel(), torch.autograd.set_multithreading_enabled(False):
        y.float().square().sum().backward()
    if receiver is not None:
        assert told == ["left"]
        for room in receiver.rooms:
            room[:-1] = room[-1:]
        names = [
            f"weight_{kind}_l0{end}" for end in ("", "_reverse")[: 1 + layer.bidirectional] for kind in ("ih", "hh")
        ]
        for name, gradient in zip(names, receiver.gradients(), strict=True):
            assert getattr(layer, name).grad is None, name
            getattr(layer, name).grad = gradient
    return {name: weight.grad.clone() for name, weight in layer.named_parameters()} | {"x": x.grad.clone()}


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("sizes", [(35, 20, 150, 150), (20, 16, 512, 512), (1, 8, 24, 64), (7, 3, 9, 1500)], ids=str)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("kind", [gatewise.LSTM, gatewise.GRU])
def test_the_gradients_are_those_of_whole_products(kind, ragged, bidirectional, sizes, processes):
    time, batch, features, hidden = sizes
    torch.manual_seed(0)
    layer = kind(features, hidden, bidirectional=bidirectional, kernel="persistent", device="cuda")
    x = torch.randn(time, batch, features, device="cuda", requires_grad=True)
    h0 = torch.randn(1 + bidirectional, batch, hidden, device="cuda")
    state = h0 if kind is gatewise.GRU else (h0, torch.randn_like(h0))
    lengths = torch.arange(batch, device="cuda") % time + 1 if ragged else None
    expected = gradients(layer, x, state, lengths, 0)
    for _ in range(3):
        found = gradients(layer, x, state, lengths, processes)
        for name, gradient in expected.items():
            # The same products of the same factors, added up in another order in float32.
            scale = gradient.abs().max()
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=float(2e-5 * scale), msg=name)


def test_a_receiver_leaves_replays_of_other_calls_as_they_are():
    torch.manual_seed(0)
    layer = gatewise.LSTM(64, 64, kernel="persistent", device="cuda")
    x = torch.randn(20, 16, 64, device="cuda", requires_grad=True)
    state = tuple(torch.zeros(1, 16, 64, device="cuda") for _ in range(2))
    expected = gradients(layer, x, state, None, 0)
    for processes in (0, 0, 0, 2, 0, 2, 0, 0):
        found = gradients(layer, x, state, None, processes)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("changes", [{"num_layers": 2}, {"memory": "lean"}, {"proj_size": 16}, {"kernel": "cudnn"}])
def test_other_calls_compute_their_gradients(changes):
    layer = gatewise.LSTM(64, 64, device="cuda", **({"kernel": "persistent"} | changes))
    x = torch.randn(20, 16, 64, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y, _ = layer(x)
    assert getattr(y.grad_fn, "token_factors", None) is None
    if "num_layers" not in changes:
        with torch.autocast("cuda", dtype=torch.bfloat16), gatewise.for_data_parallel():
            y, _ = layer(x)
        assert getattr(y.grad_fn, "token_factors", None) is None
