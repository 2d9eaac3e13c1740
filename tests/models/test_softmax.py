"""Losses of tokens against plain cross-entropy: values and every gradient, at sizes that need widening and do not."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

from gatewise.models.softmax import token_losses, widened_token_losses
from tests.pairwise import each_value

SIZES = [(1, 1, 2), (5, 3, 7), (4, 12, 9), (4, 10, 9), (6, 7, 8), (4, 8, 31), (9, 31, 200), (3, 200, 65), (5, 16, 24)]


def case(count, size, vocabulary, dtype=torch.float64):
    generator = torch.Generator().manual_seed(count)
    shapes = ((count, size), (vocabulary, size), (vocabulary,))
    hidden, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    targets = torch.randint(vocabulary, (count,), generator=generator)
    return [each.requires_grad_() for each in (hidden, weight, bias)], targets


def plain(tensors, targets):
    scores = functional.linear(*tensors)
    return functional.cross_entropy(
        scores if scores.dtype == torch.float64 else scores.float(), targets, reduction="none"
    )


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_in_float64_it_is_cross_entropy(sizes):
    tensors, targets = case(*sizes)
    shares = torch.linspace(-1, 2, sizes[0], dtype=torch.float64)
    found, expected = widened_token_losses(*tensors, targets), plain(tensors, targets)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(found, tensors, shares), torch.autograd.grad(expected, tensors, shares), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def errors(function, tensors, targets, truth):
    losses = function(tensors, targets)
    shares = torch.linspace(-1, 2, len(targets)).to(losses.dtype)
    found = [losses.detach(), *torch.autograd.grad(losses, tensors, shares)]
    return [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, truth, strict=True)]


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    each_value([*itertools.product([sizes for sizes in SIZES if sizes[0] > 1], [torch.float32, torch.bfloat16])]),
    ids=str,
)
def test_in_fewer_bits_it_is_as_close_as_cross_entropy(sizes, dtype):
    tensors, targets = case(*sizes, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    losses = plain(exact, targets)
    shares = torch.linspace(-1, 2, sizes[0], dtype=torch.float64)
    truth = [losses.detach(), *torch.autograd.grad(losses, exact, shares)]
    found = errors(lambda each, at: widened_token_losses(*each, at), tensors, targets, truth)
    allowed = errors(plain, tensors, targets, truth)
    for error, library in zip(found, allowed, strict=True):
        assert error <= 2 * (library + torch.finfo(dtype).eps)


def test_under_autocast_products_are_bfloat16_and_gradients_have_the_dtype_of_the_weights():
    tensors, targets = case(9, 31, 200, torch.float32)
    halves, _ = case(9, 31, 200, torch.float32)
    halves = [tensor.detach().bfloat16().requires_grad_() for tensor in halves]
    with torch.autocast("cpu", torch.bfloat16):
        found = widened_token_losses(*tensors, targets)
    expected = widened_token_losses(*halves, targets)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    for mine, theirs in zip(
        torch.autograd.grad(found.mean(), tensors), torch.autograd.grad(expected.mean(), halves), strict=True
    ):
        assert mine.dtype == torch.float32
        assert torch.equal(mine.bfloat16(), theirs)


@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_weights_may_lie_anywhere(offset):
    (hidden, weight, bias), targets = case(4, 12, 9, torch.bfloat16)
    buffer = torch.empty(offset + weight.numel(), dtype=torch.bfloat16)
    shifted = buffer[offset:].view(9, 12).copy_(weight.detach()).requires_grad_()
    found = widened_token_losses(hidden, shifted, bias, targets)
    assert torch.equal(found, widened_token_losses(hidden, weight, bias, targets))
    assert torch.autograd.grad(found.sum(), shifted)[0].is_contiguous()


def test_only_what_is_wanted_has_a_gradient():
    tensors, targets = case(5, 3, 7)
    expected = torch.autograd.grad(plain(tensors, targets).sum(), tensors)
    for index in range(3):
        some = [tensor.detach().requires_grad_(place == index) for place, tensor in enumerate(tensors)]
        (found,) = torch.autograd.grad(widened_token_losses(*some, targets).sum(), some[index])
        torch.testing.assert_close(found, expected[index], rtol=1e-11, atol=1e-12)
    with torch.no_grad():
        assert not widened_token_losses(*tensors, targets).requires_grad


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_number_that_is_none_is_seen(place):
    tensors, targets = case(5, 3, 7)
    with torch.no_grad():
        tensors[place].view(-1)[-1] = torch.nan
    losses = widened_token_losses(*tensors, targets)
    assert losses.isnan().any()
    gradients = torch.autograd.grad(losses.sum(), tensors)
    assert all(gradient.isnan().any() for gradient in gradients[1:])


def test_scores_far_apart_have_a_finite_loss():
    hidden = torch.tensor([[200.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    loss = widened_token_losses(hidden, weight, torch.zeros(2), torch.tensor([1]))
    assert loss.item() == 400.0
    (gradient,) = torch.autograd.grad(loss.sum(), hidden)
    assert gradient.item() == 2.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_elsewhere_it_is_cross_entropy_itself(dtype):
    tensors, targets = case(6, 7, 8, dtype)
    assert torch.equal(token_losses(*tensors, targets), plain(tensors, targets))
    with torch.autocast("cpu", torch.bfloat16):
        found = token_losses(*tensors, targets)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(700, 1500, 10_000), (35, 650, 33_278), (9, 31, 200), (64, 256, 512)], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_on_a_gpu_it_is_as_close_as_cross_entropy(sizes, autocast):
    numbers, targets = case(*sizes, torch.bfloat16)
    tensors = [tensor.detach().cuda().mul(0.1).requires_grad_() for tensor in numbers]
    targets = targets.cuda()
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    if autocast:
        tensors = [tensor.detach().float().requires_grad_() for tensor in tensors]

    def errors(function):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            losses = function(tensors, targets)
        found = [losses.detach(), *torch.autograd.grad(losses.mean(), tensors)]
        return [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, truth, strict=True)]

    losses = plain(exact, targets)
    truth = [losses.detach(), *torch.autograd.grad(losses.mean(), exact)]
    found, allowed = errors(lambda each, at: token_losses(*each, at)), errors(plain)
    for error, library in zip(found, allowed, strict=True):
        assert error <= 2 * (library + 2.0**-8)
