"""The description of a model in the benchmark: its layers, its data, and how it is trained."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
"""The arguments of a model's `forward`, which returns the loss."""


class Program(Protocol):
    """The sizes of a model, from which it and its data are made."""

    def build(self, adapted: bool) -> nn.Module:
        """Return the model on the default device.

        Args:
            adapted: Whether the model uses what `torch.nn.LSTM` does not have; see `Workload.adaptation`.

        Returns:
            A module whose `forward(*batch)` returns the loss, and whose `predict(*batch)` returns the output.
        """
        ...

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        """Yield random batches on the device of the generator, which a model can learn from."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """A model and how it is trained.

    Attributes:
        name: The name in tables.
        about: The published model, in a few words.
        program: The sizes.
        optimizer: The class of the optimizer, with its options.
        clip_norm: The norm to which the gradient is clipped.
        autocast: The dtype of autocast, with a GradScaler for float16; None without autocast.
        adaptation: The argument that the model can use in addition to `gatewise.accelerate`, such as "reverse="; empty
            if there is none.
        capturable: Whether a step can be captured in a CUDA graph, as it neither waits for the GPU nor copies from
            memory that is not pinned.
        inference: Whether inference is measured too.
        shorter: The sizes with which the loss is followed over many steps; None for those of `program`.
    """

    name: str
    about: str
    program: Program
    optimizer: functools.partial[Any]
    clip_norm: float
    autocast: torch.dtype | None = None
    adaptation: str = ""
    capturable: bool = True
    inference: bool = False
    shorter: Program | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """All values that define the model and its training, by name, as JSON has them.

        "shapes" is a digest of the names and shapes of all parameters, which differs for models of other layers.
        """
        with torch.device("meta"):
            parameters = dict(self.program.build(False).named_parameters())
        options = ", ".join(f"{name}={value}" for name, value in self.optimizer.keywords.items())
        shapes = repr([(name, *parameter.shape) for name, parameter in parameters.items()])
        return {
            **dataclasses.asdict(self.program),  # type: ignore[call-overload]
            "parameters": sum(parameter.numel() for parameter in parameters.values()),
            "shapes": hashlib.sha256(shapes.encode()).hexdigest()[:12],
            "optimizer": f"{self.optimizer.func.__name__}({options})",
            "clip_norm": self.clip_norm,
            "precision": self.precision,
        }

    @property
    def precision(self) -> str:
        """The name of the precision: float32, which cuDNN rounds to TF32 by PyTorch's default, or autocast."""
        return "float32" if self.autocast is None else f"{str(self.autocast).removeprefix('torch.')} autocast"
