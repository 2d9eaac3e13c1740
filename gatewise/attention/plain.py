"""Attention in PyTorch operators for a chunk of decoder steps, and its hand-derived backward pass.

a = query + keys                       [t, S, B, H]   (additive score only)
n = (a - mean(a)) / sqrt(var(a) + e)                  (with layer norm)
m = tanh(n * norm_weight + norm_bias)
score = m . v                          [t, S, B]      (dot: score = query . keys)
weights = softmax(score) over the source positions within the length
context = weights . values             [t, B, V]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.attention.call import EPSILON, Gradients, Inputs, Needs, Result
from gatewise.attention.problem import Problem


class Map(NamedTuple):
    """The tensors of a chunk that its backward pass needs: the softmax, the feature map, and those of the layer norm.

    Attributes:
        weights: The attention weights [t, B, S].
        tanh: The feature map m [t, S, B, H]; None for the dot score.
        normalised: The normalised sum n [t, S, B, H]; None without layer norm.
        rstd: The factor 1 / sqrt(var + e) [t, S, B, 1]; None without layer norm.
    """

    weights: Tensor
    tanh: Tensor | None = None
    normalised: Tensor | None = None
    rstd: Tensor | None = None


class Source(NamedTuple):
    """Keys and values with zeros beyond each length, and the mask.

    Attributes:
        keys: The keys [S, B, H].
        values: The values [S, B, V].
        beyond: The mask of source positions beyond the length [B, S]; None when there are none.
    """

    keys: Tensor
    values: Tensor
    beyond: Tensor | None

    @classmethod
    def of(cls, inputs: Inputs) -> Source:
        """Mask the keys and values of a call."""
        if inputs.lengths is None:
            return cls(inputs.keys, inputs.values, None)
        positions = torch.arange(inputs.keys.shape[0], device=inputs.keys.device)
        beyond = positions >= inputs.lengths[:, None]
        outside = beyond.T[..., None]
        return cls(inputs.keys.masked_fill(outside, 0), inputs.values.masked_fill(outside, 0), beyond)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and of the softmax: float32 for 16-bit dtypes, otherwise the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def score(
    problem: Problem, inputs: Inputs, source: Source, query: Tensor
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Return the scores of a chunk of decoder steps [t, B, S], and its feature map as from `replay`.

    Args:
        problem: The description of the call.
        inputs: The inputs of the call; v and the layer norm are used.
        source: The masked keys and values.
        query: The queries of the chunk [t, B, H].
    """
    found = replay(problem, inputs, source, query)
    if found[0] is None:
        return torch.bmm(query.transpose(0, 1), source.keys.permute(1, 2, 0)).transpose(0, 1), found
    assert inputs.v is not None
    return torch.matmul(found[0], inputs.v).transpose(1, 2), found


