"""When PyTorch runs an LSTM, a GRU or an RNN on cuDNN, and which of cuDNN's algorithms it asks for.

Source: the conditions in ATen's cudnn/RNN.cpp (`use_cudnn`, `get_algo`, `use_persist_common_heuristics`,
`use_rnn_persist_small_h`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gatewise.cells import GRU, LSTM, RNN, Cell
from gatewise.contract.criterion import Criterion, Refusal
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.criteria import IN_PYTORCH, LENGTHS_READABLE, NO_RESETS, NOT_EMPTY, NOT_LEAN, NOT_PROJECTED

_BF16_SINCE = 91300

CRITERIA = (
    Criterion(
        "device",
        allowed="a CUDA GPU",
        actual=lambda problem, device: device.name,
        holds=lambda problem, device: device.kind == "cuda",
        violation=lambda problem, device: (problem, Device.named("cpu")),
    ),
    Criterion(
        "cuDNN",
        allowed="present, and on in torch.backends.cudnn.enabled",
        actual=lambda problem, device: "absent or switched off",
        holds=lambda problem, device: device.kind != "cuda" or device.cudnn_version > 0,
        violation=lambda problem, device: (problem, device.replace(kind="cuda", cudnn_version=0)),
    ),
    Criterion(
        "dtype",
        allowed="float16, float32, float64; bfloat16 from cuDNN 9.13 and sm_80",
        actual=lambda problem, device: _name(problem.dtype),
        holds=lambda problem, device: _dtype_served(problem, device),
        violation=lambda problem, device: (
            problem.replace(dtype=torch.bfloat16),
            device.replace(kind="cuda", capability=(7, 0)),
        ),
    ),
    Criterion(
        "time",
        allowed="at most 65535 steps",
        actual=lambda problem, device: str(problem.time),
        holds=lambda problem, device: problem.time <= 65535,
        violation=lambda problem, device: (problem.replace(time=65536), device),
        advice="split the sequence and carry the state",
    ),
    IN_PYTORCH,
    Criterion(
        "proj_size",
        allowed="0 unless the cell is lstm",
        actual=lambda problem, device: str(problem.proj_size),
        holds=lambda problem, device: type(problem.cell) is LSTM or problem.proj_size == 0,
        violation=lambda problem, device: (
            problem.replace(cell=GRU(), proj_size=1, hidden_size=max(2, problem.hidden_size)),
            device,
        ),
    ),
    NOT_EMPTY,
    NOT_PROJECTED,
    NOT_LEAN,
    NO_RESETS,
    LENGTHS_READABLE,
)


STANDARD, SMALL, PERSISTENT = "STANDARD", "PERSIST_STATIC_SMALL_H", "PERSIST_STATIC"


class _Units(NamedTuple):
    """The numbers of hidden units up to which PyTorch requests SMALL."""

    forward: int
    backward: int


_OF_RNN, _OF_OTHERS = _Units(384, 256), _Units(192, 128)


def _small_units(problem: Problem) -> _Units:
    return _OF_RNN if type(problem.cell) is RNN else _OF_OTHERS


def _at_most(units: _Units, cell: Cell) -> Criterion:
    """Return the criterion for the hidden units of the cells that have these limits, such as `cell`."""
    return Criterion(
        "hidden_size",
        allowed=f"at most {units.forward} (forward), {units.backward} (backward)",
        actual=lambda problem, device: str(problem.hidden_size),
        holds=lambda problem, device: (
            _small_units(problem) != units
            or problem.hidden_size <= (units.backward if problem.needs_grad else units.forward)
        ),
        violation=lambda problem, device: (problem.replace(cell=cell, hidden_size=units.forward + 1), device),
    )


_NO_PROJECTION = Criterion(
    "proj_size",
    allowed="0",
    actual=lambda problem, device: str(problem.proj_size),
    holds=lambda problem, device: problem.proj_size == 0,
    violation=lambda problem, device: (problem.replace(proj_size=1, hidden_size=max(2, problem.hidden_size)), device),
)
_DENSE = Criterion(
    "layout",
    allowed="equal lengths",
    actual=lambda problem, device: problem.layout.value,
    holds=lambda problem, device: problem.layout is Layout.DENSE,
    violation=lambda problem, device: (problem.replace(layout=Layout.PACKED), device),
)

PERSISTENT_CRITERIA = {
    SMALL: (
        _NO_PROJECTION,
        _DENSE,
        Criterion(
            "dtype",
            allowed="any but float64",
            actual=lambda problem, device: _name(problem.dtype),
            holds=lambda problem, device: problem.dtype != torch.float64,
            violation=lambda problem, device: (problem.replace(dtype=torch.float64), device),
        ),
        _at_most(_OF_OTHERS, LSTM()),
        _at_most(_OF_RNN, RNN()),
    ),
    PERSISTENT: (
        _NO_PROJECTION,
        _DENSE,
        Criterion(
            "dtype",
            allowed="float16",
            actual=lambda problem, device: _name(problem.dtype),
            holds=lambda problem, device: problem.dtype == torch.float16,
            violation=lambda problem, device: (problem.replace(dtype=torch.bfloat16), device),
        ),
        Criterion(
            "num_layers",
            allowed="1",
            actual=lambda problem, device: str(problem.num_layers),
            holds=lambda problem, device: problem.num_layers == 1,
            violation=lambda problem, device: (problem.replace(num_layers=2), device),
        ),
        Criterion(
            "directions",
            allowed="1",
            actual=lambda problem, device: str(problem.num_directions),
            holds=lambda problem, device: not problem.bidirectional,
            violation=lambda problem, device: (problem.replace(bidirectional=True), device),
        ),
        Criterion(
            "hidden_size",
            allowed="multiples of 128 up to 1024",
            actual=lambda problem, device: str(problem.hidden_size),
            holds=lambda problem, device: problem.hidden_size <= 1024 and problem.hidden_size % 128 == 0,
            violation=lambda problem, device: (problem.replace(hidden_size=1152), device),
        ),
        Criterion(
            "input_size",
            allowed="multiples of 128",
            actual=lambda problem, device: str(problem.input_size),
            holds=lambda problem, device: problem.input_size % 128 == 0,
            violation=lambda problem, device: (problem.replace(input_size=500), device),
        ),
        Criterion(
            "cell",
            allowed="lstm, rnn; gru on sm_70",
            actual=lambda problem, device: f"{problem.cell.name} on {device.architecture}",
            holds=lambda problem, device: type(problem.cell) is not GRU or device.capability == (7, 0),
            violation=lambda problem, device: (problem.replace(cell=GRU()), device.replace(capability=(8, 0))),
        ),
        Criterion(
            "GPU",
            allowed="sm_70, or from sm_80 on with 98 multiprocessors or more, but not sm_86",
            actual=lambda problem, device: f"{device.architecture} with {device.multiprocessors} multiprocessors",
            holds=lambda problem, device: device.capability == (7, 0) or _wide(device),
            violation=lambda problem, device: (problem, device.replace(capability=(8, 6))),
        ),
        Criterion(
            "batch",
            allowed="multiples of 8 up to 128, below 96 for an rnn from 896 units (sm_70: of 16, with steps enough)",
            actual=lambda problem, device: str(problem.batch),
            holds=lambda problem, device: _batch_served(problem, device),
            violation=lambda problem, device: (problem.replace(batch=60), device),
        ),
    ),
}


def algorithm(problem: Problem, device: Device) -> str:
    """Name the algorithm that PyTorch asks cuDNN for, forward and backward."""
    forward, backward = (_algorithm(problem, device, units) for units in _small_units(problem))
    if not problem.needs_grad or forward == backward:
        return forward
    return f"{forward} forward, {backward} backward"


def runs_persistent(problem: Problem, device: Device) -> bool:
    """Whether one kernel runs through all steps, instead of two launches for each."""
    # Asked for a persistent kernel in bfloat16, cuDNN 9.19 takes as long a step as without: 10.4 us at H 128, training.
    # So it does in float16 between 128 and 192 units: 5.9 us at H 192, B 16, inference. For RNNs the same is assumed
    # between their limits.
    units = _small_units(problem)
    small = units.forward if problem.dtype == torch.float32 and not problem.needs_grad else units.backward
    return problem.dtype != torch.bfloat16 and _algorithm(problem, device, small) != STANDARD


def persistent_loops(problem: Problem, device: Device) -> tuple[bool, ...]:
    """Whether one kernel runs through all steps of the forward pass, and in training of the backward pass."""
    forward = runs_persistent(problem.replace(needs_grad=False), device)
    return (forward, runs_persistent(problem, device)) if problem.needs_grad else (forward,)


def why_not_persistent(problem: Problem, device: Device) -> dict[str, tuple[Refusal, ...]]:
    """Return each persistent algorithm's unmet demands; empty once both passes run on one of them."""
    units = _small_units(problem)
    if _algorithm(problem, device, units.backward if problem.needs_grad else units.forward) != STANDARD:
        return {}
    return {
        name: tuple(refusal for criterion in criteria if (refusal := criterion.check(problem, device)) is not None)
        for name, criteria in PERSISTENT_CRITERIA.items()
    }


