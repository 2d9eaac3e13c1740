"""What both layers say of calls that no shape or dtype describes: no tensors, no pair of states, TorchScript."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from gatewise.contract.errors import ArgumentError, sentence


def check_input(input: object) -> None:
    """Check that the input is a tensor at all."""
    if not isinstance(input, Tensor):
        advice = "torch.as_tensor makes one of an array or a list."
        raise ArgumentError(sentence("input", "a tensor", type(input).__name__, advice))


def check_pair(hx: object) -> None:
    """Check that an initial state is two tensors."""
    if not (isinstance(hx, tuple | list) and len(hx) == 2 and isinstance(hx[0], Tensor) and isinstance(hx[1], Tensor)):
        advice = "Give zeros for a state that is not known."
        raise ArgumentError(sentence("hx", "None or a pair of tensors (h_0, c_0)", _words(hx), advice))


def refuse_script(layer: str, way: str = "script") -> NoReturn:
    """Raise what TorchScript cannot say itself.

    Its compiler stops at some line of ours, and its tracer takes the kernel that this call would run, with this call's
    sizes, for the layer.
    """
    advice = f"For TorchScript, load its state_dict into a torch.nn.{layer}."
    how = "compiled by torch.compile or torch.export"
    raise ArgumentError(sentence(f"gatewise.{layer}", how, f"torch.jit.{way}", advice))


def _words(given: object) -> str:
    if isinstance(given, tuple | list) and len(given) < 5:
        return f"({', '.join('None' if each is None else type(each).__name__ for each in given)})"
    return type(given).__name__
