"""flatten_parameters on a GPU: one buffer for cuDNN, without any other visible change."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from gatewise.contract.weights import in_one_buffer
from gatewise.nn import GRU, LSTM, RNN, accelerate, flat_weights

OPTIONS = [
    {},
    {"num_layers": 2, "bidirectional": True},
    {"bias": False},
    {"proj_size": 4, "num_layers": 2},
]


KINDS = (LSTM, GRU, RNN)
CALLS = [(kind, options) for kind in KINDS for options in OPTIONS if kind is LSTM or "proj_size" not in options]
each_layer = pytest.mark.parametrize("kind", KINDS)


def flat(layer: LSTM | GRU | RNN) -> bool:
    per_direction = 2 + 2 * layer.bias + (layer.proj_size > 0)
    return in_one_buffer([weight for direction in layer.all_weights for weight in direction], per_direction)


@pytest.mark.parametrize(("kind", "options"), CALLS)
def test_the_operator_is_given_the_cell_and_the_sizes(kind, options, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", lambda *given: calls.append(given))
    monkeypatch.setattr(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
    monkeypatch.setattr(flat_weights, "_uses_cudnn", lambda weight: True)
    layer = kind(16, 8, batch_first=True, **options)
    layer.flatten_parameters()
    weights, per_direction, *sizes = calls[-1]
    assert all(one is other for one, other in zip(weights, layer.parameters(), strict=True))
    assert per_direction == 2 + 2 * layer.bias + (layer.proj_size > 0)
    mode = {LSTM: 2, GRU: 3, RNN: 1}[kind]
    assert sizes == [16, mode, 8, layer.proj_size, layer.num_layers, True, layer.bidirectional]
    calls.clear()
    copied = pickle.loads(pickle.dumps(layer))
    assert calls[-1][0][0] is copied.weight_ih_l0


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "options"), CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_moving_and_converting_keep_values_and_parameter_objects(kind, options, dtype):
    layer = kind(16, 8, **options)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    identities = [id(parameter) for parameter in layer.parameters()]
    layer.to("cuda", dtype)
    assert flat(layer)
    assert [id(parameter) for parameter in layer.parameters()] == identities
    for parameter, value in zip(layer.parameters(), before, strict=True):
        assert torch.equal(parameter.cpu(), value.to(dtype))


@pytest.mark.gpu
@each_layer
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_are_flat_too(copied, kind):
    layer = kind(16, 8, num_layers=2, device="cuda")
    other = copied(layer)
    assert flat(layer)
    assert flat(other)
    assert other.weight_ih_l0.data_ptr() != layer.weight_ih_l0.data_ptr()


@pytest.mark.gpu
@each_layer
def test_frozen_weights_stay_frozen(kind):
    layer = kind(16, 8)
    layer.weight_hh_l0.requires_grad_(False)
    layer.cuda()
    assert flat(layer)
    assert [parameter.requires_grad for parameter in layer.parameters()] == [True, False, True, True]


@pytest.mark.gpu
@each_layer
def test_tied_and_parametrised_weights_are_left_where_they_are(kind):
    tied = kind(8, 8, num_layers=2)
    tied.weight_hh_l1 = tied.weight_hh_l0
    tied.cuda()
    assert tied.weight_hh_l1 is tied.weight_hh_l0
    assert not flat(tied)
    normed = kind(8, 8)
    parametrizations.weight_norm(normed, "weight_hh_l0")
    normed.cuda()
    x = torch.randn(5, 2, 8, device="cuda")
    for layer in (tied, normed):
        layer(x)[0].sum().backward()


@pytest.mark.gpu
@each_layer
def test_replaced_parameters_are_flat_again_on_request(kind):
    layer = kind(16, 8, device="cuda")
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    assert not flat(layer)
    layer.flatten_parameters()
    assert flat(layer)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, state[name])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_accelerate_does_not_move_parameters_that_are_flat_already(kind):
    theirs = kind(16, 8, num_layers=2).cuda()
    pointers = [parameter.data_ptr() for parameter in theirs.parameters()]
    ours = accelerate(theirs)
    assert [parameter.data_ptr() for parameter in ours.parameters()] == pointers
