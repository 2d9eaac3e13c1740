"""Every argument that does not fit: named, with what was expected, what came, and a call that works afterwards."""

import itertools
import re

import numpy as np
import pytest
import torch

import gatewise
from gatewise import functional
from gatewise.contract.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    GatewiseError,
    KernelRefused,
    OutOfMemoryPredicted,
    ShapeError,
)
from tests.pairwise import each_value

WEIGHTS = torch.nn.LSTM(4, 6, num_layers=2, bidirectional=True).all_weights
FLAT = [tensor.detach() for direction in WEIGHTS for tensor in direction]
X = torch.randn(5, 3, 4)
RESETS = torch.zeros(5, 3, dtype=torch.bool)


def run(x=X, state=None, weights=WEIGHTS, **options):
    return functional.lstm(x, state, weights, bidirectional=options.pop("bidirectional", True), **options)


def states(*shapes, dtype=torch.float32):
    return tuple(torch.zeros(shape, dtype=dtype) for shape in shapes)


BAD = [
    (ShapeError, "`x` must be of rank 3, [T, B, I], got rank 2", lambda: run(X[0])),
    (ShapeError, "`x` must be of 4 features, got 3 in [5, 3, 3]", lambda: run(X[..., :3])),
    (DtypeError, "`x` must be torch.float32 like the weights, got torch.float64", lambda: run(X.double())),
    (
        DtypeError,
        "`x` must be float32, float64, float16 or bfloat16, got torch.int64",
        lambda: run(X.long(), None, [w.long() for w in FLAT]),
    ),
    (DeviceError, "`x` must be on cpu like the weights, got one on meta", lambda: run(X.to("meta"))),
    (
        ShapeError,
        "`h0` must be [4, 3, 6], which is [L*D, B, R], got [4, 2, 6]",
        lambda: run(state=states((4, 2, 6), (4, 3, 6))),
    ),
    (
        ShapeError,
        "`c0` must be [4, 3, 6], which is [L*D, B, H], got [2, 3, 6]",
        lambda: run(state=states((4, 3, 6), (2, 3, 6))),
    ),
    (
        DtypeError,
        "`h0` must be torch.float32 like x",
        lambda: run(state=states((4, 3, 6), (4, 3, 6), dtype=torch.float64)),
    ),
    (
        DeviceError,
        "`h0` must be on cpu like x",
        lambda: run(state=tuple(s.to("meta") for s in states((4, 3, 6), (4, 3, 6)))),
    ),
    (ShapeError, "`lengths` must be between 0 and T = 5, got -1", lambda: run(lengths=[1, -1, 2])),
    (ShapeError, "`lengths` must be between 0 and T = 5, got 6", lambda: run(lengths=torch.tensor([6, 1, 2]))),
    (ShapeError, "`lengths` must be one integer per sequence, [3], got [2]", lambda: run(lengths=[1, 2])),
    (
        ShapeError,
        "`lengths` must be one integer per sequence, [3], got [1, 3]",
        lambda: run(lengths=torch.ones(1, 3).long()),
    ),
    (DtypeError, "`lengths` must be integers, got torch.float32", lambda: run(lengths=torch.ones(3))),
    (DtypeError, "`lengths` must be integers, got torch.bool", lambda: run(lengths=torch.ones(3).bool())),
    (
        ArgumentError,
        "`lengths` must be None for a packed batch",
        lambda: run(X[0], lengths=[1], batch_sizes=torch.tensor([3])),
    ),
    (ArgumentError, "`dropout` must be a number from 0 to 1, got 1.5", lambda: run(dropout=1.5)),
    (ShapeError, "`weights` must be at least one direction of one layer, got none", lambda: run(weights=[])),
    (ShapeError, "`weights` must be a multiple of 8 tensors (4 per direction), got 12", lambda: run(weights=FLAT[:12])),
    (ShapeError, "`weights` must be shaped [24, 6] in layer 1, got [24, 4]", lambda: run(bidirectional=False)),
    (ShapeError, "`weights` must be w_ih [4H, I] and w_hh [4H, R] first", lambda: run(weights=[FLAT[2], FLAT[3]])),
    (ShapeError, "`weights` must be w_ih [4H, I]", lambda: run(weights=[FLAT[0][:23], *FLAT[1:]])),
    (
        DtypeError,
        "`weights` must be all torch.float32, got torch.float64",
        lambda: run(weights=[*FLAT[:-1], FLAT[-1].double()]),
    ),
    (DeviceError, "`weights` must be all on cpu, got meta", lambda: run(weights=[*FLAT[:-1], FLAT[-1].to("meta")])),
]