def _algorithm(problem: Problem, device: Device, small: int) -> str:
    if problem.proj_size or problem.layout is not Layout.DENSE:
        return STANDARD
    if problem.dtype != torch.float64 and problem.hidden_size <= small:
        return SMALL
    if all(criterion.holds(problem, device) for criterion in PERSISTENT_CRITERIA[PERSISTENT]):
        return PERSISTENT
    return STANDARD


def _wide(device: Device) -> bool:
    return device.capability[0] >= 8 and device.multiprocessors >= 98 and device.capability[1] != 6


def _batch_served(problem: Problem, device: Device) -> bool:
    batch, time = problem.batch, problem.time
    if device.capability == (7, 0):
        aligned = (batch % 16 == 0 and batch not in (80, 112)) or batch == 8
        long_enough = (time >= 40 and batch <= 128) or (time >= 20 and batch <= 96) or (time >= 10 and batch <= 32)
        return aligned and long_enough
    return (
        batch % 8 == 0 and batch <= 128 and (type(problem.cell) is not RNN or batch < 96 or problem.hidden_size < 896)
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_served(problem: Problem, device: Device) -> bool:
    if problem.dtype == torch.bfloat16:
        return device.cudnn_version >= _BF16_SINCE and device.capability >= (8, 0)
    return True
