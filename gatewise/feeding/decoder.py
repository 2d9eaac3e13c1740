"""The differentiable function of a decoder with input feeding."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gatewise.contract.device import Device, tf32_products_allowed
from gatewise.contract.errors import ArgumentError, ModifiedInPlace, sentence
from gatewise.contract.ranges import PROBABILITY
from gatewise.contract.second_derivatives import once_differentiable
from gatewise.contract.tracing import is_compiling
from gatewise.contract.transforms import is_transformed
from gatewise.feeding import backward_loop, forward_loop, packing
from gatewise.feeding.call import Inputs, Options, Weights
from gatewise.feeding.choice import choose
from gatewise.feeding.elementwise import Dropout
from gatewise.feeding.kernel import Kernel
from gatewise.feeding.problem import Problem


class State(NamedTuple):
    """The initial state of the decoder.

    Attributes:
        hidden: The hidden state of each layer [L, B, H].
        cell: The cell state of each layer [L, B, H].
        attended: The attentional output that is fed to the first step [B, H].
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
    kernel: str = "auto",
    attention_kernel: str = "auto",
    recompute: bool = False,
) -> Tensor:
    """Run a decoder with input feeding over given tokens; differentiable once.

    The function is equivalent to this PyTorch code, in which W_q is omitted for the dot score:

        for x in embedded:
            below = cat([x, attended])
            for l, cell in enumerate(layers):
                h[l], c[l] = cell(below, (h[l], c[l]))
                below = layer_dropout(h[l])
            context = attend(h[-1] @ W_q.T, keys, values, lengths, v=v)
            attended = dropout(tanh(cat([h[-1], context]) @ W_a.T))
            outputs.append(attended)

    The context's half of W_a is multiplied with the values once, instead of with each context.

    Args:
        embedded: The embeddings of the decoder's input tokens [T, B, E].
        state: The initial state.
        keys: The attention keys [S, B, A]; for the general score, the values multiplied by its weight.
        values: The encoder's outputs [S, B, V].
        lengths: The source lengths [B], int64, on the same device; None when all are S.
        weights: The parameters.
        dropout: The dropout probability of the attentional outputs.
        layer_dropout: The dropout probability between two LSTM layers.
        kernel: One of `gatewise.feeding.kernel_names()`, which raises if it cannot run the call; or "auto" for the
            kernel that `gatewise.use_kernel` names, and otherwise the one with the least predicted time.
        attention_kernel: One of `gatewise.attention.kernel_names()`, or "auto".
        recompute: Whether the backward pass recomputes the gates for a chunk of steps at a time, instead of keeping all
            of them. Gates are 4 of the 9 numbers that are kept for each unit of a layer and step.

    Returns:
        The attentional outputs [T, B, H]; the tensor may be a view of a wider one.

    Raises:
        ArgumentError: There is no token, or a dropout probability is not in [0, 1).
        DeviceError: The tensors are neither on a CPU nor on a GPU.
        RuntimeError: The call is made inside of a transform of `torch.func`, or in forward mode.
        KernelRefused: The named kernel or attention kernel cannot run this call; the message is the decision.

    Numerics:
        Under autocast the computation is in autocast's dtype, with cell states and element-wise operations in float32;
        gates and cell states are rounded to that dtype when they are kept for the backward pass. In float32, where
        products may be rounded to TensorFloat-32 on a GPU, those of the steps use float16 operands instead, which have
        as many mantissa bits, with a power of two as scale for each row of gradients; the kernel "fused" then reads
        keys and values in float16, too.
    """
    if not len(embedded):
        raise ArgumentError(sentence("embedded", "of at least one step", list(embedded.shape)))
    for name, probability in (("dropout", dropout), ("layer_dropout", layer_dropout)):
        PROBABILITY.check(name, probability)  # an attribute of a model's layer, which programs may set
    if is_transformed() or (not is_compiling() and forward_ad._current_level >= 0):
        raise RuntimeError(
            "A decoder with input feeding can be called neither inside of torch.func's transforms nor in forward mode. "
            "A model without input feeding can."
        )
    where = Device.probe(embedded.device)
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
        problem = Problem(
            time=embedded.shape[0],
            source=keys.shape[0],
            batch=embedded.shape[1],
            units=hidden.shape[2],
            layers=len(weights.layers),
            embedding_size=embedded.shape[2],
            features=0 if weights.query is None else len(weights.query),
            value_size=values.shape[2],
            layer_norm=weights.norm_weight is not None,
            dtype=dtype,
            dropout=bool(dropout),
            layer_dropout=bool(layer_dropout),
            allow_tf32=tf32_products_allowed(),
            ragged=lengths is not None,
            needs_grad=differentiable,
            recompute=recompute,
            attention_kernel=attention_kernel,
        )
        chosen = choose(problem, where, kernel)
        options = Options(score, attention_kernel, dtype, differentiable, chosen.halves(problem, where), recompute)
        plane = (*embedded.shape[:2], state.hidden.shape[2])
        between = (_drawn(layer_dropout, plane, embedded) for _ in weights.layers[1:])
        masks: _Masks = _drawn(dropout, plane, embedded), tuple(filter(None, between))
        if differentiable:
            return _Decoder.apply(chosen, options, lengths, masks, *every)
        inputs = _packed(options, lengths, masks, read, weights)
        return forward_loop.run(options, inputs, chosen.parts(options, inputs)).outputs


_Read = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""The tensors among `Inputs` that are differentiated, from `embedded` to `source`."""

_Masks = tuple[Dropout | None, tuple[Dropout, ...]]
"""The dropout of the attended outputs, and of what the layers above the first read."""


class _Decoder(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        chosen: Kernel,
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
        parts = chosen.parts(options, inputs)
        kept = forward_loop.run(options, inputs, parts)
        ctx.save_for_backward(*read, *weights, lengths)
        ctx.call = options, inputs, kept, parts
        ctx.version = kept.outputs._version
        return kept.outputs.detach()  # returning the tensor itself would create a reference cycle with `ctx`

    @staticmethod
    @once_differentiable("A decoder with input feeding", "A model without input feeding is differentiable twice.")
    def backward(ctx: Any, dy: Tensor) -> tuple:  # type: ignore[override]
        _ = ctx.saved_tensors  # raises if one of them was modified in place
        if ctx.call is None:
            raise RuntimeError(
                "the backward pass of a decoder frees the tensors that were kept for it; call the decoder again"
            )
        options, inputs, kept, parts = ctx.call
        if kept.outputs._version != ctx.version:
            expectation, got = "as the decoder returned it", "one modified by an inplace operation since"
            raise ModifiedInPlace(
                sentence("the output", expectation, got, "Modify a copy instead, which .clone() makes.")
            )
        ctx.call = None
        found = backward_loop.run(options, inputs, kept, _readable(dy), parts)
        return None, None, None, None, *found[:-1], *found.weights.flat()


def _packed(options: Options, lengths: Tensor | None, masks: _Masks, read: _Read, weights: Weights) -> Inputs:
    """Convert the tensors to the layout that the steps read."""
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
    """Return a gradient that the CUDA kernels can read: contiguous and at an aligned address."""
    dy = dy.contiguous()
    return dy if dy.data_ptr() % 16 == 0 else dy.clone()