def softmax_context(problem: Problem, source: Source, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the context [t, B, V] and the weights [t, B, S] for some scores."""
    if source.beyond is not None:
        scores = scores.masked_fill(source.beyond, -torch.inf)
    weights = torch.softmax(scores.to(accumulation_dtype(scores.dtype)), -1)
    if source.beyond is not None:
        # If all positions of a sequence are masked, its softmax is NaN and must become zero.
        weights = weights.masked_fill(source.beyond, 0)
    weights = weights.to(problem.dtype)
    return torch.bmm(weights.transpose(0, 1), source.values.transpose(0, 1)).transpose(0, 1), weights


def differentiable(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the context and the weights of all decoder steps by operators that autograd records, any number of times.

    Args:
        problem: The description of the call.
        inputs: The inputs of the call, the query multiplied by the matrix of the general score.
    """
    source = Source.of(inputs)
    return softmax_context(problem, source, score(problem, inputs, source, inputs.query)[0])


def replay(
    problem: Problem, inputs: Inputs, source: Source, query: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the feature map of a chunk and the tensors of its layer norm: a `Map` without the weights."""
    if not problem.additive:
        return None, None, None
    total = query[:, None] + source.keys
    normalised = rstd = None
    if problem.layer_norm:
        assert inputs.norm_weight is not None
        assert inputs.norm_bias is not None
        normalised, _, rstd = torch.native_layer_norm(total, [problem.hidden_size], None, None, EPSILON)
        rstd = rstd.to(accumulation_dtype(problem.dtype))
        total = normalised * inputs.norm_weight + inputs.norm_bias
    return total.tanh_(), normalised, rstd


def add_values(weights: Tensor, dcontext: Tensor, sums: Gradients) -> None:
    """Add the gradient of the values to its accumulator, in place.

    Args:
        weights: The weights from `softmax_context`.
        dcontext: The gradient of the context [t, B, V].
        sums: The accumulators; that of the values is used.
    """
    assert sums.values is not None
    sums.values.add_(torch.bmm(weights.permute(1, 2, 0), dcontext.transpose(0, 1)).transpose(0, 1))


def softmax_context_backward(
    problem: Problem, source: Source, weights: Tensor, dcontext: Tensor, dweights: Tensor | None
) -> Tensor:
    """Return the gradients of the scores [t, B, S].

    Args:
        problem: The description of the call.
        source: The masked keys and values.
        weights: The weights from `softmax_context`.
        dcontext: The gradient of the context [t, B, V].
        dweights: The gradient of the weights [t, B, S]; None for zero.
    """
    above = torch.bmm(dcontext.transpose(0, 1), source.values.permute(1, 2, 0)).transpose(0, 1)
    above = above.to(accumulation_dtype(above.dtype))
    if dweights is not None:
        above = above + dweights
    if source.beyond is not None:
        above = above.masked_fill(source.beyond, 0)
    share = weights.to(above.dtype)
    return (share * (above - (share * above).sum(-1, keepdim=True))).to(problem.dtype)


def score_backward(
    problem: Problem,
    inputs: Inputs,
    source: Source,
    query: Tensor,
    kept: Map,
    dscores: Tensor,
    sums: Gradients,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a chunk's query and of its keys, and accumulate those of the parameters.

    The gradient of the keys is complete only after `add_keys`.

    Args:
        problem: The description of the call.
        inputs: The inputs of the call.
        source: The masked keys and values.
        query: The queries of the chunk [t, B, H].
        kept: The feature map of the chunk.
        dscores: The gradients of the chunk's scores [t, B, S].
        sums: The accumulators of v and layer norm, added to in place; ignored if `needs.source` is False.
        needs: The gradients that are needed.
    """
    if kept.tanh is None:
        of_keys = of_query = None
        if needs.source:
            of_keys = torch.bmm(dscores.permute(1, 2, 0), query.transpose(0, 1)).transpose(0, 1)
        if needs.query:
            of_query = torch.bmm(dscores.transpose(0, 1), source.keys.transpose(0, 1)).transpose(0, 1)
        return of_query, of_keys
    into = _additive_backward(inputs, kept, dscores.transpose(1, 2), sums, needs)
    dtype = accumulation_dtype(problem.dtype)
    of_keys = of_query = None
    if needs.source:
        of_keys = into[0] if len(into) == 1 else into.sum(0, dtype=dtype)
    if needs.query:
        of_query = _times_v(into.sum(1, dtype=dtype), inputs).to(problem.dtype)
    return of_query, of_keys


def add_keys(problem: Problem, inputs: Inputs, source: Source, found: Tensor, sums: Gradients) -> None:
    """Add the gradient of the keys to its accumulator, in place.

    Args:
        problem: The description of the call.
        inputs: The inputs of the call.
        source: The masked keys and values.
        found: The keys' gradients that `score_backward` returned, summed over chunks [S, B, H].
        sums: The accumulators; that of the keys is used.
    """
    assert sums.keys is not None
    found = _times_v(found.to(accumulation_dtype(problem.dtype)), inputs)
    # NaN times zero is NaN: a NaN in the query must not reach the gradient of a masked key.
    sums.keys.add_(found if source.beyond is None else found.masked_fill(source.beyond.T[..., None], 0))


def copied_into(found: Result, out: Result | None) -> Result:
    """Return a result, copied into the tensors of `out` if it is given."""
    if out is None:
        return found
    out.context.copy_(found.context)
    for target, tensor in zip(out.kept, found.kept, strict=True):
        target.copy_(tensor)
    return out


def _additive_backward(inputs: Inputs, kept: Map, dscores: Tensor, sums: Gradients, needs: Needs) -> Tensor:
    """Accumulate the parameters' gradients; return that of query + keys, without the factor v if no layer norm."""
    assert inputs.v is not None
    assert kept.tanh is not None
    if needs.source:
        assert sums.v is not None
        sums.v.add_(kept.tanh.reshape(-1, kept.tanh.shape[-1]).T @ dscores.reshape(-1))
    into = torch.ops.aten.tanh_backward(dscores[..., None], kept.tanh)
    if kept.normalised is not None:
        into *= inputs.v
        assert inputs.norm_weight is not None
        assert kept.rstd is not None
        if needs.source:
            assert sums.norm_weight is not None
            assert sums.norm_bias is not None
            sums.norm_bias.add_(into.sum((0, 1, 2)))
            sums.norm_weight.add_((into * kept.normalised).sum((0, 1, 2)))
        into *= inputs.norm_weight
        along = (into * kept.normalised).mean(-1, keepdim=True)
        into -= into.mean(-1, keepdim=True)
        into -= kept.normalised * along
        into *= kept.rstd
    return into


def _times_v(sums: Tensor, inputs: Inputs) -> Tensor:
    # v is the same at all steps and positions, so that sums are multiplied by it and not the feature map. With layer
    # norm, `_additive_backward` has multiplied the map by it.
    return sums if inputs.v is None or inputs.norm_weight is not None else sums * inputs.v
