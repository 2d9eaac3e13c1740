"""`gatewise bench cells`: layers of every cell compared with loops over time in plain PyTorch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import torch
import typer

from gatewise.benchmarks import precision, record
from gatewise.benchmarks.cases import LSTMCase
from gatewise.benchmarks.cells import cases, picture, report
from gatewise.benchmarks.cells import record as cell_record
from gatewise.benchmarks.cells import run as cell_run
from gatewise.benchmarks.lstm.record import INFERENCE, TRAIN
from gatewise.benchmarks.sampling import Sampling
from gatewise.cli.bench_layer import cases_named, directions_named
from gatewise.cli.bench_run import Results, Where, complete, device_named
from gatewise.contract.errors import ArgumentError, sentence


def bench_cells(
    cell: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a cell, or own_lstm for an LSTM that is defined in the benchmark; repeatable. Default: all."
        ),
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="Name of a case; repeatable. Default: all of the grid.")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of {', '.join(precision.LAYER_PRECISIONS)}; repeatable. tf32 and fp32 are float32 with and "
            "without TF32. Default: all, on a CPU fp32."
        ),
    ] = None,
    direction: Annotated[str, typer.Option(help="train, inference or both.")] = "both",
    way: Annotated[
        list[str] | None,
        typer.Option(
            help=f"What to measure beside the layer of the cell: {', '.join(cell_record.OPTIONAL)}; repeatable. "
            "Default: all."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few cases, tiny ones on a CPU, as a test of the command.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="Seconds of samples for each measured time.")] = 0.05,
    device: Where = "",
    records: Annotated[
        Path | None,
        typer.Option("--record", help="The file to append to. Default: that of the benchmark in --results."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Plot training, or inference if there is no training: PREFIX.png and PREFIX.svg."),
    ] = None,
    results: Results = record.RESULTS,
) -> None:
    """Compare the layer of every cell with loops in plain PyTorch.

    The command measures time and memory of training steps and inference,
    eager and as CUDA graph replay, compares results with float64, and records
    which kernel ran. Beside the layer of each cell it measures the same layer
    with resets, dropout and zoneout, gatewise.LSTM, torch.nn.LSTM, and loops
    over the cell's step, with and without torch.compile (--way). A cell with
    wrong results gets no time, and the command fails.

    Each record is written immediately, so a run can be split by --cell,
    --case, --dtype or --way, or interrupted.

    \b
    Examples:
      gatewise bench cells --quick
      gatewise bench cells --dtype bf16 --seconds 0.03
      gatewise bench cells --cell own_lstm --way gatewise.LSTM
      gatewise bench cells --cell slstm --case flashrnn_cell --direction train
    """  # noqa: D301 - \b keeps the lines of the examples apart
    where = device_named(device)
    if seconds < 0:
        raise ArgumentError(sentence("--seconds", "at least 0", seconds))
    benchmark = cell_record.QUICK_BENCHMARK if quick else cell_record.BENCHMARK
    settings = cell_run.Settings(
        benchmark=benchmark,
        cells=cases.chosen_cells(cell or []),
        cases=cases_named(case or [], _offered(quick, where)),
        precisions=tuple(precision.chosen(dtype or [], where, precision.LAYER_PRECISIONS)),
        directions=directions_named(direction),
        sampling=Sampling(where, seconds, least=3, warmups=1, sample=0.005),
        ways=_ways(way or []),
    )
    path = records or record.path_of(results, benchmark)
    record.check_writable(path.parent, "--record" if records else "--results")

    def draw(rows: list[cell_record.CellRecord]) -> list[Path]:
        shown = TRAIN if picture.drawable(rows) else INFERENCE
        return [] if plot is None or not picture.drawable(rows, shown) else picture.draw(rows, plot, shown)

    complete(functools.partial(cell_run.run, settings), path, report.on_screen, draw)


def _offered(quick: bool, device: torch.device) -> tuple[LSTMCase, ...]:
    if quick:
        return cases.QUICK if device.type == "cuda" else cases.TINY
    return cases.CASES


def _ways(names: list[str]) -> tuple[str, ...]:
    for name in names:
        if name not in cell_record.OPTIONAL:
            raise ArgumentError(sentence("--way", f"one of {', '.join(cell_record.OPTIONAL)}", repr(name)))
    return tuple(name for name in cell_record.OPTIONAL if not names or name in names)
