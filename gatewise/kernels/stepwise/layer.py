"""Forward and backward pass of one layer, both directions: products over all time steps, and the loop over time."""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.contract.saved import Needs, OutputGradients, Result
from gatewise.kernels.cuda import deep_products, driver
from gatewise.kernels.cuda.long_products import in_stretches
from gatewise.kernels.cuda.precision import products_in_tf32
from gatewise.kernels.stack import Layer, LayerGradients
from gatewise.kernels.stepwise import backward_loop, forward_loop
from gatewise.kernels.stepwise.parameters import dropped, factors_of
from gatewise.kernels.stepwise.plan import product_layout_of
from gatewise.kernels.stepwise.product_layout import ProductLayout
from gatewise.kernels.stepwise.products import gradients_dtype, state_dtype
from gatewise.kernels.sums import bias_gradients, bias_of_sums, of_input, recurrent_runs

# The gradients of g, the third gate, are by far the largest, so the rounding error of a sum over the gates is
# determined by the terms of g. The input gradient is therefore split within g, at a third and two thirds of its rows.
_THIRDS_OF_G = 7 / 12, 8 / 12


def forward(problem: Problem, layer: Layer, layout: ProductLayout | None = None) -> Result:
    """Run the forward pass of one layer.

    The kept tensors are one value for each gate sum [D, T, B, S*H], the carried states [D, T, B, C*H] and
    `LoopOutputs.further`, if there is any.

    Args:
        problem: The problem; its number of layers is ignored.
        layer: The inputs of the layer.
        layout: The layout of states and products; None for the one with the least predicted time.
    """
    (time, batch, _), directions = layer.x.shape, len(layer.weights)
    layout = layout or product_layout_of(problem, Device.probe(layer.x.device))
    lengths = _on_device(layer.lengths, layer.x.device)
    with driver.on(layer.x.device), products_in_tf32(problem):
        gates = layout.sequence(layer.x, directions, time, batch, len(problem.cell.sums) * problem.hidden_size)
        x = layer.x.reshape(time * batch, -1)
        biases = [bias_of_sums(problem.cell, weights.b_ih, weights.b_hh) for weights in layer.weights]
        for share, weights, bias in zip(gates, layer.weights, biases, strict=True):
            _input_sums(layout, x, weights.w_ih, bias, share.flatten(0, 1))
        found = forward_loop.run(problem, layout, layer, gates, biases, lengths)
    y, h_n, c_n, cells, further = found
    if lengths is not None:
        # The final hidden state of an empty sequence is its initial one.
        h_n = torch.where((lengths > 0).unsqueeze(1), h_n, layer.h0)
    if not problem.needs_grad:
        return Result(y, h_n, c_n)
    return Result(y, h_n, c_n, tuple(each for each in (gates, cells, further) if each is not None))


def backward(
    problem: Problem,
    layer: Layer,
    result: Result,
    above: OutputGradients,
    needs: Needs,
    layout: ProductLayout | None = None,
) -> LayerGradients:
    """Run the backward pass of one layer, in the layout of the forward pass.

    The gradients of the gate sums overwrite the kept gates.
    """
    layout = layout or product_layout_of(problem, Device.probe(layer.x.device))
    lengths = _on_device(layer.lengths, layer.x.device)
    with driver.on(layer.x.device), products_in_tf32(problem):
        chain = backward_loop.run(problem, layout, layer, result, above, lengths, state=needs.state)
        return LayerGradients(
            _input_gradient(problem, layout, layer, chain.dgates) if needs.x else None,
            chain.dh0,
            chain.dc0 if needs.state else None,
            _weight_gradients(problem, layer, result, chain, lengths)
            if needs.weights
            else (None,) * (len(layer.weights) * problem.weights_per_direction),
        )


def _input_sums(layout: ProductLayout, x: Tensor, w_ih: Tensor, bias: Tensor | None, out: Tensor) -> None:
    # In row-major layout the library adds the bias at no cost. In column-major layout the element-wise kernel adds it.
    rows = w_ih.shape[0]
    out = of_input(out, rows)
    if bias is None or layout.column_major:
        deep_products.mm(x, w_ih.t(), out)
    else:
        deep_products.mm(x, w_ih.t(), out, bias[:rows])


