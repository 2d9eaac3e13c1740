"""What the loop of a decoder keeps from its forward pass to its backward pass, by arithmetic on sizes."""

from __future__ import annotations

import dataclasses

import torch

from gatewise import attention
from gatewise.attention.choice import choose
from gatewise.contract.device import Device
from gatewise.contract.kernel import TensorSpec
from gatewise.feeding.call import fit_halves, stretch_steps


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """A call of `attended_outputs` in training, without any tensor.

    Attributes:
        time: T.
        source: S.
        batch: B.
        units: H.
        layers: L.
        embedding_size: E.
        features: A, of the additive score; 0 for the dot and the general score.
        value_size: V.
        layer_norm: Whether the additive score is normalised.
        dtype: What it is computed in.
        dropout: Whether attended outputs are dropped.
        layer_dropout: Whether what the layers above the first read is.
        allow_tf32: Whether float32 products are rounded, and what the steps' products multiply is float16 for it.
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
        """Whether what the steps' products multiply is float16, on a GPU."""
        return fit_halves(self.dtype, self.units, self.features, rounded=self.allow_tf32)

    @property
    def attention(self) -> attention.Problem:
        """All its steps of attention together."""
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
    """Return the tensors that live from the forward pass to the backward pass, by what they are.

    `TensorSpec.nbytes` is what each takes. Embeddings, keys and the source's values are the caller's, and not counted;
    nor are their conversions under autocast, and where nothing is converted halves of W_a are counted that are only
    looked at.

    Args:
        sizes: Of the call.
        device: Where it runs, which says which attention kernel "auto" is.
        recompute: As in `attended_outputs`.
        attention_kernel: The same.
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
        # Keys and values as each step reads them, where attention and what surrounds it are one launch.
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
    """Return the bytes of gates that a pass with `recompute` holds at a time; 0 without."""
    if not recompute:
        return 0
    return sizes.layers * stretch_steps(sizes.time) * sizes.batch * 4 * sizes.units * sizes.dtype.itemsize
