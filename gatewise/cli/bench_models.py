"""`gatewise bench models`: training steps of models that people write with torch.nn.LSTM, before and after."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from gatewise.benchmarks import record
from gatewise.benchmarks.models import picture, report
from gatewise.benchmarks.models import record as model_record
from gatewise.benchmarks.models import run as benchmark
from gatewise.benchmarks.models.cases import CASES, TINY_CASES
from gatewise.benchmarks.models.workload import Workload
from gatewise.benchmarks.trajectories.verdict import WINDOW
from gatewise.cli.bench_run import Results, Where, complete, device_named
from gatewise.contract.errors import ArgumentError, sentence


def bench_models(
    case: Annotated[list[str] | None, typer.Option(help="Part of a model's name; repeatable. Default: all.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=WINDOW + 1, help="Training steps whose losses are compared with three seeds. Default: 50."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds of samples, for steps and for layers each. Default: 1, on a CPU 0.1."),
    ] = None,
    graphs: Annotated[bool, typer.Option(help="Whether to time steps as CUDA graphs too.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models, as a test of the command.")] = False,
    device: Where = "",
    plot: Annotated[Path | None, typer.Option(help="Plot the times: PREFIX.png and PREFIX.svg.")] = None,
    results: Results = record.RESULTS,
) -> None:
    """Train models with LSTMs as people write them, before and after one line.

    Each model is plain PyTorch with torch.nn.LSTM, in the published sizes, on
    synthetic data. It is timed as it is, after gatewise.accelerate(model),
    and where it helps with what torch.nn.LSTM does not have (reverse=,
    resets=): the whole training step, and its recurrent layers alone. Before
    that, the losses of some steps are compared with those of torch.nn.LSTM
    from three seeds; a row with another loss curve is red and has no speed,
    and the command fails.

    \b
    Examples:
      gatewise bench models --quick
      gatewise bench models --case bonito --no-graphs
      gatewise bench models --plot models
    """  # noqa: D301 - \b keeps the lines of the examples apart
    where = device_named(device)
    settings = benchmark.Settings(
        benchmark=model_record.QUICK_BENCHMARK if quick else model_record.BENCHMARK,
        workloads=_workloads(case or [], quick),
        device=where,
        steps=steps or 50,
        seconds=seconds if seconds is not None else 1.0 if where.type == "cuda" else 0.1,
        graphs=graphs,
    )
    path = record.path_of(results, settings.benchmark)
    record.check_writable(results)

    def draw(rows: list[model_record.ModelRecord]) -> list[Path]:
        return [] if plot is None or not picture.drawable(rows) else picture.draw(rows, plot)

    complete(functools.partial(benchmark.run, settings), path, report.on_screen, draw)


def _workloads(parts: list[str], quick: bool) -> tuple[Workload, ...]:
    offered = TINY_CASES if quick else CASES
    for part in parts:
        if not any(part in workload.name for workload in offered):
            known = ", ".join(workload.name for workload in offered)
            raise ArgumentError(sentence("--case", f"part of one of: {known}", repr(part)))
    return tuple(workload for workload in offered if not parts or any(part in workload.name for part in parts))
