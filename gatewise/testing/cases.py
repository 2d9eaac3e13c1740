"""Named problems at the edge cases of kernels, and random inputs for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from gatewise.cells import SLSTM, Cell, stated
from gatewise.contract.masks import mask_specs
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Inputs, OutputGradients


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A problem with a name, without a dtype.

    Attributes:
        name: A description of its special property, for use in a test's name.
        shape: The problem as a float32 training problem.
    """

    name: str
    shape: Problem

    def problem(self, *, dtype: torch.dtype = torch.float32, needs_grad: bool = True) -> Problem:
        """Return the problem in a dtype."""
        return self.shape.replace(dtype=dtype, needs_grad=needs_grad)


def _case(name: str, time: int, batch: int, input_size: int, hidden_size: int, **options: object) -> Case:
    return Case(name, Problem(time, batch, input_size, hidden_size, **options))  # type: ignore[arg-type]


_RESET_RATE = 0.3
_HOST, _DEVICE, _PACKED = Layout.HOST_LENGTHS, Layout.DEVICE_LENGTHS, Layout.PACKED

CASES: tuple[Case, ...] = (
    _case("plain", 7, 3, 5, 31),
    _case("all-ones", 1, 1, 1, 1),
    _case("one-step", 1, 3, 31, 3),
    _case("one-row", 9, 1, 3, 31),
    _case("one-unit", 9, 3, 31, 1),
    _case("one-feature", 5, 31, 1, 3),
    _case("wide", 3, 3, 200, 200),
    _case("aligned", 6, 8, 64, 128),
    _case("long", 200, 2, 3, 3),
    _case("no-bias", 7, 3, 5, 31, bias=False),
    _case("projection", 7, 3, 5, 31, proj_size=3),
    _case("two-layers", 7, 3, 5, 31, num_layers=2),
    _case("bidirectional", 7, 3, 5, 31, bidirectional=True),
    _case("bidirectional-projection-no-bias", 5, 3, 3, 31, bidirectional=True, proj_size=1, num_layers=3, bias=False),
    _case("dropout", 7, 3, 5, 31, num_layers=3, dropout=0.4),
    _case("lengths", 7, 5, 5, 31, layout=_HOST),
    _case("lengths-all", 7, 5, 3, 31, layout=_HOST, num_layers=2, bidirectional=True, proj_size=3, dropout=0.3),
    _case("device-lengths", 7, 5, 5, 31, layout=_DEVICE),
    _case("device-lengths-all", 7, 5, 3, 31, layout=_DEVICE, num_layers=2, bidirectional=True, proj_size=3),
    _case("resets", 7, 3, 5, 31, resets=True),
    _case(
        "resets-all", 7, 5, 3, 31, resets=True, layout=_HOST, num_layers=2, bidirectional=True, proj_size=3, dropout=0.3
    ),
    _case("resets-device-lengths", 7, 5, 3, 31, resets=True, layout=_DEVICE, bidirectional=True),
    _case("packed", 7, 4, 5, 31, layout=_PACKED),
    _case("packed-all", 7, 4, 3, 31, layout=_PACKED, num_layers=2, bidirectional=True, dropout=0.3),
)
"""Problems with odd sizes, sizes of one, every option, every layout of lengths, and resets."""


