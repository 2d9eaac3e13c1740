"""Comparison of the results of a call with float64, within the derived error budget."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gatewise.cells import cell_named
from gatewise.contract.saved import InputGradients, Result
from gatewise.testing.budgets import Budget, finite_values, named, relative_errors
from gatewise.testing.oracle import oracle
from gatewise.testing.trials.call import Found, rounding_of
from gatewise.testing.trials.setting import Setting
from gatewise.testing.trials.tensors import Asked

_OUTPUTS, _STATES = ("y", "h_n", "c_n"), ("dh0", "dc0")
_FEW_UNITS = 8
# If the errors of a kernel and of PyTorch are normal with the same deviation, and a tensor is one number, then the
# probability that one error exceeds twice the largest of 1 + n others is 6e-3 for n = 8, and 1.5e-5 for n = 64. Norms
# of many numbers vary less, but with few units one step can decide about all of them: where the states of two units
# are nearly equal, layer normalization multiplies their errors by up to 1 / sqrt(eps).
_PERTURBATIONS, _PERTURBATIONS_OF_FEW_UNITS = 8, 64
_NEAR = 4.0  # the factor by which an error may exceed the budget of 8 perturbations for more of them to be of use
REFERENCES = ("auto", "cpu", "gpu")
_SMALL_STEP = 2e6  # operations; a CPU computes them in about the time in which a GPU's kernels are launched


class Judge:
    """The reference of a setting, which is computed once for all of its calls.

    A budget without perturbations is fast to compute, but narrow. If a tensor exceeds it, it grows by one perturbation
    after another, until all tensors are within it, up to eight times, or 64 times for a layer of few units. At last it
    includes the other choice of selections (`torch.minimum`, `clamp`, ...) whose operands are equal but for rounding.

    Args:
        setting: The setting.
        asked: The tensors of the reference.
        reference: The device of the reference: "cpu", "gpu" (the setting's device), or "auto", which is the CPU where
            a step is so small that a GPU would only wait for launches.

    Attributes:
        selected_otherwise: Whether the results of a call exceeded the budget until it included the other choice of
            selections, and no longer then.
    """

    def __init__(self, setting: Setting, asked: Asked, reference: str = "auto") -> None:
        self._setting, self._asked = setting, asked
        self._oracles = reference_device(setting, reference)
        self._masks: tuple[Tensor, ...] | None = None
        self._exact: dict[str, Tensor] = {}
        self._sizes: dict[str, float] = {}
        self._largest: dict[str, float] = {}
        self._allowed: dict[str, float] = {}
        self._budget: Budget | None = None
        self.selected_otherwise = False

    def complaints(self, found: Found) -> list[str]:
        """Return descriptions of the errors in a call's results, one line each."""
        result, gradients, masks = found
        if self._masks is None or not _equal(masks, self._masks):
            self._prepare(masks)
        there = named(self._asked.problem, result, gradients)
        errors = relative_errors(there, self._exact)
        missing = [name for name in _wanted(self._setting, list(self._exact)) if name not in there]
        wrong = self._beyond(errors, there)
        while any(math.isfinite(errors[name]) for name in wrong):
            near = all(errors[name] <= _NEAR * allowed for name, allowed in wrong.items())
            if not self._widened(near=near):
                break
            wrong = self._beyond(errors, there)
        if any(math.isfinite(errors[name]) for name in wrong) and self._include_other_selections():
            wrong = self._beyond(errors, there)
            self.selected_otherwise |= not wrong
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
        self._exact = named(problem, *self._seen(*oracle(problem, inputs, above, self._oracles)))
        values = list(self._exact.values())
        sizes = torch.stack([finite_values(value).norm() for value in values])
        self._sizes = dict(zip(self._exact, sizes.tolist(), strict=True))
        largest = [finite_values(value).abs().amax() if value.numel() else sizes.new_zeros(()) for value in values]
        self._largest = dict(zip(self._exact, torch.stack(largest).tolist(), strict=True))
        with self._as_pytorch():
            device = self._setting.device
            self._budget = Budget(problem, inputs, above, self._exact, device, oracles=self._oracles, seen=self._seen)
        self._allow()

    def _seen(self, result: Result, gradients: InputGradients | None) -> tuple[Result, InputGradients | None]:
        """Return results of the reference as a caller of the layer sees them, on the setting's device."""
        return self._asked.to_user(*_moved((result, gradients), self._setting.device))

    def _widened(self, *, near: bool) -> bool:
        """Let the budget grow by one perturbation; return whether it did.

        Args:
            near: Whether all errors are at most `_NEAR` times their budgets.
        """
        assert self._budget is not None
        few = near and self._setting.hidden_size < _FEW_UNITS
        if self._budget.perturbations >= (_PERTURBATIONS_OF_FEW_UNITS if few else _PERTURBATIONS):
            return False
        with self._as_pytorch():
            self._budget.perturb()
        self._allow()
        return True

    def _include_other_selections(self) -> bool:
        """Let the budget include the other choice of selections between equal operands; return whether it changed."""
        assert self._budget is not None
        changed = self._budget.select_otherwise()
        self._allow()
        return changed

    def _allow(self) -> None:
        assert self._budget is not None
        beyond = {name for name, largest in self._largest.items() if largest > torch.finfo(self._dtype_of(name)).max}
        # If the exact result is not finite in the dtype of the result, anything is allowed.
        self._allowed = self._budget.allowed | dict.fromkeys(beyond, math.inf)

    @contextlib.contextmanager
    def _as_pytorch(self) -> Iterator[None]:
        with rounding_of(self._setting), _operators_of(self._setting), torch.enable_grad():
            yield

    def _dtype_of(self, name: str) -> torch.dtype:
        return self._setting.computes_in if name in _OUTPUTS else getattr(torch, self._setting.dtype)


def reference_device(setting: Setting, reference: str) -> str:
    """Return the device on which the float64 reference of a setting is computed.

    Args:
        setting: The setting.
        reference: One of `REFERENCES`.
    """
    step = 8.0 * setting.batch * setting.hidden_size * (setting.hidden_size + setting.input_size)
    on_cpu = reference == "cpu" or (reference == "auto" and step <= _SMALL_STEP)
    return "cpu" if on_cpu else setting.device


def _moved(found: tuple[Result, InputGradients | None], device: str) -> tuple[Result, InputGradients | None]:
    """Return the results of the reference on a device."""
    result, gradients = found
    result = Result(result.y.to(device), result.h_n.to(device), result.c_n.to(device))
    if gradients is None:
        return result, None
    x, h0, c0, *weights = (tensor if tensor is None else tensor.to(device) for tensor in _flat(gradients))
    return result, InputGradients(x, h0, c0, tuple(weights))


def _flat(gradients: InputGradients) -> list[Tensor | None]:
    return [gradients.x, gradients.h0, gradients.c0, *gradients.weights]


@contextlib.contextmanager
def _operators_of(setting: Setting) -> Iterator[None]:
    """Disable cuDNN inside the block if PyTorch's own operators are the comparison.

    They round more often than cuDNN; the kernel `aten` uses them.
    """
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = before and setting.kernel != "aten"
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
