"""The reference kernel: it runs every problem, and autograd can differentiate its passes again."""

from gatewise.kernels.eager import differentiable, eager, refusal_of

REFERENCE = eager

__all__ = ["REFERENCE", "differentiable", "refusal_of"]
