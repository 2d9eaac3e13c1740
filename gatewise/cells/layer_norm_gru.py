"""The GRU cell with layer normalization of its gate sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gatewise.cells.candidate import candidate
from gatewise.cells.cell import Cell, Initial
from gatewise.cells.normalization import standardized
from gatewise.cells.options import check_choice, check_flag, checked_number

GATES = ("r", "z", "n")


class LayerNormGRU(Cell):
    """A gated recurrent unit with layer normalization of its gate sums.

    With N the normalization over hidden units (`standardized`), and gates="joint", the form of DreamerV3:

        s = gain * N(W_ih x + W_hh h) + shift                             (N over all 3 H sums)
        n = tanh(sigmoid(s_r) * s_n)
        h' = (1 - z) * h + z * n,  z = sigmoid(s_z + update_bias)

    with `update_bias` = -1. With gates="apart", the form of haste:

        u = gain_ih * N(W_ih x) + shift_ih,  v = gain_hh * N(W_hh h) + shift_hh
        n = tanh(u_n + sigmoid(u_r + v_r) * v_n)
        h' = z * h + (1 - z) * n,  z = sigmoid(u_z + v_z + update_bias)

    with `update_bias` = 0, where r and z have one shift. The gates are in the order r z n. Gains and shifts are
    parameters of the cell, one vector [H] for each gate; gains are 1 initially, and shifts 0. Neither form has the
    biases b_ih and b_hh; a layer with `bias=True` adds them before the normalization.

    Args:
        gates: "joint" or "apart".
        eps: The number that is added to variances; default 1e-3 for "joint" and 1e-5 for "apart".
        update_bias: The number that is added to the sum of z; default -1 for "joint" and 0 for "apart".
        centered: Whether means are subtracted; if not, the normalization is that of RMS.

    Raises:
        ValueError: An option has a value that it cannot have.

    Source: Hafner et al., "Mastering diverse domains through world models" (2023); haste (LMNT, 2020).
    """

    name = "layer_norm_gru"
    gates = GATES
    bias = False

    def __init__(
        self,
        *,
        gates: str = "joint",
        eps: float | None = None,
        update_bias: float | None = None,
        centered: bool = True,
    ) -> None:
        check_choice("gates", gates, ("joint", "apart"))
        check_flag("centered", centered)
        is_joint = gates == "joint"
        self.normalized_gates, self.centered = gates, centered
        self.eps = checked_number("eps", (1e-3 if is_joint else 1e-5) if eps is None else eps, positive=True)
        added = (-1.0 if is_joint else 0.0) if update_bias is None else update_bias
        self.update_bias = checked_number("update_bias", added)
        self.name = self._named()

    def __setattr__(self, attribute: str, value: object) -> None:
        super().__setattr__(attribute, value)
        if attribute != "name" and "name" in vars(self):  # the name follows options that change
            self.name = self._named()

    @property
    def apart(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride] - it depends on options
        """The names of the gates with separate input and recurrent sums."""
        return GATES if self.normalized_gates == "apart" else ()

    @property
    def parameters(self) -> Mapping[str, Initial]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The gains and shifts, and their initial values."""
        kinds = ("ih_", "hh_") if self.normalized_gates == "apart" else ("",)
        shifts = ("r", "z", "ih_n", "hh_n") if self.normalized_gates == "apart" else GATES
        found: dict[str, Initial] = {f"gain_{kind}{gate}": 1.0 for kind in kinds for gate in GATES}
        return found | {f"shift_{name}": 0.0 for name in shifts}

    def step(self, gate: Any, state: Any, parameter: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the hidden state after a step."""
        given = [getattr(gate, name) for name in GATES]
        options = {"eps": self.eps, "centered": self.centered}

        def scaled(values: Any, kind: str) -> list[Any]:
            return [getattr(parameter, f"gain_{kind}{name}") * value for name, value in zip(GATES, values, strict=True)]

        if self.normalized_gates == "joint":
            found = scaled(standardized(*given, **options), "")
            r, z, n = [value + getattr(parameter, f"shift_{name}") for name, value in zip(GATES, found, strict=True)]
            z = torch.sigmoid(z + self.update_bias if self.update_bias else z)
            return (1 - z) * state.h + z * candidate(torch.tanh(torch.sigmoid(r) * n)), {}
        u_r, u_z, u_n = scaled(standardized(*[value.input for value in given], **options), "ih_")
        v_r, v_z, v_n = scaled(standardized(*[value.recurrent for value in given], **options), "hh_")
        r = torch.sigmoid(u_r + v_r + parameter.shift_r)
        z = u_z + v_z + parameter.shift_z
        z = torch.sigmoid(z + self.update_bias if self.update_bias else z)
        n = candidate(torch.tanh(u_n + parameter.shift_ih_n + r * (v_n + parameter.shift_hh_n)))
        return z * state.h + (1 - z) * n, {}

    def _named(self) -> str:
        """Return the name of the class, with the options unless all of them are the defaults."""
        options = self.normalized_gates, self.eps, self.update_bias, self.centered
        return type(self).name + ("" if options == ("joint", 1e-3, -1.0, True) else self._stated())

    def _stated(self) -> str:
        stated = f"gates={self.normalized_gates!r}, eps={self.eps!r}, update_bias={self.update_bias!r}"
        return f"({stated}, centered={self.centered!r})"

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._stated()}"
