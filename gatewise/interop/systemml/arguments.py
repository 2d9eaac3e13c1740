"""The validation of the operators' arguments: their kinds, whether they fit together, and the sizes they imply."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gatewise.contract.errors import ArgumentError, DeviceError, DtypeError, ShapeError, sentence
from gatewise.interop.systemml import sparse

_DTYPES = (torch.float64, torch.float32)


class Sizes(NamedTuple):
    """The sizes that follow from the shapes of the arguments.

    Attributes:
        N: The number of sequences.
        T: The number of time steps.
        D: The number of features of a step.
        M: The number of units.
        directions: The number of directions: 1, or 2 for the BiLSTM.
    """

    N: int
    T: int
    D: int
    M: int
    directions: int

    def __str__(self) -> str:
        """Return one line."""
        sizes = f"N {self.N}, T {self.T}, D {self.D}, M {self.M}"
        return f"{sizes}, 2 directions" if self.directions == 2 else sizes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Arguments:
    """The arguments of both passes of a call, as tensors that fit together.

    Attributes:
        X: The input [N, T*D], dense or CSR.
        W: The matrix of each direction [D+M, 4M], dense or CSR.
        b: The biases of each direction [1, 4M].
        out0: The initial output [directions, N, M].
        c0: The initial cell state [directions, N, M].
        rows: The number of sequences for which the caller's out0 has rows, at least N.
        sizes: The sizes that follow from the shapes.
        numpy: Whether the results are NumPy arrays.
    """

    X: Tensor
    W: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    out0: Tensor
    c0: Tensor
    rows: int
    sizes: Sizes
    numpy: bool

    @property
    def home(self) -> torch.device:
        """The device of the arguments, on which the results are returned."""
        return self.X.device

    def given_back(self, results: Sequence[Tensor]) -> tuple[Any, ...]:
        """Convert results to the caller's kind of array, on the caller's device."""
        at_home = (result.to(self.home) for result in results)
        return tuple(result.numpy() if self.numpy else result for result in at_home)


def read(
    X: Any,
    directions: Sequence[tuple[Any, Any]],
    out0: Any,
    c0: Any,
) -> Arguments:
    """Check the arguments that both passes have.

    Args:
        X: The caller's argument X.
        directions: The caller's arguments W and b of each direction.
        out0: The caller's argument out0.
        c0: The caller's argument c0.

    Raises:
        ShapeError: Shapes do not fit together.
        DtypeError: A dtype is neither float64 nor float32, or the dtypes differ.
        DeviceError: Tensors are on different devices.
        ArgumentError: An argument is not a matrix, or NumPy arrays and PyTorch tensors are mixed.
    """
    suffixes = ("", "_reverse")[: len(directions)]
    named = {"X": X}
    for suffix, (weight, bias) in zip(suffixes, directions, strict=True):
        named |= {f"W{suffix}": weight, f"b{suffix}": bias}
    named |= {"out0": out0, "c0": c0}
    tensors = {name: matrix_of(name, value, may_be_sparse=name[0] in "XW") for name, value in named.items()}
    like("X", named["X"], tensors["X"], named, tensors)
    sizes, rows = _sizes({name: list(tensor.shape) for name, tensor in tensors.items()}, suffixes)
    outputs, cells = (
        tensors[name].reshape(sizes.directions, rows, sizes.M)[:, : sizes.N].contiguous() for name in ("out0", "c0")
    )
    return Arguments(
        tensors["X"],
        tuple(tensors[f"W{suffix}"] for suffix in suffixes),
        tuple(tensors[f"b{suffix}"] for suffix in suffixes),
        outputs,
        cells,
        rows,
        sizes,
        numpy=not isinstance(X, Tensor),
    )


def flag(name: str, value: Any) -> bool:
    """Return a Boolean argument.

    Raises:
        ArgumentError: It is not True or False.
    """
    if not isinstance(value, bool | np.bool_):
        advice = "The Booleans TRUE and FALSE of a script are True and False in Python."
        raise ArgumentError(sentence(name, "True or False", repr(value), advice))
    return bool(value)


def require_rows(arguments: Arguments) -> None:
    """Raise `ShapeError` if out0 and c0 have more rows than X, which only the forward pass may be given."""
    sizes = arguments.sizes
    if arguments.rows != sizes.N:
        expectation = f"of as many rows as X in the backward pass, {sizes.directions * sizes.N}"
        advice = "After a smaller last batch, give the rows that the forward pass took."
        raise ShapeError(sentence("out0", expectation, sizes.directions * arguments.rows, advice))


def fingerprints(arguments: Arguments) -> dict[str, Tensor]:
    """Return numbers by which arguments of the same sizes can be told apart, for each matrix: integers [R + C].

    They are the sums of rows and of columns, of the entries' bits taken as integers. Zeros have no bits, so that a
    sparse matrix has the numbers of the dense one.
    """
    found = {"X": arguments.X}
    for suffix, weight, bias in zip(("", "_reverse"), arguments.W, arguments.b, strict=False):
        found |= {f"W{suffix}": weight, f"b{suffix}": bias}
    found |= {"out0": arguments.out0.flatten(0, 1), "c0": arguments.c0.flatten(0, 1)}
    return {name: _fingerprint(matrix) for name, matrix in found.items()}


def _fingerprint(matrix: Tensor) -> Tensor:
    bits = torch.int64 if matrix.dtype == torch.float64 else torch.int32
    if not sparse.is_sparse(matrix):
        numbers = (matrix + 0).contiguous().view(bits)  # -0.0, whose sign is a bit, becomes 0.0
        return torch.cat((numbers.sum(1), numbers.sum(0)))
    values, (rows, columns) = (matrix.values() + 0).view(bits).long(), matrix.shape
    row = torch.repeat_interleave(torch.arange(rows, device=values.device), matrix.crow_indices().diff())
    sums = values.new_zeros(rows + columns)
    return sums.index_add_(0, row, values).index_add_(0, rows + matrix.col_indices(), values)


def gradient_of(name: str, value: Any, shape: tuple[int, int], arguments: Arguments, advice: str = "") -> Tensor | None:
    """Check a gradient of an output, or another matrix, against its shape; None means zero."""
    if value is None:
        return None
    gradient = matrix_of(name, value, may_be_sparse=False)
    if tuple(gradient.shape) != shape:
        raise ShapeError(sentence(name, f"{list(shape)}", list(gradient.shape), advice))
    whole = arguments.X
    like("X", None if arguments.numpy else whole, whole, {name: value}, {name: gradient})
    return gradient


def matrix_of(name: str, value: Any, *, may_be_sparse: bool) -> Tensor:
    """Convert an array, tensor or sparse matrix of rank 2 to a tensor, dense or CSR, with a copy only if necessary."""
    tensor = _tensor(name, value)
    if tensor.dim() != 2:
        raise ShapeError(sentence(name, "a matrix", f"rank {tensor.dim()} with shape {list(tensor.shape)}"))
    if sparse.is_sparse(tensor) and not may_be_sparse:
        raise ArgumentError(sentence(name, "dense", "a sparse matrix", "X and W may be sparse."))
    if tensor.dtype not in _DTYPES:
        advice = "Convert it, to float64 unless single precision is meant."
        raise DtypeError(sentence(name, "float64 or float32", str(tensor.dtype).removeprefix("torch."), advice))
    return tensor


def like(name: str, value: Any, tensor: Tensor, others: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Check that matrices have the kind, dtype and device of the first one."""
    for other, found in tensors.items():
        if isinstance(others[other], Tensor) != isinstance(value, Tensor):
            kinds = {True: "a torch tensor", False: "a NumPy array or SciPy matrix"}
            expected, got = kinds[isinstance(value, Tensor)], kinds[isinstance(others[other], Tensor)]
            raise ArgumentError(sentence(other, f"{expected} like {name}", got))
        if found.dtype != tensor.dtype:
            dtypes = (str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, found.dtype))
            expected, got = dtypes
            raise DtypeError(sentence(other, f"{expected} like {name}", got, "Convert one of them."))
        if found.device != tensor.device:
            advice = "Move one of them with .to(device)."
            raise DeviceError(sentence(other, f"on {tensor.device} like {name}", f"on {found.device}", advice))


