"""The setting for library products: TF32 while the kernel launches them, the caller's otherwise."""

import pytest
import torch

from gatewise import testing
from gatewise.contract.problem import Problem
from gatewise.kernels import ALL
from gatewise.kernels.cuda.precision import as_in_nn_lstm

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
    with as_in_nn_lstm(PROBLEM):
        assert is_tf32()
    assert is_tf32() == callers_choice
    assert torch.backends.cuda.matmul.allow_tf32 == callers_choice


def test_an_error_leaves_the_callers_choice(callers_choice):
    with pytest.raises(ValueError, match="inside"), as_in_nn_lstm(PROBLEM):
        raise ValueError("inside")
    assert is_tf32() == callers_choice


def test_products_are_exact_inside_where_tf32_is_not_allowed(callers_choice):
    with as_in_nn_lstm(PROBLEM.replace(allow_tf32=False)):
        assert not is_tf32()
    assert is_tf32() == callers_choice


def test_other_dtypes_leave_float32_as_it_is(callers_choice):
    with as_in_nn_lstm(PROBLEM.replace(dtype=torch.bfloat16)):
        assert is_tf32() == callers_choice


@pytest.mark.parametrize("allowed", [True, False, (False, False)], ids=str)
@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "fp16"), (torch.bfloat16, "bf16")])
def test_sums_are_not_reduced_in_sixteen_bits_inside(dtype, name, allowed):
    setting, read = f"allow_{name}_reduced_precision_reduction", f"_get_cublas_allow_{name}_reduced_precision_reduction"
    before = getattr(torch._C, read)()
    if isinstance(before, bool) and isinstance(allowed, tuple):
        pytest.skip("this PyTorch has no such setting")
    try:
        setattr(torch.backends.cuda.matmul, setting, allowed)
        chosen = getattr(torch._C, read)()
        with as_in_nn_lstm(PROBLEM.replace(dtype=dtype)):
            inside = getattr(torch._C, read)()
            assert (inside if isinstance(inside, bool) else inside[0]) is False
            if isinstance(inside, tuple):
                assert inside[1] == chosen[1]
        assert getattr(torch._C, read)() == chosen
    finally:
        setattr(torch.backends.cuda.matmul, setting, before)


def test_float64_changes_nothing():
    matmul = torch.backends.cuda.matmul
    before = is_tf32(), matmul.allow_fp16_reduced_precision_reduction
    with as_in_nn_lstm(PROBLEM.replace(dtype=torch.float64)):
        assert before == (is_tf32(), matmul.allow_fp16_reduced_precision_reduction)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["persistent", "stepwise", "eager"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("time", "hidden"), [(1441, 4), (1441, 64)])
def test_gradients_of_weights_over_many_tokens_are_as_exact_as_those_of_cudnn(kernel, dtype, time, hidden):
    problem = Problem(time, 8, hidden, hidden, num_layers=2, dtype=dtype, needs_grad=True)
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    exact = testing.named(problem, *testing.oracle(problem, inputs, gradients, "cuda"))
    theirs = testing.named(problem, *testing.reference(problem, inputs, gradients, dtype=dtype, device="cuda"))
    chosen = {one.name: one for one in ALL}[kernel]
    ours = testing.named(problem, *testing.run_kernel(chosen, problem, inputs, gradients))
    for name in ("dweight_ih_l0", "dweight_hh_l0", "dweight_ih_l1", "dweight_hh_l1"):
        ratio = testing.relative_error(ours[name], exact[name]) / testing.relative_error(theirs[name], exact[name])
        assert ratio < 3, name
