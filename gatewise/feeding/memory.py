"""The memory that the decoder's loop keeps from its forward pass to its backward pass, computed from problem."""

from __future__ import annotations

import torch

from gatewise.attention.choice import choose
from gatewise.contract.device import Device
from gatewise.contract.kernel import TensorSpec
from gatewise.feeding.call import steps_per_chunk
from gatewise.feeding.problem import Problem


def kept(problem: Problem, device: Device, *, halves: bool) -> dict[str, tuple[TensorSpec, ...]]:
    """Return the tensors that live from the forward pass to the backward pass, by purpose.

    `TensorSpec.nbytes` is the size of each. Embeddings, keys and the source's values belong to the caller and are not
    counted, nor are their conversions under autocast. The halves of W_a are counted even if no conversion is needed and
    they are views.

    Args:
        problem: The description of the call.
        device: The device of the call, on which the choice of the attention kernel depends.
        halves: Whether the kernel stores the operands of the steps' products in float16 beside float32 numbers.

    Raises:
        KernelRefused: The attention kernel cannot run this call.
    """
    time, batch, units, features = problem.time, problem.batch, problem.units, problem.features
    chosen = choose(problem.attention, device, problem.attention_kernel)

    def numbers(*shape: int, count: int = 1, dtype: torch.dtype = problem.dtype) -> tuple[TensorSpec, ...]:
        return (TensorSpec(shape, dtype),) * count

    planes = time, batch
    operand = torch.float16 if halves else problem.dtype
    weights = (*numbers(4 * units, 2 * units, dtype=operand), *numbers(4 * units)) * problem.layers
    masks = problem.dropout + (problem.layers - 1) * problem.layer_dropout
    return {
        "operands": numbers(time + 1, batch, 2 * units, count=problem.layers, dtype=operand),
        "outputs": numbers(*planes, units) if halves else (),
        "gates": () if problem.recompute else numbers(*planes, 4 * units, count=problem.layers),
        "cells": numbers(*planes, units, count=problem.layers),
        "queries": numbers(*planes, 2 * features + units if features else 2 * units),
        "contexts": numbers(batch, units),
        "attention": tuple(chosen.kept(problem.attention, device)),
        "values": numbers(problem.source, batch, units),
        # The copies of keys and values that each step reads, if the attention part is one launch.
        "source": (
            (
                *numbers(problem.source, batch, features, dtype=operand),
                *numbers(problem.source, batch, units, dtype=operand),
            )
            if halves and chosen.name == "fused" and not problem.layer_norm
            else ()
        ),
        "masks": numbers(*planes, units, count=masks, dtype=torch.bool),
        "weights": (
            *weights,
            *numbers(4 * units, problem.embedding_size),
            *numbers(features + units, units),
            *numbers(units, problem.value_size),
        ),
    }


def workspace_bytes(problem: Problem) -> int:
    """Return the size in bytes of the gates that are in memory at a time if they are recomputed; 0 otherwise."""
    if not problem.recompute:
        return 0
    gates = problem.layers * steps_per_chunk(problem.time) * problem.batch * 4 * problem.units
    return gates * problem.dtype.itemsize
