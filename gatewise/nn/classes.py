"""The classes of PyTorch's recurrent layers and those of gatewise that derive from them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from gatewise.nn.cell import LSTMCell
from gatewise.nn.gru import GRU, GRUCell
from gatewise.nn.lstm import LSTM
from gatewise.nn.rnn import RNN, RNNCell

OURS = (LSTM, GRU, RNN, LSTMCell, GRUCell, RNNCell)
"""The drop-ins."""

THEIRS = (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
"""The classes of PyTorch that they derive from, in the same order."""

MARK = "_accelerated"
"""The attribute of a layer that `accelerate` has changed. It is copied and saved with the layer, for `restore`."""

_BASES = (nn.RNNBase, nn.RNNCellBase)

_ORIGINAL = "_accelerated_class"
"""The attribute of a class made by `accelerated_class` with the class of a program that it was made for."""

_MADE = "_gatewise_class"
"""The attribute of a class of a program with the class that was made for it, so that both are freed together."""


def class_of_pytorch(module: nn.Module) -> type[nn.Module] | None:
    """Return the class of PyTorch's recurrent layers and cells that a module is of; None for other modules.

    Args:
        module: The module, of such a class, of a subclass, or in TorchScript.
    """
    if isinstance(module, torch.jit.ScriptModule):
        name = getattr(module, "original_name", "")
        return next((kind for kind in THEIRS if kind.__name__ == name), None)
    return next((kind for kind in (*THEIRS, *_BASES) if isinstance(module, kind)), None)


def accelerated_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of gatewise for a class of PyTorch, or for one that derives from it.

    A subclass keeps its methods: the class that is returned derives from it and from that of gatewise.

    Args:
        kind: The class of a module.
    """
    if kind in THEIRS:
        return OURS[THEIRS.index(kind)]
    if _is_parametrised(kind):
        return _parametrised_alike(kind, accelerated_class(kind.__bases__[0]))
    return _between(kind, next(ours for ours, theirs in zip(OURS, THEIRS, strict=True) if issubclass(kind, theirs)))


def original_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Return the class from which `accelerated_class` has made a class; None if it has not made it.

    Args:
        kind: The class of a module.
    """
    if kind in OURS:
        return THEIRS[OURS.index(kind)]
    if _is_parametrised(kind):
        base = original_class(kind.__bases__[0])
        return base and _parametrised_alike(kind, base)
    return vars(kind).get(_ORIGINAL)


def _is_parametrised(kind: type) -> bool:
    # The class that torch.nn.utils.parametrize makes for a module, with one property for each parametrised tensor.
    return kind.__module__ == parametrize.__name__


def _parametrised_alike(kind: type, base: type[nn.Module]) -> type[nn.Module]:
    return type(kind)(kind.__name__, (base,), dict(vars(kind)))


def _between(kind: Any, ours: type[nn.Module]) -> type[nn.Module]:
    """Return a class like `kind`, with the class of gatewise between it and PyTorch's in the order of methods."""
    known = vars(kind).get(_MADE)
    if known is not None and issubclass(known, ours):
        return known

    def reduced(self: Any, protocol: Any) -> Any:
        by = super(found, self).__reduce_ex__(protocol)
        if isinstance(by, str):  # the name of a global object, which is the module itself
            return by
        made_by, rest = by[:2], by[2:]
        # The program's own __reduce__ names its class, and what it makes is to be accelerated again.
        return _made, _mapped(made_by, lambda value: _named(value, (found, kind), _Name(kind, ours))), *rest

    names = ("__module__", "__qualname__", "__doc__")
    attributes = {name: getattr(kind, name) for name in names} | {_ORIGINAL: kind, "__reduce_ex__": reduced}
    found = type(kind)(kind.__name__, (kind, ours), attributes)
    setattr(kind, _MADE, found)
    return found


class _Name(NamedTuple):
    """The entry in a pickle for a class that `_between` has made, which has no name by which a pickle could store it.

    Attributes:
        kind: The class of the program.
        ours: The class of gatewise.
        method: The name of a class method that takes the place of the class, or "".
    """

    kind: type[nn.Module]
    ours: type[nn.Module]
    method: str = ""

    def meant(self) -> Any:
        """Return the class or its method."""
        found = _between(self.kind, self.ours)
        return getattr(found, self.method) if self.method else found

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the class or its method, because `functools.partial` takes only what can be called."""
        return self.meant()(*arguments, **options)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with its parts changed: the members of tuples, and the arguments of `functools.partial`."""
    if type(value) is tuple:
        return tuple(_mapped(each, change) for each in value)
    if type(value) is functools.partial:
        options = {name: _mapped(each, change) for name, each in value.keywords.items()}
        return functools.partial(_mapped(value.func, change), *_mapped(value.args, change), **options)
    return change(value)


def _named(value: Any, classes: tuple[type, type], name: _Name) -> Any:
    if isinstance(value, type) and value in classes:
        return name
    if isinstance(value, MethodType) and value.__self__ in classes:
        return name._replace(method=value.__name__)
    return value


def _made(make: Any, arguments: Any) -> nn.Module:
    make, given = _mapped((make, arguments), lambda value: value.meant() if isinstance(value, _Name) else value)
    found = make(*given)
    if not isinstance(found, OURS):  # made by a function that names the program's class
        found.__class__ = accelerated_class(type(found))
    vars(found)[MARK] = True  # also where the program's own __reduce__ keeps no attributes
    return found
