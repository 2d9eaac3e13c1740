"""Products of great depth in stretches."""

import pytest
import torch

from gatewise.kernels.cuda.long_products import in_stretches

MULTIPROCESSORS = 132


def factors(rows, depth, columns):
    return torch.empty(rows, depth, device="meta"), torch.empty(depth, columns, device="meta")


def depths(*products, of_full=1):
    parts = in_stretches(products, MULTIPROCESSORS, of_full=of_full)
    assert all(left.shape[1] == right.shape[0] for left, right in parts)
    return [left.shape[1] for left, _ in parts]


@pytest.mark.parametrize("of_full", [1, 3])
def test_the_stretches_add_up_to_the_products(of_full):
    generator = torch.Generator().manual_seed(0)
    products = [
        (torch.randn(40, depth, generator=generator), torch.randn(depth, 24, generator=generator))
        for depth in (7, 600, 5001)
    ]
    whole = sum(left.double() @ right.double() for left, right in products)
    parts = in_stretches(products, 1, of_full=of_full)
    assert len(parts) == 1 + of_full + 2  # of depth 7, 600 and 5001
    total = sum(left.double() @ right.double() for left, right in parts)
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-12)


def test_what_the_library_makes_in_one_stretch():
    assert depths(factors(2624, 700, 656)) == [700]
    assert depths(factors(2624, 700, 656), of_full=3) == [232, 232, 236]
    assert depths(factors(2624, 511, 656), of_full=3) == [511]  # short
    assert depths(factors(1024, 1600, 256), of_full=3) == [1600]  # few tiles: the library parts it by itself


def test_great_depth_in_halves():
    assert depths(factors(2048, 6400, 512)) == depths(factors(2048, 6400, 512), of_full=3) == [3200, 3200]
    assert depths(factors(2048, 4096, 512)) == [4096]
    assert depths(factors(5600, 4600, 1150)) == [4600]  # many tiles: the library takes fewer registers for the half


def test_each_product_for_itself():
    assert depths(factors(2048, 64, 512), factors(2048, 6336, 512)) == [64, 3168, 3168]


def test_great_depth_cut_elsewhere():
    left, right = factors(700, 6000, 1500)
    parts = in_stretches([(left, right)], MULTIPROCESSORS, cuts=(7 / 12, 8 / 12))
    assert [part.shape[1] for part, _ in parts] == [3496, 504, 2000]
