"""Where a step of the layer norm LSTM and of the LSTM with zoneout goes, beside the plain LSTM: times and clock cycles.

    python -m benchmarks.loops.rows --record FILE     # needs a GPU; adds lines to FILE
    python -m benchmarks.loops.rows --compile h200    # without a GPU: the registers of the passes

Times are those of passes without marks: a training step and inference in a CUDA graph, and in it each kernel. Another
process runs the same passes with the marks of `benchmarks.loops.phases`. A pass whose marks take so many registers that
others are spilled has fewer marks.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.loops.phases import PHASES, Counts, counting_sources, counts_of
from gatewise.benchmarks.cases import LSTMCase
from gatewise.benchmarks.cells.call import draw, layer_of, options_with_masks
from gatewise.benchmarks.cells.cases import CASES
from gatewise.benchmarks.cells.side import layer_side
from gatewise.benchmarks.lstm.side import Side
from gatewise.cells import LSTM, Cell, LayerNormLSTM
from gatewise.contract.capture import for_cuda_graph
from gatewise.contract.device import Device
from gatewise.contract.errors import GatewiseError
from gatewise.contract.problem import Problem
from gatewise.derivation.device import DeviceCode
from gatewise.files import append_line
from gatewise.kernels.cuda import toolchain
from gatewise.kernels.persistent.launches import Launch
from gatewise.kernels.persistent.launches.builds import building, copies_of, launches_of
from gatewise.selection.timing import captured

NAMES = ("100-16-256", "100-64-256", "200-8-512", "100-64-512", "50-128-512", "100-16-1024", "100-64-1024")
WAYS: dict[str, tuple[Cell, str]] = {
    "lstm": (LSTM(), ""),
    "layer_norm_lstm": (LayerNormLSTM(), ""),
    "lstm with zoneout": (LSTM(), "zoneout"),
}
TRAINING, INFERENCE = "training", "inference"
LEFT_OUT = ((), ("waits",), ("waits", "loads"), ("waits", "masks"), ("waits", "loads", "masks"))
"""The phases without marks, in the order in which they are tried until nothing more is spilled than without marks."""

_DTYPE = torch.bfloat16
_REPLAYS = 5
_ENTRY = "recurrent_"  # with the name of a pass the name of its kernel
_WORKERS = 15  # threads that compile
Macros = tuple[tuple[str, int], ...]


class Row(NamedTuple):
    """A layer on a case, and what is done with it."""

    case: LSTMCase
    way: str
    mode: str

    @property
    def name(self) -> str:
        """The row in words."""
        return f"{self.case.name}, {self.way}, {self.mode}"


def main() -> None:
    """Measure all rows, or those named, and record them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--record", type=Path, help="file that lines of JSON are added to")
    parser.add_argument("--case", action="append", choices=NAMES, help="a case (all)")
    parser.add_argument("--way", action="append", choices=tuple(WAYS), help="a layer (all)")
    parser.add_argument("--compile", metavar="GPU", help="compile the passes for a GPU, without running them")
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)  # the process with marks
    given = parser.parse_args()
    rows = rows_of(given.case or NAMES, given.way or tuple(WAYS))
    if given.compile:
        resources(rows, Device.named(given.compile))
    elif given.count:
        count(rows, torch.device("cuda", 0))
    else:
        measure(rows, given.record, torch.device("cuda", 0))


def rows_of(names: Sequence[str], ways: Sequence[str]) -> list[Row]:
    """Return the rows of some cases and layers."""
    cases = [case for case in CASES if case.name in names]
    modes = {way: (TRAINING,) if masks else (TRAINING, INFERENCE) for way, (_, masks) in WAYS.items()}
    return [Row(case, way, mode) for case in cases for way in ways for mode in modes[way]]


def problem_of(row: Row) -> Problem:
    """Return the problem of a row, as far as its passes depend on it."""
    cell, masks = WAYS[row.way]
    if masks:
        with torch.device("meta"):
            cell = layer_of(cell, 8, **_options(row)).cell_in(True)  # type: ignore[operator]
    case = row.case
    sizes = case.time, case.batch, case.hidden_size, case.hidden_size
    return Problem(*sizes, cell=cell, dtype=_DTYPE, needs_grad=row.mode == TRAINING)


def _options(row: Row) -> dict[str, Any]:
    cell, masks = WAYS[row.way]
    return {"kernel": "persistent"} | ((options_with_masks(cell, masks) or {}) if masks else {})


