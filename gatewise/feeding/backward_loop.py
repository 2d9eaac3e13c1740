"""The backward pass of a decoder with input feeding: only what depends on the step after it runs step by step.

A step is the element-wise adjoint of the attended output, the gradient of attention's query, one product back to the
top hidden state, and for each layer the adjoint of its cell and one product back to what it read. Gradients of weights,
embeddings, keys and values are products over all steps, from operands that were kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise import attention
from gatewise.feeding.call import Gradients, Inputs, Kept, Options, Weights, at, wide
from gatewise.feeding.elementwise import Elementwise
from gatewise.feeding.products import multiply
from gatewise.feeding.weight_sums import WeightSums

_GATES = 4


def run(options: Options, inputs: Inputs, kept: Kept, dy: Tensor, parts: Elementwise) -> Gradients:
    """Run the steps backward; what was kept is used up.

    Args:
        options: As in the forward pass.
        inputs: As in the forward pass.
        kept: What that returned.
        dy: Gradient of the attended outputs [T, B, H].
        parts: The element-wise parts.
    """
    time, batch, units, top = inputs.time, inputs.batch, inputs.units, len(inputs.layers) - 1
    query_size, new = inputs.query_size, inputs.embedded.new_empty
    dsums = kept.joined[..., query_size : query_size + units]
    dqueries = kept.joined[..., query_size + units :]
    # Back from the query and the sum to the hidden state: one product, where the query came from one.
    behind = kept.joined[..., query_size:] if query_size else dsums
    joining = torch.cat([inputs.joining[query_size:], inputs.joining[:query_size]]) if query_size else inputs.joining
    count, back_count = _planes(inputs, _GATES * units), _planes(inputs, joining.shape[0])
    through = tuple(new(count, batch, 2 * units) for _ in inputs.layers)
    weights = [inputs.recurrent(layer).unflatten(0, (count, -1)) for layer in range(top + 1)]
    back = new(back_count, batch, units)
    behind = behind.unflatten(2, (back_count, -1)).transpose(1, 2)
    joining = joining.unflatten(0, (back_count, -1))
    dcell = torch.zeros_like(inputs.cell, dtype=wide(inputs.cell.dtype))
    fed, attended = through[0][..., :units], kept.operands[0][1:, :, :units]
    stretch = options.stretch(time)
    memory = tuple(new(stretch, batch, 4 * units) for _ in inputs.layers) if options.recompute else ()
    weight_sums = WeightSums(inputs, kept, whole=stretch >= time)
    for step in reversed(range(time)):
        if step == time - 1 or (step + 1) % stretch == 0:
            steps = slice(step // stretch * stretch, step + 1)
            gates = _gates(options, inputs, kept, steps, parts, memory)
        last = step == time - 1
        parts.attended_gradient(dsums[step], attended[step], dy[step], None if last else fed, at(inputs.dropout, step))
        attention.query_gradient_step(kept.steps, step, dsums[step], out=dqueries[step])
        torch.bmm(behind[step], joining, out=back)
        above = back
        for layer in reversed(range(top + 1)):
            dgates = gates[layer][step - steps.start]
            parts.cell_gradient(
                dgates,
                kept.cells[layer][step],
                kept.cells[layer][step - 1] if step else inputs.cell[layer],
                dcell[layer],
                above=above,
                beside=dqueries[step : step + 1] if layer == top and not query_size else None,
                later=None if last else through[layer][..., units:],
                dropout=inputs.between_at(layer, step),
            )
            torch.bmm(dgates.unflatten(1, (count, -1)).transpose(0, 1), weights[layer], out=through[layer])
            above = through[layer][..., :units]
        if step == steps.start:
            weight_sums.add(steps, gates)
    of_source = attention.source_gradients(kept.steps, dsums)
    hidden = kept.operands[top][1:, :, units:].flatten(0, 1)
    return Gradients(
        embedded=weight_sums.embedded,
        hidden=torch.stack([_sum(planes[..., units:]) for planes in through]),
        cell=dcell.to(inputs.cell.dtype),
        attended=_sum(fed),
        keys=of_source.keys,
        source=of_source.values @ inputs.of_context,
        weights=_weights_gradient(inputs, kept, hidden, of_source, weight_sums),
    )


def _planes(inputs: Inputs, depth: int) -> int:
    """Return into how many products, side by side, one of so many terms is cut."""
    # On a GPU, because as one it would be too few tiles for the multiprocessors.
    return _GATES if inputs.embedded.is_cuda and depth % _GATES == 0 else 1


def _weights_gradient(
    inputs: Inputs, kept: Kept, hidden: Tensor, of_source: attention.Gradients, weight_sums: WeightSums
) -> Weights:
    weights, query_size, units = inputs.weights, inputs.query_size, inputs.units
    joined, attended, query = kept.joined.flatten(0, 1), torch.empty_like(weights.attended), None
    multiply(joined[:, query_size : query_size + units].t(), hidden, attended[:, :units])
    multiply(of_source.values.flatten(0, 1).t(), inputs.source.flatten(0, 1), attended[:, units:])
    if weights.query is not None:
        query = torch.empty_like(weights.query)
        multiply(joined[:, query_size + units :].t(), hidden, query)
    of_score = (
        None if gradient is None else gradient.to(own.dtype)
        for gradient, own in zip(
            (of_source.v, of_source.norm_weight, of_source.norm_bias),
            (weights.v, weights.norm_weight, weights.norm_bias),
            strict=True,
        )
    )
    return Weights(weight_sums.layers(), query, attended, *of_score)


def _gates(
    options: Options, inputs: Inputs, kept: Kept, steps: slice, parts: Elementwise, memory: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Return the activated gates of each layer at some steps [t, B, 4H]: those kept, or computed again."""
    if not options.recompute:
        return kept.gates
    found = tuple(each[: steps.stop - steps.start] for each in memory)
    for layer, gates in enumerate(found):
        rows, operand = gates.flatten(0, 1), kept.operands[layer][steps].flatten(0, 1)
        start = inputs.sums_of_embeddings(steps, out=gates) if layer == 0 else inputs.layers[layer].bias
        torch.addmm(start, operand, inputs.recurrent(layer).t(), out=rows)
        parts.activate(rows)
    return found


def _sum(planes: Tensor) -> Tensor:
    return planes.sum(0) if len(planes) > 1 else planes[0].clone(memory_format=torch.contiguous_format)
