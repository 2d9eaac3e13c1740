"""Calls of the cells GRU and RNN are those of PyTorch's layers: outputs, final state and every gradient."""

import functools
import itertools

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from gatewise.cells import GRU, RNN
from gatewise.contract.errors import KernelRefused
from gatewise.functional.differentiable import recurrent
from tests.pairwise import each_value

TIME, BATCH, INPUT, HIDDEN = 6, 3, 4, 5
FORMS = [
    {},
    {"num_layers": 2},
    {"bidirectional": True},
    {"bias": False},
    {"num_layers": 3, "bidirectional": True, "bias": False},
]


CELLS = {
    GRU(): torch.nn.GRU,
    RNN("tanh"): torch.nn.RNN,
    RNN("relu"): functools.partial(torch.nn.RNN, nonlinearity="relu"),
}


@pytest.fixture(params=CELLS, ids=lambda cell: cell.name)
def cell(request):
    return request.param


def made(cell, dtype=torch.float64, **form):
    torch.manual_seed(0)
    module = CELLS[cell](INPUT, HIDDEN, dtype=dtype, **form)
    rows = module.num_layers * (1 + module.bidirectional)
    x = torch.randn(TIME, BATCH, INPUT, dtype=dtype, requires_grad=True)
    return module, x, torch.randn(rows, BATCH, HIDDEN, dtype=dtype, requires_grad=True)


def ours(cell, module, x, h0, kernel="auto", **options):
    weights = tuple(module.parameters())
    given = {"lengths": None, "batch_sizes": None, "dropout": 0.0, "memory": "normal"} | options
    state = None if h0 is None else (h0,)
    y, h_n, _ = recurrent(x, state, weights, bidirectional=module.bidirectional, kernel=kernel, cell=cell, **given)
    return y, h_n


def gradients(outputs, module, *inputs):
    above = [torch.arange(output.numel(), dtype=output.dtype).view(output.shape).cos() for output in outputs]
    return torch.autograd.grad(outputs, [*inputs, *module.parameters()], above)


def assert_same(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("form", "kernel"), each_value([*itertools.product(FORMS, ["auto", "aten", "eager"])]), ids=str
)
def test_dense(cell, form, kernel):
    module, x, h0 = made(cell, **form)
    found, expected = ours(cell, module, x, h0, kernel), module(x, h0)
    assert_same(found, expected)
    assert_same(gradients(found, module, x, h0), gradients(expected, module, x, h0))


@pytest.mark.parametrize(("form", "kernel"), each_value([*itertools.product(FORMS[:4], ["auto", "eager"])]), ids=str)
def test_lengths(cell, form, kernel):
    module, x, h0 = made(cell, **form)
    lengths = torch.tensor([4, 6, 1])
    packed, h_n = module(pack_padded_sequence(x, lengths, enforce_sorted=False), h0)
    expected = pad_packed_sequence(packed, total_length=TIME)[0], h_n
    found = ours(cell, module, x, h0, kernel, lengths=lengths)
    assert_same(found, expected)
    assert_same(gradients(found, module, x, h0), gradients(expected, module, x, h0))


@pytest.mark.parametrize("kernel", ["aten", "eager"])
def test_packed_batches(cell, kernel):
    module, x, h0 = made(cell, num_layers=2)
    packed = pack_padded_sequence(x.detach(), torch.tensor([6, 3, 2]))
    y, h_n = module(packed, h0)
    found = ours(cell, module, packed.data, h0, kernel, batch_sizes=packed.batch_sizes)
    assert_same(found, (y.data, h_n))


def test_a_gate_that_an_infinite_bias_closes():
    cell = GRU()
    module, x, h0 = made(cell)
    with torch.no_grad():
        module.bias_hh_l0[:HIDDEN] = -torch.inf
    assert_same(ours(cell, module, x, h0, "eager"), module(x, h0))


