"""Random cells on the kernels with generated code, on a GPU, within the budgets derived from PyTorch's own error."""

import pytest
import torch

from gatewise import testing
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.criteria import is_fused
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.stepwise import stepwise
from tests.derivation.random_cells import seeded

pytestmark = pytest.mark.gpu

CELLS, TOGETHER = 200, 10  # chunks, so that several processes can share the cells
SHAPES = [
    Problem(5, 3, 5, 31, bidirectional=True),
    Problem(7, 20, 33, 133, layout=Layout.DEVICE_LENGTHS),
    Problem(6, 16, 64, 256, num_layers=2),
    Problem(5, 9, 40, 64, bias=False, resets=True),
    Problem(9, 2, 8, 96, lean=True),
]


def cells_of(chunk, **options):
    """Return the cells of a chunk: every second one is a cell that fused kernels compute."""
    seeds = range(chunk * TOGETHER, (chunk + 1) * TOGETHER)
    pairs = zip(seeded(seeds, **options), seeded(seeds, fused=True, **options), strict=True)
    return [pair[seed % 2] for seed, pair in zip(seeds, pairs, strict=True)]


def disagreements(cells, chunk, **numbers):
    """Check the cells on each kernel that accepts them; return the messages of those that disagree."""
    found, checked = [], 0
    for number, cell in enumerate(cells):
        problem = SHAPES[(chunk + number // 2) % len(SHAPES)].replace(cell=cell, needs_grad=True, **numbers)
        for kernel in (stepwise, persistent):
            admitted = next(
                (
                    one
                    for one in (problem, problem.replace(lean=False, resets=False))
                    if not testing.why_not(kernel, one, "cuda")
                ),
                None,
            )
            if admitted is None:
                assert kernel is persistent
                assert not is_fused(cell)
                continue
            checked += 1
            try:
                testing.check_kernel(kernel, admitted, "cuda")
            except testing.Disagreement as error:
                found.append(f"{error}\n{cell.source}")
    assert checked >= len(cells) * 3 // 2  # the fused ones on both kernels
    return found


chunks = pytest.mark.parametrize("chunk", range(CELLS // TOGETHER))


@chunks
def test_float32_is_within_its_budgets(chunk):
    found = disagreements(cells_of(chunk, resets=True), chunk, dtype=torch.float32)
    assert not found, "\n\n".join(found)


@chunks
def test_bfloat16_is_within_its_budgets(chunk):
    # Rounding to 8 bits moves values across kinks, where the gradient jumps: these cells have none.
    found = disagreements(cells_of(chunk, smooth=True, resets=True), chunk, dtype=torch.bfloat16)
    assert not found, "\n\n".join(found)
