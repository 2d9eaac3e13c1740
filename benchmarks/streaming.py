"""The time of one step: gatewise's stream beside torch.nn.LSTM called with T = 1, torch.nn.LSTMCell and gatewise.LSTM.

    python benchmarks/streaming.py                       # the CPU, one thread: OMP_NUM_THREADS=1 taskset -c 1 ...
    python benchmarks/streaming.py --device cuda         # each call waits for the GPU; also replays of CUDA graphs
    python benchmarks/streaming.py --cell GRU --dtype bfloat16

A sample is one call: it begins on an idle device and ends when the output can be read. A replay of a CUDA graph of one
step is such a call, too. On a GPU there are also samples of 16 calls, and of replays of graphs of 16 steps, with one
wait at their end; their time is divided by 16. Ways are called in turn, a few calls of one and then of the next, so
that drifts of the machine affect all of them alike, and each call finds in the caches what the call before it left
there. The first calls of each turn are no samples. Before that, the outputs of all ways over a few steps are compared
with float64: in no step may a way have more than twice the largest error of torch.nn.LSTM in a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import gatewise
from gatewise.benchmarks.record import Run
from gatewise.contract.capture import captured_graph
from gatewise.files import append_line
from gatewise.testing import relative_error

RESULTS = Path(__file__).parent / "results" / "streaming.jsonl"
BATCHES, SIZES = (1, 8), (128, 512, 1024)
DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}
RIVAL = "nn"
_TURN, _LEAD, _STEPS = 25, 3, 16
_CALLS, _GRAPH, _GRAPH_OF_STEPS = f"{_STEPS} calls", "graph", f"graph of {_STEPS}"

Step = Callable[[], Tensor]


def carried(call: Callable, x: Tensor) -> Step:
    """Return a step that carries the states which `call(x, states)` returns: the output, and the new states."""
    states = None

    def step() -> Tensor:
        nonlocal states
        y, states = call(x, states)
        return y

    return step


def ways_of(cell: str, batch: int, size: int, device: str, dtype: torch.dtype) -> tuple[dict[str, Step], Tensor]:
    """Return a step of every way, all from the same weights and zero states, and their input [B, I]."""
    torch.manual_seed(0)
    made = {"device": device, "dtype": dtype}
    theirs, ours = getattr(torch.nn, cell)(size, size, **made), getattr(gatewise, cell)(size, size, **made)
    single = getattr(torch.nn, f"{cell}Cell")(size, size, **made)
    ours.load_state_dict(theirs.state_dict())
    single.load_state_dict({name.removesuffix("_l0"): value for name, value in theirs.state_dict().items()})
    x = torch.randn(batch, size, **made)

    def of_layer(layer: torch.nn.Module) -> Callable:
        def call(x: Tensor, states: object) -> tuple[Tensor, object]:
            y, states = layer(x.unsqueeze(0), states)
            return y[0], states

        return call

    def of_cell(x: Tensor, states: object) -> tuple[Tensor, object]:
        states = single(x, states)
        return states[0] if isinstance(states, tuple) else states, states

    stream = ours.stream(batch)
    ways = {RIVAL: carried(of_layer(theirs), x), "cell": carried(of_cell, x), "layer": carried(of_layer(ours), x)}
    return ways | {"stream": lambda: stream(x)}, x


def replayed(cell: str, batch: int, size: int, device: str, dtype: torch.dtype, given: Tensor) -> dict[str, Step]:
    """Return replays of CUDA graphs, of one step and of several, for torch.nn's layer, gatewise's and its stream.

    The states of the layers are at fixed addresses, as those of the stream are. A replay returns its last output. All
    have the weights of `ways_of` and the input `given`.
    """
    found, x = {}, given.unsqueeze(0)
    for name, library in ((RIVAL, torch.nn), ("layer", gatewise)):
        torch.manual_seed(0)
        layer = getattr(library, cell)(size, size, device=device, dtype=dtype)
        y, states = layer(x)
        held = tuple(torch.zeros_like(state) for state in (states if isinstance(states, tuple) else (states,)))

        def work(layer=layer, y=y, held=held) -> Tensor:  # noqa: ANN001
            out, states = layer(x, held if len(held) > 1 else held[0])
            y.copy_(out)
            for own, state in zip(held, states if isinstance(states, tuple) else (states,), strict=True):
                own.copy_(state)
            return y[0]

        def restart(held=held) -> None:  # noqa: ANN001
            for state in held:
                state.zero_()

        with gatewise.for_cuda_graph():
            found |= graphs_of(name, work, restart)
    stream = layer.stream(batch)
    return found | graphs_of("stream", lambda: stream(given), stream.reset)


def graphs_of(name: str, work: Step, restart: Callable[[], None]) -> dict[str, Step]:
    """Return replays of a graph of one step and of one of several, which begin at zero states."""
    found = {}
    work()
    torch.cuda.synchronize()
    for kind, steps in ((_GRAPH, 1), (_GRAPH_OF_STEPS, _STEPS)):
        outputs: list[Tensor] = []

        def several(steps=steps, outputs=outputs) -> None:  # noqa: ANN001
            outputs[:] = [work() for _ in range(steps)]

        graph = captured_graph(several)

        # The graph reads the memory of the layer, its input and its states, which `work` keeps.
        def step(graph=graph, outputs=outputs, work=work) -> Tensor:  # noqa: ANN001
            graph.replay()
            return outputs[-1]

        found[f"{name}, {kind}"] = step
    restart()
    return found


def repeated(ways: dict[str, Step]) -> dict[str, Step]:
    """Return ways that make several calls of each way."""

    def calls(step: Step) -> Tensor:
        for _ in range(_STEPS - 1):
            step()
        return step()

    return {f"{name}, {_CALLS}": functools.partial(calls, step) for name, step in ways.items()}


def steps_of(way: str) -> int:
    """Return the number of steps that a way computes at a time."""
    return _STEPS if way.endswith((_CALLS, _GRAPH_OF_STEPS)) else 1


def check(cell: str, batch: int, size: int, device: str, dtype: torch.dtype) -> None:
    """Compare the outputs of all ways over a few steps with float64.

    Raises:
        RuntimeError: A way has more than twice the error of torch.nn's layer, and of one rounding.
    """
    ways, x = ways_of(cell, batch, size, device, dtype)
    layer = getattr(torch.nn, cell)(size, size, dtype=torch.float64)
    torch.manual_seed(0)
    layer.load_state_dict(getattr(torch.nn, cell)(size, size, device=device, dtype=dtype).state_dict())
    expected = layer(x.cpu().double().expand(2 * _STEPS, -1, -1))[0].detach()
    if torch.device(device).type == "cuda":
        ways = ways | replayed(cell, batch, size, device, dtype, x)
    errors = {}
    for name, step in ways.items():
        if steps_of(name) == 1:
            outputs, exact = torch.stack([step().clone() for _ in range(_STEPS)]), expected[:_STEPS]
        else:  # it goes on from the states that the graph of one step has left
            outputs, exact = step().unsqueeze(0), expected[-1:]
        if name == RIVAL:
            outputs, exact = torch.cat([outputs, *[step().unsqueeze(0) for _ in range(_STEPS)]]), expected
        errors[name] = max(map(relative_error, outputs, exact))
    allowed = 2 * (errors[RIVAL] + torch.finfo(dtype).eps)
    if wrong := {name: error for name, error in errors.items() if not error <= allowed}:
        raise RuntimeError(f"{cell}, B {batch}, H {size}: errors {wrong}, allowed {allowed:.2g}")


def latencies(ways: dict[str, Step], calls: int, device: str) -> dict[str, list[float]]:
    """Return the seconds of each call by the number of its steps, for at least `calls` calls of each way."""
    waits = torch.device(device).type == "cuda"
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(-(-calls // _TURN)):
        for name, step in ways.items():
            for number in range(-_LEAD, _TURN):
                began = time.perf_counter()
                step()
                if waits:
                    torch.cuda.synchronize()
                seconds = (time.perf_counter() - began) / steps_of(name)
                if number >= 0:
                    found[name].append(seconds)
    return found


def main() -> int:
    """Measure, print a table and append the record."""
    parser = argparse.ArgumentParser(description="The time of one step of one layer, in microseconds.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--cell", default="LSTM", choices=("LSTM", "GRU", "RNN"))
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES, help="default: 1 8")
    parser.add_argument("--size", type=int, nargs="+", default=SIZES, help="units and features (128 512 1024)")
    parser.add_argument("--calls", type=int, default=2000, help="calls of each way (default: 2000)")
    parser.add_argument("--no-record", action="store_true", help=f"do not append to {RESULTS.name}")
    given = parser.parse_args()
    dtype = DTYPES[given.dtype]
    run = Run.now(torch.device(given.device))
    print(f"{run.device}, PyTorch {run.torch}, {given.cell} in {given.dtype}, microseconds a call\n")
    print(f"{'B':>3}{'H':>6}  {'way':<20}{'least':>9}{'median':>9}{'99 %':>9}{'of nn':>8}")
    rows = []
    with torch.inference_mode():
        for batch in given.batch:
            for size in given.size:
                case = given.cell, batch, size, given.device, dtype
                check(*case)
                ways, x = ways_of(*case)
                if torch.device(given.device).type == "cuda":
                    ways = ways | repeated(ways) | replayed(*case, x)
                rows += _rows(latencies(ways, given.calls, given.device), batch, size)
    if not given.no_record:
        about = {"cell": given.cell, "dtype": given.dtype, "run": dataclasses.asdict(run)}
        append_line(RESULTS, json.dumps({"benchmark": "streaming", **about, "rows": rows}))
    return 0


def _rows(samples: dict[str, list[float]], batch: int, size: int) -> list[dict[str, object]]:
    rows = []
    for way, seconds in samples.items():
        least, median, most = (float(f"{value:.5g}") for value in np.quantile(seconds, (0.0, 0.5, 0.99)))
        _, _, graph = way.partition(", ")
        rival = float(np.median(samples[f"{RIVAL}, {graph}" if graph else RIVAL]))
        rows.append({"B": batch, "H": size, "way": way, "calls": len(seconds)})
        rows[-1] |= {"least": least, "median": median, "q99": most}
        times = "".join(f"{1e6 * value:>9.1f}" for value in (least, median, most))
        print(f"{batch:>3}{size:>6}  {way:<20}{times}{median / rival:>8.3f}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
