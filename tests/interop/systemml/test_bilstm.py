"""Both directions in SystemDS' layout, against two passes of the NumPy reference."""

import itertools
import warnings

import numpy as np
import pytest
import reference_lstm as reference
import torch

from gatewise.interop import systemml
from tests.pairwise import each_value

SHAPES = [(1, 1, 1, 1), (20, 13, 50, 10), (12, 17, 15, 26), (1, 3, 5, 1), (64, 2, 2, 2)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def expected(one, other, sequences, dout, dc):
    """Return the outputs and gradients; `other` is the reverse direction's W, b, out0 and c0."""
    (N, columns), M = one.X.shape, one.out0.shape[1]
    T, D = columns // (one.W.shape[0] - M), one.W.shape[0] - M
    reversed_X = reference.turned(one.X, D)
    out, c = reference.forward(*one.inputs, sequences)
    out_r, c_r = reference.forward(reversed_X, *other, sequences)
    if sequences:
        parts = [out.reshape(N, T, M), reference.turned(out_r, M).reshape(N, T, M)]
        out = np.concatenate(parts, 2).reshape(N, T * 2 * M)
        split = dout.reshape(N, T, 2, M)
        dout_f, dout_r = split[:, :, 0].reshape(N, T * M), reference.turned(split[:, :, 1].reshape(N, T * M), M)
    else:
        out = np.hstack([out, out_r])
        dout_f, dout_r = dout[:, :M], dout[:, M:]
    forward = reference.backward(*one.inputs, sequences, dout_f, dc[:, :M])
    reverse = reference.backward(reversed_X, *other, sequences, dout_r, dc[:, M:])
    dX = forward[0] + reference.turned(reverse[0], D)
    states = [np.vstack(pair) for pair in zip(forward[3:], reverse[3:], strict=True)]
    return out, np.hstack([c, c_r]), dX, forward[1], reverse[1], forward[2], reverse[2], *states


@pytest.mark.parametrize(
    ("shape", "sequences", "density", "kernel"),
    each_value([*itertools.product(SHAPES, [True, False], [1.0, 0.004], ["auto", "eager", "aten"])]),
    ids=str,
)
@pytest.mark.parametrize("device", DEVICES)
def test_both_directions(device, kernel, density, sequences, shape):
    one = reference.problem(shape, sequences, density_x=density)
    other = reference.problem(shape, sequences, seed=1).inputs[1:]
    random = np.random.default_rng(2)
    dout = random.standard_normal((one.dout.shape[0], 2 * one.dout.shape[1]))
    dc = random.standard_normal((shape[0], 2 * shape[3]))
    X = one.X
    if density < 1:
        X = pytest.importorskip("scipy.sparse").csr_array(X)
    states = [np.vstack(pair) for pair in zip(one.inputs[3:], other[2:], strict=True)]
    inputs = (X, one.W, other[0], one.b, other[1], *states)
    options = {"kernel": kernel, "device": device}
    out, c, state = systemml.bilstm(*inputs, sequences, **options)
    assert state.projected == (density < 1 and kernel != "aten")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients = systemml.bilstm_backward(*inputs, sequences, dout, dc, state, **options)
    wanted = expected(one, other, sequences, dout, dc)
    for result, value in zip((out, c, *gradients), wanted, strict=True):
        assert reference.error(result, value) <= 1e-9


def test_torch_computes_the_same():
    torch.manual_seed(0)
    N, T, D, M = 4, 6, 3, 5
    module = torch.nn.LSTM(D, M, bidirectional=True, dtype=torch.float64)
    with torch.no_grad():
        module.bias_hh_l0.zero_()
        module.bias_hh_l0_reverse.zero_()
    x, h0, c0 = (torch.randn(size, dtype=torch.float64) for size in ((T, N, D), (2, N, M), (2, N, M)))
    y, (_, c_n) = module(x, (h0, c0))
    order = [0, 1, 3, 2]

    def matrix(w_ih, w_hh):
        return torch.cat([w_ih.t(), w_hh.t()]).unflatten(1, (4, M))[:, order].flatten(1).detach()

    def bias(b):
        return b.unflatten(0, (4, M))[order].flatten()[None].detach()

    (w, u, b, _), (w_r, u_r, b_r, _) = module.all_weights
    X = x.transpose(0, 1).reshape(N, T * D)
    arguments = (X, matrix(w, u), matrix(w_r, u_r), bias(b), bias(b_r), h0.reshape(2 * N, M), c0.reshape(2 * N, M))
    out, c, _ = systemml.bilstm(*arguments, True)
    torch.testing.assert_close(out, y.transpose(0, 1).reshape(N, -1).detach())
    torch.testing.assert_close(c, torch.cat([c_n[0], c_n[1]], 1).detach())


def test_a_smaller_last_batch_takes_the_first_rows_of_each_direction():
    one, other = reference.problem((7, 3, 2, 4), True), reference.problem((7, 3, 2, 4), True, seed=1)
    states = [np.vstack(pair) for pair in ((one.out0, other.out0), (one.c0, other.c0))]
    weights = (one.W, other.W, one.b, other.b)
    full, c_full, _ = systemml.bilstm(one.X, *weights, *states, True)
    out, c, _ = systemml.bilstm(one.X[:4], *weights, *states, True)
    np.testing.assert_allclose(out, full[:4], rtol=1e-12)
    np.testing.assert_allclose(c, c_full[:4], rtol=1e-12)
