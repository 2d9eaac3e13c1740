"""Error budgets: how far a result may be from the float64 oracle. They are derived from the data and never tuned.

    budget = 2 * (error of PyTorch's result in the same precision + rounding band)

A perturbation changes every element of the inputs by one unit (the dtype's machine epsilon, or the rounding of TF32
where it is allowed on a GPU; relative), up or down at random. The rounding band of a tensor is the largest change of
the oracle under a perturbation, plus one unit for rounding the result: it is the accuracy to which the inputs determine
the result, and grows for ill-conditioned problems. PyTorch's error is the largest of its errors for the inputs
themselves and for a few perturbations of them, because for a tiny problem a single result can be accurate by chance.

Errors are relative norms: |value - oracle| / |oracle|, Frobenius. For float64 there is no wider dtype with which to
measure PyTorch's error. Its error is then that of float32, scaled by the ratio of the two units, or the distance of
PyTorch's float64 result on the device from the oracle if that is larger, because its order of summation may differ. The
oracle is then no wider than the result and is itself wrong by as much, so that this error is added to the budget once.

Where a cell selects one of two nearly equal numbers, its gradient is right for either of them. Perturbations of a few
inputs need not meet such a case, so that `Budget.select_otherwise` computes the oracle with the other choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.contract.saved import InputGradients, Inputs, OutputGradients, Result
from gatewise.testing.oracle import oracle, reference
from gatewise.testing.selections import OtherSelections

NUDGES = 3
FEW_SELECTIONS = 100
"""The number of selections above which perturbations change enough of them to be representative."""
TF32_UNIT = 2.0**-11
"""The largest relative change of an operand when it is rounded to TF32."""


def relative_error(value: Tensor, exact: Tensor) -> float:
    """Return |value - exact| / |exact|; infinity where one of them is NaN and the other is not.

    Args:
        value: The tensor, of any floating-point dtype, on any device.
        exact: The oracle's tensor, of the same shape; the error is computed on its device.
    """
    return relative_errors({"": value}, {"": exact})[""]


def relative_errors(values: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the relative errors of several tensors, synchronising with the device only once.

    Args:
        values: The tensors by name, as in `relative_error`.
        exact: The oracle's tensors, with at least these names, all on the same device.
    """
    if not values:
        return {}
    errors = torch.stack([_error(value, exact[name].detach()) for name, value in values.items()])
    return dict(zip(values, errors.tolist(), strict=True))


def finite_values(tensor: Tensor) -> Tensor:
    """Return a tensor with zeros in place of NaN and infinities; a state of the sLSTM begins at minus infinity."""
    return tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _error(value: Tensor, exact: Tensor) -> Tensor:
    exact = exact.to(torch.float64)
    infinite = exact.new_full((), float("inf"))
    if value.shape != exact.shape:
        return infinite
    value = value.detach().to(exact.device, torch.float64)
    if exact.device.type == "cpu":  # nothing has to be synchronised to look, and most numbers are finite
        relative = (value - exact).norm() / exact.norm()
        if math.isfinite(relative.item()):
            return relative
    difference = torch.where(value == exact, 0.0, value - exact).nan_to_num(nan=0.0, posinf=float("inf"))
    error, size = difference.norm(), finite_values(exact).norm()
    relative = torch.where(error == 0, 0.0, torch.where(size > 0, error / size, infinite))
    return torch.where((value.isnan() != exact.isnan()).any(), infinite, relative)


def named(problem: Problem, result: Result, gradients: InputGradients | None = None) -> dict[str, Tensor]:
    """Return all outputs and gradients by name: `y`, `h_n`, `c_n`, `dx`, `dh0`, `dc0`, `dweight_ih_l0`...

    Args:
        problem: The problem, which determines the names of the weights.
        result: The result of the forward pass.
        gradients: The result of the backward pass; None if there was none.
    """
    tensors: dict[str, Tensor | None] = {"y": result.y, "h_n": result.h_n, "c_n": result.c_n}
    if gradients is not None:
        tensors |= {"dx": gradients.x, "dh0": gradients.h0, "dc0": gradients.c0}
        tensors |= {f"d{name}": tensor for name, tensor in zip(_weight_names(problem), gradients.weights, strict=True)}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def budgets(
    problem: Problem,
    inputs: Inputs,
    gradients: OutputGradients | None,
    exact: Mapping[str, Tensor],
    device: torch.device | str,
    *,
    oracles: torch.device | str = "cpu",
    nudges: int = NUDGES,
) -> dict[str, float]:
    """Return the budget of every tensor of `named`, as a relative norm.

    Args:
        problem: The description of the call; its dtype is the precision.
        inputs: The inputs of the call.
        gradients: The gradients of the outputs; None for a forward pass alone.
        exact: The oracle's tensors, by name.
        device: The device on which PyTorch computes the result for comparison.
        oracles: The device on which the oracle is computed.
        nudges: The number of perturbations; each takes as long as the oracle and PyTorch's result together.
    """
    budget = Budget(problem, inputs, gradients, exact, device, oracles=oracles)
    for _ in range(nudges):
        budget.perturb()
    return budget.allowed


def _unchanged(result: Result, gradients: InputGradients | None) -> tuple[Result, InputGradients | None]:
    return result, gradients


