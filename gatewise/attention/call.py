"""What travels into an attention kernel, out of it, and from its forward pass to its backward pass."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from torch import Tensor

from gatewise.attention.problem import Problem

EPSILON = 1e-5  # of the layer norm, as torch.nn.LayerNorm's


class Inputs(NamedTuple):
    """Everything the context is a function of.

    Attributes:
        query: [T, B, Q], any strides, as all the others.
        keys: [S, B, H].
        values: [S, B, V].
        lengths: Source lengths [B], int64 in [0, S], on the keys' device; None when all are S.
        v: [H]; None unless the score is additive.
        weight: [Q, H]; None unless the score is general.
        norm_weight: Gain of the layer norm [H]; None without.
        norm_bias: Its shift [H]; None without.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    lengths: Tensor | None = None
    v: Tensor | None = None
    weight: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None


class Gradients(NamedTuple):
    """Gradients of the loss by every input that can have one, shaped as in `Inputs`; None where there is no input."""

    query: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    v: Tensor | None = None
    weight: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None


class Needs(NamedTuple):
    """Which gradients the caller wants.

    Attributes:
        query: The query's.
        source: Those that all decoder steps share: keys, values, v and layer norm.
    """

    query: bool = True
    source: bool = True


ALL = Needs()


class Result(NamedTuple):
    """What a kernel's forward pass returns.

    Attributes:
        context: [T, B, V].
        weights: [T, B, S], zero beyond a length; None when they were not asked for.
        kept: What the same kernel's backward pass needs besides the inputs and the context; private to the kernel.
    """

    context: Tensor
    weights: Tensor | None
    kept: tuple[Tensor, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """The opaque value that a forward pass hands to its backward pass; it can be used more than once.

    Attributes:
        kernel: Name of the kernel whose forward made it.
        problem: What was computed.
        inputs: The inputs, shared with the caller, not copied.
        result: The outputs and what the kernel kept.
    """

    kernel: str
    problem: Problem
    inputs: Inputs
    result: Result
