"""Stacks in `gatewise.for_data_parallel`: the same results, by one autograd node for each layer."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gatewise
from gatewise.contract.errors import ArgumentError, ShapeError
from gatewise.functional import execution
from tests.pairwise import each_value

LENGTHS = [6, 2, 4, 1]
LAYERS = {
    "lstm": lambda: gatewise.LSTM(5, 8, 3),
    "lstm in both directions": lambda: gatewise.LSTM(5, 8, 3, bidirectional=True),
    "lstm with a projection": lambda: gatewise.LSTM(5, 8, 3, proj_size=3),
    "lstm backwards": lambda: gatewise.LSTM(5, 8, 2, reverse=True),
    "lean lstm": lambda: gatewise.LSTM(5, 8, 3, memory="lean"),
    "gru": lambda: gatewise.GRU(5, 8, 3),
    "rnn": lambda: gatewise.RNN(5, 8, 3),
    "recurrent": lambda: gatewise.Recurrent(gatewise.cells.PeepholeLSTM(), 5, 8, num_layers=3),
}


def tensors_in(found):
    if isinstance(found, torch.Tensor):
        return [found]
    return [tensor for each in found for tensor in tensors_in(each)]


def computed(layer, x, state, lengths, apart):
    x = x.clone().requires_grad_()
    if apart:
        with gatewise.for_data_parallel():
            found = tensors_in(layer(x, state, lengths=lengths))
    else:
        found = tensors_in(layer(x, state, lengths=lengths))
    loss = sum((each * torch.linspace(0, 1, each.numel(), dtype=each.dtype).view_as(each)).sum() for each in found)
    return [*found, *torch.autograd.grad(loss, [x, *layer.parameters()])]


@pytest.mark.parametrize(
    ("lengths", "given", "kind"), each_value([*itertools.product([None, LENGTHS], [False, True], LAYERS)]), ids=str
)
def test_the_results_and_gradients_are_those_of_one_call(kind, given, lengths):
    torch.manual_seed(0)
    layer = LAYERS[kind]().double()
    x = torch.randn(6, 4, 5, dtype=torch.float64)
    state = None
    if given:
        finals = layer(x)[1]
        state = finals.detach() if isinstance(finals, torch.Tensor) else tuple(each.detach() for each in finals)
    for one, other in zip(
        computed(layer, x, state, lengths, False), computed(layer, x, state, lengths, True), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_gradients_of_upper_layers_are_ready_before_lower_layers_are_computed(autocast, monkeypatch):
    events, backward = [], execution._backward

    def noted(ctx, *arguments):
        events.append("layer")
        return backward(ctx, *arguments)

    monkeypatch.setattr(execution, "_backward", noted)
    layer = gatewise.LSTM(4, 8, 3, kernel="eager")
    for name, weight in layer.named_parameters():
        weight.register_post_accumulate_grad_hook(lambda _, name=name: events.append(int(name[-1])))
    with gatewise.for_data_parallel(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, _ = layer(torch.randn(3, 2, 4))
    y.sum().backward()
    assert [each for each in events if each != "layer"] == [2] * 4 + [1] * 4 + [0] * 4
    if autocast:  # otherwise autograd has recorded the steps, without a backward pass of gatewise's
        assert events[::5] == ["layer"] * 3


def test_dropout_is_between_the_layers():
    torch.manual_seed(0)
    layer = gatewise.LSTM(4, 64, 2, dropout=0.5)
    with gatewise.for_data_parallel():
        first, second = layer(torch.ones(3, 2, 4))[0], layer(torch.ones(3, 2, 4))[0]
        assert not torch.equal(first, second)
        layer.eval()
        assert torch.equal(layer(torch.ones(3, 2, 4))[0], layer(torch.ones(3, 2, 4))[0])
    plain = layer(torch.ones(3, 2, 4))[0]
    assert torch.equal(plain, layer(torch.ones(3, 2, 4))[0])


def test_packed_batches_autocast_and_inference():
    layer = gatewise.LSTM(4, 8, 2)
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.randn(5, 3, 4), [5, 3, 1])
    expected = layer(packed)[0].data
    with gatewise.for_data_parallel():
        torch.testing.assert_close(layer(packed)[0].data, expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.randn(5, 3, 4))[0].dtype == torch.bfloat16
        with torch.no_grad():
            torch.testing.assert_close(layer(packed)[0].data, expected)


@pytest.mark.parametrize("shape", [(3, 2, 8), (2, 3, 8), (2, 2, 7), (2, 2)], ids=str)
def test_a_state_that_does_not_fit_is_refused_as_outside_of_the_block(shape):
    layer, state = gatewise.LSTM(4, 8, 2), torch.zeros(shape)
    with gatewise.for_data_parallel(), pytest.raises(ShapeError, match=r"`hx\[0\]` must be \[2, 2, 8\]"):
        layer(torch.randn(5, 2, 4), (state, state))


@pytest.mark.parametrize(("name", "value"), [("dropout", 1.5), ("dropout", None), ("bidirectional", "x")])
def test_an_option_that_it_cannot_have_is_refused_as_outside_of_the_block(name, value):
    weights = gatewise.LSTM(4, 8, 2).all_weights
    with gatewise.for_data_parallel(), pytest.raises(ArgumentError, match=f"`{name}` must be"):
        gatewise.functional.lstm(torch.randn(5, 2, 4), None, weights, **{name: value})


def test_layers_whose_final_states_have_other_forms_are_joined():
    layer = gatewise.Recurrent(gatewise.cells.LayerNormGRU(), 16, 8, num_layers=2)
    for name, weight in layer.named_parameters():
        weight.requires_grad_(not name.endswith("l0"))
    x = torch.randn(5, 2, 16)
    expected = layer(x)
    with gatewise.for_data_parallel():
        for one, other in zip(tensors_in(layer(x)), tensors_in(expected), strict=True):
            torch.testing.assert_close(one, other)


def test_a_checkpointed_part_that_holds_the_block_is_repeated_alike():
    layer, x = gatewise.LSTM(4, 8, 3, memory="lean"), torch.randn(5, 2, 4, requires_grad=True)

    def part(x):
        with gatewise.for_data_parallel():
            return layer(x)[0]

    checkpoint(part, x, use_reentrant=False).sum().backward()
    found = x.grad.clone()
    x.grad = None
    part(x).sum().backward()
    torch.testing.assert_close(found, x.grad)


@pytest.mark.parametrize("count", [-1, 2.5, "4", True, None])
def test_a_number_that_is_none_is_refused(count):
    with (
        pytest.raises(ArgumentError, match="`multiprocessors` must be an integer of 0 or more"),
        gatewise.for_data_parallel(count),
    ):
        pass
