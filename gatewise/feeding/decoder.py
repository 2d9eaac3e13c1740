"""The differentiable call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gatewise.contract.device import tf32_products_allowed
from gatewise.contract.errors import ArgumentError, ModifiedInPlace, sentence
from gatewise.feeding import backward_loop, forward_loop, packing, products
from gatewise.feeding.call import Inputs, Options, Weights, fit_halves
from gatewise.feeding.elementwise import Dropout, Elementwise, Plain

# Whether `plain_parts` is around the call.
_plain: ContextVar[bool] = ContextVar("gatewise_plain_parts", default=False)


@contextlib.contextmanager
def plain_parts() -> Iterator[None]:
    """Compute the element-wise parts of decoders in the block in plain torch, with no kernel of our own."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


class State(NamedTuple):
    """Where the decoder starts.

    Attributes:
        hidden: [L, B, H].
        cell: [L, B, H].
        attended: What the first step is fed [B, H].
    """

    hidden: Tensor
    cell: Tensor
    attended: Tensor


def attended_outputs(
    embedded: Tensor,
    state: State,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor | None,
    weights: Weights,
    *,
    dropout: float = 0.0,
    layer_dropout: float = 0.0,
    attention_kernel: str = "auto",
    recompute: bool = False,
) -> Tensor:
    """Run a decoder with input feeding over given tokens; differentiable once.

    The same as this PyTorch code, in which W_q is left out for the dot score:

        for x in embedded:
            below = cat([x, attended])
            for l, cell in enumerate(layers):
                h[l], c[l] = cell(below, (h[l], c[l]))
                below = layer_dropout(h[l])
            context = attend(h[-1] @ W_q.T, keys, values, lengths, v=v)
            attended = dropout(tanh(cat([h[-1], context]) @ W_a.T))
            outputs.append(attended)

    The context's half of W_a is multiplied with the values, once, instead of with each context.

    Args:
        embedded: Embeddings of the tokens that the decoder reads [T, B, E].
        state: Where it starts.
        keys: [S, B, A]; of the general score, the values through its weight.
        values: [S, B, V].
        lengths: Of the source [B], int64, on the same device; None when all are S.
        weights: The parameters.
        dropout: Probability that a unit of an attended output is dropped.
        layer_dropout: The same of what a layer reads from the one below.
        attention_kernel: One of `gatewise.attention.kernel_names()`, or "auto".
        recompute: Whether the backward pass computes the gates again, a stretch of steps at a time, instead of finding
            all of them kept: 4 of the 9 numbers that are kept for each unit of a layer and step.

    Returns:
        The attended outputs [T, B, H]; their rows may be parts of wider ones.

    Raises:
        ArgumentError: There is no token to read.
        KernelRefused: The attention kernel that was named cannot run this call.

    Numerics:
        Under autocast everything is computed in its dtype, with cell states and what is element-wise in float32; gates
        and cell states are rounded to the dtype when they are kept for the backward pass. In float32, where products
        may be rounded to TensorFloat-32 on the GPU, those of the steps round as much by taking float16 operands, with
        a power of two for each row of gradients; the kernel "fused" reads keys and values in float16 there, too.
    """
    if not len(embedded):
        raise ArgumentError(sentence("embedded", "of one step at least", list(embedded.shape)))
    device = embedded.device.type
    dtype = embedded.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        hidden, cell, attended = (each.to(dtype) for each in state)
        read: _Read = embedded, hidden, cell, attended, keys.to(dtype), values.to(dtype)
        every = *read, *weights.flat()
        differentiable = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in every)
        score = "dot" if weights.query is None else "additive"
        halves = stored_in_halves(embedded.device, dtype, weights)
        options = Options(score, attention_kernel, dtype, differentiable, halves, recompute)
        plane = (*embedded.shape[:2], state.hidden.shape[2])
        between = (_drawn(layer_dropout, plane, embedded) for _ in weights.layers[1:])
        masks: _Masks = _drawn(dropout, plane, embedded), tuple(filter(None, between))
        if differentiable:
            return _Decoder.apply(options, lengths, masks, *every)
        inputs = _packed(options, lengths, masks, read, weights)
        return forward_loop.run(options, inputs, parts_for(options, inputs)).outputs


