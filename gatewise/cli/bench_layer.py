"""`gatewise bench lstm` and `gatewise bench gru`: one layer compared with PyTorch's over a grid of shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from gatewise.benchmarks import precision, record
from gatewise.benchmarks.cases import LSTM_GRID, LSTM_QUICK, LSTM_TINY, LSTMCase
from gatewise.benchmarks.lstm import grid, picture
from gatewise.benchmarks.lstm import record as lstm_record
from gatewise.benchmarks.lstm import report as lstm_report
from gatewise.cli.bench_run import Results, Where, complete, device_named
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.contract.problem import LEAN
from gatewise.selection import AUTO, kernel_names

_HELP = """Compare gatewise.{layer} with torch.nn.{layer} over a grid of shapes.

The command measures time and memory of training steps and inference,
eager and as CUDA graph replay, with both layers sampled in turn. It
compares results with float64 and times with a lower bound (roofline), and
records which kernel ran. A row with wrong results is red and has no
speed-up, and the command fails.

Each record is written immediately, so a run can be split by --case or
--dtype, or interrupted.

\b
Examples:
  gatewise bench {cell} --quick
  gatewise bench {cell} --dtype bf16 --plot {cell}
  gatewise bench {cell} --case speech --case speech_ragged --direction train
  gatewise bench {cell} --kernel eager --kernel cudnn --dtype fp16
"""


def bench_layer(cell: str) -> Callable[..., None]:
    """Return the command that measures the layer of a cell: "lstm" or "gru"."""

    def bench(
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
        kernel: Annotated[
            list[str] | None,
            typer.Option(
                help="Name of a kernel, or lean for auto with memory='lean'; repeatable, one table each. Default: "
                "auto, the kernel that is chosen."
            ),
        ] = None,
        quick: Annotated[
            bool, typer.Option("--quick", help="A few cases and samples, tiny ones on a CPU, as a test of the command.")
        ] = False,
        seconds: Annotated[
            float | None,
            typer.Option(help="Seconds of samples for each measured time. Default: 0.15, with --quick 0.05."),
        ] = None,
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
        where = device_named(device)
        if seconds is not None and seconds < 0:
            raise ArgumentError(sentence("--seconds", "at least 0", seconds))
        benchmark = f"{cell}_quick" if quick else cell
        settings = grid.Settings(
            benchmark=benchmark,
            cases=cases_named(case or [], _offered(quick, where)),
            precisions=tuple(precision.chosen(dtype or [], where, precision.LAYER_PRECISIONS)),
            directions=directions_named(direction),
            kernels=_kernels(kernel or []),
            device=where,
            seconds=seconds if seconds is not None else 0.05 if quick else 0.15,
            least=3 if quick else 5,
            cell=cell,
        )
        path = records or record.path_of(results, benchmark)
        record.check_writable(path.parent, "--record" if records else "--results")

        def draw(rows: list[lstm_record.LayerRecord]) -> list[Path]:
            shown = lstm_record.TRAIN if picture.drawable(rows) else lstm_record.INFERENCE
            return [] if plot is None or not picture.drawable(rows, shown) else picture.draw(rows, plot, shown)

        complete(functools.partial(grid.run, settings), path, lstm_report.on_screen, draw)

    bench.__doc__ = _HELP.format(cell=cell, layer=cell.upper())
    return bench


def _offered(quick: bool, device: torch.device) -> tuple[LSTMCase, ...]:
    if quick:
        return LSTM_QUICK if device.type == "cuda" else LSTM_TINY
    return LSTM_GRID


def cases_named(names: list[str], offered: tuple[LSTMCase, ...]) -> tuple[LSTMCase, ...]:
    """Return the cases with the given names, the values of `--case`; without names all that are offered.

    Raises:
        ArgumentError: A name is unknown.
    """
    known = {case.name: case for case in offered}
    for name in names:
        if name not in known:
            raise ArgumentError(sentence("--case", f"one of {', '.join(known)}", repr(name)))
    return tuple(case for case in offered if not names or case.name in names)


def directions_named(name: str) -> tuple[str, ...]:
    """Return the directions for the value of `--direction`.

    Raises:
        ArgumentError: It is neither a direction nor "both".
    """
    both = (lstm_record.TRAIN, lstm_record.INFERENCE)
    if name not in (*both, "both"):
        raise ArgumentError(sentence("--direction", f"{', '.join(both)} or both", repr(name)))
    return both if name == "both" else (name,)


def _kernels(names: list[str]) -> tuple[str, ...]:
    known = (AUTO, LEAN, *kernel_names())
    for name in names:
        if name not in known:
            raise ArgumentError(sentence("--kernel", f"one of {', '.join(known)}", repr(name)))
    return tuple(dict.fromkeys(names or [AUTO]))
