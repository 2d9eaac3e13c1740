"""Fitting a matrix into another size is exact: what is there stays, what is not is zero."""

import pytest
import torch

from gatewise.contract.problem import Problem
from gatewise.kernels.persistent.buffers import crop_gates, pad_columns, pad_gates
from gatewise.kernels.persistent.launches import resized

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1, 31, 61, 650, 1500])
@pytest.mark.parametrize("columns", [3, 30, 200, 650])
def test_gates_there_and_back(size, columns, dtype):
    matrix = torch.randn(4 * size, columns, dtype=dtype, device="cuda")
    wide = pad_gates(matrix, Problem(1, 1, columns, size))
    rows, width = wide.shape[0] // 4, wide.shape[1]
    expected = torch.zeros(4, rows, width, dtype=dtype, device="cuda")
    expected[:, :size, :columns] = matrix.view(4, size, columns)
    assert torch.equal(wide, expected.view(4 * rows, width))
    assert torch.equal(crop_gates(wide, size, columns), matrix)


def test_what_fits_is_not_copied():
    matrix = torch.randn(32, 16, device="cuda")
    assert pad_gates(matrix, Problem(1, 1, 16, 8)) is matrix
    assert pad_columns(matrix) is matrix


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_rows_may_lie_apart_and_begin_anywhere(offset):
    matrix = torch.randn(9, 24, device="cuda", dtype=torch.float16)[:, offset : offset + 13]
    assert torch.equal(resized(matrix, 9, 16)[:, :13], matrix)
    assert not resized(matrix, 9, 16)[:, 13:].any()
    assert torch.equal(resized(matrix.t(), 13, 9), matrix.t())
    assert resized(matrix[:0], 0, 16).shape == (0, 16)
