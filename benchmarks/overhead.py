"""What choosing costs: gatewise.LSTM against torch.nn.LSTM computing the same thing with the same library.

    python benchmarks/overhead.py                        # CPU, the three cases of the acceptance criterion
    python benchmarks/overhead.py --device cuda          # cuDNN through both, H >= 512

Calls of both classes alternate in one process, in an order drawn anew for every pair, so that drifts of the machine hit
both alike. The figure is the ratio of the medians; the record keeps the 20 % and 80 % quantiles as well.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import gatewise

RESULTS = Path(__file__).parent / "results" / "overhead.jsonl"
ALLOWED = 1.03

# (T, B, H), the input as wide as the hidden state.
CASES = {
    "cpu": [(35, 20, 200), (28, 64, 128), (100, 1, 256)],
    "cuda": [(35, 20, 512), (35, 20, 650), (100, 64, 512), (35, 20, 1500), (50, 128, 1024)],
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


def training(module: torch.nn.Module, x: torch.Tensor) -> None:
    y, _ = module(x)
    y.backward(torch.ones_like(y))


def inference(module: torch.nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        module(x)


MODES: dict[str, Callable[[torch.nn.Module, torch.Tensor], None]] = {"inference": inference, "training": training}


def timed(step: Callable[[torch.nn.Module, torch.Tensor], None], module: torch.nn.Module, x: torch.Tensor) -> float:
    """Seconds of one step, until the device has finished."""
    module.zero_grad(set_to_none=True)
    x.grad = None
    finish = torch.cuda.synchronize if x.is_cuda else lambda: None
    finish()
    start = time.perf_counter()
    step(module, x)
    finish()
    return time.perf_counter() - start


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 20 % and 80 % quantiles in milliseconds."""
    ordered = sorted(seconds)
    return {
        name: round(1e3 * ordered[int(share * (len(ordered) - 1))], 5)
        for name, share in {"median": 0.5, "q20": 0.2, "q80": 0.8}.items()
    }


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
    modules = {"torch": theirs, "gatewise": ours}
    seconds: dict[str, list[float]] = {name: [] for name in modules}
    for pair in range(-max(pairs // 10, 3), pairs):
        for name in random.sample(list(modules), 2):
            taken = timed(MODES[mode], modules[name], x)
            if pair >= 0:
                seconds[name].append(taken)
    found = {name: quantiles(taken) for name, taken in seconds.items()}
    return {
        "T": T,
        "B": B,
        "H": H,
        "mode": mode,
        "dtype": str(dtype).removeprefix("torch."),
        "kernel": gatewise.explain(ours, (T, B, H)).chosen,
        "pairs": pairs,
        "milliseconds": found,
        "ratio": round(found["gatewise"]["median"] / found["torch"]["median"], 4),
    }


def circumstances(device: str) -> dict[str, object]:
    """Where and with what the measurement was made."""
    here = Path(__file__).parent
    sha = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"], cwd=here, capture_output=True, text=True, check=False
    )
    on_gpu = device.startswith("cuda")
    return {
        "benchmark": "overhead",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git": sha.stdout.strip() + ("+changes" if changed.stdout.strip() else ""),
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "gatewise": gatewise.__version__,
        "python": platform.python_version(),
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
    record = circumstances(given.device)
    print(f"{record['device']}, torch {record['torch']}, {given.dtype}, {record['threads']} threads\n")
    print(f"{'T':>4}{'B':>5}{'H':>6}  {'mode':<11}{'nn.LSTM ms':>12}{'gatewise ms':>13}{'ratio':>8}")
    rows = []
    for shape in CASES[kind]:
        for mode in MODES:
            row = measure(shape, mode, given.device, DTYPES[given.dtype], kernel, given.pairs)
            theirs, ours = (row["milliseconds"][name]["median"] for name in ("torch", "gatewise"))
            flag = "" if row["ratio"] <= ALLOWED else f"  above {ALLOWED}"
            sizes = f"{row['T']:>4}{row['B']:>5}{row['H']:>6}"
            print(f"{sizes}  {mode:<11}{theirs:>12.4f}{ours:>13.4f}{row['ratio']:>8.3f}{flag}")
            rows.append(row)
    if not given.no_record:
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(record | {"rows": rows}) + "\n")
    return int(any(row["ratio"] > ALLOWED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
