"""Products in 16 bits that the library does not make to the end, and whether gatewise's are.

    python benchmarks/deep_products.py [--seconds 10] [--seed 0]     # needs a GPU; adds to results/deep_products.jsonl

Products of sizes drawn at random, in the layouts of a layer's own: the gradient of weights over tokens, the sums of
inputs, and the gradient of hidden states. The left factor is all ones; the right one is 1 in its last terms and 0
before, so that the product is the number of terms that it counts there.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gatewise.files import append_line
from gatewise.kernels.cuda import deep_products

RESULTS = Path(__file__).parent / "results" / "deep_products.jsonl"
_LAST = 256  # terms that count, a number that 16 bits hold
_VALUES = 1 << 28
_TOKENS = (1, 2, 7, 16, 20, 64, 130)
_FEATURES = (1, 2, 3, 5, 8, 12, 16, 24, 31, 32, 48, 64, 96, 100, 128, 200, 256, 300, 512, 650, 1024, 1500, 2048, 4096)
_UNITS = (1, 2, 8, 16, 20, 32, 64, 128, 7, 300)
_AT_ONCE = 200


def main() -> None:
    """Draw products until time is up, count what is wrong, and record it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to draw products of each kind (10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sizes (0)")
    parser.add_argument("--record", type=Path, default=RESULTS, help="file that a line of JSON is added to")
    given = parser.parse_args()
    generator = random.Random(given.seed)
    memory = {dtype: (_ones(dtype), torch.zeros_like(_ones(dtype))) for dtype in (torch.float16, torch.bfloat16)}
    kinds = {kind: _count(kind, generator, memory, given.seconds) for kind in ("weights", "inputs", "states")}
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "seed": given.seed,
        **kinds,
    }
    for kind, found in kinds.items():
        library, ours = len(found["wrong of the library"]), len(found["wrong of ours"])
        print(f"{kind}: of {found['products']} products the library made {library} wrong, gatewise {ours}")
    append_line(given.record, json.dumps(record))


def _ones(dtype: torch.dtype) -> Tensor:
    return torch.ones(_VALUES, dtype=dtype, device="cuda")


def sizes(kind: str, generator: random.Random) -> tuple[int, int, int]:
    """Return rows, depth and columns: of the gradient of weights, the sums of inputs, or the gradient of states."""

    def deep(most: float) -> int:
        unit = generator.choice(_UNITS)
        return max(unit, int(math.exp(generator.uniform(math.log(1024), math.log(most)))) // unit * unit)

    while True:
        features = generator.choice(_FEATURES)
        if kind == "weights":
            found = 8 * generator.choice(_FEATURES), deep(200_000), features
        elif kind == "inputs":
            found = generator.choice(_TOKENS), deep(20_000), 4 * features
        else:
            units = deep(5_000)
            found = generator.choice(_TOKENS), 4 * units, units
        rows, depth, columns = found
        if depth * max(rows, columns) <= _VALUES and rows * depth * columns <= 3e11:
            return found


def factors(kind: str, size: tuple[int, int, int], ones: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return both factors, in the layout of the kind, and the terms of the right one that count."""
    rows, depth, columns = size
    left, right = ones[: rows * depth], zeros[: depth * columns]
    left = left.view(depth, rows).t() if kind == "weights" else left.view(rows, depth)
    right = right.view(columns, depth).t() if kind == "inputs" else right.view(depth, columns)
    return left, right, right[max(0, depth - _LAST) :]


def _count(kind: str, generator: random.Random, memory: dict, seconds: float) -> dict[str, Any]:
    end = time.monotonic() + seconds
    drawn, library, ours = 0, [], []
    while time.monotonic() < end:
        asked, found = [], []
        for _ in range(_AT_ONCE):
            dtype, size = generator.choice(list(memory)), sizes(kind, generator)
            left, right, last = factors(kind, size, *memory[dtype])
            last.fill_(1)
            found.append(torch.stack([(torch.mm(left, right) != len(last)).any(), _ours_is_wrong(left, right, last)]))
            last.fill_(0)
            asked.append((str(dtype).removeprefix("torch."), *size))
        for one, wrong in zip(asked, torch.stack(found).tolist(), strict=True):
            library += [one] if wrong[0] else []
            ours += [one] if wrong[1] else []
        drawn += _AT_ONCE
    return {"products": drawn, "wrong of the library": library, "wrong of ours": ours}


def _ours_is_wrong(left: Tensor, right: Tensor, last: Tensor) -> Tensor:
    return (deep_products.mm(left, right) != len(last)).any()


if __name__ == "__main__":
    main()