class Counting:
    """Compiles sources with as many marks as registers allow, in place of `toolchain.compile_source`.

    Args:
        folder: An empty folder.

    Attributes:
        chosen: For each pass that was compiled, by its name and macros, the phases that have no mark, and the registers
            and spilled bytes of a thread without and with marks.
    """

    def __init__(self, folder: Path) -> None:
        self.chosen: dict[tuple[str, Macros], tuple[tuple[str, ...], toolchain.Resources, toolchain.Resources]] = {}
        self._folders: dict[tuple[str, ...], Path] = {}
        for number, left_out in enumerate(LEFT_OUT):
            (folder / str(number)).mkdir()
            self._folders[left_out] = counting_sources(folder / str(number), left_out)

    def compile(
        self, source: Path, architecture: str, macros: Mapping[str, int], code: DeviceCode | None = None
    ) -> bytes:
        """Return the machine code of a source; with marks if it is a pass."""
        binary, plain = toolchain.compile_afresh(source, architecture, macros, code)
        if source.stem not in PHASES:
            return binary
        for left_out, folder in self._folders.items():
            binary, marked = toolchain.compile_afresh(folder / source.name, architecture, macros, code)
            self.chosen[source.stem, tuple(macros.items())] = left_out, plain, marked
            if marked.spilled_bytes <= plain.spilled_bytes:
                break
        return binary


def resources(rows: Sequence[Row], device: Device) -> None:
    """Compile the passes of rows with and without marks, and print what each takes."""
    done = set()
    with tempfile.TemporaryDirectory() as folder, counting_in(Path(folder)) as counting:
        for row in rows:
            for launch in launches_of(problem_of(row), device):
                if launch.source not in done:
                    done.add(launch.source)
                    _ = launch.binary
                    left_out, plain, marked = counting.chosen[_key(launch)]
                    print(
                        f"{row.name}, {launch.source[0]}: {plain}; with marks, but not of {left_out}: {marked}",
                        flush=True,
                    )


def _key(launch: Launch) -> tuple[str, Macros]:
    file, _, macros, _ = launch.source
    return file, macros  # type: ignore[return-value]


@contextlib.contextmanager
def counting_in(folder: Path) -> Iterator[Counting]:
    """Have passes compiled with marks."""
    counting, real = Counting(folder), toolchain.compile_source
    toolchain.compile_source = counting.compile
    try:
        yield counting
    finally:
        toolchain.compile_source = real


def count(rows: Sequence[Row], device: torch.device) -> None:
    """Run the passes of rows with marks, which print what they count, with a line of JSON before each row."""
    probed = Device.probe(device)
    with tempfile.TemporaryDirectory() as folder, counting_in(Path(folder)) as counting:
        launches = {row: launches_of(problem_of(row), probed) for row in rows}
        with building([launch for each in launches.values() for launch in each], _WORKERS, device):
            pass
        for index, row in enumerate(rows):
            print_counts(index, side_of(row, device), launches[row], counting, training=row.mode == TRAINING)


def print_counts(index: int, side: Side, launches: Sequence[Launch], counting: Counting, *, training: bool) -> None:
    """Run the passes of a layer twice; each time a line of JSON, for `read`, is printed before their counts."""
    for first in (True, False):
        left_out = {} if first else {launch.source[0]: counting.chosen[_key(launch)][0] for launch in launches}
        print("ROW", json.dumps({"index": index, "left_out": left_out, "first": first}), flush=True)
        with torch.set_grad_enabled(training):
            side.train() if training else side.infer()
        torch.cuda.synchronize()
        ctypes.CDLL(None).fflush(None)


def side_of(row: Row, device: torch.device) -> Side:
    """Return the layer of a row with its arguments, those of `gatewise bench cells`."""
    cell, _ = WAYS[row.way]
    side = layer_side(draw(cell, row.case, device), _DTYPE, **_options(row))
    side.prepare(row.mode == TRAINING)
    return side


Counted = TypeVar("Counted")
Found = tuple[dict[str, list[Counts]], dict[str, list[str]]]


def counted(rows: Sequence[Row]) -> dict[Row, Found]:
    """Return the counts of the passes of rows, which run in another process."""
    names = dict.fromkeys(argument for row in rows for argument in (f"--case={row.case.name}", f"--way={row.way}"))
    command = [sys.executable, "-m", "benchmarks.loops.rows", "--count", *names]
    return read(rows, subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout)


def read(rows: Sequence[Counted], printed: str) -> dict[Counted, Found]:
    """Return the counts of the passes and their phases without marks, both by pass, from the output of `count`."""
    found = {}
    for part in printed.split("ROW ")[1:]:
        head, _, lines = part.partition("\n")
        fields = json.loads(head)
        if fields["first"]:  # caches are cold, and the code is loaded
            continue
        found[rows[fields["index"]]] = counts_of(lines), fields["left_out"]
    return found


