"""Attention whose feature maps need not be kept: additive, dot and general scores over a masked source.

    context = attend(query, keys, values, lengths, score="additive", v=v)               # [T, B, H] -> [T, B, V]
    context, weights = attend(query_of_one_step, keys, values, lengths, v=v, need_weights=True)   # [B, H] -> [B, V]

    context, weights, saved = forward(query, keys, values, lengths, v=v)                # explicit passes
    gradients = backward(saved, dcontext)
    steps = new_steps(T, keys, values, lengths, v=v)                          # a decoder that runs step by step
    context = attend_step(steps, t)                                                     # of steps.queries[t]
    dquery = query_gradient_step(steps, t, dcontext)
    gradients = source_gradients(steps, dcontexts)                                      # once, after all steps

`gatewise.nn.Attention` is the layer. Of keys, the projection of the encoder's outputs is computed once a sequence, by
the caller (or by the layer's `keys`). The additive score, v . tanh(query + key), has a feature map [T, S, B, H] between
small inputs and small outputs; kernels differ in what they do with it:

| kernel | feature map |
|---|---|
| `fused` | Triton programs, in registers alone; float32, float16, bfloat16 |
| `reference` | plain torch, kept from forward to backward |
| `recompute` | plain torch, a stretch of decoder steps at a time, replayed in backward |

A kernel is chosen for each call as for an LSTM: a frozen `Problem`, criteria, stated work, a printable `Decision`.
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
