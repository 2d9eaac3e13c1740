"""One layer with projection, h = W_hr m with m = o tanh(c), as a layer without: m is the state, W_hh W_hr its matrix.

    W_hh h_t-1 = (W_hh W_hr) m_t-1

The exchange between steps is then the same as without projection, and h, wherever it is needed, is one product over all
steps. Only h0 is no projection of anything: W_hh h0 is added to the gate sums of the first step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.contract.saved import Needs, OutputGradients, Result
from gatewise.contract.weights import DirectionWeights
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent import layer as plain
from gatewise.kernels.persistent import products
from gatewise.kernels.persistent.padding import columns_widened, gates_widened
from gatewise.kernels.persistent.tokens import order_of_kept
from gatewise.kernels.stack import Layer, LayerGradients


def forward(problem: Problem, layer: Layer) -> Result:
    """Compute one layer; keep what a layer without projection keeps, and m [T, B, D*H]."""
    lengths = plain.on_device(layer.lengths, layer.x.device)
    inner, folded = _folded(problem, layer)
    with products.in_precision_of(problem):
        first = [
            torch.mm(columns_widened(h0), gates_widened(own.w_hh, problem).t())
            for h0, own in zip(layer.h0, layer.weights, strict=True)
        ]
        found = plain.forward(inner, folded, first)
        y = torch.cat(_projected(found.y, layer.weights), -1)
        h_n = torch.stack([m_n @ w_hr.t() for m_n, w_hr in zip(found.h_n, _projections(layer.weights), strict=True)])
    if lengths is not None:
        h_n = torch.where((lengths > 0).unsqueeze(1), h_n, layer.h0)
    return Result(y, h_n, found.c_n, (*found.kept[:2], found.y) if problem.needs_grad else ())


def backward(problem: Problem, layer: Layer, result: Result, above: OutputGradients, needs: Needs) -> LayerGradients:
    """Compute one layer's gradients."""
    lengths, scratch = plain.on_device(layer.lengths, layer.x.device), Scratch(layer.x)
    inner, folded = _folded(problem, layer)
    folded = folded._replace(c0=layer.c0.contiguous(), lengths=lengths)
    *kept, m = result.kept
    with products.in_precision_of(problem):
        unprojected = plain.in_order(_unprojected(above, layer.weights), order_of_kept(kept[0]))
        found = plain.gate_gradients(inner, folded, tuple(kept), unprojected, scratch)
        before = [
            found.tokens.unflat(
                torch.mm(found.tokens.flat(share), gates_widened(own.w_hh, problem))[:, : problem.proj_size]
            )
            for share, own in zip(found.sums, layer.weights, strict=True)
        ]
        return LayerGradients(
            _input_gradient(problem, layer, found, scratch) if needs.x else None,
            _initial(before, above.h_n, lengths) if needs.state else None,
            found.c0 if needs.state else None,
            _weight_gradients(problem, layer, result.y, m, found, before, above, lengths, scratch)
            if needs.weights
            else (None,) * (len(layer.weights) * problem.weights_per_direction),
        )


def _folded(problem: Problem, layer: Layer) -> tuple[Problem, Layer]:
    with products.in_precision_of(problem):
        weights = [
            DirectionWeights(own.w_ih, own.w_hh @ w_hr, own.b_ih, own.b_hh)
            for own, w_hr in zip(layer.weights, _projections(layer.weights), strict=True)
        ]
    return problem.replace(proj_size=0), layer._replace(h0=torch.zeros_like(layer.c0), weights=weights)


def _projections(weights: list[DirectionWeights]) -> list[Tensor]:
    """Return W_hr [P, H] of each direction, which every direction of a projected problem has."""
    return [own.w_hr for own in weights if own.w_hr is not None]


def _projected(m: Tensor, weights: list[DirectionWeights]) -> list[Tensor]:
    return [share @ w_hr.t() for share, w_hr in zip(m.chunk(len(weights), -1), _projections(weights), strict=True)]


def _unprojected(above: OutputGradients, weights: list[DirectionWeights]) -> OutputGradients:
    """Return gradients of m from those of h."""
    dm, dm_n, projections = None, None, _projections(weights)
    if above.y is not None:
        shares = zip(above.y.chunk(len(weights), -1), projections, strict=True)
        dm = torch.cat([share @ w_hr for share, w_hr in shares], -1)
    if above.h_n is not None:
        dm_n = torch.stack([share @ w_hr for share, w_hr in zip(above.h_n, projections, strict=True)])
    return OutputGradients(dm, dm_n, above.c_n)


def _initial(before: list[Tensor], dh_n: Tensor | None, lengths: Tensor | None) -> Tensor:
    """Return the gradient of h0: what came through the first step, or, without a step, straight from h_n."""
    dh0 = [before[0][0], *(_at_end(share, lengths) for share in before[1:])]
    if lengths is None:
        return torch.stack(dh0)
    return torch.where((lengths > 0).unsqueeze(1), torch.stack(dh0), 0.0 if dh_n is None else dh_n)


def _at_end(share: Tensor, lengths: Tensor | None) -> Tensor:
    if lengths is None:
        return share[-1]
    return share[products.last_steps(lengths), torch.arange(share.shape[1], device=share.device)]


def _input_gradient(problem: Problem, layer: Layer, found: plain.GateGradients, scratch: Scratch) -> Tensor:
    dx = found.tokens.new(layer.x, width=layer.x.shape[2])
    dsums = [found.tokens.flat(share) for share in found.sums]
    products.input_gradient(problem, dsums, layer.weights, found.tokens.flat(dx), scratch)
    return dx


def _weight_gradients(
    problem: Problem,
    layer: Layer,
    y: Tensor,
    m: Tensor,
    found: plain.GateGradients,
    before: list[Tensor],
    above: OutputGradients,
    lengths: Tensor | None,
    scratch: Scratch,
) -> tuple[Tensor | None, ...]:
    others = products.new_weight_gradients(layer, apart=problem.traced)
    products.weight_gradients(problem, layer, y, found.sums, found.bias, lengths, found.tokens, others, scratch)
    share = problem.weights_per_direction - 1
    gradients: list[Tensor | None] = []
    for direction, (through, states) in enumerate(zip(before, m.chunk(len(before), -1), strict=True)):
        dh = _total(direction, through, above, lengths, problem.proj_size)
        gradients += others[direction * share : (direction + 1) * share]
        gradients.append(found.tokens.flat(dh).t() @ found.tokens.flat(states))
    return tuple(gradients)


def _total(direction: int, through: Tensor, above: OutputGradients, lengths: Tensor | None, size: int) -> Tensor:
    """Return the gradient of every h_t [T, B, P]: from its output, from the step after it, and of the last from h_n."""
    dh = torch.zeros_like(through, memory_format=torch.contiguous_format)
    if above.y is not None:
        own = above.y[..., direction * size : (direction + 1) * size]
        dh += own if lengths is None else products.without_padding(own, lengths)
    if direction == 0:
        dh[:-1] += through[1:]
    else:
        dh[1:] += through[:-1]
    if above.h_n is None:
        return dh
    if direction == 1 or lengths is None:
        rows = above.h_n[direction] if lengths is None else products.begun(above.h_n[direction], lengths)
        dh[0 if direction == 1 else -1] += rows
    else:
        at = products.last_steps(lengths), torch.arange(dh.shape[1], device=dh.device)
        dh[at] += products.begun(above.h_n[direction], lengths)
    return dh
