"""Products of a sparse X or W with the input weights, computed from the stored entries.

The products of all steps become the input of an LSTM that multiplies only its hidden state (`projected=True` in
`gatewise.functional.forward`). The recurrent products stay dense: there is one small product per step.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from gatewise.interop.systemml.layout import gates_exchanged, steps_of

DENSITY = {"cpu": 0.1, "cuda": 0.01}
"""The fraction of stored entries, by kind of device, below which products use a sparse matrix as such; otherwise it is
made dense first.

On a CPU, sparse products with X are faster below about this fraction, at the sizes that SystemML tests with. On a GPU
they are faster only for a few thousand features; a lower fraction saves the memory of X."""


def is_sparse(matrix: Tensor) -> bool:
    """Return whether a matrix is stored as CSR."""
    return matrix.layout is torch.sparse_csr


def worth_it(matrix: Tensor) -> bool:
    """Return whether products should use the stored entries of the matrix."""
    return is_sparse(matrix) and matrix.values().numel() < DENSITY[matrix.device.type] * matrix.numel()


def dense(matrix: Tensor) -> Tensor:
    """Return a matrix as a dense one."""
    return matrix.to_dense() if is_sparse(matrix) else matrix


def csr(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return a CSR matrix.

    Args:
        rows: The index of the first entry of each row, and the number of entries [R + 1], integers.
        columns: The column of each entry, in ascending order within a row.
        values: The value of each entry.
        shape: The shape of the matrix, [R, C].
    """
    _beta_warning_given()
    return torch.sparse_csr_tensor(rows.long(), columns.long(), values, shape, check_invariants=False)


@functools.cache
def _beta_warning_given() -> None:
    # PyTorch warns once per process that CSR is in beta, which does not concern callers who pass a SciPy matrix.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.tensor([0, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([]), (1, 1))


def some_rows(matrix: Tensor, start: int, stop: int) -> Tensor:
    """Return the rows from `start` to before `stop`."""
    if not is_sparse(matrix):
        return matrix[start:stop]
    rows = matrix.crow_indices()[start : stop + 1]
    entries = slice(int(rows[0]), int(rows[-1]))
    shape = (stop - start, matrix.shape[1])
    return csr(rows - rows[0], matrix.col_indices()[entries], matrix.values()[entries], shape)


def tokens_of(sequences: Tensor, features: int) -> Tensor:
    """Return [N, T*D] as [N*T, D]; a sparse matrix stays sparse."""
    rows, columns = sequences.shape
    time = columns // features
    if not is_sparse(sequences):
        return sequences.reshape(rows * time, features)
    counts = sequences.crow_indices().diff()
    places = sequences.col_indices()
    row = torch.repeat_interleave(torch.arange(rows, device=places.device), counts)
    token = row * time + places // features
    begins = torch.bincount(token, minlength=rows * time).cumsum(0)
    return csr(torch.cat([begins.new_zeros(1), begins]), places % features, sequences.values(), (rows * time, features))


def products(x: Tensor, weights: list[Tensor]) -> Tensor:
    """Return the input products of every step and direction [T, N, directions * 4M], as `projected=True` requires.

    Args:
        x: The input X [N, T*D].
        weights: The input rows of each direction's matrix [D, 4M].
    """
    tokens = tokens_of(x, weights[0].shape[0])
    sums = [gates_exchanged(product(tokens, weight)) for weight in weights]
    # [N*T, 4M] is [N, T*4M] with the steps side by side.
    return torch.cat([steps_of(part.reshape(x.shape[0], -1), part.shape[1]) for part in sums], -1)


def gradients(x: Tensor, weights: list[Tensor], dproducts: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of X [N, T*D] and of the input rows of each matrix [D, 4M], all dense.

    Args:
        x: The argument x of `products`.
        weights: The argument weights of `products`.
        dproducts: The gradient of the result of `products`.
    """
    features = weights[0].shape[0]
    tokens = tokens_of(x, features)
    shares = [
        gates_exchanged(share).transpose(0, 1).reshape(tokens.shape[0], -1)
        for share in dproducts.chunk(len(weights), -1)
    ]
    # dS W^T = (W dS^T)^T puts a sparse W on the left, which is the side that PyTorch supports.
    dtokens = [product(weight, share.t()).t() for weight, share in zip(weights, shares, strict=True)]
    dx = (dtokens[0] if len(dtokens) == 1 else dtokens[0] + dtokens[1]).reshape(x.shape)
    turned = transposed(tokens)
    return dx, [product(turned, share) for share in shares]


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right as a dense matrix; if both are sparse, only the left one is used as such."""
    if is_sparse(right) and not is_sparse(left):
        return (transposed(right) @ left.t()).t()
    return left @ dense(right)


def transposed(matrix: Tensor) -> Tensor:
    """Return the transposed matrix; a sparse matrix stays sparse."""
    return matrix.t().to_sparse_csr() if is_sparse(matrix) else matrix.t()
