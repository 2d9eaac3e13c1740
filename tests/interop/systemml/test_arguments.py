"""Kinds of matrices, sizes, batches and memory: what goes in, what comes back, and every argument that does not fit."""

import re

import numpy as np
import pytest
import reference_lstm as reference
import torch

import gatewise
from gatewise.contract.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    GatewiseError,
    KernelRefused,
    OutOfMemoryPredicted,
    ShapeError,
)
from gatewise.interop import systemml
from tests.logged import logged

N, T, D, M = 6, 5, 4, 3
P = reference.problem((N, T, D, M), True)


def run(**changes):
    given = dict(zip(("X", "W", "b", "out0", "c0"), P.inputs, strict=True)) | changes
    return systemml.lstm(*(given.pop(name) for name in ("X", "W", "b", "out0", "c0")), True, **given)


def back(dout=P.dout, dc=P.dc, given_sequences=True, **changes):
    given = dict(zip(("X", "W", "b", "out0", "c0"), P.inputs, strict=True)) | changes
    *_, state = run()
    return systemml.lstm_backward(*given.values(), given_sequences, dout, dc, state)


def torch_of(array):
    return torch.from_numpy(array)


TENSORS = [torch.from_numpy(array) for array in P.inputs]

BAD = [
    (ShapeError, "`X` must be [N, T*D] with a multiple of D = 4 columns, got [6, 19]", lambda: run(X=P.X[:, :19])),
    (ShapeError, "`X` must be [N, T*D] with a multiple of D = 4 columns, got [6, 0]", lambda: run(X=P.X[:, :0])),
    (ShapeError, "`X` must be a matrix, got rank 3", lambda: run(X=P.X[None])),
    (ShapeError, "`W` must be [D+M, 4M], with M = 3 columns of out0", lambda: run(W=P.W[:, :11])),
    (
        ShapeError,
        "with M = 3 columns of out0 [more than 3, 12], got [3, 12]",
        lambda: run(W=P.W[:3]),
    ),
    (ShapeError, "`b` must be [1, 4M] = [1, 12], got [1, 11]", lambda: run(b=P.b[:, :11])),
    (ShapeError, "`b` must be a matrix, got rank 1 with shape [12]", lambda: run(b=P.b[0])),
    (ShapeError, "`c0` must be [6, 3] like out0, got [6, 2]", lambda: run(c0=P.c0[:, :2])),
    (ShapeError, "`c0` must be [6, 3] like out0, got [5, 3]", lambda: run(c0=P.c0[:5])),
    (ShapeError, "`W` must be [D+M, 4M], with M = 2 columns", lambda: run(out0=P.out0[:, :2], c0=P.c0[:, :2])),
    (ShapeError, "`out0` must be [N, M] with M at least 1", lambda: run(out0=P.out0[:, :0], c0=P.c0[:, :0])),
    (
        ShapeError,
        "`out0` must be of at least 6 rows, for the 6 of X, got [5, 3]. A smaller last batch",
        lambda: run(out0=P.out0[:5], c0=P.c0[:5]),
    ),
    (DtypeError, "`X` must be float64 or float32, got int64", lambda: run(X=P.X.astype(int))),
    (DtypeError, "`X` must be float64 or float32, got float16", lambda: run(X=P.X.astype(np.float16))),
    (DtypeError, "`X` must be float64 or float32, got complex128", lambda: run(X=P.X.astype(complex))),
    (DtypeError, "`X` must be float64 or float32, got object", lambda: run(X=P.X.astype(object))),
    (DtypeError, "`W` must be float64 like X, got float32", lambda: run(W=P.W.astype(np.float32))),
    (
        ArgumentError,
        "`W` must be a NumPy array or SciPy matrix like X, got a torch",
        lambda: run(W=torch_of(P.W)),
    ),
    (
        ArgumentError,
        "a torch tensor or a SciPy sparse matrix, got list",
        lambda: run(X=P.X.tolist()),
    ),
    (
        ArgumentError,
        "`c0` must be a NumPy array, a torch tensor or a SciPy sparse matrix",
        lambda: run(c0=None),
    ),
    (
        ArgumentError,
        "`b` must be dense, got a sparse matrix. X and W may be sparse",
        lambda: systemml.lstm(
            *map(torch_of, P.inputs[:2]), torch_of(P.b).to_sparse(), *map(torch_of, P.inputs[3:]), True
        ),
    ),
    (
        DeviceError,
        "`W` must be on cpu like X, got on meta",
        lambda: systemml.lstm(TENSORS[0], TENSORS[1].to("meta"), *TENSORS[2:], True),
    ),
    (
        ShapeError,
        "`dout` must be [6, 15], got [6, 3]. given_sequences is True: dout is of every step.",
        lambda: back(dout=P.dout[:, :M]),
    ),
    (
        ShapeError,
        "`dout` must be [6, 3], got [6, 15]. given_sequences is False: dout is of the last step.",
        lambda: back(given_sequences=False),
    ),
    (ShapeError, "`dc` must be [6, 3], got [5, 3]", lambda: back(dc=P.dc[:5])),
    (DtypeError, "`dc` must be float64 like X, got float32", lambda: back(dc=P.dc.astype(np.float32))),
    (ArgumentError, "`dout` must be a NumPy array or SciPy matrix like X", lambda: back(dout=torch_of(P.dout))),
    (
        ShapeError,
        "`out0` must be of as many rows as X in the backward pass, 4, got 6. After a smaller last batch",
        lambda: back(X=P.X[:4], dout=P.dout[:4], dc=P.dc[:4]),
    ),
    (DeviceError, "`device` must be a CPU or CUDA device, got 'gpu'", lambda: run(device="gpu")),
    (ArgumentError, "`seed` must be None or an integer of 0 or more, got -1", lambda: systemml.init(4, 5, 2, seed=-1)),
    (KernelRefused, "the kernel 'cudnn' cannot run this call", lambda: run(kernel="cudnn")),
    (KernelRefused, "`kernel` must be one of", lambda: run(kernel="no-such")),
    (OutOfMemoryPredicted, "no kernel fits into the memory budget", lambda: run(memory_budget=10)),
    (
        ShapeError,
        "`out0` must be [2N, M], forward rows above reverse rows, got [5, 3]",
        lambda: systemml.bilstm(P.X, P.W, P.W, P.b, P.b, P.out0[:5], P.c0[:5], True),
    ),
    (
        ShapeError,
        "`out0` must be of at least 12 rows, 2N, for the 6 of X, got [6, 3]",
        lambda: systemml.bilstm(P.X, P.W, P.W, P.b, P.b, P.out0, P.c0, True),
    ),
    (
        ShapeError,
        "`W_reverse` must be [7, 12] like W, got [6, 12]",
        lambda: systemml.bilstm(P.X, P.W, P.W[1:], P.b, P.b, P.out0, P.c0, True),
    ),
    (
        ShapeError,
        "`b_reverse` must be [1, 4M] = [1, 12], got [2, 12]",
        lambda: systemml.bilstm(P.X, P.W, P.W, P.b, np.vstack([P.b] * 2), P.out0, P.c0, True),
    ),
    (ArgumentError, "`M` must be a positive integer, got 0", lambda: systemml.init(3, 4, 0)),
    (ArgumentError, "`N` must be a positive integer, got 2.5", lambda: systemml.init(2.5, 4, 1)),
    (
        DtypeError,
        "float64 or float32, of NumPy or of torch, got int32",
        lambda: systemml.init(1, 1, 1, dtype=np.int32),
    ),
    (ArgumentError, "`N` must be a positive integer, got True", lambda: systemml.init(True, 4, 1)),
    (
        DtypeError,
        "`dtype` must be float64 or float32, of NumPy or of torch, got 'abc'",
        lambda: systemml.init(1, 1, 1, dtype="abc"),
    ),
    (
        DtypeError,
        "`dtype` must be float64 or float32, of NumPy or of torch, got 7",
        lambda: systemml.init(1, 1, 1, dtype=7),
    ),
    (
        DeviceError,
        "`device` must be a CPU or CUDA device, got 'gpu'",
        lambda: systemml.init(1, 1, 1, dtype=torch.float32, device="gpu"),
    ),
    (ArgumentError, "`device` must be None for NumPy arrays, got 'cpu'", lambda: systemml.init(1, 1, 1, device="cpu")),
]


