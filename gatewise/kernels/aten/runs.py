"""Packed batches on a CPU as runs of steps with equal batch sizes, each computed as an ordinary batch.

PyTorch's operator of a packed batch is its native loop: oneDNN does not run, and in training the gradient of each
step's part of the input products is a tensor of zeros of the size of all of them, to which the part is added. A run of
several steps has neither: it is a batch [T, B, I] for oneDNN, or for the native loop of ordinary batches. What a run
costs beside its steps is what is measured and compared (`is_faster`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
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
    return type(problem.cell) is not LSTM or onednn.supports(_dense(problem), device)


def may_take(problem: Problem) -> bool:
    """Return whether `takes` accepts a packed problem on a CPU with any settings of PyTorch."""
    if problem.element_bytes < 4:
        return False
    return not problem.proj_size if type(problem.cell) is LSTM else problem.needs_grad


class Costs(NamedTuple):
    """The microseconds of one direction of one layer by measured weights: as runs, and by PyTorch's operator.

    Attributes:
        call: A call of PyTorch's operator of a packed batch; in training, a part of it and of the next three.
        step: One of its steps.
        token: A token that it computes.
        step_of_token: A token for each step, which is zero in inference.
        runs: A call of the runs.
        several: A run of several steps.
        step_of_run: A step of such a run.
        single: A run of one step.
        token_of_runs: A token that runs compute.
    """

    call: float
    step: float
    token: float
    step_of_token: float
    runs: float
    several: float
    step_of_run: float
    single: float
    token_of_runs: float


def costs_of(problem: Problem, device: Device) -> Costs:
    """Return the costs of a packed problem.

    In training, estimates of the runs of some shapes are a third too low, and a wrong choice loses more than a missed
    one. So runs are compared with a part of the operator's time.

    Args:
        problem: The problem, which `may_take` accepts.
        device: The device, which is a CPU.
    """
    found = ranking.weights(device, f"aten packed {pytorch_layer(problem.cell).name.lower()}")
    mode = "training" if problem.needs_grad else "inference"

    def total(way: str, **counted: float) -> float:
        return sum(
            amount * found[f"{mode} {way} {name.replace('_', ' ')}"] for name, amount in counted.items() if amount
        )

    matrices, by_onednn = _matrices(problem), type(problem.cell) is LSTM
    part = ranking.weights(device, "aten packed limits")["training"] if problem.needs_grad else 1.0
    return Costs(
        call=part * total("packed", call=1),
        step=part * total("packed", steps=1),
        token=part * total("packed", products=matrices),
        step_of_token=part * total("packed", zeros=problem.gate_rows * problem.needs_grad),
        runs=total("runs", call=1),
        several=total("runs", runs=1, run_weights=matrices * by_onednn),
        step_of_run=total("runs", run_steps=not by_onednn),
        single=total("runs", single_steps=1, single_weights=matrices),
        token_of_runs=total("runs", products=matrices),
    )


def are_chosen(problem: Problem, costs: Costs, batch_sizes: Tensor) -> bool:
    """Return whether `call` computes a packed batch on this CPU.

    The operators of runs have no derivatives in forward mode, which PyTorch's operator of a packed batch has.

    Args:
        problem: The problem, which `may_take` accepts.
        costs: The costs of the problem.
        batch_sizes: The batch size of each step.
    """
    # Runs are seldom faster, and the time of a small call depends on how soon that is known.
    if not is_faster(costs, batch_sizes.tolist()):
        return False
    return takes(problem, Device.probe("cpu")) and forward_ad._current_level < 0


def is_faster(costs: Costs, batch_sizes: Sequence[int]) -> bool:
    """Return whether the runs take less time than PyTorch's operator of the packed batch.

    Args:
        costs: The costs of the problem.
        batch_sizes: The batch size of each step.
    """
    if batch_sizes[0] == batch_sizes[-1]:  # PyTorch's operator computes a single run as an ordinary batch
        return False
    call, step, token, step_of_token, of_runs, several, step_of_run, single, token_of_runs = costs
    steps, tokens, runs = len(batch_sizes), sum(batch_sizes), len(set(batch_sizes))
    limit = call + step * steps + (token + step_of_token * steps - token_of_runs) * tokens - of_runs
    if runs == steps:
        return runs * single < limit
    # Of the runs, none up to all but one have a single step. They are counted where their number decides.
    of_several, other = runs * several + steps * step_of_run, single - several - step_of_run
    if limit <= of_several and limit <= of_several + (runs - 1) * other:
        return False
    return of_several + [run.steps for run in runs_of(batch_sizes)].count(1) * other < limit


def quantities(problem: Problem, batch_sizes: Sequence[int], *, by_onednn: bool) -> dict[str, dict[str, float]]:
    """Return the quantities of one direction of one layer that its time is estimated from, for both ways.

    Args:
        problem: The problem.
        batch_sizes: The batch size of each step.
        by_onednn: Whether oneDNN computes runs of several steps.
    """
    tokens, steps, runs = sum(batch_sizes), len(batch_sizes), runs_of(batch_sizes)
    single = [run.steps for run in runs].count(1)
    several = len(runs) - single
    matrices = _matrices(problem)
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
            y = torch.nn.functional.dropout(y, problem.dropout)
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
def _dense(problem: Problem) -> Problem:
    return problem.replace(layout=Layout.DENSE)


def _matrices(problem: Problem) -> int:
    return problem.gate_rows * (problem.input_size + problem.state_size)
