"""What a training step reads as Python values, by which calls of a step are told apart."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gatewise.contract.device import tf32_products_allowed
from gatewise.functional.execution import settings_of_calls


class Kind(NamedTuple):
    """What a call reads; calls with equal values do the same work on the device.

    Attributes:
        arguments: The forms of tensors in the arguments, and all other arguments.
        modules: The classes of all modules, and their modes, training or evaluation.
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
            "the classes or modes of modules",
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

    def versions(self) -> list[int]:
        """Return how often the tensors in the groups of optimizers have been written."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        values = [value for group in groups for name, value in group.items() if name != "params"]
        return [value._version for value in values if isinstance(value, Tensor)]

    def kind(self, leaves: Sequence[Any], form: Any) -> Kind:
        """Return the kind of a call.

        Args:
            leaves: The arguments without their containers.
            form: The structure of the containers.
        """
        modules = [module for model in self._models for module in model.modules()]
        tensors = [
            tensor for module in modules for kind in (module._parameters, module._buffers) for tensor in kind.values()
        ]
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        return Kind(
            arguments=(repr(form), *map(_argument, leaves)),
            modules=tuple([(type(module), module.training) for module in modules]),
            weights=tuple([None if tensor is None else (tensor.data_ptr(), *_argument(tensor)) for tensor in tensors]),
            hyperparameters=tuple([_hyperparameters(group) for group in groups]),
            moments=tuple([each.data_ptr() for state in states for each in state.values() if isinstance(each, Tensor)]),
            settings=(_settings_of_pytorch(), settings_of_calls()),
        )


def is_known(leaf: Any) -> bool:
    """Return whether an argument is a tensor, or a value that is equal to another one only if it is the same."""
    return isinstance(leaf, Tensor) or getattr(type(leaf), "__hash__", None) is not None


def _argument(leaf: Any) -> tuple[Hashable, ...]:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf  # 1, 1.0 and True are equal, and are not the same to a step


def _hyperparameters(group: dict[str, Any]) -> tuple[Hashable, ...]:
    # Loading the state of an optimizer changes the order of the names.
    return tuple([(name, _parameters(group) if name == "params" else _value(group[name])) for name in sorted(group)])


def _parameters(group: dict[str, Any]) -> Hashable:
    return tuple(map(id, group["params"]))


def _value(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        # A graph reads a tensor on the GPU in each replay, and contains the value of one on the CPU.
        return value.data_ptr() if value.device.type != "cpu" else tuple(value.flatten().tolist())
    return tuple(map(_value, value)) if isinstance(value, (tuple, list)) else (type(value), value)


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
