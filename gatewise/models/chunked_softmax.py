"""The softmax over a vocabulary and its weighted loss, computed in chunks of tokens to limit the memory for logits."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from gatewise.contract import token_factors
from gatewise.contract.data_parallel import multiprocessors_left
from gatewise.contract.device import Device, tf32_products_allowed
from gatewise.contract.second_derivatives import once_differentiable
from gatewise.contract.token_factors import FactorReceiver, TokenFactors
from gatewise.contract.triton_kernels import TritonLaunch
from gatewise.models import fused_rows, fused_softmax
from gatewise.models.softmax import ONCE, is_plain, product_dtype, token_losses
from gatewise.models.widening import copied, is_aligned, widened, widened_columns, widened_rows

CHUNK_BYTES = 128 << 20
"""The default size of a chunk's logits in bytes: large enough that matrix products run at full speed."""

HALF_ROWS = 8192
"""The maximum number of rows of a chunk in float16, where sums over rows must not exceed 65,504."""

_TILE = 128  # rows of a tile of a matrix kernel


def mean_token_loss(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of `token_losses`, computed by `weighted_token_loss` in one chunk for 16-bit products on a GPU.

    There the gradients are computed while the logits are in the memory, and only scaled later, which takes fewer passes
    over the logits.

    Args:
        hidden: The hidden rows h [N, H], as in `token_losses`.
        weight: The matrix W [V, H].
        bias: The vector b [V].
        targets: The target tokens, int64 [N], each in [0, V).
    """
    if not (hidden.is_cuda and product_dtype(hidden).itemsize == 2 and len(hidden)) or is_plain():
        return token_losses(hidden, weight, bias, targets).mean()
    shares = hidden.new_full((len(hidden),), 1 / len(hidden), dtype=torch.float32)
    return weighted_token_loss(hidden, weight, bias, targets, shares, chunk_rows=len(hidden))


def weighted_token_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    shares: Tensor,
    *,
    chunk_rows: int = 0,
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Return $\sum_n \text{share}_n \, \ell_n$, where $\ell_n$ is the cross-entropy of row n.

    The function is differentiable once, and equivalent to this PyTorch code without its [N, V] tensors:

        scores = linear(hidden, weight, bias).float()
        losses = cross_entropy(scores, targets, reduction="none", label_smoothing=label_smoothing)
        loss = (losses * shares).sum()

    The loss is a scalar, so that the gradient of the logits is known in the forward pass up to a factor. The forward
    pass goes over the rows in chunks, replaces the logits of a chunk by their gradient in place, and multiplies the
    gradient with its operands at once. Only the gradients of `hidden`, `weight` and `bias` are kept, which the backward
    pass scales. The number of matrix products is that of the plain code.

    Args:
        hidden: The hidden rows h [N, H], in the dtype of the products; under autocast any floating-point dtype.
        weight: The matrix W [V, H], of any floating-point dtype under autocast, otherwise of that of `hidden`.
        bias: The vector b [V], of the same dtypes as `weight`.
        targets: The target tokens, int64 [N], each in [0, V).
        shares: The weight of each row in the loss [N]; it is a constant and gets no gradient.
        chunk_rows: The maximum number of rows of a chunk; chunks have nearly equal sizes. 0 chooses the number of rows
            whose logits take `CHUNK_BYTES` in the dtype of `hidden`.
        label_smoothing: The fraction of the target distribution that is spread evenly over all tokens.

    Returns:
        The loss, a scalar in nats; float64 for float64 products, otherwise float32.

    Numerics:
        Logits and their gradient are rounded to the dtype of the products, as `torch.nn.functional.linear` rounds
        them. The softmax and the sums over chunks are computed in the dtype of the result.

        On a GPU, float32 products that may be rounded to TF32 are computed in float16 instead, which has as many
        mantissa bits and takes half the memory and time. This rounds the logits once more: the gradients are more
        accurate than with TF32 operands as long as logits are below about 10, and have less than twice the error for
        logits of 30. Logits must not exceed 65,504.
    """
    if is_plain():
        scores = functional.linear(hidden, weight, bias)
        numbers = torch.float64 if scores.dtype == torch.float64 else torch.float32
        losses = functional.cross_entropy(
            scores.to(numbers), targets, reduction="none", label_smoothing=label_smoothing
        )
        return (losses * shares.to(numbers)).sum()
    dtype = dtype_of_products(hidden)
    rows = chunk_rows or rows_of_a_chunk(weight.shape[0], hidden.itemsize)
    rows = even_rows(len(hidden), rows, dtype)
    # `ctx.needs_input_grad` does not reflect no_grad mode, so that the grad mode has to be passed.
    follows = torch.is_grad_enabled()
    return _WeightedLoss.apply(hidden, weight, bias, targets, shares, rows, label_smoothing, dtype, follows)


def softmax_launches(
    vocabulary: int, size: int, dtype: torch.dtype, label_smoothing: float = 0.0, *, gradient: bool
) -> list[TritonLaunch]:
    """Return the Triton kernels that `weighted_token_loss` launches on a GPU, for compiling them ahead.

    Args:
        vocabulary: The number of tokens, V.
        size: The size of a hidden row, H.
        dtype: The dtype of the products; see `dtype_of_products`.
        label_smoothing: The fraction of the target distribution that is spread evenly over all tokens.
        gradient: Whether gradients are computed.
    """
    if dtype == torch.float64:
        return []
    if not _worth_widening(size, vocabulary, dtype, on_gpu=True):
        return fused_softmax.launches(vocabulary, vocabulary, dtype, label_smoothing, gradient=gradient)
    rows, columns = widened_rows(vocabulary), widened_columns(size)
    return [
        *fused_rows.launches(vocabulary, size, rows, columns, dtype, gradient=gradient),
        *fused_softmax.launches(vocabulary, rows, dtype, label_smoothing, gradient=gradient),
    ]


def dtype_of_products(hidden: Tensor) -> torch.dtype:
    """Return the dtype in which the logits of these rows are computed under the current settings."""
    dtype = product_dtype(hidden)
    rounded = dtype == torch.float32 and hidden.is_cuda and tf32_products_allowed()
    return torch.float16 if rounded else dtype


def rows_of_a_chunk(vocabulary: int, itemsize: int) -> int:
    """Return the number of rows whose logits take `CHUNK_BYTES`, a multiple of a matrix tile and at least one."""
    rows = CHUNK_BYTES // (vocabulary * itemsize)
    return max(1, rows if rows < _TILE else rows - rows % _TILE)


def even_rows(count: int, chunk_rows: int, dtype: torch.dtype) -> int:
    """Return the number of rows per chunk that makes the chunks nearly equal, and at most `chunk_rows` each.

    Args:
        count: The number of rows of all chunks together.
        chunk_rows: The maximum number of rows of a chunk; in float16 it is limited to `HALF_ROWS`.
        dtype: The dtype of the products.
    """
    chunks = -(-count // (min(chunk_rows, HALF_ROWS) if dtype == torch.float16 else chunk_rows))
    return -(-count // chunks) if chunks else 1


class _WeightedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        targets: Tensor,
        shares: Tensor,
        chunk_rows: int,
        smoothing: float,
        dtype: torch.dtype,
        follows: bool,
    ) -> Tensor:
        numbers = torch.float64 if dtype == torch.float64 else torch.float32
        (size, vocabulary), count = weight.shape[::-1], len(hidden)
        of_hidden, *of_weights = (follows and wanted for wanted in ctx.needs_input_grad[:3])
        gradient = of_hidden or any(of_weights)
        wider = _worth_widening(size, vocabulary, dtype, hidden.is_cuda)
        columns = widened(weight, bias, dtype, None) if wider else weight.to(dtype)
        bias_here = bias.to(dtype)
        shares = shares.to(numbers)
        # Scaled to order one, so that the products can be in 16 bits; if all shares are zero, so are the gradients.
        scale = shares.abs().amax().clamp(min=torch.finfo(numbers).tiny) if count else shares.new_ones(())
        relative = (shares / scale).unsqueeze(1)
        losses = shares.new_empty(count)
        hidden_gradient = hidden.new_empty(count, size, dtype=dtype) if of_hidden else None
        sums = _Sums(numbers if count > chunk_rows else dtype)
        room = columns.new_empty(min(chunk_rows, count), len(columns))
        softmax = _softmax(room)
        # Processes may exchange the factors of this product instead of the gradient, which is known after this pass.
        several = multiprocessors_left.get() is not None
        postponed = several and count <= chunk_rows and all(of_weights) and dtype == torch.bfloat16
        left: tuple[Tensor, ...] = ()
        for first in range(0, count, chunk_rows):
            these = slice(first, min(first + chunk_rows, count))
            part, share = hidden[these], relative[these]
            wide = room[: len(part)]
            if wider:
                rows = widened(part, 1.0, dtype, len(part))
                torch.mm(rows, columns.t(), out=wide)
            else:
                rows = part.to(dtype)
                torch.addmm(bias_here, rows, columns.t(), out=wide)
            softmax(wide[:, :vocabulary], targets[these], losses[these], smoothing, gradient=gradient)
            if hidden_gradient is not None:
                torch.mul((wide @ columns)[:, :size], share, out=hidden_gradient[these])
            if postponed:
                left = wide, rows, share
            elif any(of_weights):
                sums.add(wide, rows, share.to(dtype), with_bias=not wider)
        if postponed:
            ctx.token_factors = _token_factors(weight, *left[:2], with_bias=wider)
        ctx.save_for_backward(scale, hidden_gradient, sums.weight, sums.bias, *left)
        ctx.forms = size, vocabulary, hidden.dtype, weight.dtype, bias.dtype
        return (losses * shares).sum()

    @staticmethod
    @once_differentiable(*ONCE)
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        scale, hidden_gradient, weight_sum, bias_sum, *left = ctx.saved_tensors
        size, vocabulary, *dtypes = ctx.forms
        factor = gradient * scale
        of_hidden = of_weight = of_bias = None
        if hidden_gradient is not None:
            of_hidden = _scaled(hidden_gradient, factor, dtypes[0])
        receiver = token_factors.receiver_of(ctx)
        if left and receiver is not None:
            of_bias = _leave_factors(receiver, factor, size, vocabulary, dtypes[1:], *left)
            return of_hidden, None, of_bias, *(None,) * 6
        if left:
            scores, rows, share = left
            sums = _Sums(rows.dtype)
            sums.add(scores, rows, share.to(rows.dtype), with_bias=rows.shape[1] == size)
            weight_sum, bias_sum = sums.weight, sums.bias
        if weight_sum is not None:
            of_weight = _scaled(weight_sum[:vocabulary, :size], factor, dtypes[1])
            of_bias = _scaled(weight_sum[:vocabulary, size] if bias_sum is None else bias_sum, factor, dtypes[2])
        return of_hidden, of_weight, of_bias, *(None,) * 6


def _token_factors(weight: Tensor, scores: Tensor, rows: Tensor, *, with_bias: bool) -> TokenFactors:
    """Return the factors of the gradient of W, whose first column beyond the hidden rows may be the bias."""
    widths = scores.shape[1], rows.shape[1]
    places = (1, 2)[: 1 + with_bias]  # in `next_functions`, W and b follow the hidden rows
    flops = 2 * len(rows) * math.prod(widths)
    return TokenFactors(len(rows), widths, (rows.dtype, rows.dtype), places, weight.dtype, flops)


def _leave_factors(
    receiver: FactorReceiver,
    factor: Tensor,
    size: int,
    vocabulary: int,
    dtypes: Sequence[torch.dtype],
    scores: Tensor,
    rows: Tensor,
    share: Tensor,
) -> Tensor | None:
    """Leave the factors of the gradient of W to a receiver, and return the gradient of b.

    If the bias is a column of the rows, its gradient is a part of the same product, and None is returned.
    """
    with_bias = rows.shape[1] > size
    _, of_rows = receiver.new(rows)
    torch.mul(rows, share * factor * receiver.scale, out=of_rows)
    receiver.leave(functools.partial(_from_factors, (vocabulary, size), dtypes, with_bias), (scores, of_rows))
    if with_bias:
        return None
    return _scaled(torch.mv(scores.t(), share.to(scores.dtype).squeeze(1)), factor, dtypes[1])


def _from_factors(
    shape: tuple[int, int], dtypes: Sequence[torch.dtype], with_bias: bool, factors: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of W and, if the rows have a column for it, of b."""
    scores, rows = factors
    vocabulary, size = shape
    sums = scores.t() @ rows
    one = sums.new_ones((), dtype=torch.float32)
    found = [_scaled(sums[:vocabulary, :size], one, dtypes[0])]
    return [*found, _scaled(sums[:vocabulary, size], one, dtypes[1])] if with_bias else found


def _scaled(sums: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sums times a factor, converted to a dtype and multiplied in the wider of the two dtypes."""
    if dtype == torch.float32 and not sums.is_contiguous() and sums.ndim == 2 and fused_rows.can_copy(sums, dtype):
        scaled = sums.new_empty(sums.shape, dtype=dtype)
        fused_rows.scale(sums, factor, scaled)
        return scaled
    if dtype.itemsize < sums.itemsize:
        return (sums * factor).to(dtype)
    if dtype != sums.dtype:
        # One pass over the numbers: a factor with as many dimensions takes part in the promotion of dtypes.
        return (sums * factor.reshape((1,) * sums.ndim)).to(dtype)
    if sums.is_contiguous() or sums.ndim < 2:
        return sums * factor
    return copied(sums, torch.empty_like(sums, memory_format=torch.contiguous_format)).mul_(factor)


def _worth_widening(size: int, vocabulary: int, dtype: torch.dtype, on_gpu: bool) -> bool:
    return (dtype.itemsize == 2 or on_gpu) and not is_aligned(size, vocabulary, itemsize=dtype.itemsize)


class _Softmax(Protocol):
    """A function that writes the loss of each row and replaces the logits by their gradient."""

    def __call__(
        self, scores: Tensor, targets: Tensor, losses: Tensor, smoothing: float, *, gradient: bool
    ) -> None: ...


def _softmax(scores: Tensor) -> _Softmax:
    if scores.is_cuda and scores.dtype != torch.float64 and Device.probe(scores.device).triton:
        return fused_softmax.launch
    return _plain_softmax


def _plain_softmax(scores: Tensor, targets: Tensor, losses: Tensor, smoothing: float, *, gradient: bool) -> None:
    target = targets.unsqueeze(1)
    # In place where the dtype is that of the losses: each number is read before it is written.
    in_place = scores.dtype == losses.dtype
    logs = torch.log_softmax(scores, -1, losses.dtype, **({"out": scores} if in_place else {}))
    torch.mul(logs.gather(1, target).squeeze(1), smoothing - 1, out=losses)
    if smoothing:
        losses.sub_(logs.mean(1), alpha=smoothing)
    if not gradient:
        return
    logs.exp_().scatter_add_(1, target, logs.new_full(target.shape, smoothing - 1))
    if smoothing:
        logs.sub_(smoothing / scores.shape[1])
    if not in_place:
        scores.copy_(logs)


class _Sums:
    """The gradients of weight and bias, accumulated over chunks.

    Args:
        dtype: The dtype of the sums; that of the products if there is only one chunk.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def add(self, scores: Tensor, rows: Tensor, share: Tensor, *, with_bias: bool) -> None:
        """Add a chunk: the gradient of its logits [n, V], its hidden rows [n, H] and its shares [n, 1].

        Args:
            scores: The gradient of the logits, not yet multiplied by the shares.
            rows: The hidden rows.
            share: The weight of each row in the loss.
            with_bias: Whether to compute the bias's gradient separately; otherwise the bias is a column of the weight.
        """
        shared = rows * share
        if self.weight is not None and scores.dtype == self._dtype:
            self.weight.addmm_(scores.t(), shared)
        else:
            self.weight = self._sum(self.weight, scores.t() @ shared)
        if with_bias:
            self.bias = self._sum(self.bias, torch.mv(scores.t(), share.squeeze(1)))

    def _sum(self, total: Tensor | None, more: Tensor) -> Tensor:
        return more.to(self._dtype) if total is None else total.add_(more)
