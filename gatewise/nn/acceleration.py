"""Replace the recurrent layers of PyTorch in an existing model with those of gatewise."""

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
from gatewise.nn.rnn import RNN, RNNCell

Model = TypeVar("Model", bound=nn.Module)

_COLUMNS = 80

_OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.LSTM: LSTM,
    nn.LSTMCell: LSTMCell,
    nn.GRU: GRU,
    nn.GRUCell: GRUCell,
    nn.RNN: RNN,
    nn.RNNCell: RNNCell,
}

# Attributes in which torch.nn.LSTM stores references to its parameters; gatewise.LSTM looks them up in every call.
_REFERENCES = frozenset({"mode", "_flat_weights", "_flat_weight_refs", "_flat_weights_names", "_all_weights"})


@dataclasses.dataclass(frozen=True, slots=True)
class Swap:
    """What `accelerate` does with one recurrent layer or cell of PyTorch in a model.

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
        becomes = f"becomes gatewise.{_class_of(self.module)}"
        return f"{where}: {f'stays: it {self.obstacle}' if self.obstacle else becomes}"


def accelerate(model: Model, *, verbose: bool = True) -> Model:
    """Replace the recurrent layers of PyTorch in a model with those of gatewise, in place, and return the model.

    Every `torch.nn.LSTM`, `GRU`, `RNN`, `LSTMCell`, `GRUCell` and `RNNCell` is replaced. The new layers hold the same
    Parameter objects, so existing optimizers keep working and the `state_dict` is unchanged. The training flag, hooks,
    frozen parameters and other attributes are kept as well, and a layer that is registered in two places stays one
    layer. If the model itself is such a layer, a new module is returned. Calling the function again changes nothing.

    The following are not replaced: subclasses of these classes, and layers that have parametrizations or their own
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
    """Return the replacements that `accelerate` would make in a model, without changing anything.

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
        return f"accelerate: no torch.nn.LSTM, GRU or RNN to replace{f'; {already} already' if already else ''}"
    replaced = Counter(_class_of(swap.module) for swap in swaps if not swap.obstacle)
    present = Counter(_class_of(swap.module) for swap in swaps)
    counts = ", ".join(f"{replaced[name]} of {count} torch.nn.{name}" for name, count in present.items())
    lines = [f"accelerate: {counts} replaced"]
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
    # Sharing one dictionary of parameters, hooks and attributes keeps the handles of hooks working too.
    kind = _OURS[type(module)]
    replacement = kind.__new__(kind)
    left_out = _REFERENCES if kind is LSTM else frozenset()
    replacement.__setstate__({name: value for name, value in vars(module).items() if name not in left_out})
    for hook in replacement._load_state_dict_pre_hooks.values():
        if hook.with_module:  # pyright: ignore[reportFunctionMemberAccess] - the stub takes the wrapper for its function
            hook.module = weakref.ref(replacement)  # pyright: ignore[reportFunctionMemberAccess] - likewise
    return replacement
