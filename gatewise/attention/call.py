"""The inputs and results of attention kernels, and the state between the forward and the backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from gatewise.attention.problem import Problem
from gatewise.contract.saved import check_versions

EPSILON = 1e-5  # of the layer norm, the default of torch.nn.LayerNorm


class Inputs(NamedTuple):
    """The inputs of an attention call; tensors may have any strides.

    Attributes:
        query: The queries [T, B, Q].
        keys: The keys [S, B, H].
        values: The values [S, B, V].
        lengths: The source lengths [B], int64 in [0, S], on the keys' device; None when all are S.
        v: The vector of the additive score [H]; None for other scores.
        weight: The matrix of the general score [Q, H]; None for other scores.
        norm_weight: The weight of the layer norm [H]; None without layer norm.
        norm_bias: The bias of the layer norm [H]; None without layer norm.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    lengths: Tensor | None = None
    v: Tensor | None = None
    weight: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None


class Gradients(NamedTuple):
    """The gradients of the loss with respect to the inputs, shaped as in `Inputs`; None for absent inputs."""

    query: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    v: Tensor | None = None
    weight: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None


class Needs(NamedTuple):
    """The gradients that the caller needs.

    Attributes:
        query: Whether the gradient of the query is needed.
        source: Whether the gradients of the inputs that all decoder steps share (keys, values, v and layer norm) are
            needed.
    """

    query: bool = True
    source: bool = True


ALL = Needs()


class Result(NamedTuple):
    """The result of a kernel's forward pass.

    Attributes:
        context: The context [T, B, V].
        weights: The attention weights [T, B, S], zero beyond a length; None when they were not requested.
        kept: The tensors that the same kernel's backward pass needs besides the inputs and the context; private to the
            kernel.
    """

    context: Tensor
    weights: Tensor | None
    kept: tuple[Tensor, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """The opaque state that a forward pass hands to its backward pass; it can be used more than once.

    Attributes:
        kernel: The name of the kernel that ran the forward pass.
        problem: The description of the call.
        inputs: The inputs, which are shared with the caller and not copied.
        result: The outputs and the tensors that the kernel kept.
        versions: The version counters of the inputs and of the context when this value was made, by name; empty without
            a backward pass, and without those of inference tensors, which have no counter.
    """

    kernel: str
    problem: Problem
    inputs: Inputs
    result: Result
    versions: Mapping[str, int] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Read the version counters of all tensors."""
        object.__setattr__(self, "versions", self._read_versions() if self.problem.needs_grad else {})

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling and copying, without version counters: those of the copies are different."""
        self.check_unmodified()
        return {name: getattr(self, name) for name in ("kernel", "problem", "inputs", "result")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state, and read the version counters of the new tensors."""
        for name, value in state.items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    def check_unmodified(self) -> None:
        """Check that the inputs and the context have not been modified since the forward pass.

        Raises:
            ModifiedInPlace: A tensor was modified in place; the message names it.
        """
        now = {name: version for name, version in self._read_versions().items() if name in self.versions}
        check_versions(tuple(now), tuple([self.versions[name] for name in now]), tuple(now.values()))

    def _read_versions(self) -> dict[str, int]:
        tensors = self.inputs._asdict() | {"context": self.result.context}
        return {
            name: tensor._version
            for name, tensor in tensors.items()
            if tensor is not None and not tensor.is_inference()
        }
