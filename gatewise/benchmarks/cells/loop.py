"""The rival: a layer of any cell as a loop over time in plain PyTorch, with or without `torch.compile`.

The loop is written as a good user would: the products with the input of all steps are one matrix product before the
loop, which adds all biases that can be added there, and a step is the recurrent product and the cell's own `step`.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gatewise.cells import Cell

States = tuple[Tensor, ...]
Step = Callable[[Tensor, States, Tensor, Tensor, States], States]
Loop = Callable[..., tuple[Tensor, States]]


def step_of(cell: Cell) -> Step:
    """Return a function that computes one time step of a cell.

    It computes the states after the step from the input products [B, G*H], the states before it [B, H], the transposed
    recurrent weights [H, G*H], the recurrent biases [G*H] and the parameters of the cell. The biases are read for cells
    with gates in `apart` only; for others they are part of the input products.
    """
    # As in a loop that a user writes, the step is called directly, without `gatewise.cells.step`.
    gates = collections.namedtuple("gates", cell.gates)  # type: ignore[misc]
    both = collections.namedtuple("both", ("input", "recurrent"))
    carried = collections.namedtuple("carried", ("h", *cell.states))  # type: ignore[misc]
    learned = collections.namedtuple("learned", tuple(cell.parameters))  # type: ignore[misc]
    count, apart, names = len(cell.gates), cell.apart, cell.states
    own = bool(cell.parameters)

    def step(product: Tensor, states: States, w_hh_t: Tensor, b_hh: Tensor, parameters: States) -> States:
        if apart:
            of_input = product.chunk(count, -1)
            of_state = torch.addmm(b_hh, states[0], w_hh_t).chunk(count, -1)
            sums = [
                both(own_sum, other) if gate in apart else own_sum + other
                for gate, own_sum, other in zip(cell.gates, of_input, of_state, strict=True)
            ]
        else:
            sums = torch.addmm(product, states[0], w_hh_t).chunk(count, -1)
        arguments = (gates(*sums), carried(*states))
        h, others = cell.step(*arguments, learned(*parameters)) if own else cell.step(*arguments)
        return (h, *[others[name] for name in names])

    return step


def loop_of(cell: Cell, step: Step, *, dynamic_batch: bool = False) -> Loop:
    """Return a function that computes a layer of a cell.

    Args:
        cell: The cell.
        step: A function that computes one time step, such as the result of `step_of`, compiled or not.
        dynamic_batch: Whether `torch.compile` is told that B changes from case to case, so that it compiles the step
            once for all of them.
    """
    initial = [cell.initial_value(name) for name in ("h", *cell.states)]

    def loop(
        x: Tensor,
        states: States,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor,
        b_hh: Tensor,
        parameters: States,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, States]:
        products = functional.linear(x, w_ih, b_ih if cell.apart else b_ih + b_hh).unbind(0)
        begins = None if resets is None else resets.unsqueeze(-1).unbind(0)
        w_hh_t, outputs = w_hh.t(), []
        if dynamic_batch:
            for tensor in (products[0], *states):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        for t, product in enumerate(products):
            if begins is not None:
                states = tuple(
                    [torch.where(begins[t], value, state) for value, state in zip(initial, states, strict=True)]
                )
            states = step(product, states, w_hh_t, b_hh, parameters)
            outputs.append(states[0])
        return torch.stack(outputs), states

    return loop


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled by `torch.compile`, without graph breaks.

    PyTorch counts what it compiled by code object, and stops at a limit. The closures of all cells have the same code
    object, so each is given its own.
    """
    code = function.__code__.replace()
    own = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(own, fullgraph=True)


class CellLoop(nn.Module):
    """A layer with one direction whose forward pass is a given loop.

    Args:
        cell: The cell.
        weights: The weights by the names of a layer with one direction, such as "weight_ih_l0".
        dtype: The dtype of the weights.
        loop: The loop, such as the result of `loop_of`.
    """

    def __init__(self, cell: Cell, weights: Mapping[str, Tensor], dtype: torch.dtype, loop: Loop) -> None:
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight.to(dtype, copy=True)))
        self._loop = loop
        self._matrices = [f"{kind}_l0" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        self._learned = [f"{name}_l0" for name in cell.parameters]

    def forward(self, x: Tensor, states: States, resets: Tensor | None = None) -> tuple[Tensor, States]:
        """Return the output [T, B, H] and the final states [B, H] for an input [T, B, I] and initial states [B, H]."""
        matrices = [getattr(self, name) for name in self._matrices]
        return self._loop(x, states, *matrices, tuple([getattr(self, name) for name in self._learned]), resets)
