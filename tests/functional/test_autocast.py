"""Calls under autocast convert all weights at once where the kernel widens their gradients, with the same results."""

import pytest
import torch

import gatewise
from gatewise import functional
from gatewise.contract.weights import copied_together, in_one_buffer
from gatewise.functional import execution
from gatewise.functional.plan import plan_of
from gatewise.selection import REFERENCE


@pytest.fixture
def widens(monkeypatch):
    """Let the reference kernel say that it widens gradients, which it may return in 16 bits all the same."""
    plan_of.cache_clear()
    monkeypatch.setattr(type(REFERENCE), "widens_gradients", True)
    yield
    plan_of.cache_clear()


def called(layer, x):
    # With little memory, this kernel computes both passes itself, instead of letting autograd record them.
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x)[0].float().square().sum()


def gradients(layer, x):
    return torch.autograd.grad(called(layer, x), [x, *layer.parameters()])


@pytest.mark.parametrize("cell", [gatewise.LSTM, gatewise.GRU])
def test_gradients_are_those_of_weights_that_autograd_converts(cell, monkeypatch):
    torch.manual_seed(0)
    layer = cell(5, 9, num_layers=2, bidirectional=True, kernel="eager", memory="lean")
    x = torch.randn(6, 3, 5, requires_grad=True)
    expected = gradients(layer, x)
    plan_of.cache_clear()
    monkeypatch.setattr(type(REFERENCE), "widens_gradients", True)
    copied = []
    monkeypatch.setattr(execution, "copied_together", lambda *given: copied.append(1) or copied_together(*given))
    found = gradients(layer, x)
    plan_of.cache_clear()
    assert copied
    assert all(torch.equal(*pair) and pair[0].dtype == torch.float32 for pair in zip(found, expected, strict=True))


@pytest.mark.usefixtures("widens")
def test_only_weights_that_need_gradients_get_them():
    layer = gatewise.LSTM(4, 6, kernel="eager", memory="lean")
    layer.weight_hh_l0.requires_grad_(False)
    called(layer, torch.randn(5, 2, 4)).backward()
    assert [each.grad is not None for each in layer.parameters()] == [True, False, True, True]


@pytest.mark.usefixtures("widens")
def test_second_derivatives_reach_the_parameters():
    torch.manual_seed(0)
    layer, x = gatewise.LSTM(4, 6, kernel="eager", memory="lean"), torch.randn(5, 2, 4, requires_grad=True)

    def penalty(call):
        weights = list(layer.parameters())
        first = torch.autograd.grad(call(), [x, *weights], create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), [x, *weights])

    found = penalty(lambda: called(layer, x))
    exact = penalty(lambda: layer(x)[0].square().sum())
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.05 * other.norm()  # bfloat16 has eight bits


@pytest.mark.usefixtures("widens")
def test_weights_may_change_before_a_backward_pass_that_is_not_differentiated():
    layer, x = gatewise.LSTM(4, 6, kernel="eager", memory="lean"), torch.randn(5, 2, 4)
    expected = gradients(layer, x.requires_grad_())
    loss = called(layer, x)
    with torch.no_grad():
        layer.weight_hh_l0.mul_(2)
    assert all(map(torch.equal, torch.autograd.grad(loss, [x, *layer.parameters()]), expected))
    loss = called(layer, x)
    with torch.no_grad():
        layer.weight_hh_l0.mul_(2)
    with pytest.raises(gatewise.ModifiedInPlace, match=r"`weights\[1\]` must be as it was in the forward pass"):
        torch.autograd.grad(loss, [x], create_graph=True)
    assert torch.isfinite(torch.autograd.grad(called(layer, x), [x], create_graph=True)[0]).all()


@pytest.mark.usefixtures("widens")
def test_activation_checkpointing():
    layer, x = gatewise.LSTM(4, 6, kernel="eager", memory="lean"), torch.randn(5, 2, 4, requires_grad=True)
    expected = gradients(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        loss = y.float().square().sum()
    assert all(map(torch.equal, torch.autograd.grad(loss, [x, *layer.parameters()]), expected))


def test_weights_of_the_dtype_of_autocast_are_not_copied(monkeypatch):
    monkeypatch.setattr(execution, "copied_together", lambda *given: pytest.fail("copied"))
    layer = gatewise.LSTM(4, 6, kernel="eager", dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(5, 2, 4))[0].dtype == torch.bfloat16


def test_weights_that_differ_in_device_are_refused():
    layer = torch.nn.LSTM(4, 6)
    weights = [each.detach() for each in layer.parameters()]
    weights[2] = weights[2].to("meta")
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(gatewise.DeviceError, match="`weights` must be all on cpu"),
    ):
        functional.lstm(torch.randn(5, 2, 4), None, weights)


def test_copies_are_contiguous_and_aligned():
    tensors = [torch.randn(3, 5), torch.randn(7, 2).t(), torch.randn(3)[:0], torch.randn(11)]
    copies = copied_together(tensors, torch.float16)
    for copy, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(copy, tensor.half())
        assert copy.is_contiguous()
        assert (copy.data_ptr() - copies[0].data_ptr()) % 16 == 0
        assert not copy.requires_grad


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("cell", "proj_size"), [("LSTM", 0), ("LSTM", 8), ("GRU", 0)])
def test_cudnn_reads_copies_where_they_are(cell, proj_size, bidirectional):
    options = {"proj_size": proj_size} if proj_size else {}
    layer = getattr(gatewise, cell)(24, 16, 2, bidirectional=bidirectional, **options)
    flat = [weight.clone() for direction in layer.all_weights for weight in direction]
    per_direction = len(layer.all_weights[0])
    assert not in_one_buffer(flat, per_direction)
    assert in_one_buffer(copied_together(flat, torch.bfloat16), per_direction)
    assert not in_one_buffer(copied_together([each[:-1] for each in flat], torch.bfloat16), per_direction)
