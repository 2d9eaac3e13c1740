"""Measured weights by which a kernel ranks its own variants, such as tilings: data, a file for each GPU and for CPUs.

The files lie in `gatewise/selection/rates/rankings`, beside the measured times of calls. A kernel states quantities of
each way; a weight is what one unit of a quantity was measured to cost. Kernels compare ways of their own with them, and
never state times.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources

from gatewise.contract.device import Device

REFERENCE = Device.named("h200").name
"""The GPU whose weights rank the ways on a GPU that has none of its own."""


def weights(device: Device, name: str) -> Mapping[str, float]:
    """Return the weights of a ranking on a device.

    Args:
        device: The device; where no weights were measured on it, those of all CPUs are returned if it is one, and
            otherwise those of `REFERENCE`.
        name: The name of the ranking, such as "persistent forward 16-bit".
    """
    files = slug(device.name), device.kind, slug(REFERENCE)
    return next(_read(file)[name] for file in files if name in _read(file))


@functools.cache
def slug(device: str) -> str:
    """Return the name of a device as part of a file name."""
    return "".join(letter if letter.isalnum() else "-" for letter in device.lower())


@functools.cache
def _read(name: str) -> Mapping[str, Mapping[str, float]]:
    path = resources.files("gatewise") / "selection" / "rates" / "rankings" / f"{name}.jsonl"
    if not path.is_file():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["ranking"]: row["weights"] for row in rows}
