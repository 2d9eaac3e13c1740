"""Calls of the GRU cell are torch.nn.GRU's: outputs, final state and every gradient, on every kernel that has it."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from gatewise.cells import GRU
from gatewise.contract.errors import KernelRefused
from gatewise.functional.differentiable import recurrent

TIME, BATCH, INPUT, HIDDEN = 6, 3, 4, 5
FORMS = [
    {},
    {"num_layers": 2},
    {"bidirectional": True},
    {"bias": False},
    {"num_layers": 3, "bidirectional": True, "bias": False},
]


def made(dtype=torch.float64, **form):
    torch.manual_seed(0)
    module = torch.nn.GRU(INPUT, HIDDEN, dtype=dtype, **form)
    rows = module.num_layers * (1 + module.bidirectional)
    x = torch.randn(TIME, BATCH, INPUT, dtype=dtype, requires_grad=True)
    return module, x, torch.randn(rows, BATCH, HIDDEN, dtype=dtype, requires_grad=True)


def ours(module, x, h0, kernel="auto", **options):
    weights = tuple(module.parameters())
    given = {"lengths": None, "batch_sizes": None, "dropout": 0.0, "memory": "normal"} | options
    state = None if h0 is None else (h0, h0.new_zeros(h0.shape[0], h0.shape[1], 0))
    y, h_n, c_n = recurrent(x, state, weights, bidirectional=module.bidirectional, kernel=kernel, cell=GRU(), **given)
    assert c_n.shape == (*h_n.shape[:2], 0)
    return y, h_n


def gradients(outputs, module, *inputs):
    above = [torch.arange(output.numel(), dtype=output.dtype).view(output.shape).cos() for output in outputs]
    return torch.autograd.grad(outputs, [*inputs, *module.parameters()], above)


def assert_same(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("kernel", ["auto", "aten", "eager"])
def test_dense(form, kernel):
    module, x, h0 = made(**form)
    found, expected = ours(module, x, h0, kernel), module(x, h0)
    assert_same(found, expected)
    assert_same(gradients(found, module, x, h0), gradients(expected, module, x, h0))


@pytest.mark.parametrize("form", FORMS[:4], ids=str)
@pytest.mark.parametrize("kernel", ["auto", "eager"])
def test_lengths(form, kernel):
    module, x, h0 = made(**form)
    lengths = torch.tensor([4, 6, 1])
    packed, h_n = module(pack_padded_sequence(x, lengths, enforce_sorted=False), h0)
    expected = pad_packed_sequence(packed, total_length=TIME)[0], h_n
    found = ours(module, x, h0, kernel, lengths=lengths)
    assert_same(found, expected)
    assert_same(gradients(found, module, x, h0), gradients(expected, module, x, h0))


@pytest.mark.parametrize("kernel", ["aten", "eager"])
def test_packed_batches(kernel):
    module, x, h0 = made(num_layers=2)
    packed = pack_padded_sequence(x.detach(), torch.tensor([6, 3, 2]))
    y, h_n = module(packed, h0)
    found = ours(module, packed.data, h0, kernel, batch_sizes=packed.batch_sizes)
    assert_same(found, (y.data, h_n))


def test_a_gate_that_an_infinite_bias_closes():
    module, x, h0 = made()
    with torch.no_grad():
        module.bias_hh_l0[:HIDDEN] = -torch.inf
    assert_same(ours(module, x, h0, "eager"), module(x, h0))


def test_without_a_state_it_begins_with_zeros():
    module, x, _ = made()
    assert_same(ours(module, x, None), module(x))


@pytest.mark.parametrize("kernel", ["aten", "eager"])
def test_lean_memory_and_dropout_give_the_same_gradients_from_the_same_masks(kernel):
    module, x, h0 = made(num_layers=2)
    found = []
    for memory in ("normal", "lean"):
        if memory == "lean" and kernel == "aten":
            continue
        torch.manual_seed(7)
        outputs = ours(module, x, h0, kernel, dropout=0.5, memory=memory)
        found.append((*outputs, *gradients(outputs, module, x, h0)))
    assert not torch.equal(found[0][0], ours(module, x, h0, kernel)[0])
    assert_same(found[0], found[-1])


def test_second_derivatives():
    module, x, h0 = made()

    assert torch.autograd.gradgradcheck(lambda x, h0: ours(module, x, h0, "eager"), (x, h0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lower_precisions_are_near(dtype):
    module, x, h0 = made()
    expected = module(x, h0)
    found = ours(module.to(dtype), x.to(dtype), h0.to(dtype), "eager")
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 4 * torch.finfo(dtype).eps


def test_compiled():
    module, x, h0 = made(num_layers=2)
    weights, states = tuple(module.parameters()), h0.new_zeros(2, BATCH, 0)
    options = {"lengths": None, "batch_sizes": None, "bidirectional": False, "dropout": 0.0, "cell": GRU()}

    def run(x, h0, states, *weights):
        y, h_n, _ = recurrent(x, (h0, states), weights, kernel="auto", memory="normal", **options)
        return y, h_n

    found = torch.compile(run, backend="aot_eager", fullgraph=True)(x, h0, states, *weights)
    expected = module(x, h0)
    assert_same(found, expected)
    assert_same(gradients(found, module, x, h0), gradients(expected, module, x, h0))


def test_transforms_of_functions():
    module, x, h0 = made()
    weights = tuple(weight.detach() for weight in module.parameters())

    def loss(x):
        state = h0.detach(), h0.new_zeros(1, BATCH, 0)
        y, *_ = recurrent(
            x, state, weights, lengths=None, batch_sizes=None, bidirectional=False, dropout=0.0, kernel="auto",
            memory="normal", cell=GRU(),
        )  # fmt: skip
        return y.square().sum()

    (expected,) = torch.autograd.grad(module(x, h0)[0].square().sum(), x)
    torch.testing.assert_close(torch.func.grad(loss)(x.detach()), expected)


@pytest.mark.parametrize("kernel", ["persistent", "stepwise"])
def test_kernels_for_gpus_refuse_a_cpu_by_name(kernel):
    module, x, h0 = made()
    with pytest.raises(KernelRefused, match=r"device is CPU.*, allowed: a CUDA GPU of compute"):
        ours(module, x, h0, kernel)
