"""The conditions (`Criterion`) for running a problem that several kernels share."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from gatewise.cells import Cell, LayerNormLSTM, Regularised, stated, step_cell
from gatewise.contract.criterion import Criterion
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout
from gatewise.contract.pytorch import LAYERS, in_pytorch
from gatewise.derivation.device import MOST_SUMS
from gatewise.derivation.fused import carried_states
from gatewise.derivation.trace import is_pointwise, refusal_of


def _architecture(device: Device) -> str:
    return f"{device.name} ({device.architecture})" if device.kind == "cuda" else device.name


COMPILER = Criterion(
    "packages",
    allowed="cuda-core and NVRTC installed",
    actual=lambda problem, device: "not installed",
    holds=lambda problem, device: device.kind != "cuda" or device.compiles,
    violation=lambda problem, device: (problem, device.replace(kind="cuda", compiles=False)),
    advice="pip install 'gatewise[cuda]'",
)

AMPERE = Criterion(
    "device",
    allowed="a CUDA GPU of compute capability 8.0 or later",
    actual=lambda problem, device: _architecture(device),
    holds=lambda problem, device: device.kind == "cuda" and device.capability >= (8, 0),
    violation=lambda problem, device: (problem, Device.named("t4")),
)


class _OtherCell(Cell):
    name = "another cell"


IN_PYTORCH = Criterion(
    "cell",
    allowed=", ".join(layer.cell.name for layer in LAYERS),
    actual=lambda problem, device: problem.cell.name,
    holds=lambda problem, device: in_pytorch(problem.cell),
    violation=lambda problem, device: (problem.replace(cell=_OtherCell(), proj_size=0), device),
)


@functools.lru_cache(maxsize=256)
def is_fused(cell: Cell) -> bool:
    """Return whether fused code computes a cell: one carried state, at most four sums, no parameters or statistics.

    Other cells are computed by the code of `gatewise.derivation.row`.
    """
    if isinstance(cell, Regularised) or cell.parameters or len(cell.sums) > MOST_SUMS or not is_pointwise(cell):
        return False
    return len(carried_states(cell)) == 1


def _described(cell: Cell) -> str:
    if refusal := refusal_of(stated(cell)):
        return f"{cell.name}, which cannot be traced: {refusal.rstrip('.')}"
    if isinstance(cell, Regularised):
        return f"{cell.name}, whose masks are drawn for each call"
    learned = f", {len(cell.parameters)} parameters" if cell.parameters else ""
    normalized = "" if is_pointwise(cell) else ", normalization over units"
    return f"{cell.name}, with {len(carried_states(cell))} carried, {len(cell.sums)} sums{learned}{normalized}"


class _Branches(Cell):
    """A cell that cannot be traced, which does not meet the criterion `TRACES`."""

    name = "a cell that branches on values"
    gates = ("a",)

    def step(self, gate: Any, state: Any) -> tuple[Any, Mapping[str, Any]]:
        return (gate.a if gate.a > 0 else -gate.a), {}


TRACES = Criterion(
    "cell",
    allowed="a cell that can be traced",
    actual=lambda problem, device: _described(problem.cell),
    holds=lambda problem, device: not refusal_of(step_cell(problem.cell)),
    violation=lambda problem, device: (problem.replace(cell=_Branches(), proj_size=0), device),
)


def _normalizes(cell: Cell) -> bool:
    return not refusal_of(step_cell(cell)) and not is_pointwise(step_cell(cell))


# The normalized value of a single unit is 0, and so is its gradient. What rounding leaves of both is multiplied by
# 1 / sqrt(eps).
SEVERAL_UNITS = Criterion(
    "hidden_size",
    allowed="at least 2 for a cell that normalizes over units",
    actual=lambda problem, device: f"{problem.hidden_size} with {problem.cell.name}",
    holds=lambda problem, device: problem.hidden_size > 1 or not _normalizes(problem.cell),
    violation=lambda problem, device: (problem.replace(cell=LayerNormLSTM(), proj_size=0, hidden_size=1), device),
)


class _FiveGates(Cell):
    """A cell that does not meet the criterion `FOUR_GATES`."""

    name = "a cell with five gates"
    gates = ("a", "b", "c", "d", "e")

    def step(self, gate: Any, state: Any) -> tuple[Any, Mapping[str, Any]]:
        return torch.tanh(gate.a + gate.b + gate.c + gate.d + gate.e), {}


FOUR_GATES = Criterion(
    "cell",
    allowed=f"a cell with at most {MOST_SUMS} gates",
    actual=lambda problem, device: f"{problem.cell.name} with {len(problem.cell.gates)} gates",
    holds=lambda problem, device: len(problem.cell.gates) <= MOST_SUMS,
    violation=lambda problem, device: (problem.replace(cell=_FiveGates(), proj_size=0), device),
)

NOT_EMPTY = Criterion(
    "time x batch",
    allowed="at least 1",
    actual=lambda problem, device: f"{problem.time} x {problem.batch}",
    holds=lambda problem, device: problem.time > 0 and problem.batch > 0,
    violation=lambda problem, device: (problem.replace(time=0), device),
)

NOT_PROJECTED = Criterion(
    "x",
    allowed="the input itself, not its products with the input weights",
    actual=lambda problem, device: "input products" if problem.projected else "the input",
    holds=lambda problem, device: not problem.projected,
    violation=lambda problem, device: (problem.replace(projected=True, input_size=0), device),
)

NOT_LEAN = Criterion(
    "memory",
    allowed="'normal' in training",
    actual=lambda problem, device: "'lean'" if problem.lean else "'normal'",
    holds=lambda problem, device: not problem.rebuilds_gates,
    violation=lambda problem, device: (problem.replace(lean=True, needs_grad=True), device),
)

LENGTHS_READABLE = Criterion(
    "layout",
    allowed="equal lengths, a packed batch, or lengths on the CPU",
    actual=lambda problem, device: problem.layout.value,
    holds=lambda problem, device: problem.layout is not Layout.DEVICE_LENGTHS,
    violation=lambda problem, device: (problem.replace(layout=Layout.DEVICE_LENGTHS), device),
    advice="pass lengths.cpu() if one synchronization with the GPU per batch is acceptable",
)

NO_RESETS = Criterion(
    "resets",
    allowed="none",
    actual=lambda problem, device: "given" if problem.resets else "none",
    holds=lambda problem, device: not problem.resets,
    violation=lambda problem, device: (problem.replace(resets=True), device),
    advice="the kernels `persistent`, `stepwise` and `eager` compute them",
)


class _BeginsAtOne(Cell):
    """A cell whose states begin at one, for the violation of `RESETS_TO_INITIAL`."""

    name = "a cell with initial states"
    gates = ("a",)
    initial_states: ClassVar[Mapping[str, float]] = {"h": 1.0}

    def step(self, gate: Any, state: Any) -> tuple[Any, Mapping[str, Any]]:
        return torch.tanh(gate.a), {}


def _resets(cell: Cell) -> bool:
    """Return whether the passes reset the states of a cell to their initial values."""
    begins = [cell.initial_value(name) for name in ("h", *cell.states)]
    # At a reset, the recurrent product of the hidden state is left out.
    return begins[0] == 0 and (not any(begins) or not is_fused(cell))


RESETS_TO_INITIAL = Criterion(
    "resets",
    allowed="none for a cell whose hidden state does not begin at zero, nor for one without parameters, normalization"
    " and several states if any state does not",
    actual=lambda problem, device: f"given for {problem.cell.name}" if problem.resets else "none",
    holds=lambda problem, device: not problem.resets or _resets(problem.cell),
    violation=lambda problem, device: (problem.replace(cell=_BeginsAtOne(), proj_size=0, resets=True), device),
    advice="the kernel `eager` computes them",
)
