"""The statement of a recurrent cell: what one hidden unit computes in one time step.

A cell states the arithmetic of a single hidden unit and nothing else. Matrices, biases, layers, directions, sequence
lengths, projections and dropout belong to the schedule that runs it, and work for every cell. From the statement follow
the operators of the kernel `eager`, the adjoint, and what is kept for the backward pass.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, ClassVar


class Cell:
    """A recurrent cell.

    For every time step a schedule computes, for each gate and hidden unit, the sum
    `W_ih x + b_ih + W_hh h + b_hh`, calls `step` with the sums and with the states before the step, and carries the
    hidden state and the states that `step` returns to the next time step.

    Attributes:
        name: The name of the cell in decisions and reports; the name of the class unless it states another.
        gates: The names of the gates, in the order in which their rows stand in the weight matrices.
        states: The names of the states that are carried from step to step beside the hidden state `h`.
        apart: The names of the gates of which `step` reads two sums, `gate.<name>.input` = `W_ih x + b_ih` and
            `gate.<name>.recurrent` = `W_hh h + b_hh`, instead of their total.

    Example:
        >>> class Leaky(Cell):
        ...     gates = ("a", "g")
        ...
        ...     def step(self, gate, state):
        ...         a = torch.sigmoid(gate.a)
        ...         return a * state.h + (1 - a) * torch.tanh(gate.g), {}
    """

    name: str = ""
    gates: ClassVar[tuple[str, ...]] = ()
    states: ClassVar[tuple[str, ...]] = ()
    apart: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def step(self, gate: Any, state: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the hidden state after a step, and the other states after it by name.

        Args:
            gate: A namespace with the sum of each gate, or with its two sums for the gates in `apart`.
            state: A namespace with the states before the step: `state.h` and one attribute for each name in `states`.
        """
        raise NotImplementedError

    @property
    def sums(self) -> tuple[str, ...]:
        """The names of the sums that `step` reads: one of each gate in order, then the recurrent ones of `apart`."""
        return (
            *(f"{gate}_input" if gate in self.apart else gate for gate in self.gates),
            *(f"{gate}_recurrent" for gate in self.gates if gate in self.apart),
        )

    @property
    def recurrent_sums(self) -> tuple[int, ...]:
        """For each gate, the place in `sums` of the sum that its recurrent product is part of."""
        sums = self.sums
        return tuple(sums.index(f"{gate}_recurrent" if gate in self.apart else gate) for gate in self.gates)

    def called(self, sums: Mapping[str, Any], states: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
        """Call `step` with values by name and return the hidden state and the other states in the order of `states`.

        Args:
            sums: A value for each name in `sums`.
            states: A value for "h", where there is one, and for each name in `states`.
        """
        gate = types.SimpleNamespace()
        for name in self.gates:
            if name in self.apart:
                value = types.SimpleNamespace(input=sums[f"{name}_input"], recurrent=sums[f"{name}_recurrent"])
            else:
                value = sums[name]
            setattr(gate, name, value)
        hidden, after = self.step(gate, types.SimpleNamespace(**states))
        return hidden, tuple(after[name] for name in self.states)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(type(self))  # cells are looked up in every call, and a class has few that differ
