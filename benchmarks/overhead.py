"""What choosing costs: gatewise.LSTM against torch.nn.LSTM computing the same thing with the same library.

    python benchmarks/overhead.py                        # CPU, the three cases of the acceptance criterion
    python benchmarks/overhead.py --device cuda          # cuDNN through both, H >= 512

Calls of both classes alternate in one process, one call a sample, so that drifts of the machine hit both alike. The
figure is the ratio of the medians; the record keeps the 20 % and 80 % quantiles as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import gatewise
from gatewise.benchmarks.record import Run
from gatewise.selection.timing import time_side_by_side

RESULTS = Path(__file__).parent / "results" / "overhead.jsonl"
ALLOWED = 1.03

# (T, B, H), the input as wide as the hidden state.
CASES = {
    "cpu": [(35, 20, 200), (28, 64, 128), (100, 1, 256)],
    "cuda": [(35, 20, 512), (35, 20, 650), (100, 64, 512), (35, 20, 1500), (50, 128, 1024)],
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


def training(module: torch.nn.Module, x: torch.Tensor) -> None:
    module.zero_grad(set_to_none=True)
    x.grad = None
    y, _ = module(x)
    y.backward(torch.ones_like(y))


def inference(module: torch.nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        module(x)


MODES: dict[str, Callable[[torch.nn.Module, torch.Tensor], None]] = {"inference": inference, "training": training}


def measure(
    shape: tuple[int, int, int], mode: str, device: str, dtype: torch.dtype, kernel: str, pairs: int
) -> dict[str, object]:
    """Time one case; returns its part of the record."""
    T, B, H = shape
    torch.manual_seed(0)
    theirs = torch.nn.LSTM(H, H, device=device, dtype=dtype)
    ours = gatewise.LSTM(H, H, device=device, dtype=dtype, kernel=kernel)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(T, B, H, device=device, dtype=dtype, requires_grad=mode == "training")
    step = MODES[mode]
    functions = {"torch": lambda: step(theirs, x), "gatewise": lambda: step(ours, x)}
    timings = time_side_by_side(functions, device=device, runs=pairs, warmups=max(pairs // 10, 3), calls=1)
    return {
        "T": T,
        "B": B,
        "H": H,
        "mode": mode,
        "dtype": str(dtype).removeprefix("torch."),
        "kernel": gatewise.explain(ours, (T, B, H)).chosen,
        "seconds": {name: dataclasses.asdict(timing) for name, timing in timings.items()},
        "ratio": round(timings["gatewise"].median / timings["torch"].median, 4),
    }


def main() -> int:
    """Measure, print a table, append the record; the status is 1 when a ratio is above what is allowed."""
    parser = argparse.ArgumentParser(description="Cost of gatewise.LSTM over torch.nn.LSTM on the same library.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--kernel", help="default: aten on the CPU, cudnn on a GPU")
    parser.add_argument("--pairs", type=int, default=400, help="calls of each class per case (default: 400)")
    parser.add_argument("--no-record", action="store_true", help=f"do not append to {RESULTS.name}")
    given = parser.parse_args()
    kind = torch.device(given.device).type
    kernel = given.kernel or {"cpu": "aten", "cuda": "cudnn"}[kind]
    run = Run.now(torch.device(given.device))
    print(f"{run.device}, PyTorch {run.torch}, {given.dtype}\n")
    print(f"{'T':>4}{'B':>5}{'H':>6}  {'mode':<11}{'nn.LSTM ms':>12}{'gatewise ms':>13}{'ratio':>8}")
    rows = []
    for shape in CASES[kind]:
        for mode in MODES:
            row = measure(shape, mode, given.device, DTYPES[given.dtype], kernel, given.pairs)
            theirs, ours = (1e3 * row["seconds"][name]["median"] for name in ("torch", "gatewise"))
            flag = "" if row["ratio"] <= ALLOWED else f"  above {ALLOWED}"
            sizes = f"{row['T']:>4}{row['B']:>5}{row['H']:>6}"
            print(f"{sizes}  {mode:<11}{theirs:>12.4f}{ours:>13.4f}{row['ratio']:>8.3f}{flag}")
            rows.append(row)
    if not given.no_record:
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps({"benchmark": "overhead", "run": dataclasses.asdict(run), "rows": rows}) + "\n")
    return int(any(row["ratio"] > ALLOWED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
