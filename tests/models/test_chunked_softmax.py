"""The weighted loss in chunks against plain cross-entropy: values, every gradient, and what is alive at once."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from gatewise.models import chunked_softmax
from gatewise.models.chunked_softmax import (
    CHUNK_BYTES,
    even_rows,
    mean_token_loss,
    rows_of_a_chunk,
    weighted_token_loss,
)
from gatewise.models.softmax import plain_softmax, token_losses, widened_token_losses
from gatewise.training.precision import arithmetic
from tests.pairwise import each_value, exhaustive

# Tokens, hidden units, vocabulary; some whose 16-bit products are widened.
SIZES = [(1, 1, 2), (5, 3, 7), (4, 12, 9), (6, 8, 8), (9, 31, 200), (7, 200, 65), (64, 16, 24)]
CHUNKS = [0, 1, 2, 5, 1000]


def case(count, size, vocabulary, dtype=torch.float64):
    generator = torch.Generator().manual_seed(count)
    shapes = ((count, size), (vocabulary, size), (vocabulary,))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    targets = torch.randint(vocabulary, (count,), generator=generator)
    shares = torch.linspace(-1, 2, count, dtype=torch.float64) / count
    shares[count // 3] = 0 if count > 1 else 0.5
    return [tensor.requires_grad_() for tensor in tensors], targets, shares


def plain(tensors, targets, shares, smoothing=0.0):
    scores = functional.linear(*tensors)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    losses = functional.cross_entropy(scores, targets, reduction="none", label_smoothing=smoothing)
    return (losses * shares.to(losses.dtype)).sum()


def values(loss, tensors):
    return [loss.detach(), *torch.autograd.grad(3 * loss, tensors)]


@pytest.mark.parametrize(
    ("smoothing", "chunk", "sizes"), each_value([*itertools.product([0.0, 0.1], CHUNKS, SIZES)]), ids=str
)
def test_in_float64_it_is_cross_entropy(sizes, chunk, smoothing):
    tensors, *rest = case(*sizes)
    found = values(weighted_token_loss(*tensors, *rest, chunk_rows=chunk, label_smoothing=smoothing), tensors)
    for mine, theirs in zip(found, values(plain(tensors, *rest, smoothing), tensors), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


def errors(function, tensors, truth):
    found = values(function(tensors), tensors)
    return [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, truth, strict=True)]


@pytest.mark.parametrize(
    ("smoothing", "chunk", "sizes", "dtype"),
    each_value(
        [
            *itertools.product(
                [0.0, 0.1],
                CHUNKS,
                [sizes for sizes in SIZES if sizes[0] > 1],
                [torch.float32, torch.bfloat16, torch.float16],
            )
        ]
    ),
    ids=str,
)
def test_in_fewer_bits_it_is_as_close_as_cross_entropy(sizes, chunk, smoothing, dtype):
    tensors, *rest = case(*sizes, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    truth = values(plain(exact, *rest, smoothing), exact)
    found = errors(
        lambda each: weighted_token_loss(*each, *rest, chunk_rows=chunk, label_smoothing=smoothing), tensors, truth
    )
    allowed = errors(lambda each: plain(each, *rest, smoothing), tensors, truth)
    # A loss of both signs may cancel: its error is held to the size of its terms.
    largest = float(
        functional.cross_entropy(functional.linear(*exact), rest[0], reduction="none").detach().max()
        / truth[0].abs().detach()
    )
    for error, library, size in zip(found, allowed, (largest, 1, 1, 1), strict=True):
        assert error <= 2 * (library + torch.finfo(dtype).eps * max(size, 1))


def test_small_shares_of_many_rows_are_not_lost_in_16_bits():
    tensors, targets, _ = case(64, 16, 24, torch.float16)
    shares = torch.full((64,), 1e-6)
    gradients = torch.autograd.grad(65536 * weighted_token_loss(*tensors, targets, shares), tensors[0])
    larger = torch.autograd.grad(0.065536 * weighted_token_loss(*tensors, targets, shares * 1e6), tensors[0])
    torch.testing.assert_close(gradients, larger, rtol=2e-3, atol=1e-6)


def cut_to_tf32(tensor):
    """Drop the bits that tensor cores do not read of a float32 number."""
    return (tensor.float().contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("spread", [*exhaustive(0.05), 1.2, *exhaustive(3.2)])
def test_float16_errs_no_more_than_products_in_tf32(spread):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.tanh(torch.randn(128, 512, generator=generator))
    weight = torch.randn(2000, 512, generator=generator) * spread / 512**0.5
    bias = 0.5 * torch.randn(2000, generator=generator)
    scores = hidden.double() @ weight.double().t() + bias
    assert scores.abs().max() < 12
    targets = torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(1)
    shares = torch.full((128,), 1 / 128)
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight, bias)]
    truth = values(plain(exact, targets, shares), exact)
    halves = [tensor.half().requires_grad_() for tensor in (hidden, weight, bias)]
    found = errors(lambda each: weighted_token_loss(*each, targets, shares, chunk_rows=40), halves, truth)
    logs = torch.log_softmax(cut_to_tf32(hidden) @ cut_to_tf32(weight).t() + bias, -1)
    gradient = (logs.exp() - functional.one_hot(targets, 2000)) * 3 / 128
    products = cut_to_tf32(gradient) @ cut_to_tf32(weight), cut_to_tf32(gradient.t()) @ cut_to_tf32(hidden)
    for error, product, true in zip(found[1:3], products, truth[1:3], strict=True):
        assert error <= float((product.double() - true).norm() / true.norm())


def test_a_chunk_in_float16_has_no_more_rows_than_its_sums_can_hold():
    hidden = torch.ones(70_000, 1, dtype=torch.float16, requires_grad=True)
    weight = torch.tensor([[5.0], [-5.0]], dtype=torch.float16, requires_grad=True)
    targets, shares = torch.ones(70_000, dtype=torch.int64), torch.full((70_000,), 1e-5)
    loss = weighted_token_loss(hidden, weight, torch.zeros(2).half(), targets, shares, chunk_rows=70_000)
    (gradient,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(gradient.flatten().float(), torch.tensor([0.7, -0.7]), rtol=2e-3, atol=0)


def test_under_autocast_products_are_bfloat16_and_gradients_have_the_dtype_of_the_weights():
    tensors, *rest = case(9, 31, 200, torch.float32)
    halves = [tensor.detach().bfloat16().requires_grad_() for tensor in tensors]
    with torch.autocast("cpu", torch.bfloat16):
        found = weighted_token_loss(*tensors, *rest, chunk_rows=4)
    expected = weighted_token_loss(*halves, *rest, chunk_rows=4)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    for mine, theirs in zip(values(found, tensors)[1:], values(expected, halves)[1:], strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.bfloat16(), theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_only_what_is_wanted_has_a_gradient(dtype):
    tensors, *rest = case(5, 3, 7, dtype)
    expected = values(weighted_token_loss(*tensors, *rest, chunk_rows=2), tensors)[1:]
    for index in range(3):
        some = [tensor.detach().requires_grad_(place == index) for place, tensor in enumerate(tensors)]
        (found,) = torch.autograd.grad(3 * weighted_token_loss(*some, *rest, chunk_rows=2), some[index])
        assert torch.equal(found, expected[index])


def test_a_backward_pass_can_be_repeated():
    tensors, *rest = case(9, 31, 200)
    loss = weighted_token_loss(*tensors, *rest, chunk_rows=4)
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    for mine, again in zip(first, torch.autograd.grad(loss, tensors), strict=True):
        assert torch.equal(mine, again)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_number_that_is_none_is_seen(place):
    tensors, *rest = case(5, 3, 7)
    with torch.no_grad():
        tensors[place].view(-1)[-1] = torch.nan
    loss, *gradients = values(weighted_token_loss(*tensors, *rest, chunk_rows=2), tensors)
    assert loss.isnan()
    assert all(gradient.isnan().any() for gradient in gradients[1:])


def test_scores_far_apart_have_a_finite_loss():
    hidden = torch.tensor([[200.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]])
    loss = weighted_token_loss(hidden, weight, torch.zeros(2), torch.tensor([1]), torch.ones(1))
    assert loss.item() == 400.0
    assert torch.autograd.grad(loss, hidden)[0].item() == 2.0


def test_rows_without_any_share_have_gradients_of_zero():
    tensors, targets, shares = case(5, 3, 7)
    loss, *gradients = values(weighted_token_loss(*tensors, targets, shares * 0), tensors)
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients)


class _Sizes(TorchDispatchMode):
    """Bytes of every tensor that an operator makes, and which operators ran."""

    def __init__(self):
        super().__init__()
        self.largest, self.products = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        with contextlib.suppress(AttributeError):
            self.largest = max(self.largest, found.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_larger_than_a_chunk_is_made_and_no_product_more_than_usual(dtype):
    count, size, vocabulary, chunk = 64, 8, 512, 16
    tensors, *rest = case(count, size, vocabulary, dtype)
    with _Sizes() as seen:
        weighted_token_loss(*tensors, *rest, chunk_rows=chunk).backward()
    # The softmax of a chunk is in float32 whatever its scores are in.
    assert seen.largest == chunk * vocabulary * 4
    assert seen.products == count // chunk * 3


def test_without_gradients_nothing_is_multiplied_out():
    tensors, *rest = case(64, 8, 512, torch.float32)
    with torch.no_grad(), _Sizes() as seen:
        loss = weighted_token_loss(*tensors, *rest, chunk_rows=16)
    assert not loss.requires_grad
    assert seen.products == 4


@pytest.mark.parametrize(
    ("vocabulary", "itemsize"),
    each_value([*itertools.product([1, 600, 7710, 17_192, 50_257, 10**9], [2, 4, 8])]),
    ids=str,
)
def test_a_chunk_is_as_large_as_it_may_be(vocabulary, itemsize):
    rows = rows_of_a_chunk(vocabulary, itemsize)
    assert rows == 1 or rows * vocabulary * itemsize <= CHUNK_BYTES
    assert (rows + 128) * vocabulary * itemsize > CHUNK_BYTES


@pytest.mark.parametrize(
    ("count", "most", "rows"), [(6400, 896, 800), (7, 5, 4), (5, 100, 5), (5, 5, 5), (1, 1, 1), (0, 3, 1)]
)
def test_chunks_are_of_about_one_size(count, most, rows):
    assert even_rows(count, most, torch.bfloat16) == rows


def test_a_chunk_in_float16_is_short_enough_for_its_sums():
    assert even_rows(20_000, 20_000, torch.float16) == 6667
    assert even_rows(20_000, 20_000, torch.bfloat16) == 20_000


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(700, 512, 17_192), (35, 650, 33_278), (9, 31, 200), (640, 256, 512)], ids=str)
@pytest.mark.parametrize("kind", ["float32", "tf32", "bfloat16", "autocast"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [0, 64])
def test_on_a_gpu_it_is_as_close_as_cross_entropy(sizes, kind, smoothing, chunk):
    numbers, targets, shares = case(*sizes, torch.bfloat16 if kind == "bfloat16" else torch.float32)
    tensors = [tensor.detach().cuda().mul(0.1).requires_grad_() for tensor in numbers]
    targets, shares = targets.cuda(), shares.abs().cuda()
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    truth = values(plain(exact, targets, shares, smoothing), exact)

    def under_autocast(function):
        with (
            arithmetic("tf32" if kind == "tf32" else "float32"),
            torch.autocast("cuda", torch.bfloat16, enabled=kind == "autocast"),
        ):
            return errors(function, tensors, truth)

    allowed = under_autocast(lambda each: plain(each, targets, shares, smoothing))
    found = under_autocast(
        lambda each: weighted_token_loss(*each, targets, shares, chunk_rows=chunk, label_smoothing=smoothing)
    )
    for error, library in zip(found, allowed, strict=True):
        assert error <= 2 * (library + {"float32": 2.0**-24, "tf32": 2.0**-11}.get(kind, 2.0**-8))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_plain_softmax_is_the_plain_code(monkeypatch, smoothing):
    tensors, targets, shares = case(31, 7, 11, torch.float32)
    monkeypatch.setattr(chunked_softmax, "_WeightedLoss", None)
    with plain_softmax():
        loss = weighted_token_loss(*tensors, targets, shares, label_smoothing=smoothing)
    assert torch.equal(loss, plain(tensors, targets, shares, smoothing))
    with pytest.raises(AttributeError):
        weighted_token_loss(*tensors, targets, shares)


def test_on_a_cpu_the_mean_is_that_of_the_plain_losses_and_differentiable_twice():
    tensors, targets, _ = case(6, 5, 7, torch.float64)
    loss = mean_token_loss(*tensors, targets)
    assert torch.equal(loss, functional.cross_entropy(functional.linear(*tensors), targets))
    assert torch.autograd.gradgradcheck(lambda *each: mean_token_loss(*each, targets), tensors)


def test_a_loss_that_is_differentiable_once_refuses_a_second_derivative():
    tensors, targets, shares = case(6, 5, 7, torch.float64)
    losses = weighted_token_loss(*tensors, targets, shares), widened_token_losses(*tensors, targets).sum()
    for loss in losses:
        with pytest.raises(
            RuntimeError, match=r"is differentiable once, which excludes .* within `.*plain_softmax\(\)`"
        ):
            torch.autograd.grad(loss, tensors, create_graph=True)
        assert all(each.isfinite().all() for each in torch.autograd.grad(loss, tensors))
    with plain_softmax():
        assert torch.autograd.gradgradcheck(lambda *each: weighted_token_loss(*each, targets, shares), tensors)


def test_the_mean_loss_of_other_products_is_that_of_the_losses():
    tensors, targets, _ = case(31, 7, 11, torch.float32)
    assert torch.equal(mean_token_loss(*tensors, targets), token_losses(*tensors, targets).mean())


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(700, 512, 17_192), (35, 650, 33_278), (9, 31, 200), (2300, 400, 33_278)], ids=str)
def test_the_mean_loss_under_autocast_is_as_close_as_the_losses(sizes):
    numbers, targets, _ = case(*sizes, torch.float32)
    tensors, targets = [tensor.detach().cuda().mul(0.1).requires_grad_() for tensor in numbers], targets.cuda()
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    truth = values(torch.nn.functional.cross_entropy(exact[0] @ exact[1].t() + exact[2], targets), exact)
    with torch.autocast("cuda", torch.bfloat16):
        allowed = errors(lambda each: token_losses(*each, targets).mean(), tensors, truth)
        found = errors(lambda each: mean_token_loss(*each, targets), tensors, truth)
    for error, library in zip(found, allowed, strict=True):
        assert error <= 2 * (library + 2.0**-8)


@pytest.mark.parametrize("size", [16, 12])
@pytest.mark.parametrize("vocabulary", [64, 50])
def test_the_triton_kernel_is_compiled_for_the_strides_of_a_chunk(monkeypatch, vocabulary, size):
    rooms, plain = [], chunked_softmax._softmax

    def softmax(room):
        rooms.append(room)
        return plain(room)

    monkeypatch.setattr(chunked_softmax, "_softmax", softmax)
    hidden, weight, bias = (
        torch.randn(*shape, dtype=torch.bfloat16) for shape in ((6, size), (vocabulary, size), (vocabulary,))
    )
    targets = torch.arange(6)
    chunked_softmax.weighted_token_loss(hidden, weight, bias, targets, torch.full((6,), 1 / 6))
    *_, launch = chunked_softmax.softmax_launches(vocabulary, size, torch.bfloat16, 0.1, gradient=True)
    scores, _, _, columns, stride, smoothing = launch.arguments
    assert (scores.dtype, scores.stride(0), columns, stride) == (torch.bfloat16, stride, vocabulary, rooms[0].stride(0))
    assert (smoothing, launch.constants["SMOOTH"], launch.constants["GRADIENT"]) == (0.1, True, True)
    assert chunked_softmax.softmax_launches(vocabulary, size, torch.float64, gradient=True) == []
