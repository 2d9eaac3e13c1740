"""Tools for testing LSTM kernels: cases, a float64 oracle, error budgets, and a check that combines them.

The package is installed with gatewise, so that you can hold a kernel of your own to the same standard:

    from gatewise import testing

    for case in testing.CASES:
        testing.check_kernel(my_kernel, case.problem(dtype=torch.float32), "cuda")
"""

from gatewise.testing.budgets import budgets, named, relative_error
from gatewise.testing.cases import CASES, Case, lengths_of, make_gradients, make_inputs
from gatewise.testing.check import Disagreement, Measured, check_kernel, run_kernel, why_not
from gatewise.testing.oracle import oracle, reference

__all__ = [
    "CASES",
    "Case",
    "Disagreement",
    "Measured",
    "budgets",
    "check_kernel",
    "lengths_of",
    "make_gradients",
    "make_inputs",
    "named",
    "oracle",
    "reference",
    "relative_error",
    "run_kernel",
    "why_not",
]
