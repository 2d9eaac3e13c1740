"""The backward pass of a decoder with input feeding.

Only the work that depends on the following step runs step by step: the backward pass of the attentional output, the
gradient of the attention query, one product back to the top hidden state, and for each layer the backward pass of its
cell and one product back to its input. The gradients of weights, embeddings, keys and values are products over all
steps, computed from kept operands.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gatewise import attention
from gatewise.feeding.call import Gradients, Inputs, Kept, Options, Weights
from gatewise.feeding.elementwise import Elementwise, Planes, elementwise_dtype, operands_in
from gatewise.feeding.products import multiply, multiply_planes
from gatewise.feeding.weight_sums import WeightSums

_GATES = 4


def run(options: Options, inputs: Inputs, kept: Kept, dy: Tensor, parts: Elementwise) -> Gradients:
    """Run the steps backward, consuming the kept tensors.

    Args:
        options: The options of the forward pass.
        inputs: The inputs of the forward pass.
        kept: The result of the forward pass.
        dy: The gradient of the attentional outputs [T, B, H].
        parts: The element-wise operations.
    """
    time, batch, units, top = inputs.time, inputs.batch, inputs.units, len(inputs.layers) - 1
    query_size, new = inputs.query_size, inputs.embedded.new_empty
    dsums = kept.joined[..., query_size : query_size + units]
    dqueries = kept.joined[..., query_size + units :]
    # A single product computes the gradient of the hidden state from the gradients of the query and of the sum.
    behind = kept.joined[..., query_size:] if query_size else dsums
    joining = torch.cat([inputs.joining[query_size:], inputs.joining[:query_size]]) if query_size else inputs.joining
    count = _planes(inputs, _GATES * units)
    # For TF32, splitting a product of this size does not make it faster.
    back_count = _planes(inputs, joining.shape[0]) if options.dtype.itemsize == 2 else 1
    through = tuple(new(count, batch, 2 * units) for _ in inputs.layers)
    weights = [layer.weight.unflatten(0, (count, -1)) for layer in inputs.layers]
    scales = new(len(inputs.layers), time, batch) if options.halves else None
    back = new(back_count, batch, units)
    behind = behind.unflatten(2, (back_count, -1)).transpose(1, 2)
    joining = joining.unflatten(0, (back_count, -1))
    dcell = torch.zeros_like(inputs.cell, dtype=elementwise_dtype(inputs.cell.dtype))
    chunk = options.chunk_steps(time)
    memory = tuple(new(chunk, batch, 4 * units) for _ in inputs.layers) if options.recompute else ()
    weight_sums = WeightSums(inputs, kept, whole=chunk >= time)

    # All views are created at once: creating them step by step would take as long as the launches.
    sides = [each.split(units, 2) for each in through]
    of_rows = None if scales is None else [each.unbind() for each in scales]
    of_cells = [each.unbind() for each in kept.cells]
    of_dy, of_behind, of_dcell = dy.unbind(), behind.unbind(), dcell.unbind()

    def gradient(layer: int, step: int, side: int) -> Planes | None:
        """Return the gradient that a layer's product computed at a step, or None after the last step."""
        if step == time:
            return None
        return Planes(sides[layer][side], None if of_rows is None else of_rows[layer][step])

    from_below, beside = 0, 1
    # The steps whose gates are in memory: none yet.
    steps, gates, of_gates, factors = slice(time, time), (), [], []
    for step in reversed(range(time)):
        if step < steps.start:
            steps = slice(step // chunk * chunk, step + 1)
            gates = _gates(options, inputs, kept, steps, parts, memory)
            of_gates = [each.unbind() for each in gates]
            factors = [
                (each if scales is None else operands_in(each)).unflatten(2, (count, -1)).transpose(1, 2).unbind()
                for each in gates
            ]
        kept.attention_part.backward(step, of_dy[step], gradient(0, step + 1, from_below))
        if back_count == 1:
            torch.mm(of_behind[step][0], joining[0], out=back[0])
        else:
            torch.bmm(of_behind[step], joining, out=back)
        above = Planes(back)
        for layer in reversed(range(top + 1)):
            parts.cell_gradient(
                of_gates[layer][step - steps.start],
                of_cells[layer][step],
                of_cells[layer][step - 1] if step else inputs.cell[layer],
                of_dcell[layer],
                above=above,
                beside=Planes(dqueries[step : step + 1]) if layer == top and not query_size else None,
                later=gradient(layer, step + 1, beside),
                dropout=inputs.between_at(layer, step),
                scale=None if of_rows is None else of_rows[layer][step],
            )
            multiply_planes(factors[layer][step - steps.start], weights[layer], through[layer])
            above = gradient(layer, step, from_below)
        if step == steps.start:
            weight_sums.add(steps, gates, None if scales is None else scales[:, steps])
    # The source gradients need as much memory as keys and values; memory that is no longer needed is released first.
    del gates, of_gates, factors, memory
    kept.gates.clear()
    of_source = kept.attention_part.source_gradients(dsums)
    assert of_source.keys is not None
    assert of_source.values is not None
    return Gradients(
        embedded=weight_sums.embedded,
        hidden=torch.stack([_sum(gradient(layer, 0, beside)) for layer in range(top + 1)]),
        cell=dcell.to(inputs.cell.dtype),
        attended=_sum(gradient(0, 0, from_below)),
        keys=of_source.keys,
        source=of_source.values @ inputs.of_context,
        weights=_weights_gradient(inputs, kept, of_source, of_source.values, weight_sums),
    )


def _planes(inputs: Inputs, depth: int) -> int:
    """Return the number of products over which the sum of a product of this depth is split."""
    # On a GPU, a single product would have too few tiles for all multiprocessors.
    return _GATES if inputs.embedded.is_cuda and depth % _GATES == 0 else 1


def _weights_gradient(
    inputs: Inputs, kept: Kept, of_source: attention.Gradients, of_values: Tensor, weight_sums: WeightSums
) -> Weights:
    weights, query_size, units = inputs.weights, inputs.query_size, inputs.units
    hidden = kept.operands[-1][1:, :, units:].to(kept.joined.dtype).flatten(0, 1)
    joined, attended, query = kept.joined.flatten(0, 1), torch.empty_like(weights.attended), None
    multiply(joined[:, query_size : query_size + units].t(), hidden, attended[:, :units])
    multiply(of_values.flatten(0, 1).t(), inputs.source.flatten(0, 1), attended[:, units:])
    if weights.query is not None:
        query = torch.empty_like(weights.query)
        multiply(joined[:, query_size + units :].t(), hidden, query)
    of_score = (
        None if gradient is None or own is None else gradient.to(own.dtype)
        for gradient, own in zip(
            (of_source.v, of_source.norm_weight, of_source.norm_bias),
            (weights.v, weights.norm_weight, weights.norm_bias),
            strict=True,
        )
    )
    return Weights(weight_sums.layers(), query, attended, *of_score)


def _gates(
    options: Options, inputs: Inputs, kept: Kept, steps: slice, parts: Elementwise, memory: tuple[Tensor, ...]
) -> Sequence[Tensor]:
    """Return the activated gates of each layer at some steps [t, B, 4H], kept or recomputed."""
    if not options.recompute:
        return kept.gates
    found = tuple(each[: steps.stop - steps.start] for each in memory)
    for layer, gates in enumerate(found):
        rows, operand = gates.flatten(0, 1), kept.operands[layer][steps].flatten(0, 1)
        weight, bias = inputs.layers[layer]
        if layer == 0:
            inputs.sums_of_embeddings(steps, out=gates)
        else:
            rows.copy_(bias.expand_as(rows))
        multiply(operand, weight.t(), rows, add=True)
        parts.activate(rows)
    return found


def _sum(found: Planes | None) -> Tensor:
    assert found is not None
    total = found.planes.sum(0)
    return total if found.scale is None else total * found.scale.unsqueeze(1)
