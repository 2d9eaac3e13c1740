"""The reference kernel: it runs every problem, and autograd can differentiate its passes again."""

from gatewise.kernels.eager import differentiable, differentiable_steps, eager, is_pointwise, refusal_of

REFERENCE = eager

__all__ = ["REFERENCE", "differentiable", "differentiable_steps", "is_pointwise", "refusal_of"]
