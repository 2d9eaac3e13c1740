"""What travels into a kernel, out of it, and from its forward pass to its backward pass."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gatewise.contract.errors import ModifiedInPlace, sentence
from gatewise.contract.problem import Problem

Versions = tuple[int | None, ...]


class Inputs(NamedTuple):
    """Everything the outputs are a function of: two kernels given the same `Inputs` compute the same thing.

    Attributes:
        x: Input [T, B, I], any strides; [N, I] when packed. When the problem is projected, what the first layer's input
            weights make of it, [T, B, D*4H], and those weights are [4H, 0].
        h0: Initial hidden state [L*D, B, R].
        c0: Initial cell state [L*D, B, H].
        weights: All weights in torch's flat order.
        lengths: Sequence lengths [B], int64 in [0, T], on x's device or the CPU; None when dense or packed.
        batch_sizes: Sequences alive at each step [T], int64 on the CPU, not increasing; None unless packed.
        masks: For each gap between layers, which outputs survive dropout: L - 1 boolean tensors shaped as a layer's
            output ([T, B, D*R], or [N, D*R] when packed); empty without dropout. Survivors are scaled by
            1 / (1 - dropout).
    """

    x: Tensor
    h0: Tensor
    c0: Tensor
    weights: tuple[Tensor, ...]
    lengths: Tensor | None = None
    batch_sizes: Tensor | None = None
    masks: tuple[Tensor, ...] = ()


class Result(NamedTuple):
    """What a kernel's forward pass returns.

    Attributes:
        y: Output of the last layer [T, B, D*R] ([N, D*R] when packed), zero after each sequence's end.
        h_n: Final hidden state of every layer and direction [L*D, B, R], each at its own sequence's end. In
            memory of its own, because callers write over it. A backward pass does not read it, and may find another
            tensor in its place.
        c_n: Final cell state [L*D, B, H]; the same holds for it.
        kept: What the same kernel's backward pass needs besides inputs and outputs; private to the kernel, and
            shaped as its `kept()` says. Empty when the problem needs no gradient.
    """

    y: Tensor
    h_n: Tensor
    c_n: Tensor
    kept: tuple[Tensor, ...] = ()


class OutputGradients(NamedTuple):
    """Gradients of the loss with respect to the outputs; None stands for zero."""

    y: Tensor | None
    h_n: Tensor | None
    c_n: Tensor | None


class Needs(NamedTuple):
    """Which gradients the caller wants."""

    x: bool = True
    state: bool = True
    weights: bool = True


class InputGradients(NamedTuple):
    """Gradients with respect to the inputs, in the shapes of `Inputs`; None where not wanted."""

    x: Tensor | None
    h0: Tensor | None
    c0: Tensor | None
    weights: tuple[Tensor | None, ...]


@dataclasses.dataclass(slots=True)
class Saved:
    """The opaque value that a forward pass hands to its backward pass.

    Attributes:
        kernel: Name of the kernel whose forward made it; its backward reads `result.kept` as only it can.
        problem: What was computed.
        inputs: The inputs, shared with the caller, not copied; lengths and batch sizes are.
        result: The outputs and what the kernel kept.
        spent: Whether a single-use `kept` (cuDNN's reserve) has been consumed; the next backward repeats the forward.
        versions: How often autograd had counted a change in place of x, h0, c0, y and each weight when this was made;
            None for tensors of the inference mode, which count none.
        form: The weights in the nesting the caller gave them in, so that their gradients come back in the same; None
            for the flat order.
    """

    kernel: str
    problem: Problem
    inputs: Inputs
    result: Result
    spent: bool = False
    form: Sequence | None = None
    versions: Versions | None = None

    def __post_init__(self) -> None:
        """Note how often every tensor has been changed until now."""
        if self.versions is None:
            self.versions = self._read_versions()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a file is made from: the tensors there have versions of their own."""
        self.check_unmodified()
        names = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names} | {"versions": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what was copied or read."""
        for name, value in state.items():
            setattr(self, name, value)
        self.__post_init__()

    def check_unmodified(self) -> None:
        """Raise unless the inputs and the output are as they were when this value was made.

        Raises:
            ModifiedInPlace: A tensor was changed in place; the message names it.
        """
        found = self._read_versions()
        if found == self.versions:
            return
        names = ("x", "h0", "c0", "y", *self._weight_names())
        for name, before, now in zip(names, self.versions or (), found, strict=True):
            if before != now:
                expectation = f"as it was in the forward pass (version {before})"
                got = f"one modified by an inplace operation since (version {now})"
                advice = (
                    "Run the backward pass before it is changed, or give the forward pass a copy, as .clone() makes."
                )
                raise ModifiedInPlace(sentence(name, expectation, got, advice))

    def _weight_names(self) -> list[str]:
        form = self.form
        if form is None or isinstance(form[0], Tensor):
            return [f"weights[{index}]" for index in range(len(self.inputs.weights))]
        places = ((direction, index) for direction, group in enumerate(form) for index in range(len(group)))
        return [f"weights[{direction}][{index}]" for direction, index in places if form[direction][index] is not None]

    def _read_versions(self) -> Versions:
        inputs = self.inputs
        tensors = (inputs.x, inputs.h0, inputs.c0, self.result.y, *inputs.weights)
        try:
            return tuple(map(_version, tensors))
        except RuntimeError:  # there are tensors of the inference mode among them
            return tuple(None if tensor.is_inference() else tensor._version for tensor in tensors)


_version = operator.attrgetter("_version")
