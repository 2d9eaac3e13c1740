"""Random cells through both passes on the CPU, with the CUDA kernels compiled as C++, compared with autograd."""

import pytest
import torch

from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.stepwise.product_layout import ProductLayout
from tests.derivation.random_cells import seeded
from tests.kernels.agreement import assert_agrees
from tests.kernels.stepwise.test_passes_on_cpu import Unrefused

# The C++ compiler takes a second for each cell. The code of the cells alone, without the passes, is compiled for many
# more in tests/derivation.
FEW, MANY = 2, 40

PROBLEMS = [
    Problem(4, 3, 3, 5, num_layers=2),
    Problem(4, 3, 3, 5, bidirectional=True, layout=Layout.HOST_LENGTHS),
    Problem(3, 2, 1, 4, bidirectional=True, resets=True, bias=False),
    Problem(5, 2, 3, 1, layout=Layout.PACKED, resets=False),
]


def numbered(count):
    return pytest.mark.parametrize(
        "seed", [pytest.param(seed, marks=() if seed < FEW else pytest.mark.exhaustive) for seed in range(count)]
    )


def check(seed, on_cpu, *, fused):
    transposed = bool(seed % 2)
    on_cpu(ProductLayout(transposed_forward=transposed, transposed_backward=transposed))
    (cell,) = seeded(range(seed, seed + 1), fused=fused, resets=True)
    problem = PROBLEMS[seed % len(PROBLEMS)].replace(cell=cell, dtype=torch.float64, needs_grad=True)
    assert_agrees(Unrefused(), problem)


@numbered(MANY)
def test_rows_agree_with_autograd(seed, on_cpu):
    check(seed, on_cpu, fused=False)


@numbered(MANY)
def test_units_agree_with_autograd(seed, on_cpu):
    check(seed, on_cpu, fused=True)
