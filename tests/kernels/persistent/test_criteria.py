"""Every refusal of the persistent kernel: each criterion rejects its own violation and says so."""

import pytest
import torch

from gatewise.cells import GRU, LSTM, RNN
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.cuda.deep_products import widens
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.sizes.exactness import exact_products
from gatewise.selection.estimate import busy

H200 = Device.named("h200")
PROBLEM = Problem(20, 8, 64, 256, dtype=torch.bfloat16, needs_grad=True)


def test_accepts_an_ordinary_problem():
    assert [criterion.check(PROBLEM, H200) for criterion in persistent.criteria()] == [None] * len(
        persistent.criteria()
    )


@pytest.mark.parametrize("criterion", persistent.criteria(), ids=lambda criterion: criterion.quantity)
def test_each_criterion_rejects_its_violation(criterion):
    refusal = criterion.check(*criterion.violation(PROBLEM, H200))
    assert refusal is not None
    assert refusal.actual
    assert refusal.allowed == criterion.allowed


def test_missing_packages_are_a_refusal_with_the_command():
    bare = H200.replace(compiles=False)
    refusals = [str(refusal) for criterion in persistent.criteria() if (refusal := criterion.check(PROBLEM, bare))]
    assert refusals == [
        "packages is not installed, allowed: cuda-core and NVRTC installed; pip install 'gatewise[cuda]'"
    ]


def test_weights_that_do_not_fit_are_refused_with_their_size():
    refusals = [
        str(refusal)
        for criterion in persistent.criteria()
        if (refusal := criterion.check(PROBLEM.replace(hidden_size=4096), H200))
    ]
    assert len(refusals) == 1
    assert "128 MiB of recurrent weights" in refusals[0]


IN_TF32 = PROBLEM.replace(dtype=torch.float32, allow_tf32=True, batch=32)


def refusals_of(problem, device=H200):
    return [str(refusal) for criterion in persistent.criteria() if (refusal := criterion.check(problem, device))]


def test_float32_follows_the_users_setting():
    assert refusals_of(IN_TF32) == refusals_of(IN_TF32.replace(allow_tf32=False)) == []
    assert exact_products(IN_TF32.replace(allow_tf32=False))
    assert not exact_products(IN_TF32)
    assert not exact_products(PROBLEM)


@pytest.mark.parametrize("change", [{"batch": 1}, {"hidden_size": 128}, {"batch": 16}], ids=str)
def test_float32_is_exact_where_cudnn_never_rounds(change):
    assert exact_products(IN_TF32.replace(**change))
    assert refusals_of(IN_TF32.replace(**change)) == []


def test_exact_products_cost_time():
    exact = IN_TF32.replace(allow_tf32=False)
    works = [persistent.work(problem, H200) for problem in (exact, IN_TF32)]
    assert works[0].exact_flops == works[0].matmul_flops > works[1].exact_flops == 0
    times = [busy(work, problem, H200) for work, problem in zip(works, (exact, IN_TF32), strict=True)]
    assert times[0] > times[1]


def test_exact_weights_take_twice_the_room_of_rounded_ones():
    large = IN_TF32.replace(hidden_size=1500, input_size=1500)
    (refusal,) = refusals_of(large.replace(allow_tf32=False))
    assert "34.3 MiB of recurrent weights in 32 bits" in refusal
    assert "in training" in refusal
    assert refusals_of(large) == []
    assert refusals_of(large.replace(dtype=torch.bfloat16, allow_tf32=False)) == []


def test_float32_is_planned_and_kept_in_its_own_size():
    assert all(spec.dtype == torch.float32 for spec in persistent.kept(IN_TF32.replace(traced=True), H200))
    assert persistent.algorithm(IN_TF32, H200) != persistent.algorithm(PROBLEM, H200)


@pytest.mark.parametrize("hidden_size", [256, 41])
@pytest.mark.parametrize(("cell", "gates"), [(LSTM(), 4), (GRU(), 3), (RNN(), 1)], ids=repr)
def test_the_work_of_libraries_is_the_products_outside_the_loops(cell, gates, hidden_size):
    # Of the input; in training also the gradients of x, of the input weights and of the recurrent weights.
    problem = Problem(20, 8, 64, hidden_size, dtype=torch.bfloat16, cell=cell)
    row = 2 * 20 * 8 * gates * hidden_size
    assert persistent.work(problem, H200).matmul_flops == pytest.approx(row * 64)
    training = persistent.work(problem.replace(needs_grad=True), H200)
    assert training.matmul_flops == pytest.approx(row * (3 * 64 + hidden_size))


@pytest.mark.skipif(not widens(), reason="PyTorch 2.6 has no product of float16 with a float32 result")
@pytest.mark.parametrize("cell", [LSTM(), GRU()], ids=repr)
def test_products_of_float16_factors_are_part_of_all_products(cell):
    pair = IN_TF32.replace(time=35, batch=20, input_size=650, hidden_size=650, num_layers=2, cell=cell)
    work = persistent.work(pair, H200)
    assert 0 < work.half_flops <= work.matmul_flops


def test_states_its_work_and_what_it_keeps():
    work = persistent.work(PROBLEM, H200)
    assert work.exchanges > 0
    assert work.matmul_flops > 0
    one_by_one = persistent.kept(PROBLEM.replace(traced=True), H200)
    assert [spec.shape for spec in one_by_one] == [(1, 20, 8, 1024), (1, 20, 8, 256)]
    assert [spec.nbytes for spec in persistent.kept(PROBLEM, H200)] == [20 * 8 * (1024 + 256) * 2]
    assert persistent.kept(PROBLEM.replace(needs_grad=False), H200) == ()
    assert "units x" in persistent.algorithm(PROBLEM, H200)
