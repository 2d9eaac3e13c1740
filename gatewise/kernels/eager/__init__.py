"""The kernel `eager`: PyTorch operators, one time step after another."""

from gatewise.derivation.trace import is_pointwise, refusal_of
from gatewise.kernels.eager.kernel import differentiable, eager

__all__ = ["differentiable", "eager", "is_pointwise", "refusal_of"]
