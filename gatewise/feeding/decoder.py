"""The differentiable call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from gatewise.contract.errors import ArgumentError, sentence
from gatewise.feeding import backward_loop, forward_loop
from gatewise.feeding.call import Inputs, Kept, Layer, Options
from gatewise.feeding.elementwise import Dropout, Elementwise, Plain


class Weights(NamedTuple):
    """The parameters of a decoder with input feeding.

    Attributes:
        layers: Of each LSTM layer, bottom to top: w_ih [4H, I], w_hh [4H, H], b_ih [4H], b_hh [4H]; the first layer's
            input is the embedding, then what it is fed.
        query: Of the additive score's query [A, H]; None for the dot score.
        attended: W_a [H, H + V], of the hidden state, then of the context.
        v: Of the additive score [A]; None for the dot score.
        norm_weight: Gain of its layer norm [A]; None without.
        norm_bias: Shift [A]; None without.
    """

    layers: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]
    query: Tensor | None
    attended: Tensor
    v: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None


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
        and cell states are rounded to the dtype when they are kept for the backward pass.
    """
    if not len(embedded):
        raise ArgumentError(sentence("embedded", "of one step at least", list(embedded.shape)))
    device = embedded.device.type
    dtype = embedded.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        units, query = state.hidden.shape[2], weights.query
        of_hidden, of_context = weights.attended.to(dtype).split([units, values.shape[2]], 1)
        joining = of_hidden if query is None else torch.cat([query.to(dtype), of_hidden])
        layers = [
            Layer(torch.cat([w_ih.to(dtype), w_hh.to(dtype)], 1), (b_ih + b_hh).to(dtype))
            for w_ih, w_hh, b_ih, b_hh in weights.layers
        ]
        tensors = (
            embedded,
            *state,
            keys,
            functional.linear(values.to(dtype), of_context),
            joining,
            weights.v,
            weights.norm_weight,
            weights.norm_bias,
            *(tensor for layer in layers for tensor in layer),
        )
        tensors = tuple(tensor if tensor is None else tensor.to(dtype) for tensor in tensors)
        differentiable = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)
        plane = (*embedded.shape[:2], units)
        options = Options("dot" if query is None else "additive", attention_kernel, differentiable, recompute)
        masks = (
            _drawn(dropout, plane, embedded),
            tuple(filter(None, (_drawn(layer_dropout, plane, embedded) for _ in layers[1:]))),
        )
        if differentiable:
            return _Decoder.apply(options, lengths, masks, *tensors)  # type: ignore[no-any-return]
        inputs = _inputs(lengths, masks, tensors)
        return forward_loop.run(options, inputs, parts_for(inputs))[0]


def parts_for(inputs: Inputs) -> Elementwise:
    """Return the element-wise parts for a call: our own launches where they can be compiled, otherwise plain torch."""
    found = inputs.embedded
    if found.is_cuda and inputs.batch:
        from gatewise.feeding import launches

        if launches.available(found.device):
            return launches.Launches(inputs.batch, inputs.units, inputs.query_size, found.dtype, found.device)
    return Plain()


class _Decoder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: Options, lengths: Tensor | None, masks: tuple, *tensors: Tensor | None) -> Tensor:
        inputs = _inputs(lengths, masks, tensors)
        parts = parts_for(inputs)
        attended, kept = forward_loop.run(options, inputs, parts)
        ctx.save_for_backward(*tensors, lengths, *kept.operands, *kept.cells, *kept.gates, kept.joined)
        ctx.call = options, masks, len(tensors), kept.steps, parts
        ctx.spent = False
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:  # type: ignore[override]
        options, masks, count, steps, parts = ctx.call
        if ctx.spent:
            raise RuntimeError("the backward pass of a decoder uses up what was kept for it; call the decoder again")
        ctx.spent = True
        tensors, (lengths, *kept) = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        inputs = _inputs(lengths, masks, tensors)
        layers = len(inputs.layers)
        operands, cells, gates = kept[:layers], kept[layers : 2 * layers], kept[2 * layers : -1]
        state = Kept(tuple(operands), tuple(gates), tuple(cells), kept[-1], steps)
        found = backward_loop.run(options, inputs, state, _readable(dy), parts)
        gradients = (*found[:-1], *(tensor for layer in found.layers for tensor in layer))
        return None, None, None, *gradients


def _inputs(lengths: Tensor | None, masks: tuple, tensors: Sequence[Tensor | None]) -> Inputs:
    first, rest, weights = tensors[:6], tensors[6:10], tensors[10:]
    layers = tuple(map(Layer, weights[::2], weights[1::2]))  # type: ignore[arg-type]
    return Inputs(*first, lengths, *rest, layers, *masks)  # type: ignore[arg-type]


def _drawn(probability: float, shape: tuple[int, ...], like: Tensor) -> Dropout | None:
    if not probability:
        return None
    mask = like.new_empty(shape, dtype=torch.bool).bernoulli_(1 - probability)
    return Dropout(mask, 1 / (1 - probability))


def _readable(dy: Tensor) -> Tensor:
    """Return a gradient that launches can read: contiguous planes at an aligned address."""
    dy = dy.contiguous()
    return dy if dy.data_ptr() % 16 == 0 else dy.clone()
