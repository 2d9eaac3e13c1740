"""Compute a layer with projection by the kernels without projection, by merging W_hr into W_hh.

A layer with projection computes m = o tanh(c) and h = W_hr m. Its recurrence is that of a layer without projection
whose hidden state is m and whose recurrent weights are W_hh W_hr:

    W_hh h_t-1 = (W_hh W_hr) m_t-1

The exchange between steps is then the same as without projection, and h is one matrix product over all steps. Only h0
is not the projection of a state: W_hh h0 is added to the gate sums of the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.contract.saved import Needs, OutputGradients, Result
from gatewise.contract.weights import DirectionWeights
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent import buffers
from gatewise.kernels.persistent.schedules import layer_gradients, matrix_products
from gatewise.kernels.persistent.schedules.single_layer import GateGradients, gate_gradients, single_layer
from gatewise.kernels.stack import Layer, LayerGradients


class Projection:
    """The two passes of one layer with projection, which allocate what they return; see `LayerPasses`.

    Args:
        new_scratch: The function that returns the scratch memory of a pass, given a tensor like those that it needs.
    """

    def __init__(self, new_scratch: Callable[[Tensor], Scratch]) -> None:
        self._new_scratch = new_scratch

    def forward(self, problem: Problem, layer: Layer) -> Result:
        """Compute the outputs; keep what a layer without projection keeps, and m [T, B, D*H]."""
        lengths = buffers.on_device(layer.lengths, layer.x.device)
        inner, folded = _folded(problem, layer)
        with matrix_products.in_precision_of(problem, layer.x):
            first = [
                torch.mm(buffers.pad_columns(h0), buffers.pad_gates(own.w_hh, problem).t())
                for h0, own in zip(layer.h0, layer.weights, strict=True)
            ]
            if layer.resets is not None:  # of the first step of the forward direction; nothing precedes the other's
                first[0].masked_fill_(layer.resets[0].unsqueeze(1), 0)
            x, tokens = layer.x, buffers.order_of(layer.x, inner)
            kept = single_layer.new_kept(inner, x.shape[2], x, tokens) if problem.needs_grad else ()
            found = buffers.new_result(inner, x, tokens, kept)
            scratch = self._new_scratch(x)
            single_layer.forward(inner, buffers.as_read(folded), tokens, (found,), None, scratch, first=first)
            y = torch.cat(_projected(found.y, layer.weights), -1)
            h_n = torch.stack(
                [m_n @ w_hr.t() for m_n, w_hr in zip(found.h_n, _projections(layer.weights), strict=True)]
            )
        if lengths is not None:
            h_n = torch.where((lengths > 0).unsqueeze(1), h_n, layer.h0)
        return Result(y, h_n, found.c_n, (*found.kept[:2], found.y) if problem.needs_grad else ())

    def backward(
        self, problem: Problem, layer: Layer, result: Result, above: OutputGradients, needs: Needs
    ) -> LayerGradients:
        """Compute the gradients."""
        lengths, scratch = buffers.on_device(layer.lengths, layer.x.device), self._new_scratch(layer.x)
        inner, folded = _folded(problem, layer)
        folded = folded._replace(c0=layer.c0.contiguous(), lengths=lengths)
        *kept, m = result.kept
        with matrix_products.in_precision_of(problem, layer.x):
            unprojected = _unprojected(above, layer.weights)
            unprojected = single_layer.gradients_in_order(unprojected, buffers.order_of_kept(kept[0]))
            found = gate_gradients(inner, folded, tuple(kept), unprojected, scratch)
            through = [
                found.tokens.unflat(
                    torch.mm(found.tokens.flat(sums), buffers.pad_gates(own.w_hh, problem))[:, : problem.proj_size]
                )
                for sums, own in zip(found.sums, layer.weights, strict=True)
            ]
            for direction, share in enumerate(through):
                buffers.zeros_where_episodes_begin(share, direction, layer.resets, lengths)
            dx = found.tokens.new(layer.x, width=layer.x.shape[2]) if needs.x else None
            others = buffers.new_weight_gradients(layer, apart=problem.traced) if needs.weights else ()
            of_sums = found.sums, found.bias, lengths, found.tokens
            layer_gradients.write(problem, layer, result.y, *of_sums, dx, others, scratch)
            return LayerGradients(
                dx,
                _initial_gradient(through, above.h_n, lengths) if needs.state else None,
                found.c0 if needs.state else None,
                _with_projections(problem, others, m, found, through, above, lengths)
                if needs.weights
                else (None,) * (len(layer.weights) * problem.weights_per_direction),
            )


def _folded(problem: Problem, layer: Layer) -> tuple[Problem, Layer]:
    """Return the problem and the layer without projection, whose recurrent weights are W_hh W_hr."""
    with matrix_products.in_precision_of(problem, layer.x):
        weights = [
            DirectionWeights(own.w_ih, own.w_hh @ w_hr, own.b_ih, own.b_hh)
            for own, w_hr in zip(layer.weights, _projections(layer.weights), strict=True)
        ]
    return problem.replace(proj_size=0), layer._replace(h0=torch.zeros_like(layer.c0), weights=weights)


def _projections(weights: list[DirectionWeights]) -> list[Tensor]:
    """Return W_hr [P, H] of each direction, which every direction of a problem with projection has."""
    return [own.w_hr for own in weights if own.w_hr is not None]


def _projected(m: Tensor, weights: list[DirectionWeights]) -> list[Tensor]:
    return [share @ w_hr.t() for share, w_hr in zip(m.chunk(len(weights), -1), _projections(weights), strict=True)]


def _unprojected(above: OutputGradients, weights: list[DirectionWeights]) -> OutputGradients:
    """Return the gradients of m from those of h."""
    dm, dm_n, projections = None, None, _projections(weights)
    if above.y is not None:
        shares = zip(above.y.chunk(len(weights), -1), projections, strict=True)
        dm = torch.cat([share @ w_hr for share, w_hr in shares], -1)
    if above.h_n is not None:
        dm_n = torch.stack([share @ w_hr for share, w_hr in zip(above.h_n, projections, strict=True)])
    return OutputGradients(dm, dm_n, above.c_n)


def _initial_gradient(through: list[Tensor], dh_n: Tensor | None, lengths: Tensor | None) -> Tensor:
    """Return the gradient of h0.

    Args:
        through: The gradient of the hidden state that each step read, of each direction [T, B, P].
        dh_n: The gradient of the final hidden state, which for an empty sequence is that of h0; or None.
        lengths: The sequence lengths [B] on the device, or None.
    """
    dh0 = [through[0][0], *(_at_end(share, lengths) for share in through[1:])]
    if lengths is None:
        return torch.stack(dh0)
    return torch.where((lengths > 0).unsqueeze(1), torch.stack(dh0), 0.0 if dh_n is None else dh_n)


def _at_end(share: Tensor, lengths: Tensor | None) -> Tensor:
    if lengths is None:
        return share[-1]
    return share[buffers.last_steps(lengths), torch.arange(share.shape[1], device=share.device)]


def _with_projections(
    problem: Problem,
    others: Sequence[Tensor],
    m: Tensor,
    found: GateGradients,
    through: list[Tensor],
    above: OutputGradients,
    lengths: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of all weights from those of the others, with those of the projections."""
    each = problem.weights_per_direction - 1
    gradients: list[Tensor | None] = []
    for direction, (own, states) in enumerate(zip(through, m.chunk(len(through), -1), strict=True)):
        dh = _total(direction, own, above, lengths, problem.proj_size)
        gradients += others[direction * each : (direction + 1) * each]
        gradients.append(found.tokens.flat(dh).t() @ found.tokens.flat(states))
    return tuple(gradients)


def _total(direction: int, through: Tensor, above: OutputGradients, lengths: Tensor | None, size: int) -> Tensor:
    """Return the gradient of every h_t [T, B, P]: of its output, of the step that read it, and of h_n for the last."""
    dh = torch.zeros_like(through, memory_format=torch.contiguous_format)
    if above.y is not None:
        own = above.y[..., direction * size : (direction + 1) * size]
        dh += own if lengths is None else buffers.zeros_after_ends(own, lengths)
    if direction == 0:
        dh[:-1] += through[1:]
    else:
        dh[1:] += through[:-1]
    if above.h_n is None:
        return dh
    if direction == 1 or lengths is None:
        rows = above.h_n[direction] if lengths is None else buffers.zeros_for_empty(above.h_n[direction], lengths)
        dh[0 if direction == 1 else -1] += rows
    else:
        at = buffers.last_steps(lengths), torch.arange(dh.shape[1], device=dh.device)
        dh[at] += buffers.zeros_for_empty(above.h_n[direction], lengths)
    return dh