class Budget:
    """The budget of a call, which grows with each perturbation.

    Args:
        problem: The description of the call; its dtype is the precision.
        inputs: The inputs of the call.
        gradients: The gradients of the outputs; None for a forward pass alone.
        exact: The oracle's tensors, by name, as seen.
        device: The device on which PyTorch computes the result for comparison.
        oracles: The device on which the oracle is computed.
        seen: The tensors that are compared, computed from those of the problem; the latter themselves by default. The
            gradient of a matrix with dropped elements, say, is that of the kept ones alone, which can be much less
            accurate than the gradient of all, relative to its norm.

    Attributes:
        perturbations: The number of perturbations so far.
    """

    def __init__(
        self,
        problem: Problem,
        inputs: Inputs,
        gradients: OutputGradients | None,
        exact: Mapping[str, Tensor],
        device: torch.device | str,
        *,
        oracles: torch.device | str = "cpu",
        seen: Callable[[Result, InputGradients | None], tuple[Result, InputGradients | None]] = _unchanged,
    ) -> None:
        self._problem, self._inputs, self._gradients, self._exact = problem, inputs, gradients, exact
        self._device, self._oracles, self._seen, self.perturbations, self._selected = device, oracles, seen, 0, False
        self._unit = torch.finfo(problem.dtype).eps
        self._wide = problem.dtype == torch.float64
        self._precision = torch.float32 if self._wide else problem.dtype
        # Where TF32 is allowed, PyTorch does not round everywhere, because cuDNN has other algorithms for some sizes.
        # The perturbations therefore have the size of the rounding.
        in_tf32 = problem.allow_tf32 and problem.dtype == torch.float32 and torch.device(device).type == "cuda"
        self._step = TF32_UNIT if in_tf32 else torch.finfo(self._precision).eps
        self._errors, self._bands = dict.fromkeys(exact, 0.0), dict.fromkeys(exact, 0.0)
        self._measure((inputs, gradients), exact)

    @property
    def allowed(self) -> dict[str, float]:
        """The budget of every tensor, as a relative norm."""
        own_error = self._errors if self._wide else dict.fromkeys(self._exact, 0.0)
        return {
            name: 2 * (self._errors[name] + self._bands[name] + self._unit) + own_error[name] for name in self._exact
        }

    def perturb(self) -> None:
        """Measure another perturbation of the inputs, which takes as long as the oracle and PyTorch's result."""
        self.perturbations += 1
        moved = _nudged(self._inputs, self._gradients, self._step, self.perturbations, self._oracles)
        self._measure(moved, self._named(oracle(self._problem, *moved, device=self._oracles)))

    def select_otherwise(self) -> bool:
        """Measure the oracle with the other choice where a selection's operands are equal within four roundings.

        Returns:
            Whether there are such selections, at most `FEW_SELECTIONS`, and they had not been measured before;
            otherwise the budget does not change.
        """
        # The oracle has no projection of a cell that selects.
        if self._selected or self._problem.proj_size:
            return False
        self._selected = True
        with OtherSelections(4 * (self._unit if self._wide else self._step)) as selections:
            found = oracle(self._problem, self._inputs, self._gradients, self._oracles, stated=True)
        if not 0 < selections.number <= FEW_SELECTIONS:
            return False
        changes = relative_errors(self._named(found), self._exact)
        self._bands = {name: max(band, changes[name]) for name, band in self._bands.items()}
        return True

    def _measure(self, moved: tuple[Inputs, OutputGradients | None], there: Mapping[str, Tensor]) -> None:
        scale = self._unit / torch.finfo(self._precision).eps
        of_theirs = relative_errors(self._theirs(moved, self._precision), there)
        of_wide = relative_errors(self._theirs(moved, self._problem.dtype), there) if self._wide else {}
        of_oracle = relative_errors(there, self._exact)
        for name in self._exact:
            self._errors[name] = max(self._errors[name], scale * of_theirs[name], of_wide.get(name, 0.0))
            self._bands[name] = max(self._bands[name], scale * of_oracle[name])

    def _theirs(self, moved: tuple[Inputs, OutputGradients | None], dtype: torch.dtype) -> dict[str, Tensor]:
        return self._named(reference(self._problem, *moved, dtype=dtype, device=self._device))

    def _named(self, found: tuple[Result, InputGradients | None]) -> dict[str, Tensor]:
        return named(self._problem, *self._seen(*found))


def _nudged(
    inputs: Inputs, gradients: OutputGradients | None, unit: float, seed: int, device: torch.device | str
) -> tuple[Inputs, OutputGradients | None]:
    generator = torch.Generator(device).manual_seed(seed)

    def moved(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.float64, device=generator.device)
        return tensor.detach().to(generator.device, torch.float64) * (1 + unit * (2 * signs - 1))

    x, h0, c0 = moved(inputs.x), moved(inputs.h0), moved(inputs.c0)
    weights = tuple(moved(weight) for weight in inputs.weights)
    others = inputs._replace(x=x, h0=h0, c0=c0, weights=weights)
    return others, None if gradients is None else OutputGradients(*(moved(gradient) for gradient in gradients))


def _weight_names(problem: Problem) -> list[str]:
    kinds = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if problem.bias else [])]
    kinds += [*(["weight_hr"] if problem.proj_size else []), *problem.cell.parameters]
    directions = ["", "_reverse"][: problem.num_directions]
    return [
        f"{kind}_l{layer}{direction}"
        for layer in range(problem.num_layers)
        for direction in directions
        for kind in kinds
    ]
