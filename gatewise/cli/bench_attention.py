"""`gatewise bench attention`: attention compared with plain PyTorch."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markdown import Markdown

from gatewise.benchmarks import attention, attention_report, record
from gatewise.cli.bench_run import Results, Where, device_named, finish
from gatewise.contract.errors import ArgumentError, sentence


def bench_attention(
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="One of fp32, bf16, fp16; repeatable. Default: fp32 and bf16, on a CPU fp32."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes, as a test of the command.")] = False,
    seconds: Annotated[float, typer.Option(min=0, help="Seconds of samples for each measured time.")] = 0.2,
    device: Where = "",
    results: Results = record.RESULTS,
) -> None:
    """Measure attention, forward and backward, and compare it with plain PyTorch.

    Additive scores, 128 sequences, 512 features, sources of 10 to 1,000
    positions; tiny sizes on a CPU and with --quick. The results of each
    implementation are first compared with float64, and its loss over a few
    steps with that of plain PyTorch. Then its time is measured, eager and as
    CUDA graph replay, and its peak memory. An implementation with wrong
    results gets no time, and the command fails.
    """
    where = device_named(device)
    names = dtype or (["fp32", "bf16"] if where.type == "cuda" else ["fp32"])
    known = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for name in names:
        if name not in known:
            raise ArgumentError(sentence("--dtype", f"one of {', '.join(known)}", repr(name)))
    record.check_writable(results)
    path = record.path_of(results, attention.QUICK_BENCHMARK if quick else attention.BENCHMARK)
    console, rows, interrupted = Console(), [], False
    dtypes = tuple(known[name] for name in dict.fromkeys(names))
    try:
        with Console(stderr=True).status("starting") as status:
            for row in attention.run(where, dtypes, quick=quick, budget=seconds, begin=status.update):
                record.append_line(dataclasses.asdict(row), path)
                rows.append(row)
    except KeyboardInterrupt:
        interrupted = True
    console.print(Markdown(attention_report.markdown(rows)))
    console.print(f"[dim]Recorded in {path}[/]")
    finish(interrupted, rows)