KINDS = "`lengths` must be a tensor, an array or a sequence of integers, got"
SEQUENCE = "`weights` must be a sequence of tensors, or one sequence of them for each direction of each layer, got"
PAIR = "`state` must be None or a pair (h0, c0), got"
KNOWN = "must be one of 'auto', 'persistent', 'cudnn', 'stepwise', 'aten', 'eager', got"
BUDGET = "`memory_budget` must be None or a positive number of bytes, got"
H, C = states((4, 3, 6), (4, 3, 6))


def packed(batch_sizes):
    return run(torch.randn(5, 4), batch_sizes=batch_sizes)


def explicit(x=X, state=None, weights=WEIGHTS, **options):
    return functional.forward(x, state, weights, bidirectional=True, **options)


def backward(*arguments, **options):
    (y, _), saved = explicit()
    return functional.backward(saved, *(y if each == "dy" else each for each in arguments), **options)


BAD += [
    *[(ArgumentError, f"{KINDS} str.", lambda given=given: run(lengths=given)) for given in ("5", "531")],
    (ArgumentError, f"{KINDS} set.", lambda: run(lengths={5, 3, 1})),
    (ArgumentError, f"{KINDS} dict.", lambda: run(lengths={0: 5, 1: 3, 2: 1})),
    (ArgumentError, f"{KINDS} int.", lambda: run(lengths=5)),
    (ArgumentError, f"{KINDS} generator.", lambda: run(lengths=(length for length in (5, 3, 1)))),
    (DtypeError, "`lengths` must be integers, got [5] at place 0", lambda: run(lengths=[[5], [3], [1]])),
    (DtypeError, "`lengths` must be integers, got None at place 1", lambda: run(lengths=[5, None, 1])),
    (DtypeError, "`lengths` must be integers, got 3.0 at place 1", lambda: run(lengths=[5, 3.0, 1])),
    (DtypeError, "`lengths` must be integers, got True at place 2", lambda: run(lengths=[5, 3, True])),
    (
        DtypeError,
        "`lengths` must be integers, got torch.bool at place 0",
        lambda: run(lengths=[torch.tensor(True)] * 3),
    ),
    (DtypeError, "`lengths` must be integers, got an array of float64", lambda: run(lengths=np.array([5.0, 3, 1]))),
    (DtypeError, "`lengths` must be integers, got an array of bool", lambda: run(lengths=np.ones(3, bool))),
    (DtypeError, "`lengths` must be integers, got an array of <U1", lambda: run(lengths=np.array(["5", "3", "1"]))),
    (
        ShapeError,
        "`lengths` must be integers of 64 bits, got 1180591620717411303424",
        lambda: run(lengths=[2**70, 1, 1]),
    ),
    (
        DeviceError,
        "`lengths` must be on the CPU like x, got on meta",
        lambda: run(lengths=torch.tensor([5, 3, 1], device="meta")),
    ),
    (ArgumentError, "`lengths` must be a dense tensor", lambda: run(lengths=torch.tensor([5, 3, 1]).to_sparse())),
    *[
        (ArgumentError, f"`resets` must be a tensor, got {kind}.", lambda given=given: run(resets=given))
        for given, kind in ((True, "bool"), ([[0, 1, 0]] * 5, "list"), (np.zeros((5, 3), bool), "ndarray"))
    ],
    (
        ArgumentError,
        "`resets` must be a dense tensor, got one of torch.sparse_coo",
        lambda: run(resets=RESETS.to_sparse()),
    ),
    *[
        (
            DtypeError,
            f"`resets` must be bool or integers, got {dtype}. Convert it with .bool().",
            lambda dtype=dtype: explicit(resets=RESETS.to(dtype)),
        )
        for dtype in (torch.float32, torch.complex64)
    ],
    *[
        (
            ShapeError,
            f"`resets` must be one value for each step, [T, B] = [5, 3], got {list(shape)}",
            lambda shape=shape: run(resets=torch.zeros(shape, dtype=torch.bool)),
        )
        for shape in ((3, 5), (5,), (5, 3, 1), (6, 3))
    ],
    (
        DeviceError,
        "`resets` must be on cpu like x, got one on meta. Move it with .to(x.device).",
        lambda: run(resets=RESETS.to("meta")),
    ),
    (
        ArgumentError,
        "`resets` must be None for a packed batch, got Tensor. Give the padded batch with `lengths` and `resets`.",
        lambda: run(torch.randn(5, 4), batch_sizes=torch.tensor([3, 2]), resets=RESETS),
    ),
    (ArgumentError, "`x` must be a tensor, got list", lambda: run(X.tolist())),
    (ArgumentError, "`x` must be a tensor, got ndarray", lambda: explicit(X.numpy())),
    (ArgumentError, "`x` must be a dense tensor, got one of torch.sparse_coo", lambda: run(X.to_sparse())),
    (ArgumentError, f"{PAIR} Tensor. Give zeros", lambda: run(state=H)),
    (ArgumentError, f"{PAIR} (Tensor).", lambda: explicit(state=(H,))),
    (ArgumentError, f"{PAIR} (Tensor, None).", lambda: run(state=(H, None))),
    (ArgumentError, f"{PAIR} (ndarray, ndarray).", lambda: explicit(state=(H.numpy(), C.numpy()))),
    (ArgumentError, f"{PAIR} dict.", lambda: run(state={"h": H, "c": C})),
    (ArgumentError, f"{SEQUENCE} int.", lambda: run(weights=3)),
    (ArgumentError, f"{SEQUENCE} Tensor.", lambda: run(weights=FLAT[0])),
    (ArgumentError, f"{SEQUENCE} dict.", lambda: explicit(weights=dict(enumerate(FLAT)))),
    (ArgumentError, f"{SEQUENCE} generator.", lambda: run(weights=(weight for weight in FLAT))),
    (ArgumentError, f"{SEQUENCE} None as weights[0].", lambda: run(weights=[None])),
    (ArgumentError, f"{SEQUENCE} Tensor as weights[1].", lambda: run(weights=[WEIGHTS[0], FLAT[1]])),
    (ArgumentError, "`weights[2]` must be a tensor, got int", lambda: run(weights=[*FLAT[:2], 3, *FLAT[3:]])),
    (ArgumentError, "`weights[0]` must be a tensor, got ndarray", lambda: explicit(weights=[[FLAT[0].numpy()]])),
    (
        ArgumentError,
        "`batch_sizes` must be a tensor, as `PackedSequence.batch_sizes`, got list",
        lambda: packed([3, 2]),
    ),
    (DtypeError, "`batch_sizes` must be torch.int64, got torch.int32", lambda: packed(torch.tensor([3, 2]).int())),
    (DeviceError, "`batch_sizes` must be on the CPU, got on meta", lambda: packed(torch.tensor([3, 2], device="meta"))),
    (ShapeError, "`batch_sizes` must be of rank 1, [T], got [1, 2]", lambda: packed(torch.tensor([[3, 2]]))),
    (ShapeError, "`batch_sizes` must be positive numbers that do not", lambda: packed(torch.tensor([2, 3]))),
    (ShapeError, "`batch_sizes` must be positive numbers that do not", lambda: packed(torch.tensor([5, 0]))),
    (ShapeError, "whose sum is N = 5, the rows of x, got [3] with the sum 3", lambda: packed(torch.tensor([3]))),
    *[
        (
            ArgumentError,
            f"`dropout` must be a number from 0 to 1, got {given!r}",
            lambda given=given: run(dropout=given),
        )
        for given in (None, "0.5", [0.5], float("nan"), -1)
    ],
    (ArgumentError, "`bidirectional` must be True or False, got 'yes'", lambda: run(bidirectional="yes")),
    (ArgumentError, "`memory` must be 'normal' or 'lean', got 'leen'", lambda: run(memory="leen")),
    (ArgumentError, "`memory` must be 'normal' or 'lean', got ['lean']", lambda: explicit(memory=["lean"])),
    (KernelRefused, f"`kernel` {KNOWN} 'foo'", lambda: run(kernel="foo")),
    (KernelRefused, f"`kernel` {KNOWN} ''", lambda: gatewise.explain(gatewise.LSTM(4, 6), X, kernel="")),
    (KernelRefused, f"`kernel` {KNOWN} ''", lambda: backward("dy", kernel="")),
    (ArgumentError, "`kernel` must be 'auto' or the name of a kernel, got None", lambda: run(kernel=None)),
    (ArgumentError, "`kernel` must be 'auto' or the name of a kernel, got ['eager']", lambda: run(kernel=["eager"])),
    *[
        (ArgumentError, f"{BUDGET} {given!r}", lambda given=given: explicit(memory_budget=given))
        for given in (float("nan"), -float("inf"), -1, 0, "8GB", True, [1])
    ],
    (ArgumentError, f"{BUDGET} nan", lambda: explicit(memory_budget=float("nan"), kernel="eager")),
    (OutOfMemoryPredicted, "no kernel fits into the memory budget", lambda: explicit(memory_budget=1)),
    *[
        (
            ArgumentError,
            f"`saved` must be what gatewise.functional.forward returned for backward, got {kind}.",
            lambda given=given: functional.backward(given, None),
        )
        for given, kind in ((None, "None"), ("saved", "str"), (X, "Tensor"))
    ],
    (ArgumentError, "`dy` must be None or a tensor, got list", lambda: backward([1.0])),
    (
        DeviceError,
        "`dy` must be on cpu as its output, got one on meta",
        lambda: backward(torch.empty(5, 3, 12).to("meta")),
    ),
    (ArgumentError, "`dstate` must be None or a pair (dh, dc), each of them a", lambda: backward("dy", X)),
    (ArgumentError, "`needs` must be Needs(x, state, weights), got [True]", lambda: backward("dy", needs=[True])),
]


