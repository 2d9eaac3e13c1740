"""Products of float16 factors, on the CPU: as accurate as TF32 rounds, for values of any size."""

import functools

import pytest
import torch

from gatewise import testing
from gatewise.kernels.cuda import deep_products, toolchain
from gatewise.kernels.factors import halves
from gatewise.kernels.factors.copies import SOURCES
from tests.kernels.factors.half_factors import UNIT, Given, widened
from tests.kernels.persistent.sources_on_cpu import launch_factors_on_cpu

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


@pytest.fixture
def sources(monkeypatch):
    """Run the sources on the CPU."""
    monkeypatch.setattr(deep_products, "mm", functools.partial(widened, deep_products.mm))
    return launch_factors_on_cpu(monkeypatch)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("features", [13, 40, 120])
@pytest.mark.parametrize("directions", [1, 2])
def test_products(sources, directions, features, by_row):
    Given((4, 3, features, 11), directions, by_row=by_row).check()


@pytest.mark.parametrize("size", [48, 270], ids=["several-warps", "several-loads"])
def test_rows_that_a_block_reads_together(sources, size):
    """Warps write a row back only when all have read it."""
    Given((2, 3, 5, size)).check()


def test_blocks_with_several_rows(sources, monkeypatch):
    monkeypatch.setattr(halves, "_MOST_BLOCKS", 4)
    Given((5, 3, 40, 48), 2).check()


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
