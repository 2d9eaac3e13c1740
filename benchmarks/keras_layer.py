"""The Keras layer beside Keras' own: one training step of a layer, with and without a mask.

    python benchmarks/keras_layer.py                     # the shapes below, on the GPU when there is one

Both layers have the same weights, read the same batch and are sampled in turn. A step is forward, the mean of the
squares, backward. Before that, outputs and gradients are compared; a row that does not agree is not timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from gatewise.benchmarks.record import Run
from gatewise.files import append_line
from gatewise.interop.keras import LSTM
from gatewise.interop.keras.backend import keras_on_torch
from gatewise.selection.timing import time_side_by_side

keras = keras_on_torch()

RESULTS = Path(__file__).parent / "results" / "keras_layer.jsonl"
# (T, B, I, H)
CASES = [(100, 32, 128, 128), (200, 64, 128, 256), (100, 64, 512, 512)]
# TF32 in the products of either layer; the errors of both against float64 are of this size.
ALLOWED = 5e-3


def masks(time: int, batch: int, device: str) -> dict[str, Tensor | None]:
    """Return the masks of a case: none, padding on the right, steps left out anywhere."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(time // 4, time + 1, (batch, 1), generator=generator)
    holes = torch.rand(batch, time, generator=generator) > 0.3
    return {"none": None, "right": (torch.arange(time) < lengths).to(device), "holes": holes.to(device)}


def step(layer: keras.Layer, x: Tensor, mask: Tensor | None) -> Callable[[], list[Tensor]]:
    """Return a training step, which gives its output and gradients."""
    parameters = [x, *(weight.value for weight in layer.trainable_weights)]

    def run() -> list[Tensor]:
        for parameter in parameters:
            parameter.grad = None
        y = layer(x, mask=mask)
        y.square().mean().backward()
        return [y.detach(), *(parameter.grad for parameter in parameters)]

    return run


def row(case: tuple[int, int, int, int], kind: str, mask: Tensor | None, device: str, runs: int) -> dict:
    """Compare and time both layers on one case."""
    time, batch, features, units = case
    x = torch.randn(batch, time, features, device=device, requires_grad=True)
    layers = {"keras": keras.layers.LSTM(units, return_sequences=True), "gatewise": LSTM(units, return_sequences=True)}
    for layer in layers.values():
        layer.build((batch, time, features))
    layers["gatewise"].set_weights(layers["keras"].get_weights())
    steps = {name: step(layer, x, mask) for name, layer in layers.items()}
    expected, found = (steps[name]() for name in ("keras", "gatewise"))
    error = max(float((one - two).norm() / two.norm()) for one, two in zip(found, expected, strict=True))
    facts = {"T": time, "B": batch, "I": features, "H": units, "mask": kind, "error": error}
    if error > ALLOWED:
        return {**facts, "status": "wrong"}
    timings = time_side_by_side(steps, device=device, runs=runs, warmups=2, budget=4.0)
    return {
        **facts,
        "status": "measured",
        "seconds": {name: dataclasses.asdict(time) for name, time in timings.items()},
    }


def main() -> int:
    """Measure every case and append the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=20, help="samples of each layer")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for case in CASES:
        for kind, mask in masks(*case[:2], options.device).items():
            rows.append(row(case, kind, mask, options.device, options.runs))
            seconds = {name: f"{1e3 * time['median']:.2f} ms" for name, time in rows[-1].get("seconds", {}).items()}
            print(*case, kind, rows[-1]["status"], seconds, f"error {rows[-1]['error']:.1e}", flush=True)
    run = dataclasses.replace(Run.now(torch.device(options.device)), command=f"python {' '.join(sys.argv)}")
    record = {"benchmark": "keras_layer", "run": {**dataclasses.asdict(run), "keras": keras.__version__}, "rows": rows}
    append_line(options.results, json.dumps(record))
    return int(any(row["status"] == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
