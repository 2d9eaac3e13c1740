"""Replace the `torch.nn.LSTM` layers of an existing model with `gatewise.LSTM`."""

from __future__ import annotations

import dataclasses
import textwrap
import warnings
import weakref
from typing import TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from gatewise.contract.errors import ArgumentError, sentence
from gatewise.nn.lstm import LSTM

Model = TypeVar("Model", bound=nn.Module)

_COLUMNS = 80

# Attributes in which torch.nn.LSTM stores references to its parameters; gatewise.LSTM looks them up in every call.
_REFERENCES = frozenset({"mode", "_flat_weights", "_flat_weight_refs", "_flat_weights_names", "_all_weights"})


@dataclasses.dataclass(frozen=True, slots=True)
class Swap:
    """What `accelerate` does with one `torch.nn.LSTM` of a model.

    Attributes:
        names: All dotted names under which the module is registered; "" is the model itself.
        module: The module.
        obstacle: The reason why the module is not replaced; empty if it is.
    """

    names: tuple[str, ...]
    module: nn.Module
    obstacle: str = ""

    def __str__(self) -> str:
        """Return one line with the names of the module and what happens to it."""
        where = ", ".join(name or "the model itself" for name in self.names)
        return f"{where}: {f'stays: it {self.obstacle}' if self.obstacle else 'becomes gatewise.LSTM'}"


def accelerate(model: Model, *, verbose: bool = True) -> Model:
    """Replace every `torch.nn.LSTM` in a model with a `gatewise.LSTM`, in place, and return the model.

    The new layers hold the same Parameter objects, so existing optimizers keep working and the `state_dict` is
    unchanged. The training flag, hooks, frozen parameters and other attributes are kept as well, and a layer that is
    registered in two places stays one layer. If the model itself is a `torch.nn.LSTM`, a new module is returned.
    Calling the function again changes nothing.

    The following are not replaced: subclasses of `torch.nn.LSTM`, and layers that have parametrizations or their own
    `forward`, are compiled, or are in TorchScript. One warning names all of them with the reasons, and `planned_swaps`
    returns them. Layers that are not registered as submodules (for example, in a plain list) are not found.

    Args:
        model: Any module.
        verbose: Whether to print the report; the warning is issued in any case.

    Returns:
        The model.

    Raises:
        ArgumentError: `model` is not a `torch.nn.Module`.
    """
    swaps = planned_swaps(model)
    left = [swap for swap in swaps if swap.obstacle]
    if left:
        warnings.warn("\n  ".join(["accelerate leaves torch.nn.LSTM in place:", *map(str, left)]), stacklevel=2)
    if verbose:
        print(_report(model, swaps))
    for swap in swaps:
        if swap.obstacle:
            continue
        replacement = _converted(swap.module)
        if swap.module is model:
            return replacement  # type: ignore[return-value]
        for name in swap.names:
            parent, _, child = name.rpartition(".")
            model.get_submodule(parent).register_module(child, replacement)
    return model


def planned_swaps(model: nn.Module) -> tuple[Swap, ...]:
    """Return what `accelerate` would do with each `torch.nn.LSTM` of a model, without changing anything.

    Args:
        model: Any module.

    Returns:
        One record for every `torch.nn.LSTM`, in the order of `model.named_modules()`.

    Raises:
        ArgumentError: `model` is not a `torch.nn.Module`.
    """
    if not isinstance(model, nn.Module):
        advice = "Give the model, or one of its layers."
        raise ArgumentError(sentence("model", "a torch.nn.Module", type(model).__name__, advice))
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.LSTM) or _is_script(module):
            found.setdefault(module, []).append(name)
    return tuple(Swap(tuple(names), module, _obstacle(module)) for module, names in found.items())


def _report(model: nn.Module, swaps: tuple[Swap, ...]) -> str:
    if not swaps:
        already = sum(isinstance(module, LSTM) for module in model.modules())
        found = f"; {already} gatewise.LSTM already" if already else ""
        return f"accelerate: no torch.nn.LSTM to replace{found}"
    replaced = sum(not swap.obstacle for swap in swaps)
    lines = [f"accelerate: {replaced} of {len(swaps)} torch.nn.LSTM replaced"]
    for swap in swaps:
        lines += textwrap.wrap(str(swap), _COLUMNS, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _is_script(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) and getattr(module, "original_name", "") == nn.LSTM.__name__


def _obstacle(module: nn.Module) -> str:
    if _is_script(module):
        return "is TorchScript; accelerate the model before torch.jit.script"
    if parametrize.is_parametrized(module):
        return "has parametrizations; build it as gatewise.LSTM and register them there"
    if type(module) is not nn.LSTM:
        return f"is a subclass, {type(module).__qualname__}, whose own behaviour would be lost"
    if "forward" in vars(module):
        return "has a forward of its own, which would be lost"
    if module._compiled_call_impl is not None:
        return "is compiled; accelerate the model before .compile()"
    return ""


def _converted(module: nn.Module) -> LSTM:
    # Sharing one dictionary of parameters, hooks and attributes keeps the handles of hooks working too.
    replacement = LSTM.__new__(LSTM)
    replacement.__setstate__({name: value for name, value in vars(module).items() if name not in _REFERENCES})
    for hook in replacement._load_state_dict_pre_hooks.values():
        if hook.with_module:  # pyright: ignore[reportFunctionMemberAccess] - the stub takes the wrapper for its function
            hook.module = weakref.ref(replacement)  # pyright: ignore[reportFunctionMemberAccess] - likewise
    return replacement
