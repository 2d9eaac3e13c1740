"""What products with few rows cost on a GPU beyond their arithmetic, where a library makes them."""

from __future__ import annotations

import torch

from gatewise.contract.problem import Problem

_FEW_TOKENS = 128


def waiting_seconds(problem: Problem) -> float:
    """Return the seconds by which the products of one step of a layer exceed their arithmetic and launches.

    Fitted to PyTorch's products (cuBLAS) on an H200: few rows leave most of the GPU idle, and rows that do not begin at
    multiples of 16 bytes keep to slower kernels.
    """
    width, rows = problem.hidden_size / 1024, problem.batch
    if multiplies_exactly(problem) and rows > 1:
        microseconds = 14 * width + 18 * width**2 + 0.15 * rows
    elif problem.element_bytes == 4 and rows > 1:
        microseconds = 15 + 8 * width + 8 * width**2 + 0.1 * rows
    else:
        microseconds = 4 + 4 * width + 4 * width**2 + 0.03 * rows
    if problem.hidden_size * problem.element_bytes % 16:
        microseconds *= 3
    return microseconds * (1.0 if problem.needs_grad else 0.35) * 1e-6


def multiplies_exactly(problem: Problem) -> bool:
    """Whether products are exact to float32 or float64."""
    return problem.dtype == torch.float64 or (problem.dtype == torch.float32 and not problem.allow_tf32)


def slowdown(problem: Problem) -> float:
    """Return how many times as long as at the full rate the products over all steps take, where tokens are few."""
    return 5 / 3 if problem.batch > 1 and problem.time * problem.batch < _FEW_TOKENS else 1.0
