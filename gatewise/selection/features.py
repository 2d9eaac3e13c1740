"""The numbers that describe a call among the measured ones: what errors of estimates depend on."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import torch

from gatewise.cells import GRU
from gatewise.contract.device import Device
from gatewise.contract.kernel import Work
from gatewise.contract.problem import Layout, Problem
from gatewise.selection import points
from gatewise.selection.estimate import busy


@functools.cache
def fitted() -> dict[str, Any]:
    """Return the numbers that `benchmarks/scales.py` fitted to measured calls, and the bounds read off from them."""
    return json.loads((points.packaged_folder() / "scales.json").read_text())


def features(work: Work, problem: Problem, device: Device, apart: float = 0.0) -> dict[str, float]:
    """Return the numbers that describe a call among others, by name.

    Args:
        work: The work that the kernel states.
        problem: The call.
        device: The device that the call is for.
        apart: The distance to calls of the predicted device; 0 for calls of that device itself.
    """
    size, hidden, width = problem.element_bytes, problem.hidden_size, max(problem.input_size, 1)
    time, batch, layers = max(problem.time, 1), max(problem.batch, 1), problem.num_layers
    steps = time * layers * problem.num_directions
    total = busy(work, problem, device) or 1.0
    single = problem.dtype in (torch.float32, torch.float64)
    exact = single and (not problem.allow_tf32 or work.exact_flops > 0)
    rate = device.matmul_rate(problem.dtype, allow_tf32=problem.allow_tf32)
    of_input, others = _products(problem, device.matmul_rate(problem.dtype) if work.exact_flops else rate)
    hidden_unaligned, input_unaligned = hidden * size % 16 > 0, width * size % 16 > 0
    return {
        "log time": math.log(time),
        "log batch": math.log(batch),
        "log hidden size": math.log(hidden),
        "log input size": math.log(width),
        "log layers": math.log(layers),
        "two directions": problem.bidirectional,
        "float16": problem.dtype == torch.float16,
        "float32": single,
        "exact float32": exact,
        # Rows that do not begin at multiples of 16 bytes keep a library to slower products: the more of the estimate is
        # products of such rows, the farther it is from the time.
        "hidden rows not aligned to 16 bytes": hidden_unaligned,
        "input rows not aligned to 16 bytes": input_unaligned,
        "hidden rows not aligned to 128 bytes": hidden * size % 128 > 0,
        "hidden size not a multiple of 8": hidden % 8 > 0,
        "share of products": (of_input + others) / total,
        "share of products of input rows not aligned": of_input / total if input_unaligned else 0.0,
        "share of products of hidden rows not aligned": others / total if hidden_unaligned else 0.0,
        # Kernels compute whole tiles. cuDNN's persistent loop takes as long for 33 hidden units as for 64.
        "log tiles of 32 hidden units": math.log(-(-hidden // 32)),
        "log tiles of 64 rows": math.log(-(-batch // 64)),
        "log rows of all steps": math.log(time * batch),
        # cuDNN's loops of layers and directions run beside each other.
        "log loops": math.log(layers * problem.num_directions),
        "one row": problem.batch == 1,
        "batch not a multiple of 8": batch % 8 > 0,
        # For such sizes, cuDNN's persistent loop uses other instructions.
        "float16 in multiples of 8": problem.dtype == torch.float16 and batch % 8 == 0 and hidden % 8 == 0,
        "one step": problem.time == 1,
        "one step in exact float32": exact and problem.time == 1,
        **_slow_products(problem, exact=exact),
        "lengths": problem.layout is not Layout.DENSE,
        "checkpointed": problem.rebuilds_gates,
        "GRU": type(problem.cell) is GRU,
        "float16 factors": work.half_flops > 0,
        "exchanges": work.exchanges > 0,
        "log exchanges a step": math.log(work.exchanges / steps) if work.exchanges else 0.0,
        "share of launches": work.launches * device.launch_seconds / total,
        "share of resident products": work.resident_flops / rate / total,
        "share of the cache": work.cached_bytes / device.cache_bandwidth / total,
        "another GPU": apart,
    }


def _products(problem: Problem, rate: float) -> tuple[float, float]:
    """Return the estimated seconds of the products of the first layer's input, and of all others."""
    passes = 3 if problem.needs_grad else 1
    rows = problem.time * problem.batch * problem.num_directions
    of_input = 2.0 * rows * problem.gate_rows * problem.input_size
    return passes * of_input / rate, passes * (problem.matmul_flops - of_input) / rate


def _slow_products(problem: Problem, *, exact: bool) -> dict[str, float]:
    """Return where cuBLAS 13 multiplies a few rows of exact float32 numbers slowly.

    These are products for the gradients of the inputs, in each step or over all steps: of some rows, with more than a
    few columns and with not too many terms. `persistent` and `stepwise` avoid them (`gatewise.kernels.cuda.few_rows`),
    except for those of two directions at once. The operators of `eager` and `aten` do not.
    """
    bounds = fitted()["slow products"]
    (least, most), columns = bounds["rows"], bounds["least columns"]
    if not exact or problem.hidden_size > bounds["most hidden units"]:
        return {"slow products of steps": 0.0, "slow products over all steps": 0.0}
    wide = problem.hidden_size >= columns and least <= problem.batch <= most
    inputs = [problem.layer_input_size(layer) >= columns for layer in range(problem.num_layers)]
    few = least <= problem.time * problem.batch <= most
    return {
        "slow products of steps": float(wide),
        "slow products over all steps": sum(inputs) / len(inputs) if few else 0.0,
    }
