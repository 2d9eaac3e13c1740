"""What a training step reads as Python values, by which calls of a step are told apart."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gatewise.contract.device import tf32_products_allowed
from gatewise.functional.execution import settings_of_calls

_PLAIN = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device})
"""The types of values that cannot change. Other objects can, and remain equal to themselves."""


class Kind(NamedTuple):
    """What a call reads; calls with equal values do the same work on the device.

    Attributes:
        arguments: The forms of tensors in the arguments, and all other arguments.
        modules: The classes of all modules, and the numbers, strings and the like in their attributes.
        weights: The addresses and forms of all parameters and buffers.
        hyperparameters: The numbers in the groups of optimizers, and the addresses of the tensors there.
        moments: The addresses of the state of optimizers.
        settings: The settings of PyTorch and gatewise.
    """

    arguments: Hashable
    modules: Hashable
    weights: Hashable
    hyperparameters: Hashable
    moments: Hashable
    settings: Hashable

    def difference(self, other: Kind) -> str:
        """Return in words what differs first; empty if all is equal."""
        words = (
            "the shapes or values of arguments",
            "the class or an attribute of a module, such as its mode",
            "the memory of parameters or buffers",
            "the hyperparameters of an optimizer, such as a learning rate that is no tensor on the GPU",
            "the memory of an optimizer's state",
            "settings of PyTorch or gatewise",
        )
        return next((word for word, own, others in zip(words, self, other, strict=True) if own != others), "")


class StepReads:
    """Finds the kinds of calls of a step.

    Args:
        models: The modules that the step trains.
        optimizers: Their optimizers.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._models, self._optimizers = models, optimizers

    def modules(self) -> list[nn.Module]:
        """Return all modules, which may have changed since the last call."""
        return [module for model in self._models for module in model.modules()]

    def versions(self) -> list[int]:
        """Return how often the tensors in the groups of optimizers have been written."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        values = [value for group in groups for name, value in group.items() if name != "params"]
        return [value._version for value in values if isinstance(value, Tensor)]

    # This is called in every step, and shows in the time of small ones.
    def kind(self, modules: Sequence[nn.Module], leaves: Sequence[Any], form: Any) -> Kind:
        """Return the kind of a call.

        Args:
            modules: All modules.
            leaves: The arguments without their containers.
            form: The structure of the containers.
        """
        places = [place for module in modules for place in (module._parameters, module._buffers)]
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        return Kind(
            arguments=(repr(form), *[_argument(leaf) for leaf in leaves]),
            modules=tuple([_module(module) for module in modules]),
            weights=tuple([_weight(tensor) for place in places for tensor in place.values() if tensor is not None]),
            hyperparameters=tuple([_hyperparameters(group) for group in groups]),
            moments=tuple([each.data_ptr() for state in states for each in state.values() if isinstance(each, Tensor)]),
            settings=(_settings_of_pytorch(), settings_of_calls()),
        )


def parameters_of(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of modules; one that several modules share occurs several times."""
    return [weight for module in modules for weight in module._parameters.values() if weight is not None]


def is_known(leaf: Any) -> bool:
    """Return whether an argument is a tensor, or a value that cannot change unnoticed."""
    return isinstance(leaf, Tensor) or type(leaf) in _PLAIN


def _argument(leaf: Any) -> tuple[Hashable, ...]:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf  # 1, 1.0 and True are equal, and are not the same to a step


def _module(module: nn.Module) -> tuple[Hashable, ...]:
    # Among the attributes is `training`.
    return type(module), *[(type(each), each) for each in module.__dict__.values() if type(each) in _PLAIN]


def _weight(tensor: Tensor) -> tuple[Hashable, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _hyperparameters(group: dict[str, Any]) -> tuple[Hashable, ...]:
    # Loading the state of an optimizer changes the order of the names.
    values = [(name, group[name]) for name in sorted(group)]
    return tuple([(name, tuple(map(id, each)) if name == "params" else _value(each)) for name, each in values])


def _value(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        # A graph reads a tensor on the GPU in each replay, and contains the value of one on the CPU.
        return value.data_ptr() if value.device.type != "cpu" else tuple(value.flatten().tolist())
    return tuple([_value(each) for each in value]) if isinstance(value, (tuple, list)) else value


def _settings_of_pytorch() -> Hashable:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        tf32_products_allowed(),
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
    )
