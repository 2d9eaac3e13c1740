"""What a training step reads as Python values, by which calls of a step are told apart."""

from __future__ import annotations

import contextlib
import types
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gatewise.contract.device import tf32_products_allowed
from gatewise.functional.execution import settings_of_calls

_PLAIN = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device})
"""The types of values that cannot change. Other objects can, and remain equal to themselves."""

_COMPARED = frozenset({tuple, OrderedDict, types.FunctionType, types.BuiltinFunctionType, types.MethodType})
"""The types of other attributes of modules that are compared: functions, hooks and tuples of values as above."""

_HOOKS = frozenset(name for name in vars(nn.Module()) if name.endswith("_hooks"))
"""The attributes of a module with the functions that a program has registered, by their numbers."""


class Kind(NamedTuple):
    """What a call reads; calls with equal values do the same work on the device.

    Attributes:
        arguments: The forms of tensors in the arguments, and all other arguments.
        modules: The classes of all modules, their hooks, and the numbers, strings, tuples of them and functions in
            their attributes.
        weights: The addresses and forms of all parameters and buffers.
        hyperparameters: The numbers in the groups of optimizers, and the addresses of the tensors there.
        moments: The addresses of the state of optimizers, and the numbers there.
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
            "an optimizer's state, its memory or a number in it",
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

    def parameters(self, modules: Sequence[nn.Module]) -> list[nn.Parameter]:
        """Return the parameters of modules and optimizers; one that several modules share occurs several times.

        Args:
            modules: All modules.
        """
        weights = [weight for module in modules for weight in module._parameters.values() if weight is not None]
        known = set(map(id, weights))
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        # Those that no module has, such as a learned temperature of a loss.
        return weights + [weight for group in groups for weight in group if id(weight) not in known]

    def kept_on_cpu(self) -> str:
        """Return the name of a tensor on the CPU in the state of a parameter that is not there; empty if none is."""
        states = [state for each in self._optimizers for weight, state in each.state.items() if not weight.is_cpu]
        tensors = [(name, value) for state in states for name, value in state.items() if isinstance(value, Tensor)]
        return next((name for name, value in tensors if value.is_cpu), "")

    @contextlib.contextmanager
    def restored_after_errors(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Restore modules and optimizers after an error in the block, whose work on the device was not done.

        Tensors that the block has created there, such as the state of an optimizer, have no values.

        Args:
            modules: All modules.
        """
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        held: list[Any] = [place for each in modules for place in (vars(each), each._parameters, each._buffers)]
        held += [*states, *groups, *[optimizer.state for optimizer in self._optimizers]]
        before = [(place, dict(place)) for place in held if isinstance(place, dict)]
        values = [value for place in (*states, *groups) for value in place.values() if isinstance(value, Tensor)]
        copies = [(value, value.clone()) for value in values if value.is_cpu]
        try:
            yield
        except BaseException:
            for place, given in before:
                place.clear()
                place.update(given)
            with torch.no_grad():
                for value, copy in copies:
                    value.copy_(copy)
            raise

    # This is called in every step, and shows in the time of small ones.
    def kind(
        self, modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter], leaves: Sequence[Any], form: Any
    ) -> Kind:
        """Return the kind of a call.

        Args:
            modules: All modules.
            parameters: The result of `parameters`, for these modules.
            leaves: The arguments without their containers.
            form: The structure of the containers.
        """
        buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        return Kind(
            arguments=(repr(form), *[_argument(leaf) for leaf in leaves]),
            modules=tuple([_module(module) for module in modules]),
            weights=(tuple([_weight(each) for each in parameters]), tuple([_weight(each) for each in buffers])),
            hyperparameters=tuple([_hyperparameters(group) for group in groups]),
            moments=tuple([_moment(each) for state in states for each in state.values()]),
            settings=(_settings_of_pytorch(), settings_of_calls()),
        )


def obstacle(leaf: Any) -> str:
    """Return the reason why an argument cannot be copied or compared; empty for tensors, numbers and the like."""
    if isinstance(leaf, Tensor):
        is_dense = leaf.layout is torch.strided and not leaf.is_nested
        return "" if is_dense else "an argument is a tensor that is not dense, such as a sparse or a nested one"
    if type(leaf) in _PLAIN:
        return ""
    return f"an argument is of type {type(leaf).__name__}, whose changes cannot be noticed"


def _argument(leaf: Any) -> tuple[Hashable, ...]:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf  # 1, 1.0 and True are equal, and are not the same to a step


def _module(module: nn.Module) -> tuple[Hashable, ...]:
    values: list[Hashable] = [type(module)]
    for name, each in module.__dict__.items():
        kind = type(each)
        if kind in _PLAIN:
            values.append((kind, each))
        elif kind in _COMPARED and each:
            values.append(_compared(name, each))
    if "training" not in module.__dict__:  # a module in TorchScript
        values.append(module.training)
    return tuple(values)


def _compared(name: str, value: Any) -> Hashable:
    if isinstance(value, tuple):
        return _plain_parts(value)
    if isinstance(value, dict):
        return (name, *value) if name in _HOOKS else ()
    return name, value  # itself and not its address, which another function can have when it is gone


def _plain_parts(given: tuple[Any, ...]) -> Hashable:
    return tuple(
        [
            _plain_parts(each) if type(each) is tuple else (type(each), each if type(each) in _PLAIN else None)
            for each in given
        ]
    )


def _weight(tensor: Tensor) -> tuple[Hashable, ...]:
    if is_lazy(tensor):  # of a module such as `LazyLinear` before its first call
        return (type(tensor),)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _moment(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return value if type(value) in _PLAIN else None


def _hyperparameters(group: dict[str, Any]) -> tuple[Hashable, ...]:
    # Loading the state of an optimizer changes the order of the names.
    values = [(name, group[name]) for name in sorted(group)]
    return tuple([(name, tuple(map(id, each)) if name == "params" else _value(each)) for name, each in values])


def _value(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        # A graph reads a tensor on the GPU in each replay, and contains the value of one on the CPU.
        return value.data_ptr() if value.device.type != "cpu" else tuple(value.flatten().tolist())
    if isinstance(value, (tuple, list)):
        return tuple([_value(each) for each in value])
    return value if isinstance(value, Hashable) else type(value)


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
