"""Packed batches on a CPU as runs of steps with equal batch sizes, each computed as an ordinary batch.

PyTorch's operator of a packed batch is its native loop: oneDNN does not run, and in training the gradient of each
step's part of the input products is a tensor of zeros of the size of all of them, to which the part is added. A run of
several steps has neither: it is a batch [T, B, I] for oneDNN, or for the native loop of ordinary batches. What a run
costs beside its steps is what is measured and compared (`is_faster`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gatewise.cells import LSTM
from gatewise.contract import ranking
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.pytorch import pytorch_layer
from gatewise.contract.saved import Inputs, Result
from gatewise.contract.weights import DirectionWeights, by_direction
from gatewise.kernels.aten import onednn

States = tuple[Tensor, ...]


class Run(NamedTuple):
    """Consecutive steps of a packed batch in which the same sequences run.

    Attributes:
        steps: The number of steps.
        batch: The number of sequences.
    """

    steps: int
    batch: int


def runs_of(batch_sizes: Sequence[int]) -> tuple[Run, ...]:
    """Return the runs of a packed batch with the given batch sizes, which do not increase."""
    return tuple([Run(steps, batch) for batch, steps in Counter(batch_sizes).items()])


def takes(problem: Problem, device: Device) -> bool:
    """Return whether a packed problem may be computed run by run: on a CPU, an LSTM by oneDNN, other cells in training.

    In 16 bits it is not, because autograd adds the gradients of the weights run by run in their dtype, which would lose
    digits.
    """
    if device.kind != "cpu" or not may_take(problem):
        return False
    return type(problem.cell) is not LSTM or onednn.takes(_of_several_steps(problem), device)


def may_take(problem: Problem) -> bool:
    """Return whether `takes` accepts a packed problem on a CPU with any settings of PyTorch."""
    if problem.element_bytes < 4:
        return False
    return not problem.proj_size if type(problem.cell) is LSTM else problem.needs_grad


def are_chosen(problem: Problem, batch_sizes: Tensor) -> bool:
    """Return whether `call` computes a packed batch on this CPU.

    The operators of runs have no derivatives in forward mode, which PyTorch's operator of a packed batch has.

    Args:
        problem: The problem, which `may_take` accepts.
        batch_sizes: The batch size of each step.
    """
    device = Device.probe("cpu")
    # Runs are seldom faster, and most of what they take is known from the problem.
    faster = is_faster(problem, batch_sizes.tolist(), device)
    return faster and takes(problem, device) and forward_ad._current_level < 0


def is_faster(problem: Problem, batch_sizes: Sequence[int], device: Device) -> bool:
    """Return whether the runs take less time than PyTorch's operator of the packed batch, by measured weights.

    Args:
        problem: The problem, which `may_take` accepts.
        batch_sizes: The batch size of each step.
        device: The device, which is a CPU.
    """
    if batch_sizes[0] == batch_sizes[-1]:  # PyTorch's operator computes a single run as an ordinary batch
        return False
    weights = _weights(problem, device)
    counted = quantities(problem, batch_sizes, by_onednn=type(problem.cell) is LSTM)
    return _total(counted["runs"], weights["runs"]) < _total(counted["packed"], weights["packed"])


def quantities(problem: Problem, batch_sizes: Sequence[int], *, by_onednn: bool) -> dict[str, dict[str, float]]:
    """Return the quantities of one direction of one layer that its time is estimated from, for both ways.

    Args:
        problem: The problem.
        batch_sizes: The batch size of each step.
        by_onednn: Whether oneDNN computes runs of several steps.
    """
    # Batch sizes do not increase, so that each one is that of one run.
    tokens, steps, runs = sum(batch_sizes), len(batch_sizes), Counter(batch_sizes).values()
    single = list(runs).count(1)
    several = len(runs) - single
    matrices = problem.gate_rows * (problem.input_size + problem.state_size)
    products = tokens * matrices
    return {
        "packed": {
            "call": 1,
            "steps": steps,
            "products": products,
            "zeros": steps * tokens * problem.gate_rows * problem.needs_grad,
        },
        "runs": {
            "call": 1,
            "runs": several,
            "run weights": several * matrices * by_onednn,
            "run steps": 0 if by_onednn else steps - single,
            "single steps": single,
            "single weights": single * matrices,
            "products": products,
        },
    }


def call(problem: Problem, inputs: Inputs) -> Result:
    """Compute all layers of a packed batch run by run; autograd records the operators if it is on.

    Args:
        problem: The problem. With dropout, PyTorch's generator draws the masks that its operator would draw.
        inputs: The inputs.
    """
    assert inputs.batch_sizes is not None  # for the type checker: the batch is packed
    runs = runs_of(inputs.batch_sizes.tolist())
    directions = by_direction(inputs.weights, problem.weights_per_direction, 0)
    y, finals = inputs.x, []
    for row in range(0, len(directions), problem.num_directions):
        if row and problem.dropout:
            y = torch.nn.functional.dropout(y, problem.dropout, problem.needs_grad)
        outputs = []
        for place, weights in enumerate(directions[row : row + problem.num_directions], row):
            states = (inputs.h0[place], inputs.c0[place]) if problem.cell.states else (inputs.h0[place],)
            output, final = _direction(problem, y, runs, states, weights, reverse=place > row)
            outputs.append(output)
            finals.append(final)
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    h_n, *c_n = (torch.stack(of_all) for of_all in zip(*finals, strict=True))
    return Result(y, h_n, c_n[0] if c_n else inputs.c0)


def _direction(
    problem: Problem, x: Tensor, runs: Sequence[Run], initial: States, weights: DirectionWeights, *, reverse: bool
) -> tuple[Tensor, States]:
    pieces, outputs = x.split([run.steps * run.batch for run in runs]), [x] * len(runs)
    states = tuple([state[:0] for state in initial]) if reverse else initial
    ended: list[States] = []
    for place in reversed(range(len(runs))) if reverse else range(len(runs)):
        run, running = runs[place], len(states[0])
        if running < run.batch:  # in reverse, the shorter sequences begin with their initial states
            begun = [state[running : run.batch] for state in initial]
            states = tuple([torch.cat(pair) for pair in zip(states, begun, strict=True)]) if running else tuple(begun)
        elif running > run.batch:
            ended.append(tuple([state[run.batch :] for state in states]))
            states = tuple([state[: run.batch] for state in states])
        outputs[place], states = _run(problem, pieces[place], run, states, weights, reverse=reverse)
    ended.append(states)
    ended.reverse()
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return y, states if len(ended) == 1 else tuple([torch.cat(parts) for parts in zip(*ended, strict=True)])


def _run(
    problem: Problem, x: Tensor, run: Run, states: States, weights: DirectionWeights, *, reverse: bool
) -> tuple[Tensor, States]:
    """Compute a run, given its part of the packed input [N, I]; return its outputs [N, R] and the states after it."""
    mode = pytorch_layer(problem.cell).mode.lower()
    if run.steps == 1:
        found = getattr(torch, f"{mode}_cell")(x, states if problem.cell.states else states[0], *weights.tensors())
        after = found if problem.cell.states else (found,)
        return after[0], after
    x = x.unflatten(0, (run.steps, run.batch))
    if type(problem.cell) is LSTM:
        h, c = states
        y, h, c, _ = onednn.direction_forward(problem, x, h, c, weights, reverse=reverse)
        return y.flatten(0, 1), (h, c)
    (h,) = states
    options = problem.bias, 1, 0.0, problem.needs_grad, False, False
    y, h_n = getattr(torch, mode)(x.flip(0) if reverse else x, h.unsqueeze(0), weights.tensors(), *options)
    return (y.flip(0) if reverse else y).flatten(0, 1), (h_n.squeeze(0),)


@functools.lru_cache(maxsize=1024)
def _of_several_steps(problem: Problem) -> Problem:
    return problem.replace(layout=Layout.DENSE, time=max(2, problem.time))


# Weights are data of the package, which no program changes.
@functools.lru_cache(maxsize=1024)
def _weights(problem: Problem, device: Device) -> Mapping[str, Mapping[str, float]]:
    found = ranking.weights(device, f"aten packed {pytorch_layer(problem.cell).name.lower()}")
    ways: dict[str, dict[str, float]] = {"packed": {}, "runs": {}}
    for label, weight in found.items():
        mode, way, name = label.split(" ", 2)
        if problem.needs_grad == (mode == "training"):
            ways[way][name] = weight
    return ways


def _total(counted: Mapping[str, float], weights: Mapping[str, float]) -> float:
    total = 0.0
    for name, amount in counted.items():
        if amount:
            total += amount * weights[name]
    return total
