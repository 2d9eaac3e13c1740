"""The smooth function through measured calls."""

import json

import numpy as np
import pytest
import torch

from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels import ALL
from gatewise.selection import points
from gatewise.selection.correction import _fitted, settings_of
from gatewise.selection.features import features
from gatewise.selection.gaussian_process import _solved

DEVICE, PROBLEM = Device.named("h200"), Problem(20, 8, 64, 128, dtype=torch.bfloat16, needs_grad=True)


def test_systems_are_solved():
    generator = np.random.default_rng(0)
    factor, right = generator.standard_normal((40, 40)), generator.standard_normal(40)
    matrix = factor @ factor.T + np.eye(40)
    np.testing.assert_allclose(_solved(matrix, right), np.linalg.solve(matrix, right), rtol=1e-9)


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, marks=pytest.mark.exhaustive if kernel.name in ("cudnn", "stepwise") else ())
        for kernel in ALL
    ],
    ids=lambda kernel: kernel.name,
)
def test_a_measured_training_call_is_predicted_from_the_others(kernel):
    process = _fitted(kernel.name, True, DEVICE.name).busy
    own = sum(point.kernel == kernel.name and point.problem.needs_grad for point in points.points(DEVICE.name))
    noise = settings_of(kernel.name).noise ** 2 * np.eye(len(process.places))
    covariance = torch.from_numpy(process.covariance(process.places) + noise)
    # Every eighth call: all elements of the inverse would take most of the time.
    some = torch.arange(0, own, 8)
    units = torch.eye(len(process.places), dtype=covariance.dtype)[:, some]
    diagonal = torch.cholesky_solve(units, torch.linalg.cholesky(covariance))[some, range(len(some))].numpy()
    ratios = np.exp(process.weights[some.numpy()] / diagonal)  # Rasmussen and Williams, equation 5.12
    assert np.mean(abs(ratios - 1) <= 0.25) > 0.9


def test_every_kernel_has_a_scale_for_every_feature():
    stored = json.loads((points.packaged_folder() / "scales.json").read_text())["kernels"]
    assert {*stored} <= {"any", *(kernel.name for kernel in ALL)}
    for name in stored:
        kernel = next((kernel for kernel in ALL if kernel.name == name), ALL[-1])
        assert {*settings_of(name).names} == {*features(kernel.work(PROBLEM, DEVICE), PROBLEM, DEVICE)}, name


@pytest.mark.parametrize("kernel", ALL, ids=lambda kernel: kernel.name)
def test_an_unknown_kernel_has_the_scales_of_no_kernel_in_particular(kernel):
    assert settings_of(f"not {kernel.name}").names == settings_of(kernel.name).names