@pytest.mark.parametrize(("error", "message", "call"), BAD, ids=[message for _, message, _ in BAD])
def test_bad_input_is_named_and_the_next_call_works(error, message, call):
    with pytest.raises(error, match=re.escape(message)) as raised:
        call()
    assert isinstance(raised.value, GatewiseError)
    assert run().y.shape == (5, 3, 12)


def test_the_environment_is_named_where_it_names_no_kernel(monkeypatch):
    monkeypatch.setenv("GATEWISE_KERNEL", "foo")
    with pytest.raises(KernelRefused, match=r"`GATEWISE_KERNEL` must be one of 'auto', .* got 'foo'"):
        run()
    assert run(kernel="eager").y.shape == (5, 3, 12)


INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


@pytest.mark.parametrize(
    ("kernel", "dtype"), each_value([*itertools.product(["eager", "aten"], [*INTEGERS, ">i4", "object"])]), ids=str
)
def test_lengths_may_be_integers_of_any_type(dtype, kernel):
    array = np.array([5, 1, 3], dtype=dtype)
    expected = run(lengths=torch.tensor([5, 1, 3]), kernel=kernel).y
    forms = [array, array[::-1][::-1], list(array), tuple(array)]
    if dtype in INTEGERS:
        tensor = torch.from_numpy(array)
        forms += [tensor, list(tensor)]
    for lengths in forms:
        torch.testing.assert_close(run(lengths=lengths, kernel=kernel).y, expected, rtol=0, atol=0)


