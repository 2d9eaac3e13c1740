"""Keep the files of measured times that predictions rest on: measure calls again, or further ones, and write them.

    python benchmarks/rates.py again again.jsonl --kernel persistent --precision tf32 --steps 2 999999
    python benchmarks/rates.py write again.jsonl results/lstm.jsonl --kernel persistent --precision tf32
    python benchmarks/rates.py draw drawn.jsonl --seed 31 --steps 1 8
    python benchmarks/rates.py add drawn.jsonl results/gru.jsonl
    python benchmarks/rates.py add results/predictions.jsonl --seed 7

`again` runs the chosen calls of LSTMs, after a kernel became faster, short ones first, and appends each to a file as
soon as it is measured; calls that are in this file already are left out. `write` replaces the times of the chosen calls
that are in the given files: those of `again`, or records of `gatewise bench lstm` and `gru`, of which the newest for a
call counts. Later files replace times of earlier ones. The lines stay in place, and refer to a record that is named
like the former one, and by where, when and with what commit the calls were measured again. With `--restated`, both
take only calls whose work the kernel states otherwise than the file has it, as after a change of tilings. With
`--replays` the times of calls from Python stay: those of different kernels are compared, and are comparable only if the
CPU was equally fast.
With `--one-step` they take calls of one step, of GRUs, too.
`draw` runs training calls of shapes drawn at random on every kernel that accepts them, and `add` adds those that the
file does not have; also those of a run of `predictions.py`, once its predictions were judged. With `--one-step` the
calls have one step of up to 8 sequences, or with `--many` of 9 to 64 in 16-bit dtypes, and no gradients unless
`--training` is given.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from gatewise import files
from gatewise.benchmarks import layer_times, shapes
from gatewise.benchmarks.layer_times import Stopwatch, Times
from gatewise.benchmarks.lstm.record import EAGER, GRAPH, TRAIN, LayerRecord, newest
from gatewise.benchmarks.record import MEASURED, Run, read_lines
from gatewise.cells import LSTM
from gatewise.contract.device import Device
from gatewise.contract.errors import GatewiseError
from gatewise.contract.problem import Problem
from gatewise.contract.ranking import slug
from gatewise.kernels.cuda import few_rows
from gatewise.kernels.persistent.launches.builds import launches_of
from gatewise.kernels.persistent.sizes.exactness import exact_products
from gatewise.selection import kernel_named, points
from gatewise.selection.points import PRECISIONS, Point, Record

RATES = Path(points.__file__).parent / "rates"
BENCHMARKS = "lstm", "gru"
PREDICTIONS = "predictions"
_ANY_STEPS = 1, sys.maxsize
_AT_ONCE = 48  # calls whose kernels are built together

Key = tuple[str, Problem]


def measured_again(
    wanted: Sequence[Point],
    device: torch.device,
    *,
    seconds: float,
    watch: Stopwatch = layer_times.stopwatch,
    build: Callable[[Iterable[Problem], torch.device], None] = layer_times.build,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[Point, Times]]:
    """Measure calls until the time is over, and yield each with its new times; calls that fail are left out."""
    began = clock()
    for start in range(0, len(wanted), _AT_ONCE):
        several = wanted[start : start + _AT_ONCE]
        build([point.problem for point in several if point.kernel == "persistent"], device)
        for point in several:
            if clock() - began >= seconds:
                return
            try:
                times = watch(point.kernel, point.problem, device)
            except (RuntimeError, GatewiseError, ValueError) as error:
                print(f"FAILED {point.kernel}: {point.problem}: {str(error)[:300]}", file=sys.stderr, flush=True)
                continue
            yield point, times


def of_benchmark(path: Path, device: str) -> Iterator[Point]:
    """Yield the newest times of the kernels that ran on a device in a file of `gatewise bench lstm` or `gru`."""
    for row in newest(read_lines(path, LayerRecord), device):
        if row.status == MEASURED and row.kernel == "auto" and GRAPH in row.times:
            yield _of_row(row, path.name)


def _of_row(row: LayerRecord, name: str) -> Point:
    case, kernel = row.settings, row.ran_captured
    width, layers = case["hidden_size"], (case["num_layers"], case["directions"])
    problem = points.problem_of(
        {
            "sizes": (case["time"], case["batch"], width, width, *layers),
            "precision": row.dtype,
            "pass": "training" if row.direction == TRAIN else "inference",
            "lengths": case["ragged"],
            "cell": row.cell,
        }
    )
    graph, eager = row.median(GRAPH), row.median(EAGER) if row.ran == kernel else None
    assert graph is not None  # for the type checker
    numbers = next(each for each in map(Device.named, Device.names()) if each.name == row.run.device)
    record = Record(
        row.benchmark, numbers, f"benchmarks/results/{name}", row.run.commit[:7], row.run.date[:10], row.run.torch
    )
    return Point(kernel, problem, kernel_named(kernel).work(problem, numbers), graph, eager, record)


def of_predictions(path: Path, seed: int) -> Iterator[Point]:
    """Yield the calls that `predictions.py` measured in its run with a seed.

    Raises:
        ValueError: There is no such run, or a line describes another problem than its sizes do.
    """
    rows = [row for row in map(json.loads, path.read_text().splitlines()) if row["seed"] == seed]
    runs = [row["run"] for row in rows if "summary" in row]
    if len(runs) != 1:
        raise ValueError(f"{path}: {len(runs)} runs with seed {seed}")
    (run,) = runs
    numbers = next(each for each in map(Device.named, Device.names()) if each.name == run["device"])
    source = f"benchmarks/results/{path.name}: seed {seed}, after the shapes were judged"
    record = Record(f"judged {seed}", numbers, source, run["commit"][:7], run["date"][:10], run["torch"])
    for row in rows:
        if "summary" in row:
            continue
        marks = {"lean": "lean memory" in row["problem"], "lengths": "lengths" in row["problem"]}
        sizes = [*row["sizes"], row["directions"]]
        problem = points.problem_of({"sizes": sizes, "precision": row["precision"], "pass": "training", **marks})
        if str(problem) != row["problem"]:
            raise ValueError(f"{path}: {row['problem']} has the sizes of {problem}")
        for kernel, times in row["kernels"].items():
            work = kernel_named(kernel).work(problem, numbers)
            yield Point(kernel, problem, work, times["seconds"], None, record)


def written(known: Sequence[Point], found: dict[Key, Point], *, replays: bool = False) -> list[Point]:
    """Return the calls of a file of rates with new times, in their order; with `replays` only those in CUDA graphs."""
    every = []
    for point in known:
        new = found.get((point.kernel, point.problem))
        if new is not None:
            former, source = point.record.name.partition(", ")[0], new.record
            name = f"{former}, {'replays, ' if replays else ''}{source.name} {source.date} {source.commit}"
            # The numbers of the device stay those that the work was stated for.
            record = dataclasses.replace(source, name=name, device=point.record.device)
            eager = point.eager if replays else new.eager
            point = points.restated(dataclasses.replace(point, graph=new.graph, eager=eager, record=record))
        every.append(point)
    return every


def chosen(known: Iterable[Point], given: argparse.Namespace) -> list[Point]:
    """Return the calls that the options choose."""
    least, most = given.steps
    return [
        point
        for point in known
        if point.kernel == given.kernel
        and point.problem.needs_grad == (given.direction == TRAIN)
        and (given.precision is None or points.precision_of(point.problem) == given.precision)
        and least <= _steps(point.problem) <= most
        and (not given.few_rows or _multiplies_few_rows(point))
        and (not given.restated or _is_stated_otherwise(point))
        and (not given.several_groups or _multiplies_several_groups(point))
        and (not given.one_step or point.problem.time == 1)
    ]


def again(given: argparse.Namespace) -> int:
    """Run `again`."""
    device = torch.device(given.device)
    numbers, run = Device.probe(device), Run.now(device)
    layers = "one step" if given.one_step else "LSTM"
    source = f"benchmarks/rates.py: {layers} on the kernel {given.kernel}, medians of samples of 20 ms"
    record = Record(f"again {given.kernel}", numbers, source, run.commit[:7], run.date[:10], run.torch)
    before = points.read(given.file.read_text().splitlines()) if given.file.is_file() else ()
    done = {(point.kernel, point.problem) for point in before}
    wanted = chosen(points.points(numbers.name), given)
    wanted = [point for point in wanted if given.one_step or type(point.problem.cell) is LSTM]
    wanted = [point for point in wanted if (point.kernel, point.problem) not in done]
    wanted.sort(key=lambda point: point.graph)
    print(f"{len(wanted)} calls of {given.kernel}", flush=True)
    files.append_line(given.file, points.record_line(record))
    ratios = []
    for point, times in measured_again(wanted, device, seconds=given.seconds):
        new = dataclasses.replace(point, graph=times.graph, eager=times.eager, record=record)
        files.append_line(given.file, points.point_line(new))
        ratios.append((times.graph / point.graph, str(point.problem)))
    print(_text(ratios), flush=True)
    return 0


def _text(ratios: Sequence[tuple[float, str]]) -> str:
    if not ratios:
        return "no call was measured"
    ordered = sorted(ratios)
    ends = "\n".join(f"  {ratio:.2f} {problem}" for ratio, problem in (*ordered[:3], *ordered[-3:]))
    return f"{len(ratios)} calls took {ordered[len(ordered) // 2][0]:.3f} of the former time (median)\n{ends}"


def write(given: argparse.Namespace) -> int:
    """Run `write`."""
    path = given.rates / f"{slug(given.name)}.jsonl"
    known = points.read(path.read_text().splitlines())
    among = {(point.kernel, point.problem) for point in chosen(known, given)}
    found: dict[Key, Point] = {}
    for file in given.files:
        read = of_benchmark(file, given.name) if file.stem in BENCHMARKS else points.read(file.read_text().splitlines())
        for point in read:
            if point.record.device.name == given.name and (point.kernel, point.problem) in among:
                found[point.kernel, point.problem] = point
    every = written(known, found, replays=given.replays)
    files.write_text(path, "\n".join(points.lines(every)) + "\n")
    pairs = [(old, new) for old, new in zip(known, every, strict=True) if (old.kernel, old.problem) in found]
    counts = collections.Counter(new.record.name for _, new in pairs)
    print(f"{path.name}: {len(pairs)} of {len(among)} chosen calls have new times; records: {dict(counts)}")
    print(_text([(new.graph / old.graph, str(old.problem)) for old, new in pairs]))
    return 0


def draw(given: argparse.Namespace) -> int:
    """Run `draw`."""
    device = torch.device(given.device)
    numbers, run, (least, most) = Device.probe(device), Run.now(device), given.steps
    steps = "any number of" if (least, most) == _ANY_STEPS else f"{least} to {most}"
    kind = f"training with {steps} steps"
    if given.one_step:
        sequences = "9 to 64 sequences in 16-bit dtypes" if given.many else "up to 8 sequences"
        calls = "training calls of one step" if given.training else "one step without gradients"
        steps = "single training" if given.training else "single"
        kind = f"{calls}, of {sequences}, of LSTMs and GRUs"
    source = f"benchmarks/rates.py: shapes drawn at random with seed {given.seed}, {kind}"
    # Draws with one seed differ in their shapes by their steps, and in their times by the commit.
    name = f"drawn {given.seed} with {steps} steps, {run.date[:10]} {run.commit[:7]}"
    record = Record(name, numbers, source, run.commit[:7], run.date[:10], run.torch)
    files.append_line(given.file, points.record_line(record))
    every = (
        shapes.of_one_step(given.seed, many=given.many, training=given.training)
        if given.one_step
        else shapes.drawn(given.seed, numbers, training=True)
    )
    drawn = (problem for problem in every if least <= _steps(problem) <= most)
    count = 0
    for found in layer_times.measured(drawn, device, record, seconds=given.seconds):
        for point in found:
            files.append_line(given.file, points.point_line(point))
        count += 1
    print(f"{count} shapes", flush=True)
    return 0


def add(given: argparse.Namespace) -> int:
    """Run `add`."""
    path = given.rates / f"{slug(given.name)}.jsonl"
    known = points.read(path.read_text().splitlines())
    there = {(point.kernel, point.problem) for point in known}
    new: dict[Key, Point] = {}
    for file in given.files:
        if file.stem in BENCHMARKS:
            read: Iterable[Point] = of_benchmark(file, given.name)
        elif file.stem == PREDICTIONS:
            read = of_predictions(file, given.seed)
        else:
            read = points.read(file.read_text().splitlines())
        for point in read:
            wanted = point.record.device.name == given.name and given.kernel in (None, point.kernel)
            if wanted and (point.kernel, point.problem) not in there:
                new[point.kernel, point.problem] = point
    device = known[-1].record.device  # as everywhere in the file, so that the work is stated for the same numbers
    further = [
        dataclasses.replace(
            point,
            work=kernel_named(point.kernel).work(point.problem, device),
            record=dataclasses.replace(point.record, device=device),
        )
        for point in new.values()
    ]
    files.write_text(path, "\n".join(points.lines([*known, *further])) + "\n")
    print(f"{path.name}: {len(new)} further calls")
    return 0


def _multiplies_few_rows(point: Point) -> bool:
    """Return whether products of a call are those of `few_rows`: over all steps, or in each step of `stepwise`."""
    problem = point.problem
    exact = problem.dtype == torch.float32 and (not problem.allow_tf32 or exact_products(problem))
    rows = (problem.time * problem.batch, *([problem.batch] if point.kernel == "stepwise" else []))
    return exact and any(1 < each <= few_rows.MOST_ROWS for each in rows)


def _multiplies_several_groups(point: Point) -> bool:
    """Return whether blocks of a call on `persistent` multiply several groups of batch rows at a time."""
    return any(launch.tiling.eights > 1 for launch in launches_of(point.problem, point.record.device))


def _is_stated_otherwise(point: Point) -> bool:
    return points.stated(points.restated(point).work) != points.stated(point.work)


def _steps(problem: Problem) -> int:
    return problem.time * problem.num_layers * problem.num_directions


def main(words: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description="Measure the calls that predictions rest on, and write their times.")
    commands = parser.add_subparsers(required=True)
    command = {each.__name__: commands.add_parser(each.__name__) for each in (again, write, draw, add)}
    for each in (again, draw):
        options = command[each.__name__]
        options.add_argument("file", type=Path, help="file that the calls are appended to")
        options.add_argument("--seconds", type=float, default=60.0, help="after which no call begins (default: 60)")
        options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for each in (write, add):
        options = command[each.__name__]
        options.add_argument("files", type=Path, nargs="+", help="files of `again` or `draw`, or in results")
        options.add_argument(
            "--name", default="NVIDIA H200", help="the GPU, by its driver's name (default: NVIDIA H200)"
        )
        options.add_argument("--rates", type=Path, default=RATES, help="folder of the files of measured times")
    for each in (again, write):
        options = command[each.__name__]
        options.add_argument("--kernel", default="persistent", help="kernel of the calls (default: persistent)")
        options.add_argument("--precision", choices=PRECISIONS, help="of the calls (default: all)")
        options.add_argument("--direction", choices=(TRAIN, "inference"), default=TRAIN, help=f"(default: {TRAIN})")
        options.add_argument("--few-rows", action="store_true", help="only products of few rows of exact float32")
        options.add_argument("--restated", action="store_true", help="only calls whose work is stated otherwise now")
        several = "only calls on `persistent` whose blocks multiply several groups of batch rows at a time"
        options.add_argument("--several-groups", action="store_true", help=several)
        options.add_argument("--one-step", action="store_true", help="only calls of one step, also those of GRUs")
    command["write"].add_argument("--replays", action="store_true", help="keep the times of calls from Python")
    for each in (again, write, draw):
        steps = "steps of all layers and directions of a call (default: any)"
        names = ("LEAST", "MOST")
        command[each.__name__].add_argument("--steps", type=int, nargs=2, default=_ANY_STEPS, metavar=names, help=steps)
    one_step = "calls of one step of up to 8 sequences, by LSTMs and GRUs; without gradients unless --training is given"
    command["draw"].add_argument("--one-step", action="store_true", help=one_step)
    training = "with --one-step: training calls"
    command["draw"].add_argument("--training", action="store_true", help=training)
    many = "with --one-step: calls of 9 to 64 sequences in 16-bit dtypes"
    command["draw"].add_argument("--many", action="store_true", help=many)
    command["draw"].add_argument("--seed", type=int, required=True, help="of the shapes")
    command["add"].add_argument("--seed", type=int, help="of the run of predictions.py")
    command["add"].add_argument("--kernel", help="only calls of this kernel, as after only its code changed")
    for each in (again, write, draw, add):
        command[each.__name__].set_defaults(function=each)
    given = parser.parse_args(words)
    return given.function(given)


if __name__ == "__main__":
    sys.exit(main())