def lengths_of(problem: Problem) -> tuple[int, ...]:
    """Return the default lengths of the sequences: mixed, including 1, 0 and T; a packed batch has no 0.

    Args:
        problem: The problem, which determines T, B and the layout.
    """
    if problem.layout is Layout.DENSE or problem.time == 0:
        return (problem.time,) * problem.batch
    shortest = 1 if problem.layout is Layout.PACKED else 0
    pattern = [max(problem.time // 2, shortest), problem.time, min(1, problem.time), shortest, max(problem.time - 1, 1)]
    lengths = [pattern[row % len(pattern)] for row in range(problem.batch)]
    return tuple(sorted(lengths, reverse=True)) if problem.layout is Layout.PACKED else tuple(lengths)


def make_inputs(
    problem: Problem,
    device: torch.device | str = "cpu",
    *,
    lengths: Sequence[int] | None = None,
    seed: int = 0,
) -> Inputs:
    """Return random inputs, which for a given seed are the same on every device.

    All tensors are normally distributed with mean zero: x and states with standard deviation 1, weights with
    1 / sqrt(H), biases and parameters of cells with 0.3. (With all-positive data the gates saturate and gradients
    vanish, so that a wrong backward pass would go unnoticed.) Only normalisers of an sLSTM are positive. Padding is
    random, too. With resets, an episode begins at three steps in ten.

    Args:
        problem: The problem, which determines shapes, dtype and layout.
        device: The device of the inputs.
        lengths: The lengths of the sequences, for every layout except dense; default `lengths_of(problem)`. They must
            be in descending order for the packed layout.
        seed: The seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, deviation: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * deviation
        return drawn.to(problem.dtype).to(device)

    rows = lengths_of(problem) if lengths is None else tuple(lengths)
    tokens = (sum(rows),) if problem.layout is Layout.PACKED else (problem.time, problem.batch)
    states = problem.num_layers * problem.num_directions
    weights = []
    for layer in range(problem.num_layers):
        for _ in range(problem.num_directions):
            spread, gates = problem.hidden_size**-0.5, problem.gate_rows
            weights.append(normal(gates, problem.layer_input_size(layer), deviation=spread))
            weights.append(normal(gates, problem.state_size, deviation=spread))
            if problem.bias:
                weights += [normal(gates, deviation=0.3), normal(gates, deviation=0.3)]
            if problem.proj_size:
                weights.append(normal(problem.proj_size, problem.hidden_size, deviation=spread))
            weights += [normal(problem.hidden_size, deviation=0.3) for _ in problem.cell.parameters]
    specs = mask_specs(problem, tokens, (states, problem.batch, problem.state_size))
    masks = tuple((torch.rand(shape, generator=generator) >= 1 - share).to(device) for shape, share in specs)
    lengths_there = device if problem.layout is Layout.DEVICE_LENGTHS else "cpu"
    ragged = problem.layout in (Layout.HOST_LENGTHS, Layout.DEVICE_LENGTHS)
    x, h0 = normal(*tokens, problem.input_size), normal(states, problem.batch, problem.state_size)
    c0 = with_positive_normalizers(problem.cell, normal(states, problem.batch, problem.states_size))
    inputs = Inputs(
        x=x,
        h0=h0,
        c0=c0,
        weights=tuple(weights),
        lengths=torch.tensor(rows, dtype=torch.int64).to(lengths_there) if ragged else None,
        batch_sizes=_batch_sizes(rows, problem.time) if problem.layout is Layout.PACKED else None,
        masks=masks,
    )
    if not problem.resets:
        return inputs
    return inputs._replace(resets=(torch.rand(*tokens, generator=generator) < _RESET_RATE).to(device))


def with_positive_normalizers(cell: Cell, states: Tensor) -> Tensor:
    """Return states side by side [..., S*H], in which the normaliser is positive if they are those of an sLSTM."""
    if type(stated(cell)) is not SLSTM:
        return states
    c, n, m = states.chunk(3, -1)
    return torch.cat([c, 1 + n.abs(), m], -1)


def make_gradients(problem: Problem, inputs: Inputs, *, seed: int = 1) -> OutputGradients:
    """Return random gradients of the outputs, normal with mean zero.

    Args:
        problem: The problem, which determines the shapes.
        inputs: The inputs, which determine dtype and device.
        seed: The seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.to(problem.dtype).to(inputs.x.device)

    return OutputGradients(
        normal(*inputs.x.shape[:-1], problem.output_size), normal(*inputs.h0.shape), normal(*inputs.c0.shape)
    )


def _batch_sizes(lengths: Sequence[int], time: int) -> Tensor:
    return torch.tensor([sum(length > step for length in lengths) for step in range(time)], dtype=torch.int64)
