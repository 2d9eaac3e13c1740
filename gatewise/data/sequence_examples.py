"""Example data sets of sequences that need no file."""

from __future__ import annotations

import numpy as np
import torch

from gatewise.contract.errors import MissingExtra
from gatewise.data.sequences import Sequences


def digits() -> Sequences:
    """Return scikit-learn's handwritten digits, row by row: 1,797 sequences of 8 steps of 8 grey values.

    Source: E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise MissingExtra.for_package("scikit-learn", "the digits to learn from", "train") from None
    pixels, target = load_digits(return_X_y=True)
    return _sequences("scikit-learn's handwritten digits", pixels.reshape(-1, 8, 8), target)


def synthetic(count: int = 10_000, time: int = 10, noise: float = 0.01, seed: int = 0) -> Sequences:
    r"""Return the task of the CudnnLSTM training template: predict the sign of a mean over two noisy features.

    $$y = \left[\tanh\left(\frac{1}{T} \sum_{t=0}^{T-1} \left(0.1\, x_{1t}^2 \sin t
    + \frac{0.4\, x_{2t}^3}{|x_{1t}| + 1}\right) + \varepsilon\right) > 0\right],
    \quad x \sim U[-1, 1],\ \varepsilon \sim N(0, \text{noise}^2)$$

    Args:
        count: The number of sequences, N.
        time: The number of steps of each sequence, T.
        noise: The standard deviation of the noise that is added before the sign is taken.
        seed: The seed of the features and of the noise.

    Returns:
        N sequences of two features, labelled 0 or 1.

    Source: Y. J. Choe: TFCudnnLSTM, a simple template for TensorFlow's CudnnLSTM module, 2018.
    """
    random = np.random.default_rng(seed)
    x = random.uniform(-1.0, 1.0, (count, time, 2))
    mean = noiseless(x)
    labels = np.tanh(mean + noise * random.standard_normal(count)) > 0
    return _sequences("the template's synthetic task", x, labels.astype(np.int64))


def noiseless(x: np.ndarray) -> np.ndarray:
    """Return the mean whose sign is the label in `synthetic`, without noise, [N] for x [N, T, 2]."""
    first, second = x[:, :, 0], x[:, :, 1]
    terms = 0.1 * first**2 * np.sin(np.arange(x.shape[1])) + 0.4 * second**3 / (np.abs(first) + 1)
    return terms.mean(axis=1)


def _sequences(name: str, x: np.ndarray, labels: np.ndarray) -> Sequences:
    count, time, size = x.shape
    return Sequences(
        name=name,
        features=tuple(str(feature) for feature in range(size)),
        values=torch.from_numpy(x.reshape(-1, size).astype(np.float32)),
        lengths=torch.full((count,), time),
        labels=np.array([str(label) for label in labels], dtype=object),
        ids=np.array([str(number) for number in range(count)], dtype=object),
    )
