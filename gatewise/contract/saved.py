"""The inputs and outputs of a kernel, and the value that its forward pass hands to its backward pass."""

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
    """All values that determine the outputs of a call.

    Attributes:
        x: The input [T, B, I] with any strides; [N, I] if packed. If `Problem.projected` is set, the products of the
            input with the first layer's input weights [T, B, D*G*H]; these weights are then [G*H, 0].
        h0: The initial hidden state [L*D, B, R].
        c0: The initial cell state [L*D, B, H].
        weights: All weights in PyTorch's flat order.
        lengths: The lengths of the sequences [B], int64 in [0, T], on x's device or the CPU; None if dense or packed.
        batch_sizes: The number of running sequences at each step [T], int64 on the CPU, not increasing; None unless
            packed.
        masks: All masks of the call, bool; empty without dropout and zoneout. With dropout between the layers the first
            L - 1 are its masks, of the shape of a layer's output ([T, B, D*R], or [N, D*R] if packed), True where an
            output is kept. Outputs that are kept are scaled by 1 / (1 - dropout). The others are those of a cell that
            is `gatewise.cells.Regularised`: with recurrent dropout the mask of the hidden states that enter the
            recurrent products [L*D, B, R], True where a unit is kept; then, for each layer, the masks that change at
            every step, in the order of `Regularised.of_steps`, each of the shape of a layer's output.
        resets: The steps at which episodes begin [T, B], bool, contiguous, on x's device; None without resets. A step
            that is set reads zeros for all states before it. The reverse direction reads zeros at the step before that.
    """

    x: Tensor
    h0: Tensor
    c0: Tensor
    weights: tuple[Tensor, ...]
    lengths: Tensor | None = None
    batch_sizes: Tensor | None = None
    masks: tuple[Tensor, ...] = ()
    resets: Tensor | None = None


class Result(NamedTuple):
    """The result of a kernel's forward pass.

    Attributes:
        y: The output of the last layer [T, B, D*R] ([N, D*R] if packed), zero after the end of each sequence.
        h_n: The final hidden state of every layer and direction [L*D, B, R], at the end of each sequence. It does not
            share memory with other tensors, because callers modify it in place. A backward pass does not read it, and
            another tensor may be in its place by then.
        c_n: The final cell state [L*D, B, H]; the same is true of it.
        kept: The tensors that the same kernel's backward pass needs besides inputs and outputs, with the shapes that
            its `kept()` states. They are private to the kernel. Empty if the problem needs no gradient.
    """

    y: Tensor
    h_n: Tensor
    c_n: Tensor
    kept: tuple[Tensor, ...] = ()


class OutputGradients(NamedTuple):
    """The gradients of the loss with respect to the outputs; None means zero."""

    y: Tensor | None
    h_n: Tensor | None
    c_n: Tensor | None


class Needs(NamedTuple):
    """Which gradients the caller needs."""

    x: bool = True
    state: bool = True
    weights: bool = True


class InputGradients(NamedTuple):
    """The gradients with respect to the inputs, in the shapes of `Inputs`; None for gradients that are not needed."""

    x: Tensor | None
    h0: Tensor | None
    c0: Tensor | None
    weights: tuple[Tensor | None, ...]


@dataclasses.dataclass(slots=True)
class Saved:
    """The opaque value that a forward pass hands to its backward pass.

    Attributes:
        kernel: The name of the kernel that ran the forward pass and whose backward pass can read `result.kept`.
        problem: The description of the call.
        inputs: The inputs; tensors are shared with the caller, except for copies of lengths and batch sizes.
        result: The outputs, and the tensors that the kernel kept.
        spent: Whether a `kept` that can be used only once (cuDNN's reserve space) has been used, so that the next
            backward pass must repeat the forward pass.
        versions: The version counters of x, h0, c0, y and each weight when this value was made; None for inference
            tensors, which have no counter.
        form: The weights in the nesting that the caller gave, so that their gradients are returned in the same nesting;
            None for the flat order.
    """

    kernel: str
    problem: Problem
    inputs: Inputs
    result: Result
    spent: bool = False
    form: Sequence | None = None
    versions: Versions | None = None

    def __post_init__(self) -> None:
        """Read the version counters of all tensors."""
        if self.versions is None:
            self.versions = self._read_versions()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling and copying, without version counters: those of the copies are different.

        An autograd graph that a kernel has kept, as PyTorch's native loop does, is in no copy: the backward pass of the
        copy repeats the forward pass.
        """
        self.check_unmodified()
        names = (field.name for field in dataclasses.fields(self))
        state = {name: getattr(self, name) for name in names} | {"versions": None}
        if self.keeps_a_graph:
            state |= {"result": self.result._replace(kept=()), "spent": True}
        return state

    @property
    def keeps_a_graph(self) -> bool:
        """Whether the tensors that the kernel kept have an autograd graph, which can be neither copied nor saved."""
        return any(tensor.requires_grad for tensor in self.result.kept)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state, and read the version counters of the new tensors."""
        for name, value in state.items():
            setattr(self, name, value)
        self.__post_init__()

    def check_unmodified(self) -> None:
        """Check that the inputs and the output have not been modified since the forward pass.

        Raises:
            ModifiedInPlace: A tensor was modified in place; the message names it.
        """
        found = self._read_versions()
        if found != self.versions:
            check_versions(("x", "h0", "c0", "y", *self._weight_names()), self.versions or (), found)

    def _weight_names(self) -> list[str]:
        form = self.form
        if form is None or isinstance(form[0], Tensor):
            return [f"weights[{index}]" for index in range(len(self.inputs.weights))]
        places = ((direction, index) for direction, group in enumerate(form) for index in range(len(group)))
        return [f"weights[{direction}][{index}]" for direction, index in places if form[direction][index] is not None]

    def _read_versions(self) -> Versions:
        inputs = self.inputs
        return versions_of((inputs.x, inputs.h0, inputs.c0, self.result.y, *inputs.weights))


_version = operator.attrgetter("_version")


def versions_of(tensors: Sequence[Tensor]) -> Versions:
    """Return the version counters of tensors, by which PyTorch counts changes in place; None for inference tensors."""
    try:
        return tuple(map(_version, tensors))
    except RuntimeError:  # some are inference tensors
        return tuple(None if tensor.is_inference() else tensor._version for tensor in tensors)


def check_versions(names: Sequence[str], before: Versions, now: Versions) -> None:
    """Check that tensors have not been modified since the forward pass.

    Args:
        names: The names of the tensors.
        before: Their version counters in the forward pass.
        now: Their version counters at present.

    Raises:
        ModifiedInPlace: A tensor was modified in place; the message names it.
    """
    for name, old, new in zip(names, before, now, strict=True):
        if old != new:
            expectation = f"as it was in the forward pass (version {old})"
            got = f"one modified by an inplace operation since (version {new})"
            advice = "Run the backward pass before it is changed, or give the forward pass a copy, as .clone() makes."
            raise ModifiedInPlace(sentence(name, expectation, got, advice))
