"""The LSTM cell with layer normalization, in the forms that published code uses."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from gatewise.cells.candidate import candidate
from gatewise.cells.cell import Cell, Initial
from gatewise.cells.normalization import standardized
from gatewise.cells.options import check_choice, check_flag, checked_number

GATES = ("i", "f", "g", "o")

FORMS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "haste": {},
        "torchscript": {"cell": "both"},
        "tensorflow_addons": {"cell": "both", "eps": 1e-3},
        "tensorflow1": {"gates": "each", "cell": "both", "eps": 1e-12, "forget_bias": 1.0},
        "icefall": {"gates": "each", "cell": "both", "bias": True},
        "lingvo": {"gates": "each", "cell": "none", "eps": 1e-8, "clip": 10.0},
        "lingvo_lean": {"gates": "each", "eps": 1e-8, "gain_offset": 1.0},
        "returnn": {"cell": "both", "eps": 1e-12},
        "returnn_joined": {"gates": "joint", "cell": "carried", "eps": 1e-12},
    }
)
"""The options of published forms, by the name of the library that has the form.

Each is the form that the library's class has by default; "returnn_joined" is that of RETURNN's class with
global_norm=False, global_norm_joined=True and cell_norm_in_output=False.
"""


class LayerNormLSTM(Cell):
    """An LSTM with layer normalization of its gate sums and of its cell state.

    With N the normalization over hidden units (`standardized`), the default form is that of haste:

        z = gain_ih * N(W_ih x) + gain_hh * N(W_hh h) + shift            (each N over all 4 H sums)
        c' = sigmoid(z_f) * c + sigmoid(z_i) * tanh(z_g)
        h' = sigmoid(z_o) * tanh(gain_c * N(c') + shift_c)

    The gates are in the order i f g o. Gains and shifts are parameters of the cell, one vector [H] for each gate; gains
    are 1 initially, and shifts 0.

    Args:
        gates: The sums that share a mean and a variance: "apart", the 4 H input sums, and the 4 H recurrent sums;
            "joint", the 4 H totals of both; "each", the H totals of each gate; "none" for no normalization.
        cell: The places where the normalized cell state is used: "output", in tanh(c') only; "carried", in the next
            step only; "both"; "none".
        hidden: Whether the hidden state h' is normalized as well.
        shift: Whether there are shifts.
        eps: The number that is added to variances.
        gain_offset: The number that is added to stored gains, whose initial value is 1 - gain_offset.
        forget_bias: The number that is added to z_f.
        clip: The bound of |c'| before its normalization; None for no bound.
        bias: Whether a layer of the cell has the biases b_ih and b_hh, unless the layer's `bias` says otherwise. They
            are added before the normalization, as in icefall, the only form that has them.

    Raises:
        ValueError: An option has a value that it cannot have.

    Source: Ba et al., "Layer normalization" (2016), in the variants of haste, of PyTorch's TorchScript benchmark,
    TensorFlow Addons, TensorFlow 1, icefall, Lingvo and RETURNN (see `LayerNormLSTM.of`).
    """

    name = "layer_norm_lstm"
    gates = GATES
    states = ("c",)

    def __init__(
        self,
        *,
        gates: str = "apart",
        cell: str = "output",
        hidden: bool = False,
        shift: bool = True,
        eps: float = 1e-5,
        gain_offset: float = 0.0,
        forget_bias: float = 0.0,
        clip: float | None = None,
        bias: bool = False,
    ) -> None:
        check_choice("gates", gates, ("apart", "joint", "each", "none"))
        check_choice("cell", cell, ("output", "carried", "both", "none"))
        for option, value in (("hidden", hidden), ("shift", shift), ("bias", bias)):
            check_flag(option, value)
        self.normalized_gates, self.normalized_cell, self.normalized_hidden = gates, cell, hidden
        self.shift, self.bias = shift, bias
        self.eps = checked_number("eps", eps, positive=True)
        self.gain_offset = checked_number("gain_offset", gain_offset)
        self.forget_bias = checked_number("forget_bias", forget_bias)
        self.clip = None if clip is None else checked_number("clip", clip, positive=True, otherwise=" or None")
        self.name = self._named()

    def __setattr__(self, attribute: str, value: object) -> None:
        super().__setattr__(attribute, value)
        if attribute != "name" and "name" in vars(self):  # the name follows options that change
            self.name = self._named()

    @classmethod
    def of(cls, form: str, **options: Any) -> LayerNormLSTM:
        """Return the cell in a published form.

        Args:
            form: "haste", "torchscript", "tensorflow_addons", "tensorflow1", "icefall", "lingvo", "lingvo_lean",
                "returnn" or "returnn_joined".
            options: Options that replace those of the form.

        Raises:
            ValueError: There is no such form, or an option has a value that it cannot have.
        """
        check_choice("form", form, FORMS)
        return cls(**{**FORMS[form], **options})

    @property
    def apart(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride] - it depends on options
        """The names of the gates with separate input and recurrent sums."""
        return GATES if self.normalized_gates == "apart" else ()

    @property
    def parameters(self) -> Mapping[str, Initial]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The gains and shifts, and their initial values."""
        kinds = {"apart": ("ih_", "hh_"), "none": ()}.get(self.normalized_gates, ("",))
        gains = [f"{kind}{gate}" for kind in kinds for gate in GATES]
        shifts = [*GATES] if self.shift else []
        for name, is_normalized in (("c", self.normalized_cell != "none"), ("h", self.normalized_hidden)):
            gains += [name] * is_normalized
            shifts += [name] * (is_normalized and self.shift)
        found: dict[str, Initial] = {f"gain_{name}": 1.0 - self.gain_offset for name in gains}
        return found | {f"shift_{name}": 0.0 for name in shifts}

    def step(self, gate: Any, state: Any, parameter: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the hidden state and the cell state after a step."""

        def scaled(value: Any, gain: str) -> Any:
            found = getattr(parameter, f"gain_{gain}")
            return value * (found + self.gain_offset if self.gain_offset else found)

        def affine(value: Any, name: str) -> Any:
            value = scaled(value, name)
            return value + getattr(parameter, f"shift_{name}") if self.shift else value

        given = [getattr(gate, name) for name in GATES]
        match self.normalized_gates:
            case "apart":
                of_input = standardized(*[value.input for value in given], eps=self.eps)
                of_hidden = standardized(*[value.recurrent for value in given], eps=self.eps)
                each = zip(GATES, of_input, of_hidden, strict=True)
                sums = [scaled(one, f"ih_{name}") + scaled(other, f"hh_{name}") for name, one, other in each]
            case "joint":
                found = standardized(*given, eps=self.eps)
                sums = [scaled(value, name) for name, value in zip(GATES, found, strict=True)]
            case "each":
                found = [standardized(value, eps=self.eps) for value in given]
                sums = [scaled(value, name) for name, value in zip(GATES, found, strict=True)]
            case _:
                sums = given
        if self.shift:
            sums = [value + getattr(parameter, f"shift_{name}") for name, value in zip(GATES, sums, strict=True)]
        z_i, z_f, z_g, z_o = sums
        f = torch.sigmoid(z_f + self.forget_bias if self.forget_bias else z_f)
        c = f * state.c + torch.sigmoid(z_i) * candidate(torch.tanh(z_g))
        if self.clip is not None:
            c = torch.clamp(c, -self.clip, self.clip)
        normalized = c if self.normalized_cell == "none" else affine(standardized(c, eps=self.eps), "c")
        h = torch.sigmoid(z_o) * torch.tanh(c if self.normalized_cell == "carried" else normalized)
        if self.normalized_hidden:
            h = affine(standardized(h, eps=self.eps), "h")
        return h, {"c": c if self.normalized_cell == "output" else normalized}

    def _named(self) -> str:
        """Return the name of the class, with the options that differ from their defaults."""
        return type(self).name + (f"({stated})" if (stated := self._stated()) else "")

    def _stated(self) -> str:
        """Return the options that differ from their defaults, as arguments of a call."""
        stated = []
        for option, parameter in _OPTIONS.items():
            value = vars(self)[option if option in vars(self) else f"normalized_{option}"]
            if value != parameter.default:
                stated.append(f"{option}={value!r}")
        return ", ".join(stated)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._stated()})"


_OPTIONS = inspect.signature(LayerNormLSTM).parameters
