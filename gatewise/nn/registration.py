"""The registration of the layers with libraries that treat PyTorch's layers of these classes specially.

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

from gatewise.nn.gru import GRU
from gatewise.nn.lstm import LSTM
from gatewise.nn.rnn import RNN


def _with_dynamo(builder: Any) -> None:
    """Let `torch.compile` trace the layers.

    It leaves layers of `torch.nn.LSTM`, `GRU` and `RNN` out of its graphs, unless this option is on, because it would
    unroll them over time. Ours are one operator.
    """
    wrap = builder.VariableBuilder.wrap_module

    @functools.wraps(wrap)
    def wrap_module(self: Any, value: nn.Module) -> Any:
        is_ours = isinstance(value, LSTM | GRU | RNN)
        with builder.config.patch(allow_rnn=True) if is_ours else contextlib.nullcontext():
            return wrap(self, value)

    builder.VariableBuilder.wrap_module = wrap_module


def _with_opacus(validator: Any) -> None:
    """Let the validator of Opacus refuse and replace the layers as it does those of PyTorch."""
    for registry in (validator.ModuleValidator.VALIDATORS, validator.ModuleValidator.FIXERS):
        for ours, theirs in ((LSTM, nn.LSTM), (GRU, nn.GRU)):
            if theirs in registry:
                registry[ours] = registry[theirs]


class _WhenImported(MetaPathFinder):
    """A finder that calls a function with a module once it has been imported."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name, self._call = name, call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self._call(module)

            spec.loader.exec_module = execute_and_call
        return spec


def register() -> None:
    """Register the layers with the libraries that are imported, and with the others when they are."""
    for name, call in {
        "torch._dynamo.variables.builder": _with_dynamo,
        "opacus.validators": _with_opacus,
    }.items():
        if name in sys.modules:
            call(sys.modules[name])
        else:
            sys.meta_path.insert(0, _WhenImported(name, call))
