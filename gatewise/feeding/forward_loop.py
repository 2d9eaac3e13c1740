"""The forward pass of a decoder with input feeding, step by step.

The embeddings' contribution to the first layer's gates does not depend on the previous step and is one product for all
steps. A step then has, for L layers, L products and L element-wise operations; one product with the top hidden state,
which computes the query and the hidden state's contribution to the attentional output; attention; and the element-wise
operation that adds both contributions. The operands of a product are adjacent in memory because the operations that
compute them write them there.
"""

from __future__ import annotations

from gatewise import attention
from gatewise.feeding.attention_part import AttentionPart, Places
from gatewise.feeding.call import Inputs, Kept, Options
from gatewise.feeding.elementwise import Elementwise, Plain, elementwise_dtype
from gatewise.feeding.products import multiply
from gatewise.feeding.separate_attention import SeparateAttention


def run(options: Options, inputs: Inputs, parts: Elementwise) -> Kept:
    """Run the steps.

    Args:
        options: The options of the call.
        inputs: The inputs of the call.
        parts: The element-wise operations, for these sizes, dtype and device.

    Returns:
        The attentional outputs, and the tensors that the backward pass needs.
    """
    time, batch, units, top = inputs.time, inputs.batch, inputs.units, len(inputs.layers) - 1
    new, query_size = inputs.embedded.new_empty, inputs.query_size
    operands = tuple(new(time + 1, batch, 2 * units, dtype=options.operand) for _ in inputs.layers)
    fed = operands[0][1:, :, :units]
    outputs = new(time, batch, units) if options.halves else fed
    chunk, keep = options.chunk_steps(time), options.needs_grad
    cells = tuple(new(time, batch, units) for _ in inputs.layers) if keep else ()
    all_gates = keep and not options.recompute
    gates = (
        new(chunk, batch, 4 * units),
        *(new(time if all_gates else 1, batch, 4 * units) for _ in inputs.layers[1:]),
    )
    joined = new(time, batch, 2 * query_size + units if query_size else 2 * units)
    made, hidden = joined[..., : query_size + units], operands[top][1:, :, units:]
    # A context is not needed after its step: all steps write it to the same memory.
    contexts = new(1, batch, units).expand(time, -1, -1)
    steps = attention.new_steps(
        time,
        inputs.keys,
        inputs.values,
        inputs.lengths,
        score=options.score,
        **inputs.score_parameters(),
        queries=made[..., :query_size] if query_size else hidden,
        contexts=contexts,
        needs_grad=options.needs_grad,
        kernel=options.attention_kernel,
    )
    columns = query_size, query_size + units
    places = Places(joined[..., slice(*columns)], outputs, fed, joined[..., columns[1] :])
    attention_part = attention_part_for(options, inputs, steps, places, parts)
    product = new(batch, 4 * units)
    cell = inputs.cell.to(elementwise_dtype(inputs.cell.dtype), copy=True)
    operands[0][0, :, :units] = inputs.attended
    for operand, state in zip(operands, inputs.hidden, strict=True):
        operand[0, :, units:] = state
    weights = [layer.weight.t() for layer in inputs.layers]
    joining = inputs.joining.to(options.operand).t()
    # All views are created at once: creating them step by step would take as long as the launches.
    read = [each.unbind() for each in operands]
    written = [each[1:, :, units:].unbind() for each in operands]
    above = [each[:, :, :units].unbind() for each in operands[1:]]
    of_gates, of_cells, of_layer = [each.unbind() for each in gates], [each.unbind() for each in cells], cell.unbind()
    of_hidden, of_made = hidden.unbind(), made.unbind()
    for step in range(time):
        if step % chunk == 0:
            inputs.sums_of_embeddings(slice(step, min(step + chunk, time)), out=gates[0])
        for layer in range(top + 1):
            multiply(read[layer][step], weights[layer], product)
            parts.cell(
                of_gates[layer][step % len(of_gates[layer])],
                product,
                inputs.layers[layer].bias if layer else None,
                of_layer[layer],
                written[layer][step],
                kept=of_cells[layer][step] if keep else None,
                above=above[layer][step] if layer < top else None,
                dropout=inputs.between_at(layer, step),
            )
        multiply(of_hidden[step], joining, of_made[step])
        attention_part.forward(step)
    return Kept(operands, list(gates) if all_gates else [], cells, outputs, joined, attention_part, steps)


def attention_part_for(
    options: Options, inputs: Inputs, steps: attention.Steps, places: Places, parts: Elementwise
) -> AttentionPart:
    """Return the implementation of the attention part: one launch per step if that is possible."""
    if not isinstance(parts, Plain):
        from gatewise.feeding import fused_attention

        if fused_attention.possible(inputs, steps, halves=options.halves):
            return fused_attention.FusedAttention(inputs, steps, places, halves=options.halves)
    return SeparateAttention(inputs, steps, places, parts)
