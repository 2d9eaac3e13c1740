"""Outputs and the five gradients against the NumPy reference: every shape, kernel, precision, dense and sparse."""

import functools
import itertools

import numpy as np
import pytest
import reference_lstm as reference
import torch

import gatewise
from gatewise.contract.device import Device
from gatewise.interop import systemml
from gatewise.selection.admit import verdicts
from tests.pairwise import each_value, exhaustive_unless, pairwise

ALLOWED = {np.float64: 1e-9, np.float32: 1e-3}
NAMES = ("out", "c", "dX", "dW", "db", "dout0", "dc0")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SEQUENCES = pytest.mark.parametrize("sequences", [True, False], ids=["sequences", "last"])


def name_of(value):
    return "x".join(map(str, value)) if isinstance(value, tuple) else getattr(value, "__name__", str(value))


@functools.lru_cache(maxsize=32)
def expected(shape, sequences, density_x=1.0, density_w=1.0):
    problem = reference.problem(shape, sequences, density_x=density_x, density_w=density_w)
    outputs = reference.forward(*problem.inputs, sequences)
    return problem, (*outputs, *reference.backward(*problem.inputs, sequences, problem.dout, problem.dc))


def both_passes(inputs, dout, dc, sequences, **options):
    out, c, state = systemml.lstm(*inputs, sequences, **options)
    return (out, c, *systemml.lstm_backward(*inputs, sequences, dout, dc, state, **options)), state


def assert_agrees(found, wanted, dtype):
    for name, result, value in zip(NAMES, found, wanted, strict=True):
        assert reference.error(result, value) <= ALLOWED[dtype], name


