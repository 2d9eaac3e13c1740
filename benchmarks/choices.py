"""Two forms of drawn calls: the weights of a ranking that chooses between them, and the time that its choices lose."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np


def report(
    name: str,
    rows: Sequence[dict[str, Any]],
    quantities: Sequence[dict[str, float]],
    forms: tuple[str, str],
    *,
    fits: bool,
    part: float = 1.0,
) -> None:
    """Print how much time the choices of a ranking lose, after fitting its weights if `fits` is true.

    Args:
        name: The name of the ranking.
        rows: The calls: under "us" the times of both forms, under "chosen" whether the ranking chose the second one.
        quantities: The quantities of each call that the weights multiply, by the names of the weights. Their sum is
            positive where the second form is chosen.
        forms: The names of both forms.
        fits: Whether to fit the weights, print them and report the choices by them.
        part: The part of the time of the first form that the second one may take to be chosen.
    """
    first, second = np.array([row["us"] for row in rows]).T
    best = np.minimum(first, second)
    choices = np.array([row["chosen"] for row in rows])
    print(f"\n{name}, {len(rows)} calls")
    if fits:
        # Differences count in parts of the time of the faster form, but no more than half of it.
        features, differences = np.array([[*each.values()] for each in quantities]), (part * first - second) / best
        scale = np.maximum(1, 2 * np.abs(differences))
        weights, *_ = np.linalg.lstsq(features / (best * scale)[:, None], differences / scale, rcond=None)
        print(json.dumps(dict(zip(quantities[0], weights.tolist(), strict=True))))
        choices = features @ weights > 0
    lost = np.where(choices, second, first) / best

    def mean(times: np.ndarray) -> str:
        return f"{np.exp(np.log(times / best).mean()):.3f}"

    print(f"chosen within 5 % of the faster form: {(lost < 1.05).mean():.0%}, worst {lost.max():.2f}")
    print(f"time over the faster form, geometric mean: chosen {mean(lost * best)}, {forms[0]} {mean(first)},")
    print(f"{forms[1]} {mean(second)}")
    gained = (second / first)[choices]
    if len(gained):
        ends = f"{gained.min():.2f} to {gained.max():.2f}"
        print(f"{forms[1]} in {len(gained)} calls: {ends} of the time of {forms[0]}", flush=True)
