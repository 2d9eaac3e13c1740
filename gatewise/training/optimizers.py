"""The optimizers, in the fastest implementation that PyTorch has for the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from gatewise.training.finite_guard import FiniteGuard
from gatewise.training.options import TrainingOptions


def build_optimizer(parameters: Iterable[nn.Parameter], options: TrainingOptions) -> torch.optim.Optimizer:
    """Return the optimizer that the options name, fused if PyTorch can: one kernel for all parameters.

    Weight decay applies to parameters with two or more dimensions, not to biases. The learning rate is a tensor on the
    parameters' device, so that a captured step reads the value that a schedule writes.

    Args:
        parameters: The parameters to train; floating point, all on one device.
        options: The options; `optimizer`, `learning_rate`, `momentum`, `beta2` and `weight_decay` are read.

    Returns:
        The optimizer, with two parameter groups: matrices and all others.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [each for each in trained if each.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [each for each in trained if each.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    rate = torch.tensor(options.learning_rate, device=trained[0].device)
    # On a CPU, PyTorch's fused SGD does not update most 16-bit parameters (seen in 2.13).
    fused = all(parameter.is_cuda or parameter.dtype.itemsize >= 4 for parameter in trained)
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=options.momentum, fused=fused)
    betas = (options.momentum, options.beta2)
    kind = torch.optim.Adam if options.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, lr=rate, betas=betas, fused=fused, capturable=fused)


@torch.no_grad()
def clipped_update(
    optimizer: torch.optim.Optimizer,
    clip: float,
    clip_value: float = 0.0,
    guard: FiniteGuard | None = None,
    observed: Sequence[torch.Tensor] = (),
    size: torch.Tensor | None = None,
) -> None:
    """Clip the gradients by their norm, as `torch.nn.utils.clip_grad_norm_` does, and update the weights.

    The fused optimizers divide gradients by a factor while they read them. If a step is proportional to its gradient,
    the learning rate is divided instead. Both avoid a pass over the gradients. Nothing synchronises with the device.

    Args:
        optimizer: The optimizer from `build_optimizer`, with the gradients in its parameters.
        clip: The largest norm of all gradients together; 0 for no clipping.
        clip_value: The largest absolute value of each gradient, clipped before the norm is computed; 0 for no clipping.
        guard: The guard that checks the gradients before clipping; once its flag is set, nothing is updated.
        observed: Further numbers that the guard checks.
        size: The size of the gradients (`GradientSize`) if it is known; None to compute it.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    watched = guard is not None or (clip and not clip_value)
    if size is None and watched:
        size = gradient_size(optimizer, clip, clip_value)
    if guard is not None:
        guard.check([*observed, *([] if size is None else [size])])
        if optimizer.defaults["fused"]:
            optimizer.found_inf = guard.raised  # type: ignore[attr-defined]
        elif guard.raised.item():  # on a CPU, where reading a scalar does not synchronise
            return
    if clip_value:
        nn.utils.clip_grad_value_(parameters, clip_value, foreach=True)
        size = gradient_size(optimizer, clip) if clip else None
    if clip and size is not None and optimizer.defaults["fused"]:
        excess = (size.float() / clip).clamp(min=1.0)
        if _is_linear(optimizer):
            _step_shorter(optimizer, excess)
            return
        # The attribute in which PyTorch passes the factor of a gradient scaler.
        optimizer.grad_scale = excess  # type: ignore[attr-defined]
    elif clip and size is not None:
        nn.utils.clip_grads_with_norm_(parameters, clip, size, foreach=True)
    optimizer.step()


def gradient_size(optimizer: torch.optim.Optimizer, clip: float, clip_value: float = 0.0) -> torch.Tensor | None:
    """Return the size of the gradients of an optimizer's parameters; see `GradientSize`."""
    size = GradientSize(clip, clip_value)
    weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    size.add(weights)
    return size.of(weights)


class GradientSize:
    """A scalar that is finite if and only if all gradients are, from parts that are added one after the other.

    It is the norm of all gradients, as `torch.nn.utils.get_total_norm` computes it, if they are clipped by it;
    otherwise their largest absolute value, which takes the same time and does not overflow.

    Args:
        clip: The largest norm of all gradients together; 0 for no clipping.
        clip_value: The largest absolute value of each gradient; 0 for no clipping.
    """

    def __init__(self, clip: float, clip_value: float = 0.0) -> None:
        self._order = 2.0 if clip and not clip_value else torch.inf
        self._norms: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def add(self, weights: Sequence[torch.Tensor]) -> None:
        """Add the gradients of some weights."""
        found = {weight: weight.grad for weight in weights if weight.grad is not None and weight.grad.numel()}
        if found:
            norms = torch._foreach_norm(list(found.values()), ord=self._order)
            self._norms.update(zip(found, norms, strict=True))

    @torch.no_grad()
    def of(self, weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the size of the gradients of weights, which does not depend on the parts; None if there is none."""
        norms = [self._norms[weight] for weight in weights if weight in self._norms]
        return torch.linalg.vector_norm(torch.stack(norms), self._order) if norms else None


def _is_linear(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the step is proportional to the gradient: SGD without momentum and decay."""
    groups = optimizer.param_groups
    return isinstance(optimizer, torch.optim.SGD) and not any(
        group["momentum"] or group["weight_decay"] for group in groups
    )


def _step_shorter(optimizer: torch.optim.Optimizer, excess: torch.Tensor) -> None:
    # The fused kernel would write the divided gradients back; dividing the rate costs nothing.
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] / excess
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
