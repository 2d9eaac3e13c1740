"""Tensors that a training step keeps from call to call in its variables and in attributes of modules.

A replay runs no Python code. A step that reads such a tensor and puts another one in its place, as that of a model does
which carries its state from batch to batch, would read the tensor of its capture in every replay.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from types import CellType, FunctionType
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn

_OWN = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"})
"""The attributes of modules that PyTorch manages."""


class Variable(NamedTuple):
    """A variable or an attribute that can hold tensors.

    Attributes:
        holder: The attributes of a module, the global variables of a function, or a variable of an enclosing one.
        name: Its name.
    """

    holder: MutableMapping[str, Any] | CellType
    name: str

    def value(self) -> Any:
        """Return its value, or None if it has none."""
        if not isinstance(self.holder, CellType):
            return self.holder.get(self.name)
        try:
            return self.holder.cell_contents
        except ValueError:  # it is not set yet
            return None

    def set(self, value: Any) -> None:
        """Give it another value."""
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        else:
            self.holder[self.name] = value


class Unreadable:
    """Takes the place of a tensor of an earlier call during a capture, in which nothing may be done with it.

    Args:
        name: The name of the variable or attribute.
    """

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def _refuse(self, *given: object) -> NoReturn:
        raise RuntimeError(read_of([object.__getattribute__(self, "_name")]))

    __getattribute__ = __iter__ = __getitem__ = __bool__ = __len__ = _refuse


def read_of(names: Sequence[str]) -> str:
    """Return the reason why a step cannot be captured that reads variables of an earlier call."""
    advice = "pass it as an argument, and return its new value"
    return f"the step reads `{'`, `'.join(names)}` of an earlier call, which replays would not do; {advice}"


Held = dict[tuple[int, str], tuple[Variable, Any]]
"""Variables that hold tensors, by the identity of their holder and their name, and their values."""


def held_tensors(step: Callable[..., Any], modules: Sequence[nn.Module]) -> Held:
    """Return the variables of a step, and of functions that it names, and attributes of modules that hold tensors.

    Args:
        step: The step.
        modules: All modules.
    """
    found = [(place, place.value()) for place in variables(step, modules)]
    return {(id(place.holder), place.name): (place, value) for place, value in found if _holds_tensor(value)}


def variables(step: Callable[..., Any], modules: Sequence[nn.Module]) -> list[Variable]:
    """Return the variables of a step, and of functions that it names, and attributes of modules.

    Args:
        step: The step.
        modules: All modules.
    """
    found = [Variable(vars(module), name) for module in modules for name in vars(module) if name not in _OWN]
    known, left = set(), [step]
    while left:
        each = left.pop()
        while isinstance(each, functools.partial):
            each = each.func
        owner = getattr(each, "__self__", None if isinstance(each, FunctionType) else each)
        if owner is not None and not isinstance(owner, (nn.Module, type)) and hasattr(owner, "__dict__"):
            found += [Variable(vars(owner), name) for name in vars(owner)]
        each = getattr(each, "__func__", each)
        if not isinstance(each, FunctionType):
            each = vars(type(each)).get("__call__")
        if not isinstance(each, FunctionType) or each in known:
            continue
        known.add(each)
        own = [Variable(each.__globals__, name) for name in each.__code__.co_names if name in each.__globals__]
        own += map(Variable, each.__closure__ or (), each.__code__.co_freevars)
        found += own
        left += [value for value in map(Variable.value, own) if _is_of(value, each)]
    return found


def _is_of(value: Any, function: FunctionType) -> bool:
    # Functions of other files, such as those of libraries, are not followed.
    return isinstance(value, FunctionType) and value.__globals__ is function.__globals__


def _holds_tensor(value: Any, depth: int = 2) -> bool:
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    if not depth or not isinstance(value, (tuple, list, dict)):
        return False
    return any(_holds_tensor(each, depth - 1) for each in (value.values() if isinstance(value, dict) else value))


def replaced(before: Held, after: Held) -> list[Variable]:
    """Return the variables that held tensors and have got another value.

    Args:
        before: Variables before a call.
        after: The same after it.
    """
    gone = (None, None)
    return [place for key, (place, value) in before.items() if after.get(key, gone)[1] is not value]


@contextlib.contextmanager
def unreadable(places: Sequence[Variable]) -> Iterator[None]:
    """Raise an error where values of variables are read in the block that it has not written before.

    After an error in the block they have their values again.

    Args:
        places: The variables.
    """
    values = [place.value() for place in places]
    for place in places:
        place.set(Unreadable(place.name))
    failed = True
    try:
        yield
        failed = False
    finally:
        for place, value in zip(places, values, strict=True):
            if failed or type(place.value()) is Unreadable:
                place.set(value)


def constants(held: Held, replaced: Sequence[Variable], modules: Sequence[nn.Module]) -> list[tuple[Variable, Any]]:
    """Return the attributes of modules that hold tensors which calls do not replace, with their values.

    Args:
        held: All variables that hold tensors.
        replaced: Those that calls replace.
        modules: All modules.
    """
    owners = {id(vars(module)) for module in modules}
    others = {(id(place.holder), place.name) for place in replaced}
    return [each for key, each in held.items() if key[0] in owners and key not in others]
