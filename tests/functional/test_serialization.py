"""A saved forward pass in pieces: rebuilt, it serves backward without a forward pass where its kernel can read it."""

import copy
import json
import pickle

import pytest
import torch

from gatewise import functional
from gatewise.functional.serialization import rebuild, take_apart
from gatewise.kernels.aten import aten
from gatewise.kernels.eager import eager


def call(dtype, kernel, **options):
    torch.manual_seed(0)
    module = torch.nn.LSTM(4, 6, num_layers=2, bidirectional=True, dtype=dtype)
    x = torch.randn(5, 3, 4, dtype=dtype)
    (y, _), saved = functional.forward(x, None, module.all_weights, bidirectional=True, kernel=kernel, **options)
    dy = torch.randn_like(y)
    return saved, dy, functional.backward(saved, dy)


def assert_same(found, expected):
    torch.testing.assert_close(found.x, expected.x, rtol=0, atol=0)
    torch.testing.assert_close(tuple(found.state), tuple(expected.state), rtol=0, atol=0)
    flat = [tensor for direction in expected.weights for tensor in direction]
    torch.testing.assert_close(found.weights, flat, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"lengths": [5, 1, 0]}, {"dropout": 0.5}], ids=["plain", "lengths", "dropout"])
@pytest.mark.parametrize(("kernel", "dtype"), [(eager, torch.float64), (aten, torch.float32)])
def test_rebuilt_it_runs_no_forward(kernel, dtype, options, monkeypatch):
    if kernel is aten and "lengths" in options:
        pytest.skip("packed batches go to the native loop, whose graph cannot travel")
    saved, dy, expected = call(dtype, kernel.name, **options)
    tensors, facts = take_apart(saved)
    again = rebuild(tensors, json.loads(json.dumps(facts)))
    assert again.problem == saved.problem
    monkeypatch.setattr(type(kernel), "forward", lambda *_: pytest.fail("the forward pass ran again"))
    assert_same(functional.backward(again, dy), expected)


def test_the_native_loop_repeats_its_forward():
    saved, dy, expected = call(torch.float64, "aten")
    tensors, facts = take_apart(saved)
    assert not any(name.startswith("kept") for name in tensors)
    again = rebuild(tensors, facts)
    assert again.spent
    assert_same(functional.backward(again, dy), expected)


@pytest.mark.parametrize("travel", [copy.deepcopy, lambda saved: pickle.loads(pickle.dumps(saved))])
@pytest.mark.parametrize("options", [{}, {"lengths": [5, 1, 0]}, {"dropout": 0.5}], ids=["plain", "lengths", "dropout"])
def test_a_copy_of_what_the_native_loop_kept_repeats_its_forward(travel, options):
    saved, dy, expected = call(torch.float64, "aten", **options)
    found = functional.backward(travel(saved), dy)
    flat = [tensor for direction in found.weights for tensor in direction]
    assert_same(found._replace(weights=flat), expected)


@pytest.mark.parametrize("fact", ["torch", "gatewise", "cudnn", "device"])
def test_what_another_version_kept_is_not_read(fact, monkeypatch):
    saved, dy, expected = call(torch.float64, "eager")
    tensors, facts = take_apart(saved)
    facts["made_by"][fact] = "another"
    tensors = {name: tensor * torch.nan if name.startswith("kept") else tensor for name, tensor in tensors.items()}
    again = rebuild(tensors, facts)
    assert again.spent
    assert_same(functional.backward(again, dy), expected)


def test_the_pieces_share_no_memory():
    saved, dy, expected = call(torch.float64, "eager")
    tensors, facts = take_apart(saved)
    saved.inputs.x.zero_()
    saved.result.kept[0].zero_()
    assert_same(functional.backward(rebuild(tensors, facts), dy), expected)
