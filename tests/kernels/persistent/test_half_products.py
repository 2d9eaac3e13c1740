"""Float16 factors of the products after the loop, on the CPU: as accurate as TF32 rounds, for values of any size."""

import functools

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU, LSTM, Regularised
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.kernels.cuda import deep_products, toolchain
from gatewise.kernels.persistent import dry_run
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.launches import SOURCES
from gatewise.kernels.persistent.sizes import exactness, half_operands, layer_pairs
from tests.kernels.persistent.half_factors import UNIT, Given
from tests.kernels.persistent.sources_on_cpu import launch_on_cpu

DEVICE = Device.named("a100").replace(multiprocessors=6)  # as in test_sources_on_cpu
H200 = Device.named("h200")
RAGGED = {"layout": Layout.DEVICE_LENGTHS}
PROBLEM = Problem(6, 9, 5, 8, dtype=torch.float32, needs_grad=True, allow_tf32=True)
DTYPE = {"DTYPE": 2}


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize(
    ("name", "macros"),
    [
        *(("half_rows", {"WIDTH": width, "THREADS": 256, **DTYPE}) for width in (32, 4096, 12000)),
        *(("half_results", {"BYTES": word, **DTYPE}) for word in (4, 8, 16)),
        *(("operands", {"BYTES": word, "RESETS": word // 8, "HALVES": 1, **DTYPE}) for word in (4, 16)),
        *(("fit", {"BYTES": word, "HALVES": 1, **DTYPE}) for word in (4, 8, 16)),
    ],
    ids=str,
)
def test_compiles_without_spills(architecture, name, macros):
    pytest.importorskip("cuda.core")
    _, taken = toolchain.compile_afresh(SOURCES / f"{name}.cu", architecture, macros)
    assert taken.spilled_bytes == 0


def widened(mm, left, right, out):
    """What a GPU computes: products of float16 numbers are exact, and added up in float32, here in float64."""
    if out.dtype == left.dtype:
        return mm(left, right, out)
    assert left.dtype == right.dtype == torch.float16
    return out.copy_(left.double() @ right.double())


@pytest.fixture
def sources(monkeypatch):
    """Run the sources on the CPU, with float16 factors."""
    monkeypatch.setattr(deep_products, "mm", functools.partial(widened, deep_products.mm))
    monkeypatch.setattr(half_operands, "uses_halves", lambda problem, features, device, *, x, weights: x or weights)
    for limit in ("_UNROUNDED_HIDDEN", "_SMALL_HIDDEN"):  # so that small layers round, too
        monkeypatch.setattr(exactness, limit, 0)
    return launch_on_cpu(monkeypatch, DEVICE)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bidirectional": True, "num_layers": 2, **RAGGED},
        {"bidirectional": True, "resets": True, **RAGGED},
        {"bidirectional": True, "hidden_size": 13, "input_size": 31, "cell": GRU(), "bias": False},
        {"hidden_size": 16, "cell": GRU()},
        {"bidirectional": True, "proj_size": 3, **RAGGED},
        {"input_size": 50},
        {"bidirectional": True, "input_size": 40},
        {"bidirectional": True, "input_size": 24, "traced": True},
        {"cell": Regularised(LSTM(), 0.3, (0.1, 0.2), 0.25)},
        {"time": 1},
    ],
    ids=str,
)
def test_gradients_agree_with_float64(sources, options):
    problem = PROBLEM.replace(**options)
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs)
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    for name, value in testing.named(problem, *testing.oracle(problem, inputs, gradients)).items():
        assert testing.relative_error(found[name], value) < 5e-3, name
    rounded = problem.num_layers * ["recurrent_half_rows"]
    assert [name for name in sources.launched if name == "recurrent_half_rows"] == rounded


def test_layers_in_pairs(monkeypatch, sources):
    monkeypatch.setattr(layer_pairs, "stacked_cut", layer_pairs.room_for_two)
    test_gradients_agree_with_float64(sources, {"num_layers": 2, "dropout": 0.4})
    assert sources.launched.count("recurrent_backward") == 1


@pytest.mark.parametrize("needs", [Needs(x=False), Needs(weights=False), Needs(state=False)], ids=str)
def test_what_is_not_wanted_is_left_out(sources, needs):
    problem = PROBLEM.replace(bidirectional=True)
    inputs = testing.make_inputs(problem)
    above = testing.make_gradients(problem, inputs)
    every = persistent.backward(problem, inputs, persistent.forward(problem, inputs), above, Needs())
    found = persistent.backward(problem, inputs, persistent.forward(problem, inputs), above, needs)
    for wanted, one, other in ((needs.x, [found.x], [every.x]), (needs.weights, found.weights, every.weights)):
        assert all(torch.equal(*both) if wanted else both[0] is None for both in zip(one, other, strict=True))


# The products by themselves.


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("features", [13, 40, 120])
@pytest.mark.parametrize("directions", [1, 2])
def test_products(sources, directions, features, by_row):
    Given((4, 3, features, 11), directions, by_row=by_row).check()


def test_the_error_of_each_token_is_that_of_its_own_gradients(sources):
    """A row of dx does not lose what the gradients of another token are larger by."""
    given = Given()
    given.dgates *= torch.logspace(0, -30, 12, base=2).view(4, 3, 1)
    given.check()
    exact, found = given.expected()[0], given.found()[0]
    for one, other in zip(exact.flatten(0, 1), found.flatten(0, 1), strict=True):
        assert testing.relative_error(other, one) < 3 * UNIT


