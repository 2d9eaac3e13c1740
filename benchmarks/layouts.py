"""Row-major or column-major: the recurrent products of the stepwise kernel in each layout, beside torch.nn.LSTM.

    python benchmarks/layouts.py

Row-major products are `h W^T` with [B, H] states, column-major ones `W h` with [H, B] states: the data-layout choice of
EcoRNN. Each layout first has to agree with the layout that the kernel would choose. Times are of the device alone,
both sides under a CUDA graph, and those of eager calls, where the kernel replays recorded steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from gatewise import testing
from gatewise.benchmarks.record import Run
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.contract.saved import Inputs, Needs, OutputGradients
from gatewise.files import append_line
from gatewise.kernels import stack
from gatewise.kernels.stepwise import layer, stepwise
from gatewise.kernels.stepwise.plan import product_layout_of
from gatewise.kernels.stepwise.product_layout import ProductLayout
from gatewise.selection import cost
from gatewise.selection.timing import captured, time_side_by_side

RESULTS = Path(__file__).parent / "results" / "layouts.jsonl"

CASES = {
    "50,128,512": Problem(50, 128, 512, 512),
    "50,256,512": Problem(50, 256, 512, 512),
    "nmt_encoder": Problem(50, 128, 512, 512, num_layers=2, bidirectional=True),
    "100,64,1024": Problem(100, 64, 1024, 1024),
    "50,256,1024": Problem(50, 256, 1024, 1024),
    "50,512,1024": Problem(50, 512, 1024, 1024),
    "ptb_large": Problem(35, 20, 1500, 1500, num_layers=2),
    "100,64,2048": Problem(100, 64, 2048, 2048),
}
PRECISIONS = {"bf16": (torch.bfloat16, False), "tf32": (torch.float32, True), "fp32": (torch.float32, False)}
LAYOUTS = {
    "row": ProductLayout(),
    "column": ProductLayout(column_major=True),
    "row, by gate": ProductLayout(split_k=4),
    "column, by gate": ProductLayout(column_major=True, transposed_backward=True, split_k=4),
}


def call(
    problem: Problem, inputs: Inputs, gradients: OutputGradients, layout: ProductLayout | None
) -> Callable[[], object]:
    """Return the passes of the kernel in a layout (None: its own choice) as a function."""
    passes = functools.partial(layer.forward, layout=layout), functools.partial(layer.backward, layout=layout)

    @torch.no_grad()
    def run() -> object:
        result = stack.forward(problem, inputs, passes[0])
        if not problem.needs_grad:
            return result, None
        return result, stack.backward(problem, inputs, result, gradients, Needs(), passes[1])

    return run


def torch_call(problem: Problem, inputs: Inputs, gradients: OutputGradients) -> Callable[[], object]:
    """Return torch.nn.LSTM on the same inputs as a function."""
    module = torch.nn.LSTM(
        problem.input_size,
        problem.hidden_size,
        problem.num_layers,
        bidirectional=problem.bidirectional,
        device="cuda",
        dtype=problem.dtype,
    )
    with torch.no_grad():
        for parameter, weight in zip(module.parameters(), inputs.weights, strict=True):
            parameter.copy_(weight)
    sources = [tensor.detach().requires_grad_(problem.needs_grad) for tensor in (inputs.x, inputs.h0, inputs.c0)]

    def run() -> object:
        with torch.set_grad_enabled(problem.needs_grad):
            y, state = module(sources[0], (sources[1], sources[2]))
        if problem.needs_grad:
            torch.autograd.grad([y, *state], [*sources, *module.parameters()], list(gradients))
        return y

    return run


def measure(problem: Problem, runs: int) -> dict[str, object]:
    """Time one case; returns its part of the record."""
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    device, own = Device.probe("cuda"), call(problem, inputs, gradients, None)
    theirs = torch_call(problem, inputs, gradients)  # its parameters must outlive the graph that reads them
    functions = {"nn.LSTM": captured(theirs), "chosen": captured(own)}
    expected = testing.named(problem, *own())
    for name, layout in LAYOUTS.items():
        if layout.split_k > 1 and not problem.needs_grad:
            continue
        in_form = call(problem, inputs, gradients, layout)
        for tensor, value in testing.named(problem, *in_form()).items():
            error = testing.relative_error(value, expected[tensor])
            if not error <= 8 * torch.finfo(torch.bfloat16 if problem.dtype.itemsize == 2 else torch.float16).eps:
                raise AssertionError(f"{name}: {tensor} is off by {error:.2g}")
        functions[name] = captured(in_form)
    times = time_side_by_side(functions, device="cuda", runs=runs, calls=2)
    eager = {"nn.LSTM, eager": theirs, "chosen, eager": own}
    times |= time_side_by_side(eager, device="cuda", runs=runs, calls=2)
    predicted = cost.seconds(stepwise.name, stepwise.work(problem, device), problem, device)
    return {
        "mode": "training" if problem.needs_grad else "inference",
        "form": str(product_layout_of(problem, device)),
        "microseconds_a_step": {name: round(time.median * 1e6 / problem.time, 2) for name, time in times.items()},
        "predicted": round(predicted * 1e6 / problem.time, 2),
    }


def main() -> int:
    """Measure, print a table, append the record."""
    parser = argparse.ArgumentParser(description="The stepwise kernel's forms beside torch.nn.LSTM.")
    parser.add_argument("--runs", type=int, default=7, help="samples of each (default: 7)")
    parser.add_argument("--precision", choices=PRECISIONS, action="append", help="default: all")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default: {RESULTS.name}")
    given = parser.parse_args()
    run = Run.now(torch.device("cuda"))
    print(f"{run.device}, PyTorch {run.torch}; microseconds a time step\n")
    rows = []
    for name, shape in CASES.items():
        for precision in given.precision or PRECISIONS:
            dtype, allow_tf32 = PRECISIONS[precision]
            torch.backends.cudnn.allow_tf32 = allow_tf32
            for needs_grad in (True, False):
                problem = shape.replace(dtype=dtype, allow_tf32=allow_tf32, needs_grad=needs_grad)
                row = {"case": name, "precision": precision, **measure(problem, given.runs)}
                print(f"{name:<12}{precision:<6}{row['mode']:<10}{row['microseconds_a_step']}, {row['predicted']}")
                rows.append(row)
    append_line(given.results, json.dumps({"benchmark": "layouts", "run": dataclasses.asdict(run), "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
