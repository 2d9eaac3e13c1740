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
from gatewise.benchmarks.scale import picture, report
from gatewise.benchmarks.scale import run as benchmark
from gatewise.benchmarks.scale.language_model import LanguageModelTraining
from gatewise.benchmarks.scale.training import TRAININGS, Training
from gatewise.benchmarks.scale.translation import QUICK_TRANSLATION, TRANSLATIONS, TranslationTraining
from gatewise.benchmarks.scale.ways import Way, Ways
from gatewise.cli.bench_run import Results, Where, complete, device_named
from gatewise.contract.errors import ArgumentError, sentence

_PRECISIONS = {name: precision.PRECISIONS[name] for name in ("bf16-autocast", "tf32", "fp32")}
_SIZES = {"lm": LANGUAGE_MODELS, "nmt": TRANSLATIONS}
_BATCHES = {"lm": [20, 128], "nmt": [128]}
_CALLS = {"lm": 20, "nmt": 5}  # a step of plain PyTorch takes a tenth of a second for translation
_NAMES = "; ".join(f"with {name}: {'; '.join(each.ways.names)}" for name, each in TRAININGS.items())


def bench_scale(
    model: Annotated[
        str, typer.Option(help=f"One of {', '.join(TRAININGS)}: the model of gatewise train lm or nmt.")
    ] = "lm",
    size: Annotated[
        str, typer.Option(help=f"One of {', '.join(LANGUAGE_MODELS)}; with nmt {' or '.join(TRANSLATIONS)}.")
    ] = "large",
    processes: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Number of processes; repeatable. Default: 1, 2, 4, ... GPUs; on a CPU 1 and 2."),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Sequences of each process; repeatable. Default: 20 and 128, of nmt 128; with --quick 4."
        ),
    ] = None,
    vocabulary: Annotated[int | None, typer.Option(min=2, help="Words of lm. Default: 10000; with --quick 50.")] = None,
    dtype: Annotated[
        str, typer.Option(help=f"One of {', '.join(_PRECISIONS)}. Default: bf16-autocast, on a CPU fp32.")
    ] = "",
    way: Annotated[
        list[str] | None,
        typer.Option(help=f"Name of a row; repeatable; {_NAMES}. Default: the first 3."),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Samples of each row.")] = 10,
    calls: Annotated[
        int | None,
        typer.Option(min=1, help="Training steps per sample. Default: 20 on GPUs, of nmt 5; 1 on a CPU."),
    ] = None,
    limit: Annotated[float, typer.Option(min=1, help="The largest time of a row in seconds.")] = 300.0,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, as a test of the command.")] = False,
    device: Where = "",
    plot: Annotated[Path | None, typer.Option(help="Plot the speed-ups: PREFIX.png and PREFIX.svg.")] = None,
    results: Results = record.RESULTS,
) -> None:
    """Train a language model, or translation, on 1, 2, 4, ... processes with the same batch in each.

    The command starts torchrun for each number of processes, with NCCL on GPUs
    and gloo on CPUs. The rows are torch.nn.LSTM and gatewise.LSTM in a loop in
    plain PyTorch with DistributedDataParallel, and the step of gatewise train
    lm; with --model nmt, translation in plain PyTorch and the step of gatewise
    train nmt; --way names others. Before a row is timed, its losses over some
    steps are compared with those of the first row, and the weights of all
    processes must have the same bits; a row with wrong results gets no speed,
    and the command fails. If a process fails, or a row takes longer than
    --limit, the command ends with the reason.

    \b
    Examples:
      gatewise bench scale --quick
      gatewise bench scale --plot scale
      gatewise bench scale --processes 1 --processes 2 --batch 20
      gatewise bench scale --model nmt
    """  # noqa: D301 - \b keeps the lines of the examples apart
    where = device_named(device)
    training = _training(model, size, vocabulary, quick)
    if where.index is not None:
        raise ArgumentError(sentence("--device", "cpu or cuda", repr(device), "Each process uses its own GPU."))
    name = dtype or ("bf16-autocast" if where.type == "cuda" else "fp32")
    if name not in _PRECISIONS:
        raise ArgumentError(sentence("--dtype", f"one of {', '.join(_PRECISIONS)}", repr(name)))
    (chosen,) = precision.chosen([name], where, _PRECISIONS)
    settings = benchmark.Settings(
        benchmark=benchmark.QUICK_BENCHMARK if quick else benchmark.BENCHMARK,
        training=training,
        batches=tuple(dict.fromkeys(batch or ([4] if quick else _BATCHES[model]))),
        processes=_processes(processes or [], where),
        ways=_ways(training.ways, way or []),
        precision=chosen,
        device=where,
        runs=min(runs, 3) if quick else runs,
        calls=calls or (_CALLS[model] if where.type == "cuda" else 1),
        limit=limit,
    )
    path = record.path_of(results, settings.benchmark)
    record.check_writable(results)

    def draw(rows: list[Record]) -> list[Path]:
        return [] if plot is None or not picture.drawable(rows) else picture.draw(rows, plot)

    complete(functools.partial(benchmark.run, settings), path, report.on_screen, draw)


def _training(model: str, size: str, vocabulary: int | None, quick: bool) -> Training:
    if model not in TRAININGS:
        raise ArgumentError(sentence("--model", f"one of {', '.join(TRAININGS)}", repr(model)))
    if size not in _SIZES[model]:
        of_model = "" if model == "lm" else f" with --model {model}"
        raise ArgumentError(sentence("--size", f"one of {', '.join(_SIZES[model])}{of_model}", repr(size)))
    if model == "nmt":
        if vocabulary is not None:
            advice = "The sizes of its vocabularies are those of --size."
            raise ArgumentError(sentence("--vocabulary", "left out with --model nmt", vocabulary, advice))
        return TranslationTraining(QUICK_TRANSLATION if quick else TRANSLATIONS[size])
    case = dataclasses.replace(QUICK_LANGUAGE_MODEL, name="scale_quick") if quick else LANGUAGE_MODELS[size]
    return LanguageModelTraining(case, vocabulary or (50 if quick else 10_000))


def _processes(numbers: list[int], device: torch.device) -> tuple[int, ...]:
    if device.type != "cuda":
        return tuple(dict.fromkeys(numbers)) or (1, 2)
    there = torch.cuda.device_count()
    for number in numbers:
        if number > there:
            raise ArgumentError(sentence("--processes", f"at most the {there} GPUs of this machine", number))
    return tuple(dict.fromkeys(numbers)) or tuple(2**power for power in range(there.bit_length()))


def _ways(known: Ways, names: list[str]) -> tuple[Way, ...]:
    for name in names:
        if name not in known.names:
            raise ArgumentError(sentence("--way", f"one of: {'; '.join(known.names)}", repr(name)))
    return known.named(names)
