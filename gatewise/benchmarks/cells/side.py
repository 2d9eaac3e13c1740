"""The sides of a comparison: a layer of gatewise and loops in plain PyTorch with the same values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gatewise.benchmarks.cells.call import CellCall, layer_of
from gatewise.benchmarks.cells.loop import CellLoop, Loop
from gatewise.benchmarks.lstm.side import Outputs, Side


def layer_side(call: CellCall, dtype: torch.dtype, *, resets: bool = False, **options: object) -> Side:
    """Create the side of gatewise's layer of the cell; its states are [1, B, H].

    Args:
        call: The values.
        dtype: The dtype.
        resets: Whether the call has resets.
        options: The options of the layer, if it has others than by default, where users get the kernel that is fastest.
    """
    with torch.device(call.x.device):
        module = layer_of(call.cell, call.case.hidden_size, dtype=dtype, **options)
    module.load_state_dict(call.weights)
    x = call.x.to(dtype, copy=True)
    states = tuple(state.to(dtype, copy=True).unsqueeze(0) for state in call.states)
    begins = call.resets if resets else None
    form = states if call.cell.states else states[0]

    def run() -> Outputs:
        y, final = module(x, form, resets=begins)
        return (y, final) if isinstance(final, Tensor) else (y, *final)

    return _side(call, module, x, states, run)


def loop_side(call: CellCall, dtype: torch.dtype, loop: Loop, *, resets: bool = False) -> Side:
    """Create the side of a loop in plain PyTorch, whose states are [B, H]."""
    module = CellLoop(call.cell, call.weights, dtype, loop)
    x, states = call.x.to(dtype, copy=True), tuple(state.to(dtype, copy=True) for state in call.states)
    begins = call.resets if resets else None

    def run() -> Outputs:
        y, final = module(x, states, begins)
        return y, *final

    return _side(call, module, x, states, run)


def _side(call: CellCall, module: nn.Module, x: Tensor, states: tuple[Tensor, ...], run: Callable[[], Outputs]) -> Side:
    dstates = [gradient.to(x.dtype).view(state.shape) for gradient, state in zip(call.dstates, states, strict=True)]
    given = (call.dy.to(x.dtype), *dstates)
    leaves = (x, *states, *module.parameters())
    return Side(module, x, states, given, run, lambda tensor: tensor, leaves, names=("h", *call.cell.states))
