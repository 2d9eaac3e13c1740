"""The registration of the layers with libraries that treat layers of PyTorch's classes specially.

It is done when such a library is imported, because importing them here would take seconds.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import nn

from gatewise.contract.errors import ArgumentError, sentence
from gatewise.nn.classes import OURS, THEIRS
from gatewise.nn.recurrent import Recurrent
from gatewise.nn.recurrent_cell import RecurrentCell

_LAYERS = "_layers_of_gatewise"
"""The attribute of a function that stands for one of a library's, with the classes that it treats specially."""


def _replaced(
    owner: Any, name: str, kinds: tuple[type, ...], make: Callable[[Any, Callable[[], tuple[type, ...]]], Any]
) -> None:
    """Put a function that calls the one of a library in its place, unless this was done before.

    Args:
        owner: The class of the library.
        name: The name of its function.
        kinds: The classes of gatewise that the new function treats specially.
        make: Returns the new function for the old one and a function that returns these classes.
    """
    old = getattr(owner, name)
    layers = getattr(old, _LAYERS, None)
    if layers is not None:  # also after gatewise was imported anew, with other classes
        layers.update(dict.fromkeys(kinds))
        return
    layers = dict.fromkeys(kinds)
    new = functools.wraps(old)(make(old, lambda: tuple(layers)))
    setattr(new, _LAYERS, layers)
    setattr(owner, name, new)


def _with_dynamo(builder: Any) -> None:
    """Let `torch.compile` trace the layers.

    It leaves layers of `torch.nn.LSTM`, `GRU` and `RNN` out of its graphs, unless this option is on, because it would
    unroll them over time. Ours are one operator.
    """
    owner = getattr(builder, "VariableBuilder", None)
    if not (hasattr(owner, "wrap_module") and hasattr(getattr(builder, "config", None), "allow_rnn")):
        version = torch.__version__
        warnings.warn(f"torch.compile will not trace gatewise's layers with PyTorch {version}.", stacklevel=2)
        return

    def make(wrap: Any, layers: Callable[[], tuple[type, ...]]) -> Any:
        def wrap_module(self: Any, value: nn.Module) -> Any:
            is_ours = isinstance(value, layers())
            with builder.config.patch(allow_rnn=True) if is_ours else contextlib.nullcontext():
                return wrap(self, value)

        return wrap_module

    _replaced(owner, "wrap_module", OURS, make)


def _with_fx(symbolic_trace: Any) -> None:
    """Let `torch.fx.symbolic_trace` record calls of the layers as those of PyTorch's, before their hooks run."""

    def make(is_leaf: Any, layers: Callable[[], tuple[type, ...]]) -> Any:
        def is_leaf_module(self: Any, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, layers()) or is_leaf(self, m, module_qualified_name)

        return is_leaf_module

    _replaced(symbolic_trace.Tracer, "is_leaf_module", (*OURS, Recurrent, RecurrentCell), make)


def _with_opacus(validators: Any) -> None:
    """Let the validator of Opacus refuse and replace the layers as it does those of PyTorch."""
    _enter(validators.ModuleValidator.VALIDATORS)
    _enter(validators.ModuleValidator.FIXERS, _without_options)


def _with_thop(profile: Any) -> None:
    """Let thop count the operations of the layers as it does for those of PyTorch."""
    _enter(profile.register_hooks)


def _without_options(replace: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return a function that replaces layers, and refuses those with options that would be lost."""

    def checked(module: nn.Module, **options: Any) -> nn.Module:
        if getattr(module, "reverse", False):
            advice = "Flip the input and the output of a layer without it."
            raise ArgumentError(sentence("reverse", "False for a layer that Opacus replaces", True, advice))
        if rate := getattr(module, "weight_dropout", 0.0):
            advice = "Opacus computes no dropout of weights."
            raise ArgumentError(sentence("weight_dropout", "0 for a layer that Opacus replaces", rate, advice))
        return replace(module, **options)

    return checked


def _enter(registry: dict[type[nn.Module], Any], around: Callable[[Any], Any] = lambda entry: entry) -> None:
    for ours, theirs in zip(OURS, THEIRS, strict=True):
        if theirs in registry:
            registry.setdefault(ours, around(registry[theirs]))


_LIBRARIES: dict[str, Callable[[Any], None]] = {
    "torch._dynamo.variables.builder": _with_dynamo,
    "torch.fx._symbolic_trace": _with_fx,
    "opacus.validators": _with_opacus,
    "thop.profile": _with_thop,
}


def _called(call: Callable[[Any], None], module: ModuleType) -> None:
    with contextlib.suppress(AttributeError):  # a version of the library that has other names must still be imported
        call(module)


class _AfterImport(MetaPathFinder):
    """A finder of modules that calls a function with a module after its import.

    Modules whose import has begun already, in another thread or around that of gatewise, are looked at again in the
    imports of other modules that follow.
    """

    def __init__(self, calls: dict[str, Callable[[Any], None]], begun: dict[str, Callable[[Any], None]]) -> None:
        self._calls, self._begun = calls, begun

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for name in list(self._begun):
            if not _is_begun(name):
                call = self._begun.pop(name, None)
                if call is not None and name in sys.modules:
                    _called(call, sys.modules[name])
        call = self._calls.pop(fullname, None)
        if call is None:
            return None
        try:
            spec = importlib.util.find_spec(fullname)  # calls all finders; this one no longer finds the module
        finally:
            self._calls[fullname] = call
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                if module.__name__ == fullname:  # one loader loads all modules of a zip archive
                    _called(call, module)

            spec.loader.exec_module = execute_and_call
        return spec


def _is_begun(name: str) -> bool:
    # Python's own test for a module that is in sys.modules, and whose import has not ended.
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return getattr(spec, "_initializing", False)


def register() -> None:
    """Register the layers with the libraries that are imported, and with the others when they are."""
    begun = {name: call for name, call in _LIBRARIES.items() if _is_begun(name)}
    for name, call in _LIBRARIES.items():
        if name in sys.modules and name not in begun:
            _called(call, sys.modules[name])
    kind = (_AfterImport.__module__, _AfterImport.__qualname__)
    others = [finder for finder in sys.meta_path if (type(finder).__module__, type(finder).__qualname__) != kind]
    sys.meta_path[:] = [_AfterImport(dict(_LIBRARIES), begun), *others]  # also for importlib.reload