@pytest.mark.parametrize("budget", [None, 10**9, 1e9, np.float32(1e9), np.int64(10**9), float("inf")])
def test_a_memory_budget_may_be_any_positive_number(budget):
    assert explicit(memory_budget=budget)[0].y.shape == (5, 3, 12)


@pytest.mark.parametrize("kernel", ["eager", "aten"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_gradient_of_any_output_all_gradients_are_zero(kernel, dtype):
    weights = [weight.to(dtype) for weight in FLAT]
    _, saved = explicit(X.to(dtype), weights=weights, kernel=kernel)
    found = functional.backward(saved, None)
    for tensor in (found.x, *found.state, *found.weights):
        assert tensor.shape
        assert not tensor.any()


def test_torch_programs_that_catch_runtime_errors_keep_working():
    with pytest.raises(RuntimeError):
        run(X[..., :3])
    with pytest.raises(ValueError):  # noqa: PT011
        run(X[0])


@pytest.mark.parametrize("kernel", ["auto", "eager", "aten"])
@pytest.mark.parametrize(("time", "batch"), [(0, 3), (5, 0), (0, 0)])
def test_empty_sequences_and_batches_give_empty_results(kernel, time, batch):
    if kernel == "aten":
        with pytest.raises(GatewiseError, match=f"time x batch is {time} x {batch}, allowed: at least 1"):
            run(X[:time, :batch], kernel=kernel)
        return
    x = X[:time, :batch].requires_grad_()
    state = tuple(torch.randn(4, batch, 6, requires_grad=True) for _ in range(2))
    y, final = run(x, state, kernel=kernel)
    assert y.shape == (time, batch, 12)
    if time == 0:
        torch.testing.assert_close(tuple(final), state, rtol=0, atol=0)
    torch.autograd.backward([y, *final], [torch.ones_like(tensor) for tensor in (y, *final)])
    assert x.grad.shape == x.shape
    assert state[0].grad.shape == (4, batch, 6)


@pytest.mark.parametrize("kernel", ["auto", "eager"])
def test_all_lengths_zero_hand_the_state_through(kernel):
    state = tuple(torch.randn(4, 3, 6, requires_grad=True) for _ in range(2))
    y, final = run(state=state, lengths=[0, 0, 0], kernel=kernel)
    assert y.shape == (5, 3, 12)
    assert not y.any()
    torch.testing.assert_close(tuple(final), state, rtol=0, atol=0)
    torch.autograd.backward(list(final), [torch.full_like(tensor, 2.0) for tensor in final])
    torch.testing.assert_close(state[0].grad, torch.full((4, 3, 6), 2.0), rtol=0, atol=0)


@pytest.mark.gpu
def test_a_length_out_of_range_on_the_gpu_turns_its_row_into_nan():
    weights = [tensor.cuda() for tensor in FLAT]
    y, (h_n, _) = run(X.cuda(), weights=weights, lengths=torch.tensor([5, 6, -1], device="cuda"))
    assert torch.isfinite(y[:, 0]).all()
    assert y[:, 1].isnan().all()
    assert h_n[:, 2].isnan().all()