@pytest.fixture(params=gatewise.kernel_names())
def kernel(request):
    return request.param


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    """Single precision means single precision: TF32 has three digits."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def skip_if_refused(kernel, device, dtype, shape):
    N, T, D, M = shape
    problem = gatewise.contract.problem.Problem(T, N, D, M, dtype=dtype, needs_grad=True)
    answer = next(v for v in verdicts(problem, Device.probe(device)) if v.kernel == kernel)
    if not answer.accepted:
        pytest.skip("; ".join(map(str, answer.refusals)))


# To a CPU shapes of many units or products, which NumPy computes for seconds, are as any other.
LARGE = [shape for shape in reference.SHAPES if shape[3] > 250]
SMALL = [shape for shape in reference.SHAPES if shape not in LARGE]


@pytest.mark.parametrize(
    ("shape", "sequences", "dtype"),
    [
        *each_value(pairwise(SMALL, [True, False], [np.float64, np.float32])),
        *exhaustive_unless([], itertools.product(LARGE, [True, False], [np.float64, np.float32])),
    ],
    ids=name_of,
)
@pytest.mark.parametrize("device", DEVICES)
def test_dense(kernel, device, dtype, sequences, shape):
    skip_if_refused(kernel, device, torch.from_numpy(np.zeros(1, dtype)).dtype, shape)
    problem, wanted = expected(shape, sequences)
    arrays = [array.astype(dtype) for array in problem]
    found, state = both_passes(arrays[:5], *arrays[5:], sequences, kernel=kernel, device=device)
    assert state.kernel == kernel
    assert all(isinstance(result, np.ndarray) and result.dtype == dtype for result in found)
    assert_agrees(found, wanted, dtype)


# What is sparse is multiplied before the loop, to which a shape of many units is as any other.
SPARSE = [
    *pairwise(SMALL, [0.9, 0.5, 0.05, 0.004], ["X", "W", "both"], [True, False]),
    *itertools.product(LARGE, [0.9, 0.05], ["X", "W", "both"], [True, False]),
]


@pytest.mark.parametrize(
    ("shape", "density", "which", "sequences"),
    exhaustive_unless(
        [case.values for case in each_value([each for each in SPARSE if each[0] in SMALL], (1, 2)) if not case.marks],
        SPARSE,
    ),
    ids=name_of,
)
@pytest.mark.parametrize("device", DEVICES)
def test_sparse_of_scipy(device, which, density, sequences, shape):
    scipy_sparse = pytest.importorskip("scipy.sparse")
    densities = {"density_x": density if which != "W" else 1.0, "density_w": density if which != "X" else 1.0}
    problem, wanted = expected(shape, sequences, **densities)
    X = scipy_sparse.csr_array(problem.X) if which != "W" else problem.X
    W = scipy_sparse.csc_matrix(problem.W) if which != "X" else problem.W
    found, state = both_passes((X, W, *problem[2:5]), *problem[5:], sequences, device=device)
    entries = min(part.nnz / (part.shape[0] * part.shape[1]) for part in (X, W) if scipy_sparse.issparse(part))
    assert state.projected == (entries < systemml.DENSITY[device])
    assert all(isinstance(result, np.ndarray) for result in found)
    assert_agrees(found, wanted, np.float64)


@pytest.mark.parametrize(
    ("which", "density", "shape", "layout", "sequences"),
    each_value(
        pairwise(
            ["X", "W", "both"],
            [0.5, 0.05, 0.004],
            [(20, 13, 50, 10), (12, 17, 15, 26), (1, 3, 5, 1)],
            [torch.sparse_csr, torch.sparse_coo],
            [True, False],
        )
    ),
    ids=name_of,
)
@pytest.mark.parametrize("device", DEVICES)
def test_sparse_tensors_and_kernels(kernel, device, layout, which, density, sequences, shape):
    skip_if_refused(kernel, device, torch.float64, shape)
    densities = {"density_x": density if which != "W" else 1.0, "density_w": density if which != "X" else 1.0}
    problem, wanted = expected(shape, sequences, **densities)
    X, W, *rest = (torch.from_numpy(array).to(device) for array in problem)
    X = X.to_sparse(layout=layout) if which != "W" else X
    W = W.to_sparse(layout=layout) if which != "X" else W
    found, state = both_passes((X, W, *rest[:3]), *rest[3:], sequences, kernel=kernel)
    assert state.kernel == kernel
    assert all(isinstance(result, torch.Tensor) and result.device == rest[0].device for result in found)
    assert_agrees([result.cpu() for result in found], wanted, np.float64)


@SEQUENCES
@pytest.mark.parametrize("device", DEVICES)
def test_all_positive_data_give_no_gradient_of_weights(kernel, device, sequences):
    """The data of the original tests, all in [0, 10]: every gate saturates, so that a wrong backward would pass."""
    skip_if_refused(kernel, device, torch.float64, (20, 13, 50, 10))
    random = np.random.default_rng(0)
    problem = reference.problem((20, 13, 50, 10), sequences)
    positive = [random.uniform(0, 10, array.shape) for array in problem]
    wanted = reference.backward(*positive[:5], sequences, *positive[5:])
    assert not wanted[1].any()
    found, _ = both_passes(positive[:5], *positive[5:], sequences, kernel=kernel, device=device)
    assert not found[3].any()
    for name, result, value in zip(NAMES[2:], found[2:], wanted, strict=True):
        assert reference.error(result, value) <= ALLOWED[np.float64], name


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["persistent", "stepwise", "cudnn"])
@pytest.mark.parametrize("shape", [(32, 75, 128, 256), (64, 32, 16, 256)])
def test_single_precision_holds_with_tf32_too(kernel, shape, monkeypatch):
    if kernel not in gatewise.kernel_names():
        pytest.skip(f"no kernel {kernel}")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    problem, wanted = expected(shape, True)
    arrays = [array.astype(np.float32) for array in problem]
    found, state = both_passes(arrays[:5], *arrays[5:], True, kernel=kernel, device="cuda")
    assert state.kernel == kernel
    assert_agrees(found, wanted, np.float32)


def test_nan_in_gives_nan_out():
    problem = reference.problem((4, 3, 5, 2), True)
    problem.X[1, 7] = np.nan
    out, c, _ = systemml.lstm(*problem.inputs, True)
    assert np.isnan(out[1, 2:]).all()
    assert np.isnan(c[1]).all()
    assert np.isfinite(out[[0, 2, 3]]).all()
