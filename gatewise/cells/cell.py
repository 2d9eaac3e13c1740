"""The base class of recurrent cells.

A cell defines the arithmetic of a single hidden unit in one time step. Matrices, biases, layers, directions, sequence
lengths, projections and dropout belong to the kernel that runs the cell, and work for every cell. The package
`derivation` derives from the definition the PyTorch operators and the CUDA code of the step and of its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

Initial = float | Callable[[Any], object]
"""The initial value of a parameter: a number, or a function that fills a tensor, as those of `torch.nn.init` do."""


class Cell:
    """A recurrent cell.

    In every time step, a kernel computes the sum `W_ih x + b_ih + W_hh h + b_hh` for each gate and hidden unit, and
    applies `step` to the sums and to the states before the step. The hidden state and the other states that `step`
    returns are passed to the next time step.

    Attributes:
        name: The name of the cell in decisions and reports; the name of the class unless it states another.
        gates: The names of the gates, in the order in which their rows stand in the weight matrices.
        states: The names of the states other than the hidden state `h` that are passed from step to step.
        apart: The names of the gates for which `step` reads two separate sums, `gate.<name>.input` = `W_ih x + b_ih`
            and `gate.<name>.recurrent` = `W_hh h + b_hh`, instead of their total.
        parameters: The names of the learned parameters with one value for each hidden unit [H], and their initial
            values: a number, or a function that fills a tensor, such as `torch.nn.init.normal_`. Every direction of
            every layer has its own.
        initial_states: The initial values of states where a call gives none, and at resets; zero for states that are
            not named.
        bias: Whether a layer of the cell has the biases b_ih and b_hh, unless the layer's `bias` says otherwise.

    Examples:
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
    parameters: ClassVar[Mapping[str, Initial]] = {}
    initial_states: ClassVar[Mapping[str, float]] = {}
    bias: bool = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def initial_value(self, state: str) -> float:
        """Return the initial value of "h" or of a state in `states`, where a call gives none and at resets."""
        return self.initial_states.get(state, 0.0)

    def step(self, gate: Any, state: Any, *args: Any, **kwargs: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the hidden state and a mapping of the other states after a step.

        Args:
            gate: A namespace with the sum of each gate, or with both sums for the gates in `apart`.
            state: A namespace with the states before the step: `state.h` and one attribute for each name in `states`.
            args: For a cell that has `parameters`, a namespace with them: its step is `step(self, gate, state,
                parameter)`. Other cells have no third argument.
            kwargs: Nothing; it lets type checkers accept both forms.
        """
        raise NotImplementedError

    @property
    def sums(self) -> tuple[str, ...]:
        """The names of the sums that `step` reads: one per gate, then the recurrent sums of the gates in `apart`."""
        return (
            *(f"{gate}_input" if gate in self.apart else gate for gate in self.gates),
            *(f"{gate}_recurrent" for gate in self.gates if gate in self.apart),
        )

    @property
    def recurrent_sums(self) -> tuple[int, ...]:
        """For each gate, the index in `sums` of the sum that contains its recurrent product."""
        sums = self.sums
        return tuple(sums.index(f"{gate}_recurrent" if gate in self.apart else gate) for gate in self.gates)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return False
        own, others = vars(self), vars(other)
        return own.keys() == others.keys() and all(_is_same(value, others[name]) for name, value in own.items())

    def __hash__(self) -> int:
        own = vars(self)
        if not own:  # every call looks up its cell, and most cells have no attributes
            return hash(type(self))
        try:
            return hash((type(self), *own.values()))  # so that a cell is traced again if its attributes change
        except TypeError:  # an attribute that cannot be hashed, such as a list
            return hash((type(self), repr(own)))


def _is_same(one: object, other: object) -> bool:
    if one is other:
        return True
    # Arrays and tensors cannot be compared as a whole by `==`; cells that differ in them differ.
    if getattr(one, "shape", ()) or getattr(other, "shape", ()):
        return False
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # lists and dictionaries of them compare them by `==`
        return False
