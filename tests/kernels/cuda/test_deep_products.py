"""Products over many tokens lack no terms, and the products into which they are split add up to them."""

import itertools
import random

import pytest
import torch

from gatewise import testing
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels import ALL
from gatewise.kernels.cuda import deep_products
from gatewise.kernels.cuda.deep_products import depths
from tests.kernels.persistent.emulation import assert_agrees, emulate
from tests.pairwise import each_value

MULTIPROCESSORS = 132

# Sizes of products that lacked their last block of at most 64 terms on an H200.
WRONG = [
    (32, 98176, 8),
    (256, 11528, 64),
    (64, 3073, 48),
    (128, 5635, 96),
    (384, 9859, 48),
    (320, 113994, 256),
    (768, 62660, 96),
    (1536, 114762, 256),
    (2600, 92740, 24),
    (4096, 64515, 256),
    (6000, 18435, 32),
    (8, 83264, 1),
    (800, 18242, 2048),
]


@pytest.mark.parametrize("size", WRONG, ids=str)
def test_a_depth_with_a_remaining_block_is_split(size):
    first, *others = depths(*size, MULTIPROCESSORS)
    assert others
    assert first + sum(others) == size[1]
    assert all(len(depths(size[0], depth, size[2], MULTIPROCESSORS)) == 1 for depth in (first, *others))


def test_the_last_terms_come_first():
    assert depths(256, 11528, 64, MULTIPROCESSORS) == (8, 11520)
    assert depths(16, 2049, 4, MULTIPROCESSORS) == (1, 2048)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param((256, 6272, 64), id="98 blocks: 97 is divided by nothing"),
        pytest.param((256, 2047, 64), id="not deep"),
        pytest.param((8192, 11528, 1024), id="a tile for nearly every multiprocessor"),
    ],
)
def test_other_products_are_not_split(size):
    assert depths(*size, MULTIPROCESSORS) == (size[1],)


def test_every_depth_is_covered_in_few_products():
    found = [depths(8, depth, 8, MULTIPROCESSORS) for depth in range(2048, 300_000, 997)]
    assert [sum(one) for one in found] == list(range(2048, 300_000, 997))
    assert max(map(len, found)) <= 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_product_on_a_cpu_is_not_split(dtype):
    left, right = torch.ones(32, 11528, dtype=dtype), torch.ones(11528, 8, dtype=dtype)
    assert [one.shape for one in deep_products.parts(left, right)[0]] == [left.shape, right.shape]


def close(found, left, right, start=0.0):
    exact = start + left.double() @ right.double()
    assert float((found.double() - exact).norm() / exact.norm()) < 4e-3


def in_halves(left, right):
    whole = left.shape[-1] // 2
    return [(left[..., whole:], right[..., whole:, :]), (left[..., :whole], right[..., :whole, :])]


def test_the_parts_add_up_to_the_product(monkeypatch):
    monkeypatch.setattr(deep_products, "parts", in_halves)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(2, *shape, generator=generator).bfloat16() for shape in ((12, 3000), (3000, 8)))
    close(deep_products.mm(left[0], right[0]), left[0], right[0])
    out = torch.full((12, 8), torch.nan, dtype=torch.bfloat16)
    assert deep_products.mm(left[0], right[0], out) is out
    close(out, left[0], right[0])
    begun = out.double()
    deep_products.addmm(out, left[1], right[1])
    close(out, left[1], right[1], begun)
    batch = torch.full((2, 12, 8), torch.nan, dtype=torch.bfloat16)
    deep_products.bmm(left, right, batch)
    close(batch, left, right)
    deep_products.bmm(left, right, batch, adds=True)
    close(batch, 2 * left, right)


@pytest.mark.parametrize(
    ("lean", "options"),
    each_value(
        [
            *itertools.product(
                [False, True],
                [
                    {},
                    {"hidden_size": 8, "bidirectional": True},
                    {"num_layers": 2, "bidirectional": True, "layout": Layout.HOST_LENGTHS},
                    {"time": 1},
                ],
            )
        ]
    ),
    ids=str,
)
def test_gradients_agree_when_every_product_is_split(monkeypatch, options, lean):
    emulate(monkeypatch)
    monkeypatch.setattr(deep_products, "parts", in_halves)
    assert_agrees(Problem(6, 3, 6, 5, dtype=torch.float64, needs_grad=True, lean=lean).replace(**options))


@pytest.mark.gpu
@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_term_is_counted_on_a_gpu(dtype, widened):
    if widened and not deep_products.widens():
        pytest.skip("this version of PyTorch has no such products")
    generator = random.Random(0)
    sizes = WRONG + [
        (8 * 2 ** generator.randrange(9), int(2 ** generator.uniform(11, 17)), 2 ** generator.randrange(10))
        for _ in range(500)
    ]
    for rows, depth, columns in sizes:
        left = torch.ones(depth, rows, dtype=dtype, device="cuda").t()
        right = torch.zeros(depth, columns, dtype=dtype, device="cuda")
        right[-256:] = 1
        out = torch.empty(rows, columns, device="cuda") if widened else None
        assert bool((deep_products.mm(left, right, out) == 256).all()), (rows, depth, columns)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["persistent", "stepwise", "eager"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("time", "hidden"), [(1441, 4), (1441, 64), (613, 200)])
def test_gradients_of_weights_over_many_tokens_on_a_gpu(kernel, dtype, time, hidden):
    problem = Problem(time, 8, hidden, hidden, num_layers=2, dtype=dtype, needs_grad=True)
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    exact = testing.named(problem, *testing.oracle(problem, inputs, gradients, "cuda"))
    chosen = {one.name: one for one in ALL}[kernel]
    found = testing.named(problem, *testing.run_kernel(chosen, problem, inputs, gradients))
    of_weights = [name for name in exact if name.startswith("dweight")]
    for name in of_weights:  # the last step alone is 2 to 18 percent of them
        assert testing.relative_error(found[name], exact[name]) < 3 * torch.finfo(dtype).eps, name
