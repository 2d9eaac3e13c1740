"""The choice of the kernel that computes a problem."""

from gatewise.selection.admit import kernel_named, kernel_names
from gatewise.selection.choose import choose, decide
from gatewise.selection.explain import explain
from gatewise.selection.predict import predicted
from gatewise.selection.preference import AUTO, FREE, Preference, check_name, preference, use_kernel
from gatewise.selection.reference import REFERENCE, differentiable, differentiable_steps, has_adjoint, refusal_of

__all__ = [
    "AUTO",
    "FREE",
    "REFERENCE",
    "Preference",
    "check_name",
    "choose",
    "decide",
    "differentiable",
    "differentiable_steps",
    "explain",
    "has_adjoint",
    "kernel_named",
    "kernel_names",
    "predicted",
    "preference",
    "refusal_of",
    "use_kernel",
]
