"""The smooth function through measured calls."""

import numpy as np

from gatewise.selection.correction import _solved


def test_systems_are_solved():
    generator = np.random.default_rng(0)
    factor, right = generator.standard_normal((40, 40)), generator.standard_normal(40)
    matrix = factor @ factor.T + np.eye(40)
    np.testing.assert_allclose(_solved(matrix, right), np.linalg.solve(matrix, right), rtol=1e-9)
