"""Products of a few rows in float32 take their zeros from the caller's memory, and are as exact as other products."""

import pytest
import torch

from gatewise import testing
from gatewise.contract.problem import Problem
from gatewise.kernels.cuda import deep_products
from gatewise.kernels.cuda.few_rows import is_faster_with_zeros
from gatewise.kernels.cuda.precision import products_in_tf32
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.stepwise import stepwise

EXACT = Problem(1, 1, 1, 1, allow_tf32=False)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize(
    ("rows", "terms", "faster"),
    [
        (1, 128, False),
        (2, 128, True),
        (16, 128, True),
        (17, 128, False),
        (8, 79, False),
        (8, 80, True),
        (8, 769, False),
    ],
)
def test_it_depends_on_rows_and_terms(rows, terms, faster):
    assert is_faster_with_zeros(torch.empty(rows, terms)) == faster


def test_only_products_of_float32_into_contiguous_rows():
    left, out = torch.empty(8, 128), torch.empty(8, 512)
    assert is_faster_with_zeros(left, out[:, :])
    assert not is_faster_with_zeros(left, out[:, :500])
    assert not is_faster_with_zeros(left, torch.empty(512, 8).t())
    assert not is_faster_with_zeros(torch.empty(128, 8).t(), out)
    assert not is_faster_with_zeros(left.double())
    assert not is_faster_with_zeros(left.half())


@pytest.mark.parametrize("device", DEVICES)
def test_the_memory_is_the_callers_and_may_contain_anything(device):
    left, right = torch.randn(8, 128, device=device), torch.randn(128, 512, device=device)
    memory = torch.full((1 << 16,), 255, dtype=torch.uint8, device=device)  # NaN in every format
    scratch, out = Scratch(left, memory), torch.full((8, 512), torch.nan, device=device)
    with products_in_tf32(EXACT):
        deep_products.mm(left, right, out, memory=scratch)
        found, before = out.clone(), memory.clone()
        with scratch.frame():
            deep_products.addmm(out, left, right, scratch)
    exact = left.double() @ right.double()
    for twice, result in ((1, found), (2, out)):
        assert float((result.double() - twice * exact).norm() / exact.norm()) < 1e-6
    assert scratch.needed == 512 * 4 + 512 * 4 + 8 * 512 * 4  # the zeros of both products, and the second one
    assert torch.equal(memory[2048 * 2 + 8 * 2048 :], before[2048 * 2 + 8 * 2048 :])
    assert not before[:2048].any()


def test_without_memory_nothing_is_allocated(monkeypatch):
    monkeypatch.setattr(torch, "addmm", lambda *arguments, **options: pytest.fail("zeros were added"))
    deep_products.mm(torch.randn(8, 128), torch.randn(128, 4), torch.empty(8, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [persistent, stepwise], ids=["persistent", "stepwise"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("sizes", [(1, 8, 128, 128), (7, 1, 112, 112), (5, 2, 164, 88), (40, 9, 200, 144)], ids=str)
def test_layers_of_a_few_rows_agree_with_float64(kernel, bidirectional, sizes):
    problem = Problem(*sizes, num_layers=2, bidirectional=bidirectional, needs_grad=True)
    for _ in range(3):  # the second call may be recorded, and the third one replayed
        testing.check_kernel(kernel, problem, "cuda")
