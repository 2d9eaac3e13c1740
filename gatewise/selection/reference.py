"""The reference kernel: it runs every problem, and autograd can differentiate its passes again."""

from gatewise.kernels.eager import differentiable, eager, is_pointwise, refusal_of

REFERENCE = eager

__all__ = ["REFERENCE", "differentiable", "is_pointwise", "refusal_of"]
