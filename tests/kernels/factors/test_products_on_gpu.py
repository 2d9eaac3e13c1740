"""Products of float16 factors on a device, held to what rounding the factors costs."""

import pytest
import torch

from gatewise import testing
from gatewise.kernels.cuda.deep_products import widens
from tests.kernels.factors.half_factors import UNIT, Given

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not widens(), reason="needs products that widen their factors")]


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("features", [13, 40, 120])
def test_products_of_small_factors(features, directions):
    Given((4, 3, features, 11), directions, device="cuda").check()


@pytest.mark.parametrize("gradients", [1e-44, 1e-38, 1e-4, 1e20])
@pytest.mark.parametrize("values", [1e-42, 1e-20, 1.0, 1e15])
def test_values_of_any_size(gradients, values):
    given = Given(device="cuda")
    given.dgates *= gradients * torch.logspace(0, -30, 12, base=2).view(4, 3, 1)
    for tensor in (given.x, given.y, given.h0, *given.weights[0][:2]):
        tensor *= values
    given.x *= torch.logspace(0, -20, 13, base=2)
    given.check()


def test_what_is_not_finite_stays_where_products_have_it():
    for place in ("dgates", "x", "y", "h0"):
        for value in (torch.nan, torch.inf):
            given = Given(device="cuda")
            getattr(given, place).view(-1)[3] = value
            for found, exact in zip(given.found(), given.expected(), strict=True):
                assert torch.equal(found.isfinite(), exact.isfinite()), (place, value)


@pytest.mark.parametrize("sizes", [(50, 64, 512, 512), (20, 80, 200, 650), (300, 8, 1024, 200)])
def test_products_of_large_factors(sizes):
    given = Given(sizes, 2, device="cuda")
    for found, exact in zip(given.found(), given.expected(), strict=True):
        assert testing.relative_error(found, exact) < UNIT
