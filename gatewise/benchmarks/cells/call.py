"""The values of one call of a cell's layer: drawn once for each case, and the same in every precision."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn

from gatewise.benchmarks.cases import LSTMCase
from gatewise.benchmarks.cells.loop import CellLoop, loop_of, step_of
from gatewise.benchmarks.cells.record import ZONEOUT
from gatewise.benchmarks.lstm.call import exact
from gatewise.cells import GRU, LSTM, RNN, Cell
from gatewise.contract.errors import ArgumentError
from gatewise.nn import GRU as GRU_LAYER
from gatewise.nn import LSTM as LSTM_LAYER
from gatewise.nn import RNN as RNN_LAYER
from gatewise.nn import Recurrent

RESET_RATE = 0.03
"""The fraction of steps at which an episode begins, in calls with resets."""

_RATE, _ZONEOUT = 0.25, 0.1
_STEPS_BEFORE = 8
# With gains of 1, which layer normalization has initially, and random matrices the states of `LayerNormLSTM` are
# chaotic: over 512 steps gradients grow by a factor of 1e4, and even in float32 they have nothing in common with those
# in float64. Cooijmans et al., "Recurrent batch normalization" (2017), recommend smaller gains for this reason.
_GAIN = 0.25


@dataclasses.dataclass(frozen=True, slots=True)
class CellCall:
    """The input, initial states, weights, gradients of the outputs, and resets of a call.

    They are exact in float16, bfloat16 and all wider formats, so that one float64 result is the truth for all
    precisions, and every error is one of the computation.

    Attributes:
        cell: The cell.
        case: The sizes.
        x: The input [T, B, I], normally distributed with mean zero.
        states: The initial states [B, H], h first: those after a few steps from the cell's own initial states, so that
            they are states that the cell can have.
        weights: The weights by name: matrices and biases uniformly distributed as in PyTorch, parameters of the cell
            with their initial values, a quarter of them for gains, and the same uniformly distributed numbers added.
        dy: The gradient of the output [T, B, H], normally distributed.
        dstates: The gradients of the final states [B, H], normally distributed.
        resets: The steps at which episodes begin [T, B].
    """

    cell: Cell
    case: LSTMCase
    x: Tensor
    states: tuple[Tensor, ...]
    weights: dict[str, Tensor]
    dy: Tensor
    dstates: tuple[Tensor, ...]
    resets: Tensor


def layer_of(cell: Cell, size: int, **options: object) -> nn.Module:
    """Return a layer of a cell as its users create it: by the class of its own if there is one with these options."""
    if not options.keys().isdisjoint(("recurrent_dropout", "zoneout", "candidate_dropout")):
        return Recurrent(cell, size, size, **{"bias": True} | options)  # type: ignore[arg-type]
    if type(cell) is LSTM:
        return LSTM_LAYER(size, size, **options)  # type: ignore[arg-type]
    if type(cell) is GRU:
        return GRU_LAYER(size, size, **options)  # type: ignore[arg-type]
    if type(cell) is RNN:
        return RNN_LAYER(size, size, nonlinearity=cell.nonlinearity, **options)  # type: ignore[arg-type]
    options = {"bias": True} | options  # as the layers that it is compared with
    return Recurrent(cell, size, size, **options)  # type: ignore[arg-type]


def options_with_masks(cell: Cell, way: str) -> dict[str, object] | None:
    """Return the options of a layer for one of the ways `WITH_MASKS`; None if the cell does not take them.

    The rates are a quarter, and a tenth for zoneout of every state that may have it.
    """
    option = way.replace("-", "_")
    states = [name for name in ("h", *cell.states) if math.isfinite(cell.initial_value(name))]
    options: dict[str, object] = {option: dict.fromkeys(states, _ZONEOUT) if way == ZONEOUT else _RATE}
    try:
        with torch.device("meta"):
            layer_of(cell, 1, **options)
    except ArgumentError:
        return None
    return options


def draw(cell: Cell, case: LSTMCase, device: torch.device, seed: int = 1) -> CellCall:
    """Draw the values of a case; a seed gives the same values on devices of the same kind."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return exact(torch.randn(shape, generator=generator, device=device))

    weights = _weights(cell, case, generator)
    tokens, state = (case.time, case.batch), (case.batch, case.hidden_size)
    names = ("h", *cell.states)
    initial = [torch.full(state, cell.initial_value(name), dtype=torch.float64, device=device) for name in names]
    earlier = normal(_STEPS_BEFORE, *state).double()
    with torch.no_grad():
        _, states = CellLoop(cell, weights, torch.float64, loop_of(cell, step_of(cell)))(earlier, tuple(initial))
    return CellCall(
        cell,
        case,
        x=normal(*tokens, case.hidden_size),
        states=tuple(exact(each) for each in states),
        weights=weights,
        dy=normal(*tokens, case.hidden_size),
        dstates=tuple(normal(*state) for _ in names),
        resets=torch.rand(tokens, generator=generator, device=device) < RESET_RATE,
    )


def _weights(cell: Cell, case: LSTMCase, generator: torch.Generator) -> dict[str, Tensor]:
    device, bound = generator.device, case.hidden_size**-0.5
    # Initial values of a cell's parameters may be drawn, by PyTorch's own generators.
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(generator.initial_seed())
        layer = layer_of(cell, case.hidden_size)
    learned = {f"{name}_l0": _GAIN if name.startswith("gain_") else 1.0 for name in cell.parameters}
    found = {}
    for name, parameter in layer.named_parameters():
        drawn = torch.empty(parameter.shape, device=device).uniform_(-bound, bound, generator=generator)
        found[name] = exact(parameter.detach() * learned[name] + drawn if name in learned else drawn)
    return found
