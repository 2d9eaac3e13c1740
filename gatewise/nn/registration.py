"""The registration of the layers with libraries that treat layers of PyTorch's classes specially.

It is done when such a library is imported, because importing them here would take seconds.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import nn

from gatewise.nn.classes import OURS, THEIRS


def _with_dynamo(builder: Any) -> None:
    """Let `torch.compile` trace the layers.

    It leaves layers of `torch.nn.LSTM`, `GRU` and `RNN` out of its graphs, unless this option is on, because it would
    unroll them over time. Ours are one operator.
    """
    wrap = builder.VariableBuilder.wrap_module

    @functools.wraps(wrap)
    def wrap_module(self: Any, value: nn.Module) -> Any:
        is_ours = isinstance(value, OURS)
        with builder.config.patch(allow_rnn=True) if is_ours else contextlib.nullcontext():
            return wrap(self, value)

    builder.VariableBuilder.wrap_module = wrap_module


def _with_opacus(validators: Any) -> None:
    """Let the validator of Opacus refuse and replace the layers as it does those of PyTorch."""
    _enter(validators.ModuleValidator.VALIDATORS)
    _enter(validators.ModuleValidator.FIXERS)


def _with_thop(profile: Any) -> None:
    """Let thop count the operations of the layers as it does for those of PyTorch."""
    _enter(profile.register_hooks)


def _enter(registry: dict[type[nn.Module], Any]) -> None:
    for ours, theirs in zip(OURS, THEIRS, strict=True):
        if theirs in registry:
            registry.setdefault(ours, registry[theirs])


_LIBRARIES: dict[str, Callable[[Any], None]] = {
    "torch._dynamo.variables.builder": _with_dynamo,
    "opacus.validators": _with_opacus,
    "thop.profile": _with_thop,
}


def _called(call: Callable[[Any], None], module: ModuleType) -> None:
    with contextlib.suppress(AttributeError):  # a version of the library that has other names must still be imported
        call(module)


class _AfterImport(MetaPathFinder):
    """A finder of modules that calls a function with a module after its import."""

    def __init__(self, calls: dict[str, Callable[[Any], None]]) -> None:
        self._calls = calls

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        call = self._calls.pop(fullname, None)
        if call is None:
            return None
        try:
            spec = importlib.util.find_spec(fullname)  # asks all finders, and this one does not know the name now
        finally:
            self._calls[fullname] = call
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                _called(call, module)

            spec.loader.exec_module = execute_and_call
        return spec


def register() -> None:
    """Register the layers with the libraries that are imported, and with the others when they are."""
    later = {}
    for name, call in _LIBRARIES.items():
        if name in sys.modules:
            _called(call, sys.modules[name])
        else:
            later[name] = call
    sys.meta_path.insert(0, _AfterImport(later))