def _input_gradient(problem: Problem, layout: ProductLayout, layer: Layer, dgates: Tensor) -> Tensor:
    time, batch, features = layer.x.shape
    total = layer.x.new_empty(time * batch, features)
    # The library's TF32 kernels are faster if both operands are contiguous along the inner dimension of the product.
    transposed = layout.transposed_backward
    matrices = [weights.w_ih.t().contiguous().t() if transposed else weights.w_ih for weights in layer.weights]
    products = [
        (of_input(share.flatten(0, 1), matrix.shape[0]), matrix) for share, matrix in zip(dgates, matrices, strict=True)
    ]
    exact = problem.dtype == torch.float32 and not problem.allow_tf32
    if exact:
        products = in_stretches(products, Device.probe(total.device).multiprocessors, cuts=_THIRDS_OF_G)
    zeros = total if exact else None
    deep_products.mm(*products[0], total, memory=zeros)
    for factors in products[1:]:
        deep_products.addmm(total, *factors, memory=zeros)
    return total.view(time, batch, features)


def _weight_gradients(
    problem: Problem, layer: Layer, result: Result, chain: backward_loop.LoopGradients, lengths: Tensor | None
) -> tuple[Tensor | None, ...]:
    (time, batch, features), directions = layer.x.shape, len(layer.weights)
    x, h0, size = layer.x, layer.h0, problem.hidden_size
    if lengths is not None:
        # The padding may contain any values, and 0 * NaN is NaN.
        steps = torch.arange(time, device=x.device).unsqueeze(1)
        x = torch.where((steps < lengths).unsqueeze(2), x, 0)
        h0 = torch.where((lengths > 0).unsqueeze(1), h0, 0)
    x, outputs, resets = x.reshape(time * batch, features), result.y.unflatten(-1, (directions, -1)), layer.resets
    if resets is not None:
        # The forward direction alone enters a sequence at its first step.
        h0 = torch.cat([torch.where(resets[0].unsqueeze(1), 0, h0[:1]), h0[1:]])
    factors = factors_of(problem, layer)
    h0 = dropped(h0, factors)
    gradients: list[Tensor | None] = []
    wide = gradients_dtype(problem)
    for direction, share in enumerate(chain.dgates):
        history, flat = outputs[:, :, direction], share.flatten(0, 1)
        # Each step's gradient is multiplied by the hidden state before the step; before the first step, that is h0.
        first = backward_loop.first_steps(share, lengths, direction)
        later = flat[batch:] if direction == 0 else flat[:-batch]
        before = history[:-1] if direction == 0 else history[1:]
        if resets is not None:
            # In both directions, a border is between the same steps.
            before = torch.where(resets[1:].unsqueeze(2), 0, before)
        before = dropped(before, None if factors is None else factors[direction])
        w_ih, w_hh = (x.new_empty(problem.gate_rows, width, dtype=wide) for width in (features, h0.shape[2]))
        for run in recurrent_runs(problem.cell):
            rows = run.rows_of(w_hh, size)
            deep_products.mm(run.columns_of(first, size).t(), h0[direction], rows)
            if time > 1:
                deep_products.addmm(rows, run.columns_of(later, size).t(), before.reshape((time - 1) * batch, -1))
        gradients += [deep_products.mm(of_input(flat, problem.gate_rows).t(), x, w_ih), w_hh]
        if problem.bias:
            # Summing over all rows at once would need a larger workspace than the gradients themselves.
            own = share.sum(1, dtype=state_dtype(share.dtype)).sum(0).to(wide)
            gradients += bias_gradients(problem.cell, own)
        if chain.dprojected is not None:
            unprojected = result.kept[2][direction].flatten(0, 1)
            gradients.append(deep_products.mm(chain.dprojected[direction].flatten(0, 1).t(), unprojected))
        if chain.dparameters is not None:
            gradients += chain.dparameters[direction].sum(0).to(problem.dtype).unbind(0)
    return tuple(gradients)


def _on_device(lengths: Tensor | None, device: torch.device) -> Tensor | None:
    return None if lengths is None else lengths.to(device, torch.int64, non_blocking=True).contiguous()
