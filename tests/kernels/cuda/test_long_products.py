"""Float32 products of large depth are split into several products."""

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
def test_the_split_products_add_up_to_the_products(of_full):
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


def test_products_that_cublas_accumulates_in_one_register_are_split():
    assert depths(factors(2624, 700, 656)) == [700]
    assert depths(factors(2624, 700, 656), of_full=3) == [232, 232, 236]
    assert depths(factors(2624, 511, 656), of_full=3) == [511]  # short
    assert depths(factors(1024, 1600, 256), of_full=3) == [1600]  # few tiles: cuBLAS uses split-K


def test_a_large_depth_is_halved():
    assert depths(factors(2048, 6400, 512)) == depths(factors(2048, 6400, 512), of_full=3) == [3200, 3200]
    assert depths(factors(2048, 4096, 512)) == [4096]
    assert depths(factors(5600, 4600, 1150)) == [4600]  # many tiles: cuBLAS uses fewer registers for half the depth


def test_each_product_is_split_separately():
    assert depths(factors(2048, 64, 512), factors(2048, 6336, 512)) == [64, 3168, 3168]


def test_a_large_depth_is_split_at_given_fractions():
    left, right = factors(700, 6000, 1500)
    parts = in_stretches([(left, right)], MULTIPROCESSORS, cuts=(7 / 12, 8 / 12))
    assert [part.shape[1] for part, _ in parts] == [3496, 504, 2000]
