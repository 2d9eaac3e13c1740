"""Comparison of the results of a call with float64, within the derived error budget."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gatewise.cells import cell_named
from gatewise.contract.saved import InputGradients, Result
from gatewise.testing.budgets import budgets, finite_values, named, relative_errors
from gatewise.testing.oracle import oracle
from gatewise.testing.trials.call import Found, rounding_of
from gatewise.testing.trials.setting import Setting
from gatewise.testing.trials.tensors import Asked

_OUTPUTS, _STATES = ("y", "h_n", "c_n"), ("dh0", "dc0")
_NUDGES = (0, 1, 8)  # the numbers of perturbations of successive budgets, each at least as wide as the one before


class Judge:
    """The reference of a setting, which is computed once for all of its calls.

    A budget without perturbations is fast to compute, but narrow. Tensors that exceed it are compared with budgets from
    more perturbations.
    """

    def __init__(self, setting: Setting, asked: Asked) -> None:
        self._setting, self._asked = setting, asked
        self._masks: tuple[Tensor, ...] | None = None
        self._reference: tuple[Result, InputGradients | None] | None = None
        self._exact: dict[str, Tensor] = {}
        self._sizes: dict[str, float] = {}
        self._largest: dict[str, float] = {}
        self._allowed: dict[str, float] = {}
        self._nudges = 0

    def complaints(self, found: Found) -> list[str]:
        """Return descriptions of the errors in a call's results, one line each."""
        result, gradients, masks = found
        if self._masks is None or not _equal(masks, self._masks):
            self._prepare(masks)
        there = named(self._asked.problem, result, gradients)
        errors = relative_errors(there, self._exact)
        missing = [name for name in _wanted(self._setting, list(self._exact)) if name not in there]
        wrong = self._beyond(errors, there)
        for nudges in _NUDGES:
            if nudges > self._nudges and any(math.isfinite(errors[name]) for name in wrong):
                self._allow(nudges)
                wrong = self._beyond(errors, there)
        lines = [f"{name}: {_said(errors[name], there[name], allowed)}" for name, allowed in wrong.items()]
        lines += [f"{name}: missing" for name in missing]
        for name, value in there.items():
            dtype = self._dtype_of(name)
            if value.shape != self._exact[name].shape or value.dtype != dtype:
                expected = f"{list(self._exact[name].shape)} {dtype}"
                lines.append(f"{name}: {list(value.shape)} {value.dtype}, expected {expected}")
        return lines

    @property
    def unjudged(self) -> int:
        """The number of tensors that cannot be checked, because PyTorch's error or the result itself is infinite."""
        return sum(math.isinf(allowed) for allowed in self._allowed.values())

    def _beyond(self, errors: dict[str, float], found: dict[str, Tensor]) -> dict[str, float]:
        """Return the budget of each tensor whose error exceeds it."""
        budget = {name: self._allowed[name] + _underflow(value, self._sizes[name]) for name, value in found.items()}
        return {name: allowed for name, allowed in budget.items() if not errors[name] <= allowed}

    def _prepare(self, masks: tuple[Tensor, ...]) -> None:
        self._masks = masks
        self._asked = self._asked._replace(inputs=self._asked.inputs._replace(masks=masks))
        problem, inputs, above, *_ = self._asked
        self._reference = oracle(problem, inputs, above, self._setting.device)
        self._exact = named(problem, *self._asked.to_user(*self._reference))
        values = list(self._exact.values())
        sizes = torch.stack([finite_values(value).norm() for value in values])
        self._sizes = dict(zip(self._exact, sizes.tolist(), strict=True))
        largest = [finite_values(value).abs().amax() if value.numel() else sizes.new_zeros(()) for value in values]
        self._largest = dict(zip(self._exact, torch.stack(largest).tolist(), strict=True))
        self._allow(_NUDGES[0])

    def _allow(self, nudges: int) -> None:
        problem, inputs, above, *_ = self._asked
        assert self._reference is not None
        plain = named(problem, *self._reference)
        with rounding_of(self._setting), _operators_of(self._setting), torch.enable_grad():
            self._allowed = budgets(
                problem,
                inputs,
                above,
                plain,
                self._setting.device,
                oracles=self._setting.device,
                nudges=nudges,
            )
        beyond = {name for name, largest in self._largest.items() if largest > torch.finfo(self._dtype_of(name)).max}
        self._allowed |= dict.fromkeys(beyond, math.inf)  # the exact result is not finite in the dtype of the result
        self._nudges = nudges

    def _dtype_of(self, name: str) -> torch.dtype:
        return self._setting.computes_in if name in _OUTPUTS else getattr(torch, self._setting.dtype)


@contextlib.contextmanager
def _operators_of(setting: Setting) -> Iterator[None]:
    """Disable cuDNN inside the block if PyTorch's own operators are the comparison, and for float64.

    PyTorch's own operators, which the kernel `aten` uses, round more often than cuDNN. In float64 the oracle itself is
    computed by cuDNN.
    """
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = before and setting.kernel != "aten" and setting.computes_in != torch.float64
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


def _wanted(setting: Setting, names: Sequence[str]) -> list[str]:
    """Return the names of the tensors that a call must return, among those of the reference."""
    outputs = [name for name in _OUTPUTS if setting.has_c or name != "c_n"]
    if not setting.training:
        return outputs
    weights = names[len(_OUTPUTS) + len(_STATES) + 1 :]
    if setting.mode == "explicit":
        states, learned = list(_STATES), list(weights)
    else:
        states = list(_STATES) if setting.states == "learned" else []
        if not setting.has_c:
            states = [name for name in states if name != "dc0"]
        learned = list(weights[: max(0, len(weights) - setting.frozen)])
        if not {"y", "h", "sum"} & set(setting.above.split()):
            # The projection and some parameters of the last step, as those of an output gate, do not reach the states.
            unsure = tuple(f"d{name}_l" for name in ("weight_hr", *cell_named(setting.cell).parameters))
            learned = [name for name in learned if not name.startswith(unsure)]
    return [*outputs, *(["dx"] if setting.x_learned else []), *states, *learned]


def _equal(masks: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    return len(masks) == len(others) and all(map(torch.equal, masks, others))


def _underflow(found: Tensor, size: float) -> float:
    """Return the relative error that rounding to the spacing of a dtype's smallest numbers may cause.

    A GPU may flush numbers below the smallest normal number of float32 to zero; that of bfloat16 is the same.
    """
    numbers = torch.finfo(found.dtype)
    spacing = numbers.eps if found.dtype in (torch.float16, torch.float64) else 1.0
    return numbers.smallest_normal * spacing * found.numel() ** 0.5 / size if size else 0.0


def _said(error: float, value: Tensor, allowed: float) -> str:
    if math.isfinite(error):
        return f"relative error {error:.3g}, allowed {allowed:.3g}"
    return f"{int(value.isnan().sum())} of {value.numel()} values are NaN, or it is infinitely wrong"
