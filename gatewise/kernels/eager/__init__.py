"""The kernel `eager`: PyTorch operators, one time step after another."""

from gatewise.derivation.trace import refusal_of
from gatewise.kernels.eager.blocks import has_adjoint
from gatewise.kernels.eager.kernel import differentiable, differentiable_steps, eager
from gatewise.kernels.eager.one_step import Product, one_step
from gatewise.kernels.eager.unroll import state_dtype

__all__ = [
    "Product",
    "differentiable",
    "differentiable_steps",
    "eager",
    "has_adjoint",
    "one_step",
    "refusal_of",
    "state_dtype",
]
