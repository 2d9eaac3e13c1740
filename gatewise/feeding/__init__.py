"""A decoder with input feeding: LSTM layers and attention in one forward and one backward pass.

With input feeding each step reads the attentional output of the previous step, so that the steps of a layer cannot be
computed in one call. `Plain` is the reference implementation of the element-wise operations between a step's matrix
products; on CUDA devices each of them is one CUDA kernel of this package.
"""

from gatewise.feeding.call import LayerWeights, Weights
from gatewise.feeding.decoder import State, attended_outputs
from gatewise.feeding.memory import Sizes, kept, workspace_bytes

__all__ = ["LayerWeights", "Sizes", "State", "Weights", "attended_outputs", "kept", "workspace_bytes"]
