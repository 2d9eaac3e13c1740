"""The reference kernel: it runs every problem, and autograd can differentiate its passes again."""

from gatewise.kernels.eager import differentiable, differentiable_steps, eager, has_adjoint, refusal_of

REFERENCE = eager

__all__ = ["REFERENCE", "differentiable", "differentiable_steps", "has_adjoint", "refusal_of"]