def measure(rows: Sequence[Row], record: Path | None, device: torch.device) -> None:
    """Time the rows, count their cycles in another process, print a table and record both."""
    probed = Device.probe(device)
    problems = [problem_of(row) for row in rows]
    needed = [each for problem in problems for each in (*launches_of(problem, probed), *copies_of(problem, probed))]
    with building(needed, _WORKERS, device):
        pass
    timed = {}
    for row in rows:
        try:
            timed[row] = times_of(row, device)
        except (RuntimeError, GatewiseError) as error:
            print(f"{row.name} failed: {error}", flush=True)
    found = counted(rows)
    for row in timed:
        for line in lines_of(row, timed[row], *found.get(row, ({}, {}))):
            if record:
                append_line(record, json.dumps(line))
    print("\n".join(table(timed, found)))


def times_of(row: Row, device: torch.device) -> dict[str, float]:
    """Return microseconds a time step: "all" of a replay of a CUDA graph, and each kernel in it by its name."""
    return times_in_graph(side_of(row, device), row.case.time, training=row.mode == TRAINING)


def times_in_graph(side: Side, steps: int, *, training: bool) -> dict[str, float]:
    """Return the microseconds of a time step as `times_of` does, of a layer whose call has a number of steps."""
    with torch.set_grad_enabled(training), for_cuda_graph():
        replay = captured(side.train if training else side.infer, warmups=2)
    for _ in range(3):
        replay()
    samples = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_REPLAYS):
            replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / _REPLAYS)
    found = {"all": statistics.median(samples)}
    with profile(activities=[ProfilerActivity.CUDA]) as observed:
        for _ in range(_REPLAYS):
            replay()
        torch.cuda.synchronize()
    for event in observed.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name[:60]] = found.get(event.name[:60], 0.0) + event.time_range.elapsed_us() / _REPLAYS
    return {name: round(time / steps, 4) for name, time in found.items()}


def lines_of(
    row: Row, times: dict[str, float], counts: dict[str, list[Counts]], left_out: dict[str, list[str]]
) -> Iterator[dict[str, object]]:
    """Yield the lines of the record: one for the times of a row, and one for each pass and thread that counts."""
    case = [row.case.time, row.case.batch, row.case.hidden_size, False, "bf16"]
    of_row = {"benchmark": "loops", "scripts": "benchmarks/loops/rows.py", "torch": torch.__version__}
    of_row |= {"case": case, "cell": row.way, "mode": row.mode}
    where = {"device": torch.cuda.get_device_name(), "date": datetime.now(UTC).date().isoformat()}
    yield {**of_row, "what": "times of a step in a CUDA graph", "us_a_step": times, **where}
    for name, threads in counts.items():
        for own in threads:
            yield {
                **of_row,
                "what": "clock cycles of the phases of a step",
                "pass": name,
                "thread": own.thread,
                "steps": own.steps,
                "us_a_step": times.get(_ENTRY + name),
                "marked_us_a_step": round(own.nanoseconds / 1e3 / row.case.time, 4),
                "ghz": round(own.cycles / max(own.nanoseconds, 1), 4),
                "phases": {phase: round(cycles) for phase, cycles in own.phases.items()},
                "waits": round(own.waits),
                "polls": round(own.reloads, 2),
                "polls_of_exchanges": [round(each, 2) for each in own.exchange_reloads],
                "left_out": left_out.get(name, []),
                **where,
            }


def table(timed: Mapping[Row, dict[str, float]], found: Mapping[Row, Found]) -> Iterator[str]:
    """Yield the lines of a table: the times of each row, and the phases that its passes' first threads counted."""
    for row, times in timed.items():
        counts, _ = found.get(row, ({}, {}))
        plain = timed.get(row._replace(way="lstm"), times)["all"]
        loops = {name.removeprefix(_ENTRY): time for name, time in times.items() if name.startswith(_ENTRY)}
        others = sum(time for name, time in times.items() if name != "all") - sum(loops.values())
        parts = ", ".join(f"{name} {time:.2f}" for name, time in {**loops, "other kernels": others}.items())
        yield f"== {row.name}: {times['all']:.2f} us a step ({times['all'] / plain:.2f} of plain); {parts}"
        for name, (own, *_) in counts.items():
            marked, cycles = own.nanoseconds / 1e3 / row.case.time, sum(own.phases.values())
            polls = "/".join(f"{each:.1f}" for each in (own.reloads, *own.exchange_reloads))
            yield (
                f"{name}: {own.steps} steps, marked {marked:.2f} us, {cycles:.0f} cycles, waits {own.waits:.0f},"
                f" polls {polls}:"
                f" {', '.join(f'{_short(phase)} {count:.0f}' for phase, count in own.phases.items())}"
            )


def _short(phase: str) -> str:
    return phase.replace("first ", "1 ").replace("second ", "2 ")


if __name__ == "__main__":
    main()