@pytest.mark.parametrize("options", [{}, {"lengths": [4, 6, 1]}, {"lengths": [4, 0, 1]}], ids=str)
@pytest.mark.parametrize("kernel", ["aten", "eager"])
def test_other_states_may_be_given_without_elements(cell, kernel, options):
    module, x, h0 = made(cell)
    found = ours(cell, module, x, h0, kernel, **options)
    given = {"lengths": None, "batch_sizes": None, "dropout": 0.0, "memory": "normal"} | options
    state = h0, h0.new_zeros(1, BATCH, 0)
    weights = tuple(module.parameters())
    y, h_n, _ = recurrent(x, state, weights, bidirectional=False, kernel=kernel, cell=cell, **given)
    assert_same((y, h_n), found)


def test_without_a_state_it_begins_with_zeros(cell):
    module, x, _ = made(cell)
    assert_same(ours(cell, module, x, None), module(x))


@pytest.mark.parametrize("kernel", ["aten", "eager"])
def test_lean_memory_and_dropout_give_the_same_gradients_from_the_same_masks(cell, kernel):
    module, x, h0 = made(cell, num_layers=2)
    found = []
    for memory in ("normal", "lean"):
        if memory == "lean" and kernel == "aten":
            continue
        torch.manual_seed(7)
        outputs = ours(cell, module, x, h0, kernel, dropout=0.5, memory=memory)
        found.append((*outputs, *gradients(outputs, module, x, h0)))
    assert not torch.equal(found[0][0], ours(cell, module, x, h0, kernel)[0])
    assert_same(found[0], found[-1])


def test_second_derivatives(cell):
    module, x, h0 = made(cell)

    # Along random directions, as PyTorch's own tests do.
    run = functools.partial(ours, cell, module, kernel="eager")
    assert torch.autograd.gradgradcheck(run, (x, h0), atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lower_precisions_are_near(cell, dtype):
    module, x, h0 = made(cell)
    expected = module(x, h0)
    found = ours(cell, module.to(dtype), x.to(dtype), h0.to(dtype), "eager")
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 4 * torch.finfo(dtype).eps


# `make test` compiles layers with a single state: tests/nn/test_single_state.py.
@pytest.mark.exhaustive
def test_compiled(cell):
    module, x, h0 = made(cell, num_layers=2)
    weights, states = tuple(module.parameters()), h0.new_zeros(2, BATCH, 0)
    options = {"lengths": None, "batch_sizes": None, "bidirectional": False, "dropout": 0.0, "cell": cell}

    def run(x, h0, states, *weights):
        y, h_n, _ = recurrent(x, (h0, states), weights, kernel="auto", memory="normal", **options)
        return y, h_n

    found = torch.compile(run, backend="aot_eager", fullgraph=True)(x, h0, states, *weights)
    expected = module(x, h0)
    assert_same(found, expected)
    assert_same(gradients(found, module, x, h0), gradients(expected, module, x, h0))


def test_transforms_of_functions(cell):
    module, x, h0 = made(cell)
    weights = tuple(weight.detach() for weight in module.parameters())

    def loss(x):
        state = h0.detach(), h0.new_zeros(1, BATCH, 0)
        y, *_ = recurrent(
            x, state, weights, lengths=None, batch_sizes=None, bidirectional=False, dropout=0.0, kernel="auto",
            memory="normal", cell=cell,
        )  # fmt: skip
        return y.square().sum()

    (expected,) = torch.autograd.grad(module(x, h0)[0].square().sum(), x)
    torch.testing.assert_close(torch.func.grad(loss)(x.detach()), expected)


@pytest.mark.parametrize("kernel", ["persistent", "stepwise"])
def test_kernels_for_gpus_refuse_a_cpu_by_name(cell, kernel):
    module, x, h0 = made(cell)
    with pytest.raises(KernelRefused, match=r"device is CPU.*, allowed: a CUDA GPU of compute"):
        ours(cell, module, x, h0, kernel)
