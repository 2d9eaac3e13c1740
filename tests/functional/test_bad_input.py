"""Every argument that does not fit: named, with what was expected, what came, and a call that works afterwards."""

import re

import pytest
import torch

from gatewise import functional
from gatewise.contract.errors import ArgumentError, DeviceError, DtypeError, GatewiseError, ShapeError

WEIGHTS = torch.nn.LSTM(4, 6, num_layers=2, bidirectional=True).all_weights
FLAT = [tensor.detach() for direction in WEIGHTS for tensor in direction]
X = torch.randn(5, 3, 4)


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
    (ShapeError, "`lengths` must be one integer a sequence, [3], got [2]", lambda: run(lengths=[1, 2])),
    (
        ShapeError,
        "`lengths` must be one integer a sequence, [3], got [1, 3]",
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
    (ShapeError, "`weights` must be a multiple of 8 tensors (4 a direction), got 12", lambda: run(weights=FLAT[:12])),
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


@pytest.mark.parametrize(("error", "message", "call"), BAD, ids=[message for _, message, _ in BAD])
def test_bad_input_is_named_and_the_next_call_works(error, message, call):
    with pytest.raises(error, match=re.escape(message)) as raised:
        call()
    assert isinstance(raised.value, GatewiseError)
    assert run().y.shape == (5, 3, 12)


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
