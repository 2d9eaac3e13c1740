"""`gatewise bench scale`: training on 1, 2, 4, ... processes with the same batch in each."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Annotated

import torch
import typer

from gatewise.benchmarks import precision, record
from gatewise.benchmarks.cases import LANGUAGE_MODELS, QUICK_LANGUAGE_MODEL
from gatewise.benchmarks.record import Record
from gatewise.benchmarks.scale import picture, report, ways
from gatewise.benchmarks.scale import run as benchmark
from gatewise.cli.bench_run import Results, Where, complete, device_named
from gatewise.contract.errors import ArgumentError, sentence

_PRECISIONS = {name: precision.PRECISIONS[name] for name in ("bf16-autocast", "tf32", "fp32")}
_WAYS = (*ways.WAYS, *ways.OTHERS)


def bench_scale(
    size: Annotated[str, typer.Option(help=f"One of {', '.join(LANGUAGE_MODELS)}.")] = "large",
    processes: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Number of processes; repeatable. Default: 1, 2, 4, ... GPUs; on a CPU 1 and 2."),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Sequences of each process; repeatable. Default: 20 and 128; with --quick 4."),
    ] = None,
    vocabulary: Annotated[int | None, typer.Option(min=2, help="Words. Default: 10000; with --quick 50.")] = None,
    dtype: Annotated[
        str, typer.Option(help=f"One of {', '.join(_PRECISIONS)}. Default: bf16-autocast, on a CPU fp32.")
    ] = "",
    way: Annotated[
        list[str] | None,
        typer.Option(help=f"Name of a row; repeatable: {'; '.join(way.name for way in _WAYS)}. Default: the first 3."),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Samples of each row.")] = 10,
    calls: Annotated[
        int | None, typer.Option(min=1, help="Training steps per sample. Default: 20 on GPUs, 1 on a CPU.")
    ] = None,
    limit: Annotated[float, typer.Option(min=1, help="The largest time of a row in seconds.")] = 300.0,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, as a test of the command.")] = False,
    device: Where = "",
    plot: Annotated[Path | None, typer.Option(help="Plot the speed-ups: PREFIX.png and PREFIX.svg.")] = None,
    results: Results = record.RESULTS,
) -> None:
    """Train a language model on 1, 2, 4, ... processes with the same batch in each.

    The command starts torchrun for each number of processes, with NCCL on GPUs
    and gloo on CPUs. The rows are torch.nn.LSTM and gatewise.LSTM in a loop in
    plain PyTorch with DistributedDataParallel, and the step of gatewise train
    lm; --way names others. Before a row is timed, its losses over some steps
    are compared with those of torch.nn.LSTM, and the weights of all processes
    must have the same bits; a row with wrong results gets no speed, and the
    command fails. If a process fails, or a row takes longer than --limit, the
    command ends with the reason.

    \b
    Examples:
      gatewise bench scale --quick
      gatewise bench scale --plot scale
      gatewise bench scale --processes 1 --processes 2 --batch 20
    """  # noqa: D301 - \b keeps the lines of the examples apart
    where = device_named(device)
    if size not in LANGUAGE_MODELS:
        raise ArgumentError(sentence("--size", f"one of {', '.join(LANGUAGE_MODELS)}", repr(size)))
    if where.index is not None:
        raise ArgumentError(sentence("--device", "cpu or cuda", repr(device), "Each process uses its own GPU."))
    name = dtype or ("bf16-autocast" if where.type == "cuda" else "fp32")
    if name not in _PRECISIONS:
        raise ArgumentError(sentence("--dtype", f"one of {', '.join(_PRECISIONS)}", repr(name)))
    (chosen,) = precision.chosen([name], where, _PRECISIONS)
    settings = benchmark.Settings(
        benchmark=benchmark.QUICK_BENCHMARK if quick else benchmark.BENCHMARK,
        case=dataclasses.replace(QUICK_LANGUAGE_MODEL, name="scale_quick") if quick else LANGUAGE_MODELS[size],
        vocabulary=vocabulary or (50 if quick else 10_000),
        batches=tuple(dict.fromkeys(batch or ([4] if quick else [20, 128]))),
        processes=_processes(processes or [], where),
        ways=_ways(way or []),
        precision=chosen,
        device=where,
        runs=min(runs, 3) if quick else runs,
        calls=calls or (20 if where.type == "cuda" else 1),
        limit=limit,
    )
    path = record.path_of(results, settings.benchmark)
    record.check_writable(results)

    def draw(rows: list[Record]) -> list[Path]:
        return [] if plot is None or not picture.drawable(rows) else picture.draw(rows, plot)

    complete(functools.partial(benchmark.run, settings), path, report.on_screen, draw)


def _processes(numbers: list[int], device: torch.device) -> tuple[int, ...]:
    if device.type != "cuda":
        return tuple(dict.fromkeys(numbers)) or (1, 2)
    there = torch.cuda.device_count()
    for number in numbers:
        if number > there:
            raise ArgumentError(sentence("--processes", f"at most the {there} GPUs of this machine", number))
    return tuple(dict.fromkeys(numbers)) or tuple(2**power for power in range(there.bit_length()))


def _ways(names: list[str]) -> tuple[ways.Way, ...]:
    known = [way.name for way in _WAYS]
    for name in names:
        if name not in known:
            raise ArgumentError(sentence("--way", f"one of: {'; '.join(known)}", repr(name)))
    return ways.named(names)
