"""How long cuDNN's time steps take beyond what arithmetic and launches explain: fitted, since no rule derives it.

Fitted to the rows of `cudnn` in tests/selection/measured.jsonl, times under CUDA graphs on one H200 with cuDNN 9.19:
nn.LSTM's in the record of `gatewise bench lstm` at commit 191f4af, and sizes around those that the persistent
algorithms take. Most of them are met within 10 %, the worst within 40 %. All times are microseconds of one step of one
layer and direction. All rows are of LSTMs: a step of a GRU is taken to wait as long, since no row says otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gatewise.contract.problem import Problem
from gatewise.kernels.cudnn.criteria import BACKWARD_SMALL, FORWARD_SMALL

_FEW_ROWS, _NARROW = 16, 256
_CACHE_BYTES = 50e6  # of the second-level cache, beyond which the sums of all steps come from memory

BESIDE = 0.66
"""Of the launches of several layers or directions, how many follow each other: the rest run beside them."""


class _Fit(NamedTuple):
    """A sum of terms: one constant, two by the width (H / 1024) and its square, one by the rows of the batch."""

    constant: float
    width: float
    square: float
    row: float

    def at(self, problem: Problem) -> float:
        """Return its value."""
        width = problem.hidden_size / 1024
        return self.constant + self.width * width + self.square * width**2 + self.row * problem.batch


class _Misaligned(NamedTuple):
    """By the megabyte of weights where rows do not begin at multiples of 16 bytes: a constant, and one by the rows."""

    constant: float
    row: float

    def at(self, problem: Problem) -> float:
        """Return its value."""
        if problem.hidden_size * problem.element_bytes % 16 == 0:
            return 0.0
        megabytes = problem.gate_rows * problem.state_size * problem.element_bytes / 1e6
        return (self.constant + self.row * problem.batch) * megabytes


class _Standard(NamedTuple):
    """How much longer than launches and arithmetic the skinny products of a step take.

    Attributes:
        training: Forward and backward together.
        inference: Forward alone.
        together: Of it, what remains for each of several layers and directions, which run beside each other.
        training_misaligned: What is added for rows that begin anywhere, forward and backward together.
        inference_misaligned: The same, forward alone.
        training_of_few: Forward and backward of few rows together, where they are multiplied otherwise.
        inference_of_few: The same, forward alone.
        narrow: Of `together`, what remains up to 256 hidden units.
        alone: What of it a call of a single step takes.
    """

    training: _Fit
    inference: _Fit
    together: float
    training_misaligned: _Misaligned
    inference_misaligned: _Misaligned
    training_of_few: _Fit | None = None
    inference_of_few: _Fit | None = None
    narrow: float = 1.0
    alone: float = 1.0

    def fit(self, problem: Problem) -> _Fit:
        """Return that of a problem's direction and rows."""
        few = problem.batch <= _FEW_ROWS
        if problem.needs_grad:
            return self.training_of_few if few and self.training_of_few else self.training
        return self.inference_of_few if few and self.inference_of_few else self.inference


_SIXTEEN_BITS = _Standard(
    _Fit(0, 2.6, 1.8, 0.022), _Fit(0, 0, 1.4, 0.0074), 0.5, _Misaligned(1.6, 0.025), _Misaligned(0.7, 0.005)
)
_TF32 = _Standard(
    _Fit(7.7, 9.2, 9.3, 0.047), _Fit(1, 0, 6, 0.012), 0.6, _Misaligned(1.6, 0.02), _Misaligned(0.9, 0.002)
)
_EXACT = _Standard(
    _Fit(4, 40, 0, 0.05),
    _Fit(0, 20, -4, 0.003),
    0.95,
    _Misaligned(1.2, 0),
    _Misaligned(0.7, 0),
    _Fit(-6, 40, 0, 0),
    _Fit(0, 0, 16, 0),
    narrow=0.5,
    alone=0.7,
)


def waiting_seconds(problem: Problem) -> float:
    """Return what a step of the standard algorithm takes beyond its launches and arithmetic."""
    if problem.element_bytes == 2 or problem.batch == 1:  # a single row is multiplied by a kernel of its own
        standard = _SIXTEEN_BITS
    else:
        standard = _TF32 if problem.dtype == torch.float32 and problem.allow_tf32 else _EXACT
    microseconds = standard.fit(problem).at(problem)
    if is_stacked(problem):
        microseconds *= standard.together * (standard.narrow if problem.hidden_size <= _NARROW else 1.0)
    if problem.time == 1:
        microseconds *= standard.alone
    misaligned = standard.training_misaligned if problem.needs_grad else standard.inference_misaligned
    return (microseconds + misaligned.at(problem)) * 1e-6


def persistent_seconds(problem: Problem) -> float:
    """Return what a step of the persistent algorithms takes beyond its arithmetic: more, the more rows."""
    if problem.hidden_size <= FORWARD_SMALL:
        return _of_small_sizes(problem) * 1e-6
    width, rows = problem.hidden_size / 1024, max(problem.batch, 16)
    few, many = min(rows, 64) - 16, max(0, rows - 64)
    if problem.needs_grad:
        return (4.1 + 2.3 * width + 0.21 * few + 0.14 * many) * 1e-6
    gates = problem.time * problem.batch * problem.gate_rows * problem.element_bytes
    from_memory = 0.2 if gates > _CACHE_BYTES else 0.0
    return (1.05 + 0.75 * width + 0.085 * few + 0.03 * many + from_memory) * 1e-6


def _of_small_sizes(problem: Problem) -> float:
    width, rows = problem.hidden_size / BACKWARD_SMALL, problem.batch
    if problem.element_bytes == 4:
        if width > 1:  # in inference alone
            return 4.1 + 0.138 * rows
        if problem.needs_grad:
            return (0.3 + 4.0 * width**2) * (1 + 0.004 * rows)
        return (0.05 + 1.8 * width**2) * (1 + 0.003 * rows)
    return 1.4 + 2.4 * width + 0.006 * rows if problem.needs_grad else 0.4 + 1.2 * width + 0.0005 * rows


def is_stacked(problem: Problem) -> bool:
    """Whether there are several layers or directions."""
    return problem.num_layers * problem.num_directions > 1
