"""A call of `gatewise.LSTM` with all of its options, as data."""

from __future__ import annotations

import dataclasses

import torch

from gatewise.contract.problem import NORMAL


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One way to call the layer. Defaults are the simplest value of each option.

    Attributes:
        time: T.
        batch: B.
        input_size: I.
        hidden_size: H.
        num_layers: L.
        bidirectional: Whether D is 2.
        proj_size: P; 0 for none.
        bias: Whether there are biases.
        dtype: The dtype of the parameters, as a name.
        autocast: The dtype of autocast, as a name; empty without autocast.
        allow_tf32: Whether float32 products may be rounded to TF32.
        dropout: The probability of dropout between layers.
        device: "cpu" or "cuda".
        kernel: "auto" or the name of a kernel.
        memory: "normal" or "lean".
        mode: How the call is made: "eager", "explicit" (`functional.forward` and `backward`), "inference" (inference
            mode), "no_grad", "graph" (captured as a CUDA graph and replayed), "compile" (`torch.compile`), "ddp"
            (inside `DistributedDataParallel`), "stream" (on a stream of its own).
        together: Whether all forward passes of the setting's calls come before all of their backward passes.
        batch_first: The argument of that name.
        packed: Whether the input is a `PackedSequence`.
        lengths: The dtype of the lengths, as a name, "list" for a list of integers, or empty for none.
        lengths_on_cpu: Whether lengths lie on the CPU.
        x: How the input lies in memory: "dense", "by row" (as a transposed batch), "gaps" (columns of a wider tensor),
            "every other step", "one row" (the same memory for all rows).
        states: What is given for the initial state: "none", "given", or "learned" (requiring gradients).
        x_learned: Whether the input requires a gradient.
        weights: How parameters lie in memory: "flat" (as the layer makes them), "walls" (between walls of NaN), "odd"
            (so, beginning at an odd offset) or "transposed".
        frozen: The number of parameters, from the last, that require no gradient.
        above: Which outputs have a gradient: a subset of "y h c" in this order, separated by spaces; "sum" is that of
            `y.sum()`, which lies in memory as a single value.
        poison: Where a NaN stands: "nowhere", "padding" (beyond the ends of sequences) or "x" (in one value of it).
        changes: Whether all values are written over in place after two calls, as an optimiser and a loader do.
        calls: How often the call is made.
        seed: The seed of all values.
    """

    time: int = 1
    batch: int = 1
    input_size: int = 1
    hidden_size: int = 1
    num_layers: int = 1
    bidirectional: bool = False
    proj_size: int = 0
    bias: bool = True
    dtype: str = "float32"
    autocast: str = ""
    allow_tf32: bool = False
    dropout: float = 0.0
    device: str = "cpu"
    kernel: str = "auto"
    memory: str = NORMAL
    mode: str = "eager"
    together: bool = False
    batch_first: bool = False
    packed: bool = False
    lengths: str = ""
    lengths_on_cpu: bool = False
    x: str = "dense"
    states: str = "none"
    x_learned: bool = True
    weights: str = "flat"
    frozen: int = 0
    above: str = "y"
    poison: str = "nowhere"
    changes: bool = False
    calls: int = 3
    seed: int = 0

    @property
    def computes_in(self) -> torch.dtype:
        """The dtype of the computation."""
        given = getattr(torch, self.dtype)
        return getattr(torch, self.autocast) if self.autocast and given != torch.float64 else given

    @property
    def training(self) -> bool:
        """Whether gradients are computed."""
        return self.mode not in ("inference", "no_grad")

    @property
    def ragged(self) -> bool:
        """Whether sequences have lengths of their own."""
        return self.packed or bool(self.lengths)

    @property
    def size(self) -> int:
        """Values of the gates, inputs and weights: what a reference in float64 takes, but for a factor."""
        directions = 1 + self.bidirectional
        features = self.input_size + 5 * directions * self.hidden_size * self.num_layers
        weights = 4 * directions * self.hidden_size * (self.input_size + (1 + directions) * self.hidden_size)
        return self.time * self.batch * features + weights * self.num_layers

    def changed(self) -> dict[str, object]:
        """Return the options that differ from their defaults."""
        fields = dataclasses.fields(self)
        return {own.name: value for own in fields if (value := getattr(self, own.name)) != own.default}

    def __str__(self) -> str:
        """The setting as Python writes it, without its defaults."""
        return f"Setting({', '.join(f'{name}={value!r}' for name, value in self.changed().items())})"

    def program(self) -> str:
        """Return a program that shows what comes of the setting."""
        return f"from gatewise.testing.trials import Setting, trial\n\ntrial({self})\n"
