"""The memory that the decoder's loop keeps from its forward pass to its backward pass, computed from sizes."""

from __future__ import annotations

import dataclasses

import torch

from gatewise import attention
from gatewise.attention.choice import choose
from gatewise.contract.device import Device
from gatewise.contract.kernel import TensorSpec
from gatewise.feeding.call import fit_halves, steps_per_chunk


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a call of `attended_outputs` in training.

    Attributes:
        time: The number of decoder steps, T.
        source: The number of source positions, S.
        batch: The batch size, B.
        units: The number of units of a layer, H.
        layers: The number of LSTM layers, L.
        embedding_size: The size of an embedding, E.
        features: The number of features of the additive score, A; 0 for the dot and the general score.
        value_size: The number of features of the encoder's outputs, V.
        layer_norm: Whether the additive score has a layer norm.
        dtype: The dtype of the computation.
        dropout: Whether the attentional outputs have dropout.
        layer_dropout: Whether the inputs of the layers above the first have dropout.
        allow_tf32: Whether float32 products may be rounded to TensorFloat-32; operands may then be stored in float16.
    """

    time: int
    source: int
    batch: int
    units: int
    layers: int
    embedding_size: int
    features: int
    value_size: int
    layer_norm: bool = False
    dtype: torch.dtype = torch.float32
    dropout: bool = False
    layer_dropout: bool = False
    allow_tf32: bool = False

    @property
    def halves(self) -> bool:
        """Whether the operands of the steps' products are stored in float16 on a GPU."""
        return fit_halves(self.dtype, self.units, self.features, rounded=self.allow_tf32)

    @property
    def attention(self) -> attention.Problem:
        """The attention problem of all steps together."""
        return attention.Problem(
            steps=self.time,
            source=self.source,
            batch=self.batch,
            hidden_size=self.features or self.units,
            value_size=self.units,
            score=attention.Score.ADDITIVE if self.features else attention.Score.DOT,
            layer_norm=self.layer_norm,
            ragged=True,
            dtype=self.dtype,
            needs_grad=True,
            allow_tf32=self.allow_tf32,
        )


def kept(
    sizes: Sizes, device: Device, *, recompute: bool = False, attention_kernel: str = "auto"
) -> dict[str, tuple[TensorSpec, ...]]:
    """Return the tensors that live from the forward pass to the backward pass, by purpose.

    `TensorSpec.nbytes` is the size of each. Embeddings, keys and the source's values belong to the caller and are not
    counted, nor are their conversions under autocast. The halves of W_a are counted even if no conversion is needed and
    they are views.

    Args:
        sizes: The sizes of the call.
        device: The device of the call, on which the choice of "auto" depends.
        recompute: Whether gates are recomputed, as in `attended_outputs`.
        attention_kernel: The attention kernel, as in `attended_outputs`.
    """
    time, batch, units, features = sizes.time, sizes.batch, sizes.units, sizes.features
    chosen = choose(sizes.attention, device, attention_kernel)

    def numbers(*shape: int, count: int = 1, dtype: torch.dtype = sizes.dtype) -> tuple[TensorSpec, ...]:
        return (TensorSpec(shape, dtype),) * count

    planes = time, batch
    halves = sizes.halves and device.kind == "cuda" and device.compiles
    operand = torch.float16 if halves else sizes.dtype
    weights = (*numbers(4 * units, 2 * units, dtype=operand), *numbers(4 * units)) * sizes.layers
    masks = sizes.dropout + (sizes.layers - 1) * sizes.layer_dropout
    return {
        "operands": numbers(time + 1, batch, 2 * units, count=sizes.layers, dtype=operand),
        "outputs": numbers(*planes, units) if halves else (),
        "gates": () if recompute else numbers(*planes, 4 * units, count=sizes.layers),
        "cells": numbers(*planes, units, count=sizes.layers),
        "queries": numbers(*planes, 2 * features + units if features else 2 * units),
        "contexts": numbers(batch, units),
        "attention": tuple(chosen.kept(sizes.attention, device)),
        "values": numbers(sizes.source, batch, units),
        # The copies of keys and values that each step reads, if the attention part is one launch.
        "source": (
            (
                *numbers(sizes.source, batch, features, dtype=operand),
                *numbers(sizes.source, batch, units, dtype=operand),
            )
            if halves and chosen.name == "fused" and not sizes.layer_norm
            else ()
        ),
        "masks": numbers(*planes, units, count=masks, dtype=torch.bool),
        "weights": (
            *weights,
            *numbers(4 * units, sizes.embedding_size),
            *numbers(features + units, units),
            *numbers(units, sizes.value_size),
        ),
    }


def workspace_bytes(sizes: Sizes, *, recompute: bool = False) -> int:
    """Return the size in bytes of the gates that are in memory at a time with `recompute`; 0 without."""
    if not recompute:
        return 0
    return sizes.layers * steps_per_chunk(sizes.time) * sizes.batch * 4 * sizes.units * sizes.dtype.itemsize
