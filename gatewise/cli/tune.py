"""`gatewise tune`: measure calls on this machine's GPU, so that predictions rest on them."""

from __future__ import annotations

import collections
import datetime
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from gatewise import files
from gatewise.benchmarks import layer_times, shapes
from gatewise.benchmarks.record import Run
from gatewise.cli.bench_run import Where, device_named
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, CheckpointError, sentence
from gatewise.contract.ranking import slug
from gatewise.selection import points
from gatewise.selection.estimate import estimated
from gatewise.selection.points import FORMAT, Point, Record

app = typer.Typer(add_completion=False)

_SECONDS = 100.0
_LEAST, _MOST = 1.0, 3600.0
_INTERRUPTED = 130


@app.command()
def tune(
    seconds: Annotated[float, typer.Option(help="The time for measuring, in seconds.")] = _SECONDS,
    device: Where = "",
    show: Annotated[
        bool, typer.Option("--show", help="Print what was measured on the device, and measure nothing.")
    ] = False,
) -> None:
    """Measure the kernels on this machine, so that the fastest one is chosen.

    Calls of many sizes run on every kernel that accepts them, from Python and
    replayed as a CUDA graph. The times are written to a file in the user's
    cache folder, and from then on predictions rest on them.

    \b
    Examples:
      gatewise tune
      gatewise tune --seconds 300
      gatewise tune --show

    Use the machine for nothing else meanwhile. Without this command, times
    on GPUs other than the H200 and the H100 are estimated from data sheets.
    """  # noqa: D301 - \b keeps the lines of the examples apart
    where = device_named(device)
    numbers = Device.probe(where)
    if show:
        typer.echo("\n".join(_known(numbers)))
        return
    if not _LEAST <= seconds <= _MOST:
        raise ArgumentError(sentence("--seconds", f"from {_LEAST:g} to {_MOST:g}", f"{seconds:g}"))
    path = points.user_folder() / f"{slug(numbers.name)}.jsonl"
    check_ours(path)
    _check_writable(path)  # before the measurement, which would be lost
    run = Run.now(where)
    record = Record(
        "tune", numbers, "gatewise tune", run.commit[:10], datetime.date.today().isoformat(), torch.__version__
    )
    found, interrupted = _measured(
        layer_times.measured(shapes.designed(numbers), where, record, seconds=seconds), numbers.name
    )
    if interrupted:
        typer.echo("Interrupted: nothing is written.", err=True)
        raise typer.Exit(_INTERRUPTED)
    if not found:
        raise ArgumentError(f"No call could be measured on {numbers.name}. Run: gatewise doctor")
    check_ours(path)
    files.write_text(path, "\n".join(points.lines(found)) + "\n")
    points.points.cache_clear()
    typer.echo("\n".join(_known(numbers)))


def _check_writable(path: Path) -> None:
    """Create the folder of a file, and raise if the file cannot be written there.

    Raises:
        CheckpointError: The folder cannot be created or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        advice = "Set GATEWISE_CACHE to a folder that can be written."
        raise CheckpointError(f"{path} cannot be written: {error.strerror}. {advice}") from error


def check_ours(path: Path) -> None:
    """Raise if a file is there that gatewise did not write.

    Raises:
        ArgumentError: The first line of the file is not that of a file of this command.
    """
    if path.exists() and not (path.is_file() and path.read_bytes().startswith(f'{{"format": "{FORMAT}"}}'.encode())):
        advice = "Move it away, or set GATEWISE_CACHE to another folder."
        raise ArgumentError(sentence("the file of measured times", "one that gatewise wrote", str(path), advice))


def _measured(steps: Iterable[list[Point]], name: str) -> tuple[list[Point], bool]:
    found: list[Point] = []
    columns = TextColumn("{task.description}"), BarColumn(16, pulse_style="bar.pulse"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"measuring on {name}", total=None)
        try:
            for several in steps:
                found += several
                progress.update(task, description=f"measured {len(found):,} calls on {name}")
        except KeyboardInterrupt:
            return found, True
    return found, False


def _known(numbers: Device) -> Iterator[str]:
    found = points.points(numbers.name)
    yield numbers.name
    own = points.users_own(numbers.name)
    if own and found != own:
        yield f"  {len(own):,} calls that another version of gatewise measured are left out"
        yield "  Run: gatewise tune"
    if not found:
        yield "  nothing is measured: times are estimated from the numbers of the device"
        yield "  Run: gatewise tune"
        return
    yield f"  {len(found):,} measured calls, {'of this machine' if found == own else 'that came with gatewise'}"
    for record in dict.fromkeys(point.record for point in found):
        version = f", commit {record.commit}" if record.commit else ""
        yield f"  {record.date}, PyTorch {record.torch}{version}"
    if found == own:
        yield f"  {points.user_folder() / slug(numbers.name)}.jsonl"
    yield ""
    yield f"  {'kernel':<11} {'pass':<10} {'calls':>6}  {'measured over estimated':<24} precisions"
    groups: dict[tuple[str, bool], list[Point]] = collections.defaultdict(list)
    for point in found:
        groups[point.kernel, point.problem.needs_grad].append(point)
    for (kernel, training), several in groups.items():
        phase = "training" if training else "inference"
        precisions = ", ".join(sorted({points.precision_of(each.problem) or "" for each in several}))
        yield f"  {kernel:<11} {phase:<10} {len(several):>6,}  {_misses(several):<24} {precisions}"


def _misses(several: Sequence[Point]) -> str:
    found = sorted(point.graph / estimated(point.work, point.problem, point.record.device) for point in several)
    low, middle, high = (found[math.floor(share * (len(found) - 1))] for share in (0.1, 0.5, 0.9))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"
