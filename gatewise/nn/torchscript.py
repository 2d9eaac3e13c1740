"""The layers in TorchScript, which compiles and records PyTorch's own layers in their places."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from gatewise.contract.errors import ArgumentError, sentence
from gatewise.functional.operators import preference  # layers may not import `selection`

OPTIONS_MARK = "_has_options_of_gatewise"
"""The attribute of a layer of PyTorch's that has attributes which are options of gatewise's layers."""


def scriptable(self: Any) -> Any:
    """Return the layer of PyTorch with the same parameters and attributes, which `torch.jit.script` compiles.

    Raises:
        ArgumentError: PyTorch's layer would not compute the same.
    """
    ours, theirs = _classes(self)
    if type(self).forward is not ours.forward:
        return self  # TorchScript compiles the forward of the program's own class, or says why it cannot
    _check(self, ours, "script")
    if parametrize.is_parametrized(self):
        advice = "Call torch.nn.utils.parametrize.remove_parametrizations before."
        expectation = "without parametrizations for torch.jit.script"
        raise ArgumentError(sentence(f"gatewise.{ours.__name__}", expectation, "some", advice))
    warnings.warn(
        f"torch.jit.script compiles torch.nn.{theirs.__name__} in place of gatewise.{ours.__name__}, and also puts it "
        "into the model that it is given. Give it a copy (copy.deepcopy), or call gatewise.accelerate afterwards.",
        stacklevel=2,
    )
    found = theirs.__new__(theirs)
    vars(found).update(vars(self))
    vars(found).pop("_accelerated", None)  # nothing is left for `restore` to do
    vars(found)[OPTIONS_MARK] = True
    return found


def traced(self: Any, *given: Any, **options: Any) -> Any:
    """Run PyTorch's layer, whose operators `torch.jit.trace` can record; the tracer calls this instead of `forward`.

    Raises:
        ArgumentError: PyTorch's layer would not compute the same.
    """
    ours, theirs = _classes(self)
    if type(self).forward is not ours.forward or torch.onnx.is_in_onnx_export():
        return nn.Module._slow_forward(self, *given, **options)
    _check(self, ours, "trace")
    used = [name for name in ("lengths", "resets") if options.pop(name, None) is not None]
    used += [name for name, value in zip(("lengths", "resets"), given[2:], strict=False) if value is not None]
    if used:
        advice = "PyTorch's layers have no such input."
        raise ArgumentError(sentence(used[0], "None in torch.jit.trace", "a value", advice))
    return theirs.forward(self, *given[:2], **options)


def _classes(layer: nn.Module) -> tuple[type[nn.Module], type[nn.Module]]:
    """Return the class of gatewise that a layer is of, and the class of PyTorch that this one derives from."""
    ours = next(kind for kind in type(layer).__mro__ if kind.__module__.startswith("gatewise.nn."))
    theirs = next(kind for kind in ours.__mro__ if kind.__module__ == "torch.nn.modules.rnn")
    return ours, theirs


def _check(layer: nn.Module, ours: type[nn.Module], way: str) -> None:
    name = f"gatewise.{ours.__name__}"
    own = getattr(layer, "kernel", None)  # None for a cell, whose single steps PyTorch's own operator computes
    kernel, _, source = preference(own or "auto")
    if own is not None and kernel != "auto":
        advice = 'Set kernel="auto"' if own != "auto" else f"It is {source}"
        advice = f"{advice}; TorchScript runs PyTorch's own operators."
        raise ArgumentError(sentence("kernel", f"'auto' for {name} in torch.jit.{way}", repr(kernel), advice))
    if layer.training and getattr(layer, "weight_dropout", 0.0):
        advice = "Call .eval() before, or use torch.compile."
        expectation = f"0 for {name} in torch.jit.{way}"
        raise ArgumentError(sentence("weight_dropout", expectation, layer.weight_dropout, advice))
    if getattr(layer, "reverse", False):
        advice = "Flip the input and the output of a layer without it, or use torch.compile or torch.onnx.export."
        raise ArgumentError(sentence("reverse", f"False for {name} in torch.jit.{way}", True, advice))