def _tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        value = value.detach()
        if value.layout is torch.strided or sparse.is_sparse(value):
            return value
        return value.to_sparse_csr()
    if isinstance(value, np.ndarray):
        return _from_numpy(name, value)
    scipy_sparse = sys.modules.get("scipy.sparse")
    if scipy_sparse is not None and scipy_sparse.issparse(value):
        matrix = value.tocsr()
        if not matrix.has_canonical_format:
            matrix = matrix.copy()
            matrix.sum_duplicates()
        rows, columns, values = (_from_numpy(name, part) for part in (matrix.indptr, matrix.indices, matrix.data))
        return sparse.csr(rows, columns, values, matrix.shape)
    raise ArgumentError(sentence(name, "a NumPy array, a torch tensor or a SciPy sparse matrix", type(value).__name__))


def _from_numpy(name: str, array: np.ndarray) -> Tensor:
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise DtypeError(sentence(name, "float64 or float32", array.dtype, "Convert it, to float64 in general."))
    # PyTorch supports no negative strides and no foreign byte order, and warns about read-only memory.
    plain = array.dtype.isnative and array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if plain else array.astype(array.dtype.newbyteorder("="), order="C"))


def _sizes(shapes: dict[str, list[int]], suffixes: Sequence[str]) -> tuple[Sizes, int]:
    directions = len(suffixes)
    held, M = shapes["out0"]
    if M == 0 or held % directions:
        expectation = "[N, M] with M at least 1" if directions == 1 else "[2N, M], forward rows above reverse rows"
        raise ShapeError(sentence("out0", expectation, shapes["out0"]))
    if shapes["c0"] != shapes["out0"]:
        raise ShapeError(sentence("c0", f"{shapes['out0']} like out0", shapes["c0"]))
    for suffix in suffixes:
        rows, columns = shapes[f"W{suffix}"]
        if columns != 4 * M or rows <= M:
            expectation = f"[D+M, 4M], with M = {M} columns of out0 [more than {M}, {4 * M}]"
            raise ShapeError(sentence(f"W{suffix}", expectation, [rows, columns]))
        if shapes[f"W{suffix}"] != shapes["W"]:
            raise ShapeError(sentence(f"W{suffix}", f"{shapes['W']} like W", shapes[f"W{suffix}"]))
        if shapes[f"b{suffix}"] != [1, 4 * M]:
            raise ShapeError(sentence(f"b{suffix}", f"[1, 4M] = [1, {4 * M}]", shapes[f"b{suffix}"]))
    D = shapes["W"][0] - M
    N, columns = shapes["X"]
    if columns == 0 or columns % D:
        advice = f"D is rows(W) - columns(out0) = {shapes['W'][0]} - {M}."
        raise ShapeError(sentence("X", f"[N, T*D] with a multiple of D = {D} columns", shapes["X"], advice))
    held //= directions
    if held < N:
        expectation = f"at least {directions * N} rows" + (", 2N" if directions == 2 else "")
        advice = "A smaller last batch takes the first rows; a larger one has no initial state."
        raise ShapeError(sentence("out0", f"of {expectation}, for the {N} of X", shapes["out0"], advice))
    return Sizes(N, columns // D, D, M, directions), held
