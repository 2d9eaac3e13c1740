"""Conversion between SystemML's matrices and PyTorch's tensors, which hold the same numbers in another order.

SystemML has one matrix [D+M, 4M] per direction, with input rows above recurrent rows and gates in the order `i f o g`
in columns, and one row per sequence, with its steps side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_GATES = (0, 1, 3, 2)
"""The permutation from `i f g o` to `i f o g`, which is its own inverse."""


def flat_weights(directions: Sequence[tuple[Tensor, Tensor]], size: int) -> list[Tensor]:
    """Return weights in PyTorch's flat order: `w_ih, w_hh, b_ih, b_hh` for each direction; the second bias is zero.

    They are views of one buffer in cuDNN's layout, so that no pass has to pack them again.

    Args:
        directions: For each direction a dense W [D+M, 4M] and b [1, 4M]. W may have fewer than D input rows, those of
            the features that the kernel reads; the M recurrent rows are last.
        size: The number of units, M.
    """
    matrices, biases = [], []
    for weight, _ in directions:
        matrices += [(4 * size, weight.shape[0] - size), (4 * size, size)]
        biases += [(4 * size,)] * 2
    shapes = [*matrices, *biases]
    counts = [torch.Size(shape).numel() for shape in shapes]
    buffer = directions[0][0].new_zeros(sum(counts))
    parts = [part.view(shape) for part, shape in zip(buffer.split(counts), shapes, strict=True)]
    flat = []
    for index, (weight, bias) in enumerate(directions):
        w_ih, w_hh = parts[2 * index : 2 * index + 2]
        b_ih, b_hh = parts[2 * (index + len(directions)) : 2 * (index + len(directions)) + 2]
        ordered = gates_exchanged(weight)
        w_ih.copy_(ordered[:-size].t())
        w_hh.copy_(ordered[-size:].t())
        b_ih.copy_(gates_exchanged(bias).squeeze(0))
        flat += [w_ih, w_hh, b_ih, b_hh]
    return flat


def matrix_of(w_ih: Tensor, w_hh: Tensor) -> Tensor:
    """Return SystemML's matrix [D+M, 4M] for PyTorch's weights [4M, D] and [4M, M]."""
    return gates_exchanged(torch.cat([w_ih.t(), w_hh.t()]))


def gates_exchanged(matrix: Tensor) -> Tensor:
    """Swap the last two gates of a dense matrix [..., 4M]: `i f o g` to `i f g o`, and back."""
    return matrix.unflatten(-1, (4, -1))[..., _GATES, :].flatten(-2)


def steps_of(sequences: Tensor, features: int) -> Tensor:
    """Return [N, T*F] as [T, N, F], a view."""
    rows, columns = sequences.shape
    return sequences.reshape(rows, columns // features, features).transpose(0, 1)


def sequences_of(steps: Tensor) -> Tensor:
    """Return [T, N, F] as [N, T*F], always as a copy."""
    time, rows, features = steps.shape
    return (
        torch.empty_like(steps, memory_format=torch.contiguous_format)
        .view(rows, time, features)
        .copy_(steps.transpose(0, 1))
        .view(rows, time * features)
    )
