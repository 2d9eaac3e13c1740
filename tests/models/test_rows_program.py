"""The Triton program that copies rows, in Triton's interpreter where there is no GPU, against plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from tests.compilers import device_of_programs

pytestmark = pytest.mark.parametrize("device", [device_of_programs()])

SIZES = [(1, 1), (3, 7), (5, 650), (2, 1500), (4, 1024), (2, 2049)]
DTYPES = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
]


def part_of(count, size, dtype, device, beside=3):
    """Return a matrix whose rows are parts of the rows of another one, with NaN beside them."""
    generator = torch.Generator().manual_seed(size)
    wide = torch.full((count, size + beside), torch.nan)
    wide[:, :size] = torch.randn(count, size, generator=generator)
    return wide.to(device, dtype)[:, :size]


@pytest.mark.parametrize(("dtype", "to"), DTYPES, ids=str)
@pytest.mark.parametrize(("count", "size"), SIZES)
def test_rows_are_followed_by_a_number_and_zeros(device, count, size, dtype, to):
    from gatewise.models import fused_rows

    matrix, column = part_of(count, size, dtype, device), torch.randn(count).to(device, dtype)
    height, width = count + 3, size + 4
    wide = torch.full((height, width), torch.nan, dtype=to, device=device)
    fused_rows.widen(matrix, column, wide)
    expected = torch.zeros(height, width, dtype=to, device=device)
    expected[:count, :size], expected[:count, size] = matrix.to(to), column.to(to)
    assert torch.equal(wide, expected)


@pytest.mark.parametrize(("dtype", "to"), DTYPES, ids=str)
@pytest.mark.parametrize(("count", "size"), SIZES)
def test_rows_are_multiplied_in_float32(device, count, size, dtype, to):
    from gatewise.models import fused_rows

    matrix, factor = part_of(count, size, dtype, device, beside=4), torch.tensor(1 / 3, device=device)
    scaled = torch.full((count, size), torch.nan, dtype=to, device=device)
    fused_rows.scale(matrix, factor, scaled)
    assert torch.equal(scaled, (matrix.float() * factor).to(to))


def test_a_matrix_without_rows_is_not_copied(device):
    from gatewise.models import fused_rows

    fused_rows.scale(torch.empty(0, 3, device=device), torch.ones((), device=device), torch.empty(0, 3, device=device))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_stay_where_they_are(device, value):
    from gatewise.models import fused_rows

    matrix = torch.zeros(2, 9, device=device)
    matrix[1, 4] = value
    wide = torch.empty(8, 16, dtype=torch.bfloat16, device=device)
    fused_rows.widen(matrix, torch.zeros(2, device=device), wide)
    assert (~wide.isfinite()).nonzero().tolist() == [[1, 4]]
