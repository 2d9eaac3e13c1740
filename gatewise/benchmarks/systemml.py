"""The time that the state of SystemML's operators saves, compared with repeating the forward pass.

    python -m gatewise.benchmarks.systemml                    # on the CPU
    python -m gatewise.benchmarks.systemml --device cuda
    python -m gatewise.benchmarks.systemml --into docs/how-to/come-from-systemml.md

A row is timed after both versions returned the same gradients. Its three functions are sampled in turn: the forward
pass, both passes with the state passed between them, and both passes without it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from gatewise.benchmarks.provenance import provenance
from gatewise.benchmarks.record import RESULTS, Run, append_line, path_of, read_lines
from gatewise.benchmarks.report import fill_block
from gatewise.contract.decision import format_seconds
from gatewise.contract.errors import KernelRefused
from gatewise.functional import RepeatedForwardWarning
from gatewise.interop import systemml
from gatewise.selection.timing import Timing, time_side_by_side

BENCHMARK = "systemml"
# (N, T, D, M): four sizes from the tests of SystemML, and one of a language model on a GPU.
CASES = {
    "cpu": [(20, 13, 50, 10), (64, 32, 16, 32), (32, 8, 36, 1025), (32, 75, 128, 256)],
    "cuda": [(20, 13, 50, 10), (64, 32, 16, 32), (32, 8, 36, 1025), (32, 75, 128, 256), (64, 100, 512, 512)],
}
KERNELS = {"cpu": ("eager", "aten"), "cuda": ("eager", "aten", "cudnn")}
DTYPES = (torch.float64, torch.float32)
_SECONDS = 10.0  # the time of all samples of a row
# Both versions differ only in the order of sums on a GPU, in single precision in TF32.
ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-3}


@dataclasses.dataclass(frozen=True, slots=True)
class StateRecord:
    """One row: a problem in one precision on one kernel.

    Attributes:
        benchmark: "systemml".
        sizes: N, T, D and M.
        dtype: The name of the precision.
        kernel: The name of the kernel.
        error: The largest difference of a gradient with and without the state, relative to its largest value.
        forward: The time of the forward pass.
        with_state: The time of both passes, with the state passed on.
        without_state: The time of both passes, with the forward pass repeated.
        run: The run of the record.
    """

    benchmark: str
    sizes: tuple[int, int, int, int]
    dtype: str
    kernel: str
    error: float
    forward: Timing
    with_state: Timing
    without_state: Timing
    run: Run

    @property
    def saved(self) -> float:
        """The fraction of the time of both passes that the state saves."""
        return 1 - self.with_state.median / self.without_state.median

    @property
    def speed_up(self) -> float:
        """The speed-up of the backward pass alone."""
        return (self.without_state.median - self.forward.median) / (self.with_state.median - self.forward.median)

    @classmethod
    def from_line(cls, line: str) -> StateRecord:
        """Parse one line of a file."""
        fields = json.loads(line)
        times = {name: Timing(**fields[name]) for name in ("forward", "with_state", "without_state")}
        return cls(**fields | times | {"sizes": tuple(fields["sizes"]), "run": Run(**fields["run"])})


def measure(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, kernel: str, run: Run, device: str, runs: int
) -> StateRecord:
    """Compare the gradients with and without the state, then measure the times.

    Raises:
        KernelRefused: The kernel cannot run the problem.
        ArithmeticError: The gradients with and without the state differ.
    """
    inputs, dout, dc = _problem(sizes, dtype, device)

    def forward() -> systemml.State:
        return systemml.lstm(*inputs, True, kernel=kernel)[2]

    def both(keep: bool) -> tuple[Tensor, ...]:
        state = forward()
        return systemml.lstm_backward(*inputs, True, dout, dc, state if keep else None, kernel=kernel)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RepeatedForwardWarning)
        pairs = zip(both(True), both(False), strict=True)
        error = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
        if not error <= ALLOWED[dtype]:
            raise ArithmeticError(f"{kernel}, {sizes}, {dtype}: gradients differ by {error:.1e} of the largest")
        functions = {
            "forward": forward,
            "with_state": lambda: both(True),
            "without_state": lambda: both(False),
        }
        times = time_side_by_side(functions, device=device, runs=runs, budget=_SECONDS)
    return StateRecord(BENCHMARK, sizes, str(dtype).removeprefix("torch."), kernel, error, **times, run=run)


def markdown(records: Sequence[StateRecord]) -> str:
    """Return the table of one run, and its environment."""
    lines = [
        "| N, T, D, M | dtype | kernel | both passes without | with state | saved | backward alone |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for record in records:
        without, kept = (format_seconds(timing.median) for timing in (record.without_state, record.with_state))
        cells = [", ".join(map(str, record.sizes)), record.dtype, record.kernel]
        figures = [without, kept, f"{record.saved:.0%}", f"{record.speed_up:.2f}x"]
        lines.append(f"| {' | '.join(cells + figures)} |")
    return "\n".join([*lines, "", provenance([record.run for record in records])])


def newest_of_each(records: Sequence[StateRecord]) -> dict[str, list[StateRecord]]:
    """Return the rows of the newest run on each kind of device, "cpu" and "cuda"."""
    found = {}
    for kind, on_gpu in (("cpu", False), ("cuda", True)):
        of_kind = [record for record in records if bool(record.run.driver) == on_gpu]
        if of_kind:
            found[kind] = [record for record in of_kind if record.run == of_kind[-1].run]
    return found


def summary(folder: Path = RESULTS) -> str:
    """Return the tables of the newest runs, with the CPU first."""
    return "\n\n".join(map(markdown, newest_of_each(read_lines(path_of(folder, BENCHMARK), StateRecord)).values()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and record, or write the newest tables into a page."""
    parser = argparse.ArgumentParser(prog="gatewise.benchmarks.systemml", description=main.__doc__)
    parser.add_argument("--device", default="cpu", choices=sorted(CASES))
    parser.add_argument("--runs", type=int, default=15, help="samples of each function (default: 15)")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"folder of the records (default: {RESULTS})")
    parser.add_argument("--into", type=Path, help="a page whose block gets the newest tables; measures nothing")
    given = parser.parse_args(arguments)
    if given.into is not None:
        fill_block(given.into, BENCHMARK, summary(given.results))
        return 0
    run, records = Run.now(torch.device(given.device)), []
    for sizes in CASES[given.device]:
        for dtype in DTYPES:
            for kernel in KERNELS[given.device]:
                try:
                    record = measure(sizes, dtype, kernel, run, given.device, given.runs)
                except KernelRefused as refused:
                    print(f"{kernel} refuses {sizes}: {str(refused).splitlines()[0]}")
                    continue
                append_line(dataclasses.asdict(record), path_of(given.results, BENCHMARK))
                records.append(record)
                print(f"{record.sizes} {record.dtype} {kernel}: {record.saved:.0%} saved", flush=True)
    print(markdown(records))
    return 0


def _problem(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor, Tensor]:
    N, T, D, M = sizes
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    weights, _, _, _ = systemml.init(N, D, M, dtype=dtype, device=device, seed=0)
    inputs = (normal(N, T * D), weights, normal(1, 4 * M), normal(N, M), normal(N, M))
    return inputs, normal(N, T * M), normal(N, M)


if __name__ == "__main__":
    sys.exit(main())
