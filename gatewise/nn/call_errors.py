"""The errors of a layer's call, in the names and the order of axes of the layer's arguments.

The functions that compute a call name its tensors `x`, `h0` and `c0`, and order the axes of x as [T, B, I]. A layer
takes `input` and `hx`. Only a call that has failed comes here, so that the others take no time for it.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from gatewise.contract.errors import ArgumentError, DeviceError, DtypeError, GatewiseError, sentence

CALL_ERRORS = (ValueError, RuntimeError)
"""The base classes of the errors by which gatewise and PyTorch refuse the tensors of a call."""

_SUBJECT = re.compile(r"`(x|h0|c0|lengths|resets|batch_sizes)` must be ")
_NAME = re.compile(r"(?<!['\"\w])(x|h0|c0|batch_sizes)(?!['\"\w])")
_OF_ONE_SEQUENCE = re.compile(r"\[(\d+), 1, (\d+)\]")


def restate(
    error: Exception, input: Tensor | PackedSequence, hx: Tensor | tuple[Tensor, ...] | None, batch_first: bool = False
) -> None:
    """Put the names and axes of a layer's arguments into an error, which the caller raises again.

    Args:
        error: The error of the call.
        input: The input as the user gave it.
        hx: The initial states as the user gave them.
        batch_first: Whether a padded batch is [B, T, I].

    Raises:
        ArgumentError: The error is one of PyTorch, and a tensor is not dense.
        DeviceError: The error is one of PyTorch, and a state is on another device than the input.
    """
    if not isinstance(error, GatewiseError):
        tensor = input if isinstance(input, Tensor) else input.data
        check_dense("input", tensor, error)
        for name, state in _named(hx):
            check_dense(name, state, error)
            _check_device(name, state, tensor.device, "the input", error)
        return
    text = str(error)
    subject = _SUBJECT.match(text)
    if subject is None:
        return
    several = isinstance(hx, (tuple, list)) and len(hx) > 1
    names = {"x": "input", "h0": "hx[0]" if several else "hx", "c0": "hx[1]", "batch_sizes": "batch_sizes"}
    if not isinstance(input, Tensor):
        names |= {"x": "input.data", "batch_sizes": "input.batch_sizes"}
    elif input.dim() == 2:
        text = _OF_ONE_SEQUENCE.sub(r"[\1, \2]", text).replace("[L*D, B, ", "[L*D, ")
    elif batch_first and subject[1] == "x":
        text = text.replace(str(list(input.transpose(0, 1).shape)), str(list(input.shape)))
    error.args = (_NAME.sub(lambda found: names[found[1]], text),)


def restate_step(error: Exception, input: Tensor, hx: Tensor | tuple[Tensor, ...] | None, weight: Tensor) -> None:
    """Do the same for the call of a cell, whose input is [B, I] or [I].

    Args:
        error: The error of the call.
        input: The input, of a shape that fits.
        hx: The states as the user gave them, of shapes that fit.
        weight: A weight of the cell.

    Raises:
        ArgumentError: The error is one of PyTorch, and a tensor is not dense.
        DtypeError: The error is one of PyTorch, and a state has another dtype than the input, without autocast.
        DeviceError: The error is one of PyTorch, and a tensor is on another device than the weights.
    """
    if isinstance(error, GatewiseError):
        restate(error, input, hx)
        return
    for name, tensor in (("input", input), *_named(hx)):
        check_dense(name, tensor, error)
        _check_device(name, tensor, weight.device, "the weights", error)
        if tensor.dtype != input.dtype and not torch._C._is_any_autocast_enabled():
            advice = "Convert it with .to(input.dtype)."
            raise DtypeError(sentence(name, f"{input.dtype} like the input", tensor.dtype, advice)) from error


def check_dense(name: str, tensor: Tensor, error: Exception | None = None) -> None:
    """Check that a tensor is dense.

    Args:
        name: The name of the argument, for the error.
        tensor: The tensor.
        error: The error of PyTorch that is explained, if there was one.

    Raises:
        ArgumentError: It is not.
    """
    if tensor.layout is not torch.strided:
        message = sentence(name, "a dense tensor", f"one of {tensor.layout}", "Call .to_dense() on it.")
        raise ArgumentError(message) from error


def _check_device(name: str, tensor: Tensor, device: torch.device, like: str, error: Exception) -> None:
    if tensor.device != device:
        advice = "Move one of them with .to(device)."
        raise DeviceError(sentence(name, f"on {device} like {like}", f"one on {tensor.device}", advice)) from error


def _named(hx: Tensor | tuple[Tensor, ...] | None) -> list[tuple[str, Tensor]]:
    if hx is None:
        return []
    if isinstance(hx, Tensor):
        return [("hx", hx)]
    return [(f"hx[{index}]", state) for index, state in enumerate(hx)]
