"""The launches of a call on the kernel `fused`, for compiling them ahead of the call."""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.attention.call import ALL, Inputs, Needs
from gatewise.attention.fused.kernel import fused
from gatewise.attention.problem import Problem
from gatewise.contract.triton_kernels import TritonLaunch, noted


def launches(
    problem: Problem, *, forward: bool = True, needs: Needs = ALL, need_weights: bool = False
) -> list[TritonLaunch]:
    """Return the launches of a call with contiguous tensors: the forward pass, and in training the backward pass.

    Args:
        problem: The description of the call.
        forward: Whether to include the forward pass, which a decoder that runs step by step does not run at once.
        needs: The gradients that the backward pass computes.
        need_weights: Whether the forward pass returns the attention weights, without a gradient.
    """

    def tensor(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=problem.dtype, device="meta")

    steps, source, batch, size = problem.steps, problem.source, problem.batch, problem.hidden_size
    norm = [tensor(size) if problem.layer_norm else None for _ in range(2)]
    inputs = Inputs(
        query=tensor(steps, batch, size),  # that of the general score is multiplied by its weight before the kernel
        keys=tensor(source, batch, size),
        values=tensor(source, batch, problem.value_size),
        lengths=torch.empty(batch, dtype=torch.int64, device="meta") if problem.ragged else None,
        v=tensor(size) if problem.additive else None,
        norm_weight=norm[0],
        norm_bias=norm[1],
    )
    with noted() as found:
        result = fused.forward(problem, inputs, need_weights=need_weights)
    found = found if forward else []
    if not problem.needs_grad:
        return found
    with noted() as of_gradients:
        fused.backward(problem, inputs, result, tensor(*result.context.shape), None, needs=needs)
    return found + of_gradients
