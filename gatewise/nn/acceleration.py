"""Turn the recurrent layers of PyTorch in an existing model into those of gatewise, and back."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import nn

from gatewise.contract.errors import ArgumentError, sentence
from gatewise.nn.classes import MARK, OURS, THEIRS, accelerated_class, class_of_pytorch, original_class
from gatewise.nn.pytorch_layer import OPTIONS, release_graphs
from gatewise.nn.recurrent import Recurrent
from gatewise.nn.recurrent_cell import RecurrentCell
from gatewise.nn.torchscript import OPTIONS_MARK

Model = TypeVar("Model", bound=nn.Module)

_COLUMNS = 80

# The methods that `forward` of PyTorch's layers calls, and that of gatewise's layers does not.
_CALLED = (
    "check_forward_args",
    "check_input",
    "check_hidden_size",
    "get_expected_hidden_size",
    "get_expected_cell_size",
    "permute_hidden",
)


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
        if self.obstacle:
            return f"{_where(self.names)}: stays: it {self.obstacle}"
        name = _name(self.module)
        note = ", whose single steps PyTorch's own operator computes as before" if name.endswith("Cell") else ""
        return f"{_where(self.names)}: becomes gatewise.{name}{note}"


def accelerate(model: Model, *, verbose: bool = True) -> Model:
    """Turn the recurrent layers of PyTorch in a model into those of gatewise, in place, and return the model.

    The class of every `torch.nn.LSTM`, `GRU`, `RNN`, `LSTMCell`, `GRUCell` and `RNNCell` becomes the class of gatewise
    that derives from it. The modules, their parameters, buffers, hooks, parametrizations and all other attributes stay
    the same objects, so existing optimizers and references keep working and the `state_dict` is unchanged. A subclass
    of these classes keeps its methods; if it has a `forward` of its own, `super().forward` calls gatewise. Calling the
    function again changes nothing, and `gatewise.restore` undoes it.

    The following are left as they are: subclasses whose own `forward` does not call `super().forward`, or that have
    their own versions of the checks that PyTorch's `forward` calls, modules with attributes of their own that are named
    as options of gatewise's layers are, modules to which a `forward` has been assigned, subclasses from which no class
    can be derived, layers with complex weights, and TorchScript.
    One warning names all of them with the reasons, and `gatewise.nn.planned_swaps` returns them. Layers that are not
    registered as submodules (for example, in a plain list) are not found.

    Args:
        model: Any module.
        verbose: Whether to print the report, which names every recurrent layer and cell in the model; the warning is
            issued in any case.

    Returns:
        The model.

    Raises:
        ArgumentError: `model` is not a `torch.nn.Module`.
    """
    swaps = planned_swaps(model)
    classes = [(swap.module, accelerated_class(type(swap.module))) for swap in swaps if not swap.obstacle]
    left = [swap for swap in swaps if swap.obstacle]
    if left:
        warnings.warn("\n  ".join([f"accelerate leaves {_classes(left)} unchanged:", *map(str, left)]), stacklevel=2)
    if verbose:
        print(_report(model, swaps))
    for module, kind in classes:
        module.__class__ = kind
        setattr(module, MARK, True)
        if isinstance(module, nn.RNNBase):
            release_graphs(module)
    return model


def restore(model: Model, *, verbose: bool = True) -> Model:
    """Turn the recurrent layers of gatewise in a model into those of PyTorch, in place, and return the model.

    This undoes `gatewise.accelerate`, and also changes layers that were made by gatewise's own classes. The modules,
    their parameters, buffers, hooks, parametrizations and all other attributes stay the same objects; options such as
    `kernel` have no effect until the next `gatewise.accelerate`, and calls with `lengths` or `resets` are errors until
    then. The following are left as they are, and a warning names them: layers with `weight_dropout` or `reverse`, which
    PyTorch's would ignore, layers of a class that derives from gatewise's, layers to which another library has since
    given a class of its own, as `fully_shard` does, and layers of other cells, which PyTorch does not have.

    Args:
        model: Any module, also one that was copied or loaded from a file.
        verbose: Whether to print which layers were changed.

    Returns:
        The model.

    Raises:
        ArgumentError: `model` is not a `torch.nn.Module`.
    """
    done, left = restored(model)
    if left:
        warnings.warn("\n  ".join(["restore leaves layers unchanged:", *left]), stacklevel=2)
    if verbose:
        head = f"restore: {len(done)} of {len(done) + len(left)} layers of gatewise restored"
        print("\n".join(_indented([head], [*done, *left])))
    return model


def restored(model: nn.Module) -> tuple[list[str], list[str]]:
    """Do what `restore` does, without a report.

    Args:
        model: Any module.

    Returns:
        A line for each layer that was changed, and a line with the reason for each layer of gatewise that was not.

    Raises:
        ArgumentError: `model` is not a `torch.nn.Module`.
    """
    done, left = [], []
    for names, module in _modules(model):
        if not issubclass(type(module), (*OURS, Recurrent, RecurrentCell)):
            continue
        reason, original = _kept_by_restore(module), original_class(type(module))
        if reason or original is None:
            left.append(f"{_where(names)}: stays: {reason}")
            continue
        module.__class__ = original
        again = " again" if vars(module).pop(MARK, False) else ""
        if any(name in vars(module) for name in OPTIONS):  # they apply again after the next `accelerate`
            setattr(module, OPTIONS_MARK, True)
        done.append(f"{_where(names)}: becomes torch.nn.{_name(module)}{again}")
    return done, left


def _kept_by_restore(module: nn.Module) -> str:
    """Return the reason why a layer of gatewise cannot become one of PyTorch; empty if it can."""
    kind = type(module).__name__
    if not isinstance(module, OURS):
        return f"it is a gatewise.{kind}, which torch.nn does not have"
    ignored = [name for name in ("weight_dropout", "reverse") if getattr(module, name, False)]
    if ignored:
        return f"it has the option {ignored[0]}, which torch.nn does not have"
    if original_class(type(module)) is not None:
        return ""
    if MARK in vars(module):
        return f"its class, {kind}, was made after accelerate"
    base = next(ours.__name__ for ours in OURS if isinstance(module, ours))
    return f"its class, {kind}, derives from gatewise.{base}; derive it from torch.nn.{base} and call accelerate"


def planned_swaps(model: nn.Module) -> tuple[Swap, ...]:
    """Return the changes that `accelerate` would make to the layers of PyTorch in a model, without making them.

    Args:
        model: Any module.

    Returns:
        One record for every such layer or cell of PyTorch's, in the order of `model.named_modules()`.

    Raises:
        ArgumentError: `model` is not a `torch.nn.Module`.
    """
    return tuple(
        Swap(names, module, _obstacle(module))
        for names, module in _modules(model)
        if class_of_pytorch(module) and not isinstance(module, OURS)
    )


def _modules(model: nn.Module) -> Iterator[tuple[tuple[str, ...], nn.Module]]:
    if not isinstance(model, nn.Module):
        advice = "Give the model, or one of its layers."
        raise ArgumentError(sentence("model", "a torch.nn.Module", type(model).__name__, advice))
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(name)
    for module, names in found.items():
        yield tuple(names), module


def _where(names: Iterable[str]) -> str:
    return ", ".join(name or "the model itself" for name in names)


def _report(model: nn.Module, swaps: tuple[Swap, ...]) -> str:
    replaced = Counter(_name(swap.module) for swap in swaps if not swap.obstacle)
    present = Counter(_name(swap.module) for swap in swaps)
    counts = ", ".join(f"{replaced[name]} of {count} torch.nn.{name}" for name, count in present.items())
    already = [
        f"{_where(names)}: is gatewise.{kind.__name__} already"
        for names, module in _modules(model)
        for kind in (*OURS, Recurrent, RecurrentCell)
        if isinstance(module, kind)
    ]
    head = f"{counts} replaced" if swaps else "no torch.nn.LSTM, GRU or RNN to replace"
    return "\n".join(_indented([f"accelerate: {head}"], [*map(str, swaps), *already]))


def _indented(head: list[str], lines: Iterable[str]) -> list[str]:
    for line in lines:
        head += textwrap.wrap(line, _COLUMNS, initial_indent="  ", subsequent_indent="    ")
    return head


def _classes(swaps: Iterable[Swap]) -> str:
    return ", ".join(dict.fromkeys(f"torch.nn.{_name(swap.module)}" for swap in swaps))


def _obstacle(module: nn.Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript; accelerate the model before torch.jit.script"
    if "forward" in vars(module):
        return "has a forward of its own, which would be lost"
    if isinstance(module, nn.RNNBase) and any(weight.is_complex() for weight in module.parameters(recurse=False)):
        return "has complex weights, for which gatewise has no kernels"
    kind, theirs = type(module), class_of_pytorch(module)
    if theirs not in THEIRS:
        return f"is a subclass, {kind.__qualname__}, with a forward of its own"
    if not _calls_super(kind, theirs):
        said = f"is a subclass, {kind.__qualname__}, with a forward of its own that does not call super().forward"
        return f"{said}; derive it from gatewise.{theirs.__name__} and call super().forward"
    changed = [name for name in _CALLED if getattr(kind, name, None) is not getattr(theirs, name, None)]
    if changed:
        return f"is a subclass, {kind.__qualname__}, with its own {' and '.join(changed)}, which would not be called"
    taken = _taken(module, OURS[THEIRS.index(theirs)])
    if taken:
        names, options = " and ".join(taken), "which are options" if len(taken) > 1 else "which is an option"
        return f"has attributes of its own named {names}, {options} of gatewise's layers"
    # Unlike other attributes, these are looked up after the methods of the class.
    held = module._modules, module._parameters, module._buffers
    if isinstance(module, nn.RNNBase) and any("stream" in each for each in held):
        return "has a module, parameter or buffer named stream, which is a method of gatewise's layers"
    try:
        accelerated_class(kind)
    except Exception as error:  # noqa: BLE001 - whatever the program's metaclass or __init_subclass__ raises
        return f"is a subclass, {kind.__qualname__}, that cannot be derived from: {error}"
    return ""


def _calls_super(kind: type[nn.Module], theirs: type[nn.Module]) -> bool:
    """Return whether every `forward` between a class and PyTorch's seems to call that of the next class by `super`.

    It does where its code has the names `super` and `forward`; what else it does with them is not looked at.
    """
    between = kind.__mro__[: kind.__mro__.index(theirs)]
    functions = [inspect.unwrap(vars(base)["forward"]) for base in between if "forward" in vars(base)]
    names = [getattr(getattr(function, "__code__", None), "co_names", ()) for function in functions]
    return all({"super", "forward"} <= set(each) for each in names)


def _taken(module: nn.Module, ours: type[nn.Module]) -> list[str]:
    """Return the options of gatewise's class under whose names a module has attributes of its own."""
    if OPTIONS_MARK in vars(module):
        return []
    options = [name for name in OPTIONS if hasattr(ours, name)]
    return [name for name in options if hasattr(type(module), name) or hasattr(module, name)]


def _name(module: nn.Module) -> str:
    kind = class_of_pytorch(module)
    return kind.__name__ if kind else ""
