"""SystemML's LSTM in plain NumPy, float64, step by step, without any code of gatewise."""

from typing import NamedTuple

import numpy as np

# (N, T, D, M): the sizes in SystemML's own tests.
SHAPES = [
    (1, 1, 1, 1),
    (20, 13, 50, 10),
    (1, 3, 5, 1),
    (20, 13, 1, 10),
    (20, 13, 4, 1),
    (20, 1, 4, 10),
    (20, 1, 50, 10),
    (20, 13, 50, 1),
    (20, 13, 15, 25),
    (12, 17, 15, 26),
    (64, 2, 2, 2),
    (32, 8, 36, 1025),
    (32, 75, 128, 256),
    (64, 32, 16, 32),
]


class Problem(NamedTuple):
    """The arguments of both passes."""

    X: np.ndarray
    W: np.ndarray
    b: np.ndarray
    out0: np.ndarray
    c0: np.ndarray
    dout: np.ndarray
    dc: np.ndarray

    @property
    def inputs(self):
        return self[:5]


def problem(shape, sequences, *, density_x=1.0, density_w=1.0, seed=0):
    """Return data with mean zero, and W scaled so that the gates do not saturate."""
    N, T, D, M = shape
    random = np.random.default_rng(seed)
    X, W = random.standard_normal((N, T * D)), random.standard_normal((D + M, 4 * M)) / np.sqrt(D + M)
    X *= random.random(X.shape) < density_x
    W *= random.random(W.shape) < density_w
    return Problem(
        X,
        W,
        random.standard_normal((1, 4 * M)),
        random.standard_normal((N, M)),
        random.standard_normal((N, M)),
        random.standard_normal((N, T * M if sequences else M)),
        random.standard_normal((N, M)),
    )


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def steps(X, W, b, out0, c0):
    """Return per step: its input, gates, previous cell, cell, output."""
    M, D = out0.shape[1], W.shape[0] - out0.shape[1]
    out, c, history = out0, c0, []
    for t in range(X.shape[1] // D):
        joined = np.hstack([X[:, t * D : (t + 1) * D], out])
        z = joined @ W + b
        i, f, o, g = sigmoid(z[:, :M]), sigmoid(z[:, M : 2 * M]), sigmoid(z[:, 2 * M : 3 * M]), np.tanh(z[:, 3 * M :])
        before, c = c, f * c + i * g
        out = o * np.tanh(c)
        history.append((joined, (i, f, o, g), before, c, out))
    return history


def forward(X, W, b, out0, c0, sequences):
    """Compute out and c."""
    history = steps(X, W, b, out0, c0)
    outputs = [out for *_, out in history]
    return np.hstack(outputs) if sequences else outputs[-1], history[-1][3]


def backward(X, W, b, out0, c0, sequences, dout, dc):
    """Compute dX, dW, db, dout0, dc0."""
    M, D = out0.shape[1], W.shape[0] - out0.shape[1]
    history = steps(X, W, b, out0, c0)
    dX, dW, db = np.zeros_like(X), np.zeros_like(W), np.zeros_like(b)
    dh = np.zeros_like(out0)
    for t in reversed(range(len(history))):
        joined, (i, f, o, g), before, c, _ = history[t]
        if sequences:
            dh = dh + dout[:, t * M : (t + 1) * M]
        elif t == len(history) - 1:
            dh = dh + dout
        tanh_c = np.tanh(c)
        dc = dc + dh * o * (1 - tanh_c**2)
        dz = np.hstack(
            [dc * g * i * (1 - i), dc * before * f * (1 - f), dh * tanh_c * o * (1 - o), dc * i * (1 - g**2)]
        )
        dW += joined.T @ dz
        db += dz.sum(0, keepdims=True)
        below = dz @ W.T
        dX[:, t * D : (t + 1) * D], dh, dc = below[:, :D], below[:, D:], dc * f
    return dX, dW, db, dh, dc


def turned(X, features):
    """Return [N, T*F] with the steps in reverse order."""
    N, columns = X.shape
    return X.reshape(N, columns // features, features)[:, ::-1].reshape(N, columns)


def error(found, expected):
    """Return the largest difference, relative to the largest expected number."""
    found = np.asarray(found, dtype=np.float64)
    assert found.shape == expected.shape
    scale = np.abs(expected).max(initial=0.0)
    difference = np.abs(found - expected).max(initial=0.0)
    return difference if scale == 0 else difference / scale
