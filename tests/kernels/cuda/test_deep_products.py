"""Products over many tokens are made to the end, in parts that add up."""

import pytest
import torch

from gatewise import testing
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels import ALL
from gatewise.kernels.cuda import deep_products
from tests.kernels.persistent.emulation import assert_agrees, emulate


def factors(rows, depth, columns, dtype=torch.bfloat16):
    return torch.empty(rows, depth, dtype=dtype, device="meta"), torch.empty(depth, columns, dtype=dtype, device="meta")


def depths(*given, **options):
    return [left.shape[1] for left, _ in deep_products.parts(*factors(*given, **options))]


def test_what_remains_of_the_depth_comes_first():
    assert depths(256, 11528, 64) == [8, 11520]
    assert depths(256, 11528, 64, dtype=torch.float16) == [8, 11520]
    assert depths(16, 2049, 4) == [1, 2048]


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        pytest.param((256, 11520, 64), {}, id="whole blocks"),
        pytest.param((256, 2040, 64), {}, id="not deep"),
        pytest.param((4096, 11528, 1024), {}, id="many tiles"),
        pytest.param((256, 11528, 64), {"dtype": torch.float32}, id="float32"),
        pytest.param((256, 11528, 64), {"dtype": torch.float64}, id="float64"),
    ],
)
def test_other_products_are_made_at_once(sizes, options):
    assert depths(*sizes, **options) == [sizes[1]]


def close(found, left, right, start=0.0):
    exact = start + left.double() @ right.double()
    assert float((found.double() - exact).norm() / exact.norm()) < 4e-3


def test_the_parts_add_up_to_the_product():
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


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hidden_size": 8, "bidirectional": True},
        {"num_layers": 2, "bidirectional": True, "layout": Layout.HOST_LENGTHS},
        {"time": 1},
    ],
    ids=str,
)
def test_gradients_agree_when_every_product_is_parted(monkeypatch, options, lean):
    def parts(left, right):
        whole = left.shape[-1] // 2
        return [(left[..., whole:], right[..., whole:, :]), (left[..., :whole], right[..., :whole, :])]

    emulate(monkeypatch)
    monkeypatch.setattr(deep_products, "parts", parts)
    assert_agrees(Problem(6, 3, 6, 5, dtype=torch.float64, needs_grad=True, lean=lean).replace(**options))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("depth", [2049, 4104, 11528, 16392, 50001])
@pytest.mark.parametrize(("rows", "columns"), [(32, 8), (256, 64), (512, 128), (1024, 256), (2048, 512)])
def test_every_term_is_counted_on_a_gpu(dtype, depth, rows, columns):
    # Ones and zeros that 16 bits hold exactly: how many ones there are is the product.
    ones = torch.zeros(depth, dtype=dtype, device="cuda")
    ones[:: max(1, depth // 100)] = 1
    ones[-1] = 1
    left = ones.repeat(rows, 1).t().contiguous().t()
    right = torch.ones(depth, columns, dtype=dtype, device="cuda")
    assert bool((deep_products.mm(left, right) == int(ones.sum())).all())


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
