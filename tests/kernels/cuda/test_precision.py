"""PyTorch's setting for TF32 is changed only while a kernel launches its matrix products."""

import pytest
import torch

from gatewise.contract.problem import Problem
from gatewise.kernels.cuda.precision import products_in_tf32, sums_in_float32

PROBLEM = Problem(20, 8, 64, 256, dtype=torch.float32, allow_tf32=True)


@pytest.fixture(params=[False, True], ids=["exact", "TF32"])
def callers_choice(request):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = before


def is_tf32():
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32


def test_products_are_tf32_inside_and_the_callers_afterwards(callers_choice):
    with products_in_tf32(PROBLEM):
        assert is_tf32()
    assert is_tf32() == callers_choice
    assert torch.backends.cuda.matmul.allow_tf32 == callers_choice


def test_an_error_leaves_the_callers_choice(callers_choice):
    with pytest.raises(ValueError, match="inside"), products_in_tf32(PROBLEM):
        raise ValueError("inside")
    assert is_tf32() == callers_choice


def test_products_are_exact_inside_if_tf32_is_not_allowed(callers_choice):
    with products_in_tf32(PROBLEM.replace(allow_tf32=False)):
        assert not is_tf32()
    assert is_tf32() == callers_choice


def test_other_dtypes_change_nothing(callers_choice):
    with products_in_tf32(PROBLEM.replace(dtype=torch.bfloat16)):
        assert is_tf32() == callers_choice


def test_without_a_setting_for_sums_in_float16_nothing_is_changed(monkeypatch):
    for name in ("_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"):
        monkeypatch.delattr(torch._C, name, raising=False)  # PyTorch 2.6 has neither
    with sums_in_float32():
        pass
