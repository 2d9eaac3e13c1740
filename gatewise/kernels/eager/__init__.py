"""The kernel `eager`: PyTorch operators, one time step after another."""

from gatewise.derivation.trace import is_pointwise, refusal_of
from gatewise.kernels.eager.kernel import differentiable, differentiable_steps, eager

__all__ = ["differentiable", "differentiable_steps", "eager", "is_pointwise", "refusal_of"]