def test_columns_of_very_different_size(sources):
    given = Given()
    given.x *= torch.logspace(0, -20, 13, base=2)
    given.check()
    exact, found = given.expected()[1], given.found()[1]
    for one, other in zip(exact.t(), found.t(), strict=True):
        assert testing.relative_error(other, one) < 3 * UNIT


@pytest.mark.parametrize("gradients", [1e-44, 1e-38, 1e-30, 1e-4, 1e20, 1e37])
@pytest.mark.parametrize("values", [1e-42, 1e-20, 1.0, 1e15])
def test_values_of_any_size(sources, gradients, values):
    """Subnormal numbers too, and results that are."""
    given = Given()
    given.dgates *= gradients
    for tensor in (given.x, given.y, given.h0, *given.weights[0][:2]):
        tensor *= values
    if gradients * values < 1e36:
        given.check()
    else:
        assert all(
            torch.equal(own.isinf(), other.float().isinf())
            for own, other in zip(given.found(), given.expected(), strict=True)
        )


def test_zeros(sources):
    given = Given(directions=2)
    given.dgates[0] = 0
    given.dgates[1, 2, 1] = 0
    given.check()
    for tensor in (given.x, given.y, given.h0, *(own.w_ih for own in given.weights)):
        tensor.zero_()
    assert all(not own.any() for own in given.found())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", ["dgates", "x", "y", "h0", "w_ih"])
def test_what_is_not_finite_stays_where_products_have_it(sources, place, value):
    given = Given()
    tensor = given.weights[0].w_ih if place == "w_ih" else getattr(given, place)
    tensor.view(-1)[3] = value  # of y in a step that another step reads
    for found, exact in zip(given.found(), given.expected(), strict=True):
        assert torch.equal(found.isfinite(), exact.isfinite())
        if value != value:
            assert torch.equal(found.isnan(), exact.isnan())
        finite = exact.isfinite()
        assert testing.relative_error(found.where(finite, 0), exact.where(finite, 0)) < 3 * UNIT


def test_values_after_the_end_of_a_sequence_count_for_nothing(sources):
    lengths = torch.tensor([4, 0, 2])
    given = Given(lengths=lengths)
    clean = given.found()
    given.x[2:, 2], given.x[:, 1], given.h0[:, 1] = 1e30, torch.nan, torch.inf
    given.y[2:, 2], given.y[:, 1] = 0, 0  # as outputs are
    again = given.found()
    given.x[2:, 2], given.x[:, 1], given.h0[:, 1] = -1e-30, 1e38, 7.0
    assert all(torch.equal(*both) for both in zip(again, given.found(), strict=True))
    assert torch.equal(again[1], clean[1])


def test_sums_stay_in_float32_where_the_user_allows_float16(sources, monkeypatch):
    allowed, mm = [], deep_products.mm
    monkeypatch.setattr(
        deep_products, "mm", lambda *given: allowed.append(torch._C._get_cublas_allow_fp16_accumulation()) or mm(*given)
    )
    torch._C._set_cublas_allow_fp16_accumulation(True)
    try:
        Given().found()
        assert torch._C._get_cublas_allow_fp16_accumulation()
    finally:
        torch._C._set_cublas_allow_fp16_accumulation(False)
    assert allowed
    assert not any(allowed)


# The choice.


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"time": 1, "batch": 2}, False),
        ({"allow_tf32": False}, False),
        ({"dtype": torch.bfloat16}, False),
        ({"lean": True}, False),
    ],
    ids=str,
)
def test_float16_factors_are_used_where_they_save_time(changes, expected):
    problem = Problem(100, 64, 1024, 1024, dtype=torch.float32, allow_tf32=True, needs_grad=True).replace(**changes)
    assert half_operands.uses_halves(problem, 1024, H200, x=True, weights=True) is expected
    assert bool(persistent.work(problem, H200).half_flops) is expected
    assert not half_operands.uses_halves(problem, 1024, H200, x=False, weights=False)
    assert not half_operands.uses_halves(problem, 1024, Device.named("a100"), x=True, weights=True)


def test_without_products_that_widen_nothing_changes(monkeypatch):
    problem = Problem(100, 64, 1024, 1024, dtype=torch.float32, allow_tf32=True, needs_grad=True)
    monkeypatch.setattr(half_operands, "widens", lambda: False)
    assert not half_operands.uses_halves.__wrapped__(problem, 1024, H200, x=True, weights=True)


def test_float16_factors_take_no_more_memory(monkeypatch):
    """They take that of the gradients, besides the input weights; copies of hidden states are no longer made."""
    problem = Problem(50, 64, 1024, 1024, dtype=torch.float32, allow_tf32=True, needs_grad=True, bidirectional=True)
    dry_run._memory_of.cache_clear()
    found = persistent.workspace_bytes(problem, H200)
    monkeypatch.setattr(half_operands, "uses_halves", lambda *given, **wanted: False)
    dry_run._memory_of.cache_clear()
    plain = persistent.workspace_bytes(problem, H200)
    dry_run._memory_of.cache_clear()
    weights = 4 * 1024 * 1024 * 2
    assert found - plain <= weights + (64 << 10)