def parts_for(options: Options, inputs: Inputs) -> Elementwise:
    """Return the element-wise parts for a call: our own launches where they can be compiled, otherwise plain torch."""
    found = inputs.embedded
    if found.is_cuda and inputs.batch and not _plain.get():
        from gatewise.feeding import launches

        if launches.available(found.device):
            sizes = inputs.batch, inputs.units, inputs.query_size
            return launches.Launches(*sizes, found.dtype, options.halves, found.device)
    return Plain()


def stored_in_halves(device: torch.device, dtype: torch.dtype, weights: Weights) -> bool:
    """Whether what the steps' products multiply is stored in float16, beside float32 numbers that may be rounded.

    TensorFloat-32 has as many bits behind the point, ten, and its numbers take twice the room.
    """
    features = 0 if weights.query is None else len(weights.query)
    units, rounded = weights.attended.shape[0], tf32_products_allowed()
    if device.type != "cuda" or _plain.get() or not fit_halves(dtype, units, features, rounded=rounded):
        return False
    from gatewise.feeding import launches

    return products.widens() and launches.available(device)


_Read = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""The tensors among `Inputs` that are differentiated, from `embedded` to `source`."""

_Masks = tuple[Dropout | None, tuple[Dropout, ...]]
"""The dropout of the attended outputs, and of what the layers above the first read."""


class _Decoder(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        options: Options,
        lengths: Tensor | None,
        masks: _Masks,
        embedded: Tensor,
        hidden: Tensor,
        cell: Tensor,
        attended: Tensor,
        keys: Tensor,
        values: Tensor,
        *weights: Tensor | None,
    ) -> Tensor:
        read: _Read = embedded, hidden, cell, attended, keys, values
        inputs = _packed(options, lengths, masks, read, Weights.of(weights))
        parts = parts_for(options, inputs)
        kept = forward_loop.run(options, inputs, parts)
        ctx.save_for_backward(*read, *weights, lengths)
        ctx.call = options, inputs, kept, parts
        ctx.version = kept.outputs._version
        return kept.outputs.detach()  # the tensor itself would be held by the function that made it

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:  # type: ignore[override]
        _ = ctx.saved_tensors  # raises where one was changed in place since
        if ctx.call is None:
            raise RuntimeError("the backward pass of a decoder uses up what was kept for it; call the decoder again")
        options, inputs, kept, parts = ctx.call
        if kept.outputs._version != ctx.version:
            expectation, got = "as the decoder returned it", "one modified by an inplace operation since"
            raise ModifiedInPlace(sentence("the output", expectation, got, "Change a copy instead, as .clone() makes."))
        ctx.call = None
        found = backward_loop.run(options, inputs, kept, _readable(dy), parts)
        return None, None, None, *found[:-1], *found.weights.flat()


def _packed(options: Options, lengths: Tensor | None, masks: _Masks, read: _Read, weights: Weights) -> Inputs:
    """Put in place what the steps read."""
    embedded, hidden, cell, attended, keys, source = read
    of_context = packing.of_context(weights, options.dtype)
    return Inputs(
        embedded.to(options.dtype),
        hidden,
        cell,
        attended,
        keys,
        source,
        lengths,
        weights,
        embedded.dtype,
        *masks,
        packing.layers(weights, options.dtype, options.operand),
        packing.from_embeddings(weights, options.dtype),
        packing.joining(weights, options.dtype),
        of_context,
        source @ of_context.t(),
    )


def _drawn(probability: float, shape: tuple[int, ...], like: Tensor) -> Dropout | None:
    if not probability:
        return None
    mask = like.new_empty(shape, dtype=torch.bool).bernoulli_(1 - probability)
    return Dropout(mask, 1 / (1 - probability))


def _readable(dy: Tensor) -> Tensor:
    """Return a gradient that launches can read: contiguous planes at an aligned address."""
    dy = dy.contiguous()
    return dy if dy.data_ptr() % 16 == 0 else dy.clone()
