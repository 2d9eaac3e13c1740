"""A decoder with input feeding: LSTM layers and attention in one forward and one backward pass.

With input feeding each step reads the attentional output of the previous step, so that the steps of a layer cannot be
computed in one call. A kernel is chosen for each call in the same way as for an LSTM: from a frozen `Problem`, the
kernels' criteria and statements of work, as a printable `Decision`. The matrix products of both kernels are PyTorch's:

| kernel | operations between a step's products |
|---|---|
| `fused` | one CUDA kernel of this package for each; one for all of the attention if that is possible |
| `eager` | PyTorch operators |
"""

from gatewise.feeding.call import LayerWeights, Weights
from gatewise.feeding.choice import decide, kept, kernel_names
from gatewise.feeding.decoder import State, attended_outputs
from gatewise.feeding.memory import workspace_bytes
from gatewise.feeding.problem import Problem

__all__ = [
    "LayerWeights",
    "Problem",
    "State",
    "Weights",
    "attended_outputs",
    "decide",
    "kept",
    "kernel_names",
    "workspace_bytes",
]
