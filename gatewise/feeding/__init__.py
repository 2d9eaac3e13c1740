"""The loop of a decoder with input feeding: LSTM layers and attention in one forward and one backward pass.

Each step reads what the step before attended to, so that no call can take all steps of a layer at once. `Plain` is the
reference of what stands between a step's products; on CUDA devices it is a launch of our own for each part.
"""

from gatewise.feeding.call import LayerWeights, Weights
from gatewise.feeding.decoder import State, attended_outputs
from gatewise.feeding.memory import Sizes, kept, workspace_bytes

__all__ = ["LayerWeights", "Sizes", "State", "Weights", "attended_outputs", "kept", "workspace_bytes"]
