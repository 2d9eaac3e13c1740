"""Fit the Gaussian processes that correct estimates to the measured calls in `gatewise/selection/rates`.

    python benchmarks/scales.py --commit 1234567

For each kernel, the scales of the features and the standard deviations, with the noise of measurements, are those that
make the measured calls of the H200 and the H100 the most likely: those of least negative logarithm of the marginal
likelihood (Rasmussen and Williams, chapter 5). They are drawn to the prior, with which the fit begins and which unknown
kernels keep: several hundred calls say little about some of the features. The file `scales.json` beside the measured
calls names the commit. Judge a fit by `benchmarks/predictions.py` with a new seed.
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
from gatewise.selection import points
from gatewise.selection.estimate import estimated
from gatewise.selection.features import features

SCALES = Path(points.__file__).parent / "rates" / "scales.json"
DEVICES = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
STEPS, RATE = 25, 0.08
PULL = 0.05  # the weight of the squared logarithms of changes of the prior
DEVIATIONS = ("spread", "slope", "noise")


class Calls(NamedTuple):
    """The calls of a kernel and a pass on all devices, as features [N, F] and logarithms of errors [N]."""

    features: Tensor
    errors: Tensor


def calls_of(kernel: str, *, training: bool) -> Calls:
    """Return the measured calls of a kernel on all devices."""
    rows, errors = [], []
    for name in DEVICES:
        for point in points.points(name):
            if point.kernel == kernel and point.problem.needs_grad == training:
                # The covariance is the same as seen from each device.
                apart = float(name != DEVICES[0])
                found = features(point.work, point.problem, point.record.device, apart)
                rows.append([float(value) for value in found.values()])
                errors.append(math.log(point.graph / estimated(point.work, point.problem, point.record.device)))
    return Calls(torch.tensor(rows), torch.tensor(errors))


def surprise(calls: Calls, scales: Tensor, deviations: Tensor) -> Tensor:
    """Return the negative logarithm of the marginal likelihood of the errors of calls, for each call."""
    spread, slope, noise = deviations
    places, count = calls.features * scales, len(calls.errors)
    inner = places @ places.T
    squares = inner.diagonal()[:, None] + inner.diagonal() - 2 * inner
    distance = (3 * squares.clamp(min=1e-12)).sqrt()
    covariance = spread**2 * (1 + distance) * torch.exp(-distance) + slope**2 * (1 + inner)
    lower = torch.linalg.cholesky(covariance + noise**2 * torch.eye(count))
    errors = (calls.errors - calls.errors.median())[:, None]
    return (0.5 * (errors * torch.cholesky_solve(errors, lower)).sum() + lower.diagonal().log().sum()) / count


def fitted(kernel: str, prior: dict) -> dict:
    """Return the entry of a kernel: the scales and deviations that make its measured calls the most likely."""
    parts = [calls_of(kernel, training=training) for training in (True, False)]
    scales, deviations = (
        torch.tensor(list(prior["scales"].values())),
        torch.tensor([prior[name] for name in DEVIATIONS]),
    )
    changes = torch.zeros(len(scales) + len(deviations), requires_grad=True)
    optimizer = torch.optim.Adam([changes], lr=RATE)
    first, count = None, sum(len(part.errors) for part in parts)
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for part in parts:  # one at a time, because each graph holds several matrices [N, N]
            of_scales, of_deviations = changes.exp().split([len(scales), len(deviations)])
            found = surprise(part, scales * of_scales, deviations * of_deviations) * len(part.errors) / count
            found.backward()
            total += found.item()
        (PULL * changes.square().mean()).backward()
        optimizer.step()
        first = total if first is None else first
    print(f"{kernel}: negative log likelihood of a call {first:.4f} -> {total:.4f}", flush=True)
    of_scales, of_deviations = changes.detach().exp().split([len(scales), len(deviations)])
    return {
        "scales": dict(zip(prior["scales"], map(short, (scales * of_scales).tolist()), strict=True)),
        **dict(zip(DEVIATIONS, map(short, (deviations * of_deviations).tolist()), strict=True)),
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
    before = json.loads(SCALES.read_text())
    prior = before["kernels"]["any"]
    kernels = {"any": prior, **{kernel.name: fitted(kernel.name, prior) for kernel in ALL}}
    head = {
        "source": "benchmarks/scales.py: greatest marginal likelihood of the measured calls of " + ", ".join(DEVICES),
        "commit": given.commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    kept = {"slow products": before["slow products"]}
    files.write_text(SCALES, json.dumps({**head, **kept, "kernels": kernels}, indent=1) + "\n")


if __name__ == "__main__":
    main()
