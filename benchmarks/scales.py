"""Fit the Gaussian processes that correct estimates to the measured calls in `gatewise/selection/rates`.

    python benchmarks/scales.py --commit 1234567

For each kernel, the scales of the features and the standard deviations are those with the least error of predicting
each measured call of the H200 and of the H100 from all others (leave-one-out). They are drawn to the prior, with which
the fit begins and which unknown kernels keep: several hundred calls say little about some of the features. The noise is
not fitted but that of repeated measurements, so that predictions of measured calls follow the measurement. The file
`scales.json` beside the measured calls names the commit. Judge a fit by `benchmarks/predictions.py` with a new seed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise import files
from gatewise.kernels import ALL
from gatewise.selection import correction, points

SCALES = Path(points.__file__).parent / "rates" / "scales.json"
DEVICES = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
STEPS, RATE = 30, 0.05
PULL = 0.01  # the weight of the squared logarithms of changes of the prior
SMOOTH = 0.03  # errors below this, about the noise of measurements, count little
DEVIATIONS = ("spread", "slope")


class Calls(NamedTuple):
    """The calls of a kernel on a device and on the others, as features [N, F] and logarithms of errors [N]."""

    features: Tensor
    errors: Tensor
    own: Tensor


def calls_of(kernel: str, device: str, training: bool) -> Calls:
    """Return the measured calls of a kernel on a device, followed by those of the other devices."""
    rows, errors, own = [], [], []
    for name in (device, *(other for other in DEVICES if other != device)):
        for point in points.points(name):
            if point.kernel == kernel and point.problem.needs_grad == training:
                apart = 0.0 if name == device else 1.0
                found = correction.features(point.work, point.problem, point.record.device, apart)
                rows.append([float(value) for value in found.values()])
                errors.append(
                    math.log(point.graph / correction.estimated(point.work, point.problem, point.record.device))
                )
                own.append(name == device)
    return Calls(*map(torch.tensor, (rows, errors, own)))


def left_out_error(calls: Calls, scales: Tensor, deviations: Tensor, noise: float) -> Tensor:
    """Return the mean error of predicting each call of the device from all others."""
    spread, slope = deviations
    places = calls.features * scales
    inner = places @ places.T
    squares = inner.diagonal()[:, None] + inner.diagonal() - 2 * inner
    distance = (3 * squares.clamp(min=1e-12)).sqrt()
    covariance = spread**2 * (1 + distance) * torch.exp(-distance) + slope**2 * (1 + inner)
    inverse = torch.linalg.inv(covariance + noise**2 * torch.eye(len(inner)))
    errors = inverse @ (calls.errors - calls.errors.median()) / inverse.diagonal()
    return (errors[calls.own] ** 2 + SMOOTH**2).sqrt().mean()


def fitted(kernel: str, prior: dict) -> dict:
    """Return the entry of a kernel: the scales and deviations with the least error."""
    parts = [calls_of(kernel, device, training) for device in DEVICES for training in (True, False)]
    scales, deviations = (
        torch.tensor(list(prior["scales"].values())),
        torch.tensor([prior[name] for name in DEVIATIONS]),
    )
    changes = torch.zeros(len(scales) + len(deviations), requires_grad=True)
    optimizer = torch.optim.Adam([changes], lr=RATE)
    first = None
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for part in parts:  # one at a time, because each graph holds several matrices [N, N]
            of_scales, of_deviations = changes.exp().split([len(scales), len(deviations)])
            error = left_out_error(part, scales * of_scales, deviations * of_deviations, prior["noise"]) / len(parts)
            error.backward()
            total += error.item()
        (PULL * changes.square().mean()).backward()
        optimizer.step()
        first = total if first is None else first
    print(f"{kernel}: mean error of the logarithm {first:.4f} -> {total:.4f}", flush=True)
    of_scales, of_deviations = changes.detach().exp().split([len(scales), len(deviations)])
    return {
        "scales": dict(zip(prior["scales"], map(short, (scales * of_scales).tolist()), strict=True)),
        **dict(zip(DEVIATIONS, map(short, (deviations * of_deviations).tolist()), strict=True)),
        "noise": prior["noise"],
    }


def short(value: float) -> float:
    """Return a value with three digits."""
    return float(f"{value:.3g}")


def main() -> None:
    """Fit all kernels and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True, help="the commit of the measured calls")
    given = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    prior = json.loads(SCALES.read_text())["kernels"]["any"]
    kernels = {"any": prior, **{kernel.name: fitted(kernel.name, prior) for kernel in ALL}}
    head = {
        "source": "benchmarks/scales.py: least leave-one-out error over the measured calls of " + ", ".join(DEVICES),
        "commit": given.commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    files.write_text(SCALES, json.dumps({**head, "kernels": kernels}, indent=1) + "\n")


if __name__ == "__main__":
    main()
