"""The Triton kernels, by what they compute.

| file | Triton kernels |
|---|---|
| `forward.py` | scores and their log-sum-exp, which training keeps (1/H of the feature map); the context |
| `softmax_gradient.py` | gradients of scores and values |
| `input_gradient.py` | gradients of queries, keys and parameters |
| `step.py` | a single decoder step, forward and backward, each in one launch |
| `pieces.py` | functions shared by several kernels |
"""

from gatewise.attention.fused.programs.forward import context_program, score_program
from gatewise.attention.fused.programs.input_gradient import input_gradient_program, parameter_gradient_program
from gatewise.attention.fused.programs.softmax_gradient import (
    score_gradient_program,
    short_gradient_program,
    value_gradient_program,
)
from gatewise.attention.fused.programs.step import step_gradient_program, step_program

__all__ = [
    "context_program",
    "input_gradient_program",
    "parameter_gradient_program",
    "score_gradient_program",
    "score_program",
    "short_gradient_program",
    "step_gradient_program",
    "step_program",
    "value_gradient_program",
]
