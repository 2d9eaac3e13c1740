"""Exchanging the recurrent layers of a finished model."""

from __future__ import annotations

import dataclasses
import textwrap
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from gatewise.contract.errors import ArgumentError, sentence
from gatewise.nn.cell import LSTMCell
from gatewise.nn.gru import GRU, GRUCell
from gatewise.nn.lstm import LSTM

Model = TypeVar("Model", bound=nn.Module)

_COLUMNS = 80

_OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.LSTM: LSTM,
    nn.LSTMCell: LSTMCell,
    nn.GRU: GRU,
    nn.GRUCell: GRUCell,
}

# What torch.nn.LSTM remembers about its parameters; gatewise.LSTM looks them up in every call instead.
_BOOKKEEPING = frozenset({"mode", "_flat_weights", "_flat_weight_refs", "_flat_weights_names", "_all_weights"})


@dataclasses.dataclass(frozen=True, slots=True)
class Swap:
    """What `accelerate` would do with one recurrent layer or cell of PyTorch's in a model.

    Attributes:
        names: Every dotted name the module is registered under; "" is the model itself.
        module: The module.
        obstacle: Why it stays; empty when it is exchanged.
    """

    names: tuple[str, ...]
    module: nn.Module
    obstacle: str = ""

    def __str__(self) -> str:
        """One line: where it is, and what happens to it."""
        where = ", ".join(name or "the model itself" for name in self.names)
        becomes = f"becomes gatewise.{_class_of(self.module)}"
        return f"{where}: {f'stays: it {self.obstacle}' if self.obstacle else becomes}"


def accelerate(model: Model, *, verbose: bool = True) -> Model:
    """Exchange every `torch.nn.LSTM` and `torch.nn.GRU` in a model for gatewise's, in place, and return the model.

    A `torch.nn.LSTMCell` or `torch.nn.GRUCell` becomes gatewise's too. The new layers hold the very same Parameter
    objects, so optimizers made before keep working and `state_dict` stays. The training flag, hooks, frozen parameters
    and other attributes stay as well, and a layer registered in two places stays one layer. A model that is itself such
    a layer is returned as a new module. Running it again changes nothing.

    What was exchanged, and what was left and why, is printed. Left alone, each named with its reason in one warning as
    well and listed by `planned_swaps`: subclasses of these classes, layers with parametrizations, with a `forward` of
    their own, already compiled, or in TorchScript. Layers that are not registered as submodules (in a plain list, say)
    are not found.

    Args:
        model: Any module.
        verbose: Whether to print; the warning comes in any case.

    Returns:
        The model.

    Raises:
        ArgumentError: `model` is not a `torch.nn.Module`.
    """
    swaps = planned_swaps(model)
    left = [swap for swap in swaps if swap.obstacle]
    if left:
        warnings.warn("\n  ".join([f"accelerate leaves {_classes(left)} in place:", *map(str, left)]), stacklevel=2)
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
    """Tell what `accelerate` would exchange and what it would leave, without changing anything.

    Args:
        model: Any module.

    Returns:
        One record for every such layer or cell of PyTorch's, in the order of `model.named_modules()`.

    Raises:
        ArgumentError: `model` is not a `torch.nn.Module`.
    """
    if not isinstance(model, nn.Module):
        advice = "Give the model, or one of its layers."
        raise ArgumentError(sentence("model", "a torch.nn.Module", type(model).__name__, advice))
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if _class_of(module) and not isinstance(module, tuple(_OURS.values())):
            found.setdefault(module, []).append(name)
    return tuple(Swap(tuple(names), module, _obstacle(module)) for module, names in found.items())


def _report(model: nn.Module, swaps: tuple[Swap, ...]) -> str:
    if not swaps:
        ours = [type(module).__name__ for module in model.modules() if isinstance(module, tuple(_OURS.values()))]
        already = ", ".join(f"{count} gatewise.{name}" for name, count in Counter(ours).items())
        return f"accelerate: no torch.nn.LSTM or torch.nn.GRU to exchange{f'; {already} already' if already else ''}"
    exchanged = Counter(_class_of(swap.module) for swap in swaps if not swap.obstacle)
    present = Counter(_class_of(swap.module) for swap in swaps)
    counts = ", ".join(f"{exchanged[name]} of {count} torch.nn.{name}" for name, count in present.items())
    lines = [f"accelerate: {counts} exchanged"]
    for swap in swaps:
        lines += textwrap.wrap(str(swap), _COLUMNS, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _classes(swaps: Iterable[Swap]) -> str:
    return ", ".join(dict.fromkeys(f"torch.nn.{_class_of(swap.module)}" for swap in swaps))


def _class_of(module: nn.Module) -> str:
    """Return the name of the class of PyTorch's that a module is or was made from; empty for others."""
    if isinstance(module, torch.jit.ScriptModule):
        name = getattr(module, "original_name", "")
        return name if name in {kind.__name__ for kind in _OURS} else ""
    return next((kind.__name__ for kind in _OURS if isinstance(module, kind)), "")


def _obstacle(module: nn.Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript; accelerate the model before torch.jit.script"
    if parametrize.is_parametrized(module):
        return f"has parametrizations; build it as gatewise.{_class_of(module)} and register them there"
    if type(module) not in _OURS:
        return f"is a subclass, {type(module).__qualname__}, whose own behaviour would be lost"
    if "forward" in vars(module):
        return "has a forward of its own, which would be lost"
    if module._compiled_call_impl is not None:
        return "is compiled; accelerate the model before .compile()"
    return ""


def _converted(module: nn.Module) -> nn.Module:
    # One dictionary of parameters, hooks and attributes serves both, so handles of hooks keep working too.
    kind = _OURS[type(module)]
    replacement = kind.__new__(kind)
    left_out = _BOOKKEEPING if kind is LSTM else frozenset()
    replacement.__setstate__({name: value for name, value in vars(module).items() if name not in left_out})
    for hook in replacement._load_state_dict_pre_hooks.values():
        if hook.with_module:  # pyright: ignore[reportFunctionMemberAccess] - the stub takes the wrapper for its function
            hook.module = weakref.ref(replacement)  # pyright: ignore[reportFunctionMemberAccess] - likewise
    return replacement
