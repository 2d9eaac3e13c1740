"""What choosing costs: gatewise.LSTM against torch.nn.LSTM computing the same thing with the same library.

    python benchmarks/overhead.py                        # CPU, the three cases of the acceptance criterion
    python benchmarks/overhead.py --device cuda          # cuDNN through both, H >= 512
    python benchmarks/overhead.py --streaming            # one step of one sequence a call, and LSTMCell

Calls of both classes alternate in one process, so that drifts of the machine hit both alike. The figure is the ratio of
the medians; the record keeps the 20 % and 80 % quantiles as well. A streaming row is the time until a call returns, on
an idle device: what is compared is the CPU's work.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import gatewise
from gatewise.benchmarks.record import Run
from gatewise.files import append_line
from gatewise.selection.timing import Clock, time_side_by_side

RESULTS = Path(__file__).parent / "results" / "overhead.jsonl"
ALLOWED = 1.03

# (T, B, H), the input as wide as the hidden state.
CASES = {
    "cpu": [(35, 20, 200), (28, 64, 128), (100, 1, 256)],
    "cuda": [(35, 20, 512), (35, 20, 650), (100, 64, 512), (35, 20, 1500), (50, 128, 1024)],
}
STREAMING = [(1, 1, 128), (1, 1, 256), (1, 1, 512), (1, 1, 1024)]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}

Step = Callable[[], object]


class IssueClock:
    """Time until the calls of a sample return, whether or not the device has done its part."""

    def __init__(self, device: torch.device) -> None:
        self._waits = device.type == "cuda"
        self._began = 0.0

    def start(self) -> None:
        """Wait for earlier work, then begin a sample."""
        if self._waits:
            torch.cuda.synchronize()
        self._began = time.perf_counter()

    def stop(self) -> float:
        """Return the seconds since `start`."""
        return time.perf_counter() - self._began


def training(module: torch.nn.Module, x: Tensor) -> Step:
    """A pass forward and back over a batch."""
    parameters, ones = [x, *module.parameters()], torch.ones(*x.shape[:-1], module.hidden_size).to(x)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        module(x)[0].backward(ones)

    return step


def inference(module: torch.nn.Module, x: Tensor) -> Step:
    """A pass forward."""

    def step() -> None:
        with torch.no_grad():
            module(x)

    return step


def streaming(module: torch.nn.Module, x: Tensor) -> Step:
    """One step of a sequence: the state that a call returns goes into the next."""
    x, state = x.detach(), None

    def step() -> None:
        nonlocal state
        with torch.inference_mode():
            found = module(x, state)
            state = found if isinstance(module, (torch.nn.LSTMCell, gatewise.LSTMCell)) else found[1]

    return step


MODES: dict[str, Callable[[torch.nn.Module, Tensor], Step]] = {"inference": inference, "training": training}
STREAMING_MODES: dict[str, Callable[[torch.nn.Module, Tensor], Step]] = {"streaming": streaming, "training": training}


def measure(
    shape: tuple[int, int, int], mode: str, device: str, dtype: torch.dtype, kernel: str, pairs: int
) -> dict[str, object]:
    """Time one case of the layers; returns its part of the record."""
    T, B, H = shape
    torch.manual_seed(0)
    theirs = torch.nn.LSTM(H, H, device=device, dtype=dtype)
    ours = gatewise.LSTM(H, H, device=device, dtype=dtype, kernel=kernel)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(T, B, H, device=device, dtype=dtype, requires_grad=mode == "training")
    short = T == 1
    begin = (STREAMING_MODES if short else MODES)[mode]
    functions = {"torch": begin(theirs, x), "gatewise": begin(ours, x)}
    clock = IssueClock(torch.device(device)) if short else None
    chosen = gatewise.explain(ours, (T, B, H), training=mode == "training").chosen
    return {**_row(shape, mode, dtype, chosen or ""), **_timed(functions, device, pairs, clock)}


def measure_cell(hidden_size: int, mode: str, device: str, dtype: torch.dtype, pairs: int) -> dict[str, object]:
    """Time one case of the cells, one sequence; returns its part of the record."""
    torch.manual_seed(0)
    theirs = torch.nn.LSTMCell(hidden_size, hidden_size, device=device, dtype=dtype)
    ours = gatewise.LSTMCell(hidden_size, hidden_size, device=device, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, hidden_size, device=device, dtype=dtype, requires_grad=mode == "training")
    begin = STREAMING_MODES[mode]
    functions = {"torch": begin(theirs, x), "gatewise": begin(ours, x)}
    return {
        **_row((1, 1, hidden_size), mode, dtype, "LSTMCell"),
        **_timed(functions, device, pairs, IssueClock(torch.device(device))),
    }


def _row(shape: tuple[int, int, int], mode: str, dtype: torch.dtype, kernel: str) -> dict[str, object]:
    sizes = dict(zip("TBH", shape, strict=True))
    return {**sizes, "mode": mode, "dtype": str(dtype).removeprefix("torch."), "kernel": kernel}


def _timed(functions: dict[str, Step], device: str, pairs: int, clock: Clock | None) -> dict[str, object]:
    timings = time_side_by_side(functions, device=device, runs=pairs, warmups=max(pairs // 10, 3), calls=1, clock=clock)
    return {
        "seconds": {name: dataclasses.asdict(timing) for name, timing in timings.items()},
        "ratio": round(timings["gatewise"].median / timings["torch"].median, 4),
    }


def main() -> int:
    """Measure, print a table, append the record; the status is 1 when a ratio is above what is allowed."""
    parser = argparse.ArgumentParser(description="Cost of gatewise.LSTM over torch.nn.LSTM on the same library.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--kernel", help="default: aten on the CPU, cudnn on a GPU")
    parser.add_argument("--streaming", action="store_true", help="one step of one sequence a call, and LSTMCell")
    parser.add_argument("--pairs", type=int, default=400, help="calls of each class per case (default: 400)")
    parser.add_argument("--no-record", action="store_true", help=f"do not append to {RESULTS.name}")
    given = parser.parse_args()
    kind = torch.device(given.device).type
    kernel = given.kernel or {"cpu": "aten", "cuda": "cudnn"}[kind]
    dtype = DTYPES[given.dtype]
    run = Run.now(torch.device(given.device))
    print(f"{run.device}, PyTorch {run.torch}, {given.dtype}\n")
    print(f"{'T':>4}{'B':>5}{'H':>6}  {'mode':<11}{'kernel':<12}{'torch ms':>11}{'gatewise ms':>13}{'ratio':>8}")
    rows = []
    for shape in STREAMING if given.streaming else CASES[kind]:
        for mode in STREAMING_MODES if given.streaming else MODES:
            rows.append(measure(shape, mode, given.device, dtype, kernel, given.pairs))
            _print(rows[-1])
            if given.streaming:
                rows.append(measure_cell(shape[2], mode, given.device, dtype, given.pairs))
                _print(rows[-1])
    if not given.no_record:
        append_line(RESULTS, json.dumps({"benchmark": "overhead", "run": dataclasses.asdict(run), "rows": rows}))
    return int(any(row["ratio"] > ALLOWED for row in rows))


def _print(row: dict) -> None:
    theirs, ours = (1e3 * row["seconds"][name]["median"] for name in ("torch", "gatewise"))
    flag = "" if row["ratio"] <= ALLOWED else f"  above {ALLOWED}"
    sizes = f"{row['T']:>4}{row['B']:>5}{row['H']:>6}"
    print(f"{sizes}  {row['mode']:<11}{row['kernel']:<12}{theirs:>11.4f}{ours:>13.4f}{row['ratio']:>8.3f}{flag}")


if __name__ == "__main__":
    sys.exit(main())
