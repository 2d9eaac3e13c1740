"""Additive, dot and general attention over a masked source, with kernels that need not store the feature map.

    context = attend(query, keys, values, lengths, score="additive", v=v)               # [T, B, H] -> [T, B, V]
    context, weights = attend(query_of_one_step, keys, values, lengths, v=v, need_weights=True)   # [B, H] -> [B, V]

    context, weights, saved = forward(query, keys, values, lengths, v=v)                # explicit passes
    gradients = backward(saved, dcontext)
    steps = new_steps(T, keys, values, lengths, v=v)                          # for a decoder that runs step by step
    context = attend_step(steps, t)                                                     # reads steps.queries[t]
    dquery = query_gradient_step(steps, t, dcontext)
    gradients = source_gradients(steps, dcontexts)                                      # once, after all steps

`gatewise.nn.Attention` is the layer. The keys are a projection of the encoder's outputs, which the caller (or the
layer's method `keys`) computes once per sequence. The additive score, v . tanh(query + key), has a feature map
[T, S, B, H], which is much larger than its inputs and outputs. The kernels differ in how they handle it:

| kernel | feature map |
|---|---|
| `fused` | Triton kernels hold it in registers only; float32, float16, bfloat16 |
| `reference` | PyTorch operators store it from the forward to the backward pass |
| `recompute` | PyTorch operators compute it for a chunk of decoder steps at a time, and again in the backward pass |

A kernel is chosen for each call in the same way as for an LSTM: from a frozen `Problem`, the kernels' criteria and
statements of work, as a printable `Decision`.
"""

from gatewise.attention.attention import attend, backward, explain, forward, new_sums
from gatewise.attention.call import Gradients, Inputs, Saved
from gatewise.attention.choice import kernel_names
from gatewise.attention.problem import Problem, Score
from gatewise.attention.steps import (
    Steps,
    attend_step,
    new_gathering,
    new_steps,
    query_gradient_step,
    source_gradients,
)

__all__ = [
    "Gradients",
    "Inputs",
    "Problem",
    "Saved",
    "Score",
    "Steps",
    "attend",
    "attend_step",
    "backward",
    "explain",
    "forward",
    "kernel_names",
    "new_gathering",
    "new_steps",
    "new_sums",
    "query_gradient_step",
    "source_gradients",
]
