"""The kernel `eager`: PyTorch operators, one time step after another."""

from gatewise.derivation.trace import refusal_of
from gatewise.kernels.eager.blocks import has_adjoint
from gatewise.kernels.eager.kernel import differentiable, differentiable_steps, eager

__all__ = ["differentiable", "differentiable_steps", "eager", "has_adjoint", "refusal_of"]