@pytest.mark.parametrize(("error", "message", "call"), BAD, ids=[message for _, message, _ in BAD])
def test_bad_input_is_named_and_the_next_call_works(error, message, call):
    with pytest.raises(error, match=re.escape(message)) as raised:
        call()
    assert isinstance(raised.value, GatewiseError)
    assert run()[0].shape == (N, T * M)


@pytest.mark.parametrize("rows", [1, 4, 6])
@pytest.mark.parametrize("kernel", ["eager", "aten"])
def test_a_smaller_last_batch_takes_the_first_rows(rows, kernel):
    out, c, state = run(X=P.X[:rows], kernel=kernel)
    full, c_full, _ = run(kernel=kernel)
    np.testing.assert_allclose(out, full[:rows], rtol=1e-10)
    np.testing.assert_allclose(c, c_full[:rows], rtol=1e-10)
    # Its state serves the backward pass that is given the rows that were taken.
    inputs = (P.X[:rows], P.W, P.b, P.out0[:rows], P.c0[:rows])
    found = systemml.lstm_backward(*inputs, True, P.dout[:rows], P.dc[:rows], state)
    expected = reference.backward(*inputs, True, P.dout[:rows], P.dc[:rows])
    assert all(reference.error(result, value) <= 1e-9 for result, value in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tensors_in_tensors_out(dtype):
    tensors = [torch_of(array).to(dtype).requires_grad_() for array in P]
    out, c, state = systemml.lstm(*tensors[:5], True)
    found = systemml.lstm_backward(*tensors[:5], True, *tensors[5:], state)
    for result in (out, c, *found):
        assert isinstance(result, torch.Tensor)
        assert result.dtype == dtype
        assert not result.requires_grad


def test_arrays_that_torch_cannot_share_are_read_all_the_same():
    expected = run()[0]
    fixed = P.X.copy()
    fixed.flags.writeable = False
    for X in (fixed, P.X[::-1][::-1], np.asfortranarray(P.X), P.X.astype(">f8"), np.repeat(P.X, 2, 0)[::2]):
        np.testing.assert_allclose(run(X=X)[0], expected, rtol=1e-12)


def test_missing_gradients_are_zero():
    *_, state = run()
    zero = np.zeros_like
    for dout, dc in ((None, P.dc), (P.dout, None), (None, None)):
        filled = zero(P.dout) if dout is None else dout, zero(P.dc) if dc is None else dc
        found = systemml.lstm_backward(*P.inputs, True, dout, dc, state)
        expected = systemml.lstm_backward(*P.inputs, True, *filled, state)
        for result, value in zip(found, expected, strict=True):
            np.testing.assert_allclose(result, value, rtol=1e-12, atol=1e-14)


def test_inputs_stay_as_they_were():
    before = [array.copy() for array in P]
    *_, state = run()
    systemml.lstm_backward(*P.inputs, True, P.dout, P.dc, state)
    for array, copy in zip(P, before, strict=True):
        np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize("sorted_indices", [True, False])
def test_sparse_matrices_in_any_order_and_with_duplicates(sorted_indices):
    sparse = pytest.importorskip("scipy.sparse")
    rows, columns = np.array([0, 0, 3, 3, 3, 5]), np.array([17, 2, 9, 9, 1, 19])
    values = np.random.default_rng(0).standard_normal(6)
    plain = np.zeros((N, T * D))
    np.add.at(plain, (rows, columns), values)
    indptr = np.array([0, 2, 2, 2, 5, 5, 6])
    X = sparse.csr_array((values, columns, indptr), shape=plain.shape)
    if sorted_indices:
        X.sum_duplicates()
    before = X.indices.copy()
    out, _, state = run(X=X)
    assert state.projected == (X.nnz < systemml.DENSITY["cpu"] * plain.size)
    np.testing.assert_allclose(out, run(X=plain)[0], rtol=1e-12)
    np.testing.assert_array_equal(X.indices, before)


def test_memory_passes_the_preferred_kernel_over_with_one_line():
    _, _, state = run()
    from gatewise.contract.device import Device
    from gatewise.selection import decide

    accepted = {v.kernel: v for v in decide(state.saved.problem, Device.probe("cpu")).verdicts if v.accepted}
    preferred = accepted.pop(state.kernel)
    other = min(accepted.values(), key=lambda verdict: verdict.peak_bytes)
    if other.peak_bytes > preferred.peak_bytes:
        pytest.skip("the preferred kernel needs the least memory")
    with logged() as messages:
        out, _, small = run(memory_budget=preferred.peak_bytes - 1)
    assert small.kernel == other.kernel
    (line,) = messages
    assert f"{small.kernel} runs: {state.kernel} needs" in line
    np.testing.assert_allclose(out, run()[0], rtol=1e-12)


def test_sparse_matrices_made_dense_are_said():
    X = pytest.importorskip("scipy.sparse").csr_array(np.eye(N, T * D))
    with logged() as messages, gatewise.use_kernel("aten"):
        _, _, state = run(X=X)
    assert not state.projected
    assert messages == ["sparse matrices are converted to dense ones: the kernel 'aten' cannot run this call"]


def test_forced_by_configuration(monkeypatch):
    monkeypatch.setenv("GATEWISE_KERNEL", "aten")
    assert run()[2].kernel == "aten"
    with gatewise.use_kernel("eager"):
        assert run()[2].kernel == "eager"
        assert run(kernel="aten")[2].kernel == "aten"


def test_init():
    W, b, out0, c0 = systemml.init(20, 50, 10, seed=3)
    assert [a.shape for a in (W, b, out0, c0)] == [(60, 40), (1, 40), (20, 10), (20, 10)]
    scale = np.sqrt(6 / (60 + 40))
    assert 0.99 * scale < np.abs(W).max() <= scale
    assert abs(W.mean()) < 0.02 * scale
    assert not any(array.any() for array in (b, out0, c0))
    assert W.dtype == np.float64
    tensors = systemml.init(20, 50, 10, dtype=torch.float32, seed=3)
    assert all(tensor.dtype == torch.float32 for tensor in tensors)
    np.testing.assert_array_equal(tensors[0].numpy(), W.astype(np.float32))
    assert not np.array_equal(systemml.init(20, 50, 10, seed=4)[0], W)
    assert not np.array_equal(systemml.init(20, 50, 10)[0], systemml.init(20, 50, 10)[0])
