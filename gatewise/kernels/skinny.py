"""What products cost on a GPU beyond their arithmetic at the stated rate, where a library makes them.

Few rows leave most of the GPU idle, and rows that do not begin at multiples of 16 bytes keep to slower kernels. Fitted
to PyTorch's native loop under CUDA graphs on an H200 (PyTorch 2.11, cuBLAS of CUDA 13.0): the rows of `aten` in
tests/selection/measured.jsonl.
"""

from __future__ import annotations

import torch

from gatewise.contract.problem import Problem

_FEW_TOKENS = 128
_ALONE = 0.4  # what a single step takes of it in training: it sums no gradients of weights
_MISALIGNED = 3.0
_EXACT = 1.12  # exact products reach some 47 of the 53 TFLOP/s stated for an H200; 1.10 to 1.15 fit the rows alike


def waiting_seconds(problem: Problem) -> float:
    """Return the seconds by which one step of PyTorch's loop exceeds its arithmetic and launches."""
    if not problem.needs_grad:
        return forward_seconds(problem)
    width, rows = problem.hidden_size / 1024, problem.batch
    if multiplies_exactly(problem) and rows > 1:
        microseconds = 20 + 30 * width + 0.15 * rows
    elif problem.element_bytes == 4 and rows > 1:
        microseconds = 12 + 20 * width + 0.28 * rows
    else:
        microseconds = 10 + 16 * width + 0.09 * rows
    return microseconds * _penalty(problem) * (_ALONE if problem.time == 1 else 1.0) * 1e-6


def forward_seconds(problem: Problem) -> float:
    """Return the seconds by which the forward product of a step exceeds its arithmetic and launch."""
    width, rows = problem.hidden_size / 1024, problem.batch
    if multiplies_exactly(problem) and rows > 1:
        microseconds = 7 + 10 * width + 0.05 * rows
    elif problem.element_bytes == 4 and rows > 1:
        microseconds = 3 + 10 * width + 0.02 * rows
    else:
        microseconds = 1.4 + 1.4 * width + 1.4 * width**2 + 0.01 * rows
    return microseconds * _penalty(problem) * 1e-6


def _penalty(problem: Problem) -> float:
    return _MISALIGNED if problem.hidden_size * problem.element_bytes % 16 else 1.0


def multiplies_exactly(problem: Problem) -> bool:
    """Whether products are exact to float32 or float64."""
    return problem.dtype == torch.float64 or (problem.dtype == torch.float32 and not problem.allow_tf32)


def exact_slowdown(problem: Problem) -> float:
    """Return how many times as long as at the stated rate PyTorch's products take: exact ones fall short of it."""
    return _EXACT if multiplies_exactly(problem) else 1.0


def slowdown(problem: Problem) -> float:
    """Return how many times as long as at the full rate the products over all steps take, where tokens are few."""
    return 5 / 3 if problem.batch > 1 and problem.time * problem.batch < _FEW_TOKENS else 1.0
