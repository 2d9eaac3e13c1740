"""`gatewise bench nmt`: training translation with attention, compared with plain PyTorch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import torch
import typer

from gatewise.benchmarks import precision, record
from gatewise.benchmarks.nmt import picture, report, table
from gatewise.benchmarks.nmt import record as nmt_record
from gatewise.benchmarks.nmt.cases import CASES, QUICK_CASES, TINY_CASES, TranslationCase
from gatewise.benchmarks.nmt.ways import Way, ways
from gatewise.cli.bench_run import Results, Where, complete, device_named
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.planning.budget import bytes_of

NONE = "none"
_BUDGET = "8GB"
_LOSS = 3.5  # the loss of a model that knows only the topic of each sentence, see `gatewise.benchmarks.nmt.sentences`


def bench_translation(
    case: Annotated[list[str] | None, typer.Option(help="Name of a case; repeatable. Default: all.")] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of {', '.join(table.TRANSLATION_PRECISIONS)}; repeatable. tf32 and fp32 are float32 with and "
            "without TF32, bf16 is autocast. Default: all, on a CPU fp32."
        ),
    ] = None,
    way: Annotated[
        list[str] | None, typer.Option(help="Only rows with this in their name; repeatable. Plain PyTorch always runs.")
    ] = None,
    memory_budget: Annotated[
        str,
        typer.Option(
            help="Memory budget for the search for the largest batch of the first case, such as 8GB; none: no search. "
            "Default: 8GB, with --quick and on a CPU none."
        ),
    ] = "",
    loss: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Loss in nats per token until which the first case is trained; 0: no such training. Default: 3.5, "
            "with --quick 0.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One case in TF32, tiny ones on a CPU, as a test of the command.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds of samples per table. Default: 5, with --quick 2, on a CPU 0.2."),
    ] = None,
    device: Where = "",
    plot: Annotated[
        Path | None, typer.Option(help="Plot memory by part, and throughput by batch: PREFIX.png and PREFIX.svg.")
    ] = None,
    results: Results = record.RESULTS,
) -> None:
    """Compare training of translation with attention with plain PyTorch.

    Each row trains the same LSTM encoder-decoder from the same weights:
    throughput of a whole step (forward, loss, backward, clipping, Adam), eager
    and as CUDA graph replay; peak memory and its parts; time to a loss; the
    largest batch within a memory budget. Before that, loss and gradients are
    compared with float64, and the loss of a few steps, eager and replayed,
    with that of plain PyTorch; a row with wrong results is red and has no
    speed, and the command fails.

    Each record is written when its table is done, so a run can be split by
    --case or --dtype, or interrupted.

    \b
    Examples:
      gatewise bench nmt --quick
      gatewise bench nmt --case iwslt-50-50-128 --dtype tf32 --plot nmt
      gatewise bench nmt --dtype tf32 --way fused --memory-budget 16GB
      gatewise bench nmt --loss 0 --memory-budget none
    """  # noqa: D301 - \b keeps the lines of the examples apart
    where = device_named(device)
    on_gpu = where.type == "cuda"
    benchmark = nmt_record.QUICK_BENCHMARK if quick else nmt_record.BENCHMARK
    names = dtype or (["tf32"] if quick and on_gpu else [])
    aim = (0.0 if quick else _LOSS) if loss is None else loss
    settings = table.Settings(
        benchmark=benchmark,
        cases=_cases(case or [], quick, where),
        precisions=tuple(precision.chosen(names, where, table.TRANSLATION_PRECISIONS)),
        ways=_ways(way or []),
        device=where,
        seconds=seconds if seconds is not None else (2.0 if quick else 5.0) if on_gpu else 0.2,
        calls=3 if on_gpu else 1,
        budget=_budget(memory_budget or (_BUDGET if on_gpu and not quick else NONE), where),
        loss=aim or None,
    )
    path = record.path_of(results, benchmark)
    record.check_writable(results)

    def draw(rows: list[nmt_record.TranslationRecord]) -> list[Path]:
        return [] if plot is None or not picture.drawable(rows) else picture.draw(rows, plot)

    complete(functools.partial(table.run, settings), path, report.on_screen, draw)


def _budget(text: str, device: torch.device) -> int | None:
    if text == NONE:
        return None
    if device.type != "cuda":
        raise ArgumentError(
            sentence("--memory-budget", f"{NONE} on a CPU, whose memory PyTorch does not count", repr(text))
        )
    return bytes_of(text, Device.probe(device))


def _cases(names: list[str], quick: bool, device: torch.device) -> tuple[TranslationCase, ...]:
    offered = (QUICK_CASES if device.type == "cuda" else TINY_CASES) if quick else CASES
    known = {case.name: case for case in offered}
    for name in names:
        if name not in known:
            raise ArgumentError(sentence("--case", f"one of {', '.join(known)}", repr(name)))
    return tuple(case for case in offered if not names or case.name in names)


def _ways(parts: list[str]) -> tuple[Way, ...]:
    known = ways()
    for part in parts:
        if not any(part.lower() in way.name.lower() for way in known):
            names = ", ".join(repr(way.name) for way in known)
            raise ArgumentError(sentence("--way", f"part of one of: {names}", repr(part)))
    return tuple(
        way for way in known if way.plain or not parts or any(part.lower() in way.name.lower() for part in parts)
    )
