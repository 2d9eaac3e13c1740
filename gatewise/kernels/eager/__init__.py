"""The kernel `eager`: a cell's own operators, one step after another."""

from gatewise.kernels.eager.kernel import differentiable, eager

__all__ = ["differentiable", "eager"]
