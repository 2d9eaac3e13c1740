"""The settings of trials: a call of a layer with all of its options, as data."""

from __future__ import annotations

import dataclasses

import torch

from gatewise.cells import cell_named
from gatewise.contract.problem import LEAN, NORMAL
from gatewise.contract.pytorch import in_pytorch

LARGE_TF32_HIDDEN, LARGE_TF32_TOKENS = 257, 700
"""The fewest units and tokens with which `persistent` makes float16 products of what may be rounded to TF32."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One way to call the layer. The default of each option is its simplest value.

    Attributes:
        time: The number of time steps, T.
        batch: The batch size, B.
        input_size: The number of input features, I.
        hidden_size: The number of hidden units, H.
        num_layers: The number of layers, L.
        bidirectional: Whether the layer is bidirectional.
        proj_size: The size of the projection, P; 0 for none.
        bias: Whether the layer has biases.
        dtype: The dtype of the parameters, as a name.
        autocast: The dtype of autocast, as a name; empty without autocast.
        allow_tf32: Whether float32 products may be rounded to TF32.
        dropout: The probability of dropout between layers.
        device: "cpu" or "cuda".
        kernel: "auto" or the name of a kernel.
        memory: "normal" or "lean".
        mode: The way of calling: "eager", "explicit" (`functional.forward` and `backward`), "inference" (inference
            mode), "no_grad", "graph" (captured as a CUDA graph and replayed), "compile" (`torch.compile`), "ddp"
            (inside `DistributedDataParallel`), "stream" (on a separate stream).
        together: Whether all forward passes of the setting's calls run before all of their backward passes.
        batch_first: The layer's argument of that name.
        packed: Whether the input is a `PackedSequence`.
        lengths: The dtype of the lengths, as a name, "list" for a list of integers, or empty for none.
        lengths_on_cpu: Whether the lengths are on the CPU.
        x: The memory layout of the input: "dense", "by row" (as a transposed batch), "gaps" (columns of a wider
            tensor), "every other step", "one row" (the same memory for all rows).
        states: The initial state: "none", "given", or "learned" (requiring gradients).
        x_learned: Whether the input requires a gradient.
        weights: The memory layout of parameters: "flat" (as the layer creates them), "walls" (surrounded by NaN), "odd"
            (surrounded by NaN, and beginning at an odd offset) or "transposed".
        frozen: The number of parameters, counted from the last, that require no gradient.
        above: The outputs that have a gradient: a subset of "y h c" in this order, separated by spaces; or "sum" for
            the gradient of `y.sum()`, which is a single value in memory.
        poison: The position of a NaN: "nowhere", "padding" (beyond the lengths of sequences) or "x" (one value of it).
        changes: Whether all values are overwritten in place after two calls, as by an optimizer and a data loader.
        calls: The number of calls.
        seed: The seed of all values.
        cell: The name of a cell in `gatewise.cells`.
        resets: The dtype of the resets, as a name, or empty for none.
        reverse: Whether the layer reads sequences from their last step to their first.
        weight_dropout: The probability of dropping an element of a recurrent matrix.
        recurrent_dropout: The probability of dropping a unit of the hidden state that enters the recurrent products.
        candidate_dropout: The probability of dropping a unit of the candidate at a step.
        zoneout: The probability that a unit keeps its hidden state at a step.
        zoneout_others: The probability that a unit keeps another state at a step.
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
    cell: str = "lstm"
    resets: str = ""
    reverse: bool = False
    weight_dropout: float = 0.0
    recurrent_dropout: float = 0.0
    candidate_dropout: float = 0.0
    zoneout: float = 0.0
    zoneout_others: float = 0.0

    @property
    def regularised(self) -> bool:
        """Whether there is dropout or zoneout in the recurrence, other than of weights."""
        return bool(self.recurrent_dropout or self.candidate_dropout or self.zoneout or self.zoneout_others)

    @property
    def computes_in(self) -> torch.dtype:
        """The dtype of the computation."""
        given = getattr(torch, self.dtype)
        return getattr(torch, self.autocast) if self.autocast and given != torch.float64 else given

    @property
    def has_c(self) -> bool:
        """Whether the cell has states beside the hidden state."""
        return bool(cell_named(self.cell).states)

    @property
    def training(self) -> bool:
        """Whether gradients are computed."""
        return self.mode not in ("inference", "no_grad")

    @property
    def large_tf32(self) -> bool:
        """Whether `persistent` is named for training in TF32 with so many units and tokens that products are large."""
        return (
            self.kernel == "persistent"
            and self.computes_in == torch.float32
            and self.allow_tf32
            and self.training
            and self.memory != LEAN
            and in_pytorch(cell_named(self.cell))
            and self.hidden_size >= LARGE_TF32_HIDDEN
            and self.batch > 1
            and self.time * self.batch >= LARGE_TF32_TOKENS
        )

    @property
    def ragged(self) -> bool:
        """Whether sequences have lengths."""
        return self.packed or bool(self.lengths)

    @property
    def size(self) -> int:
        """The number of values of gates, inputs and weights: the memory of a float64 reference up to a factor."""
        directions = 1 + self.bidirectional
        features = self.input_size + 5 * directions * self.hidden_size * self.num_layers
        weights = 4 * directions * self.hidden_size * (self.input_size + (1 + directions) * self.hidden_size)
        return self.time * self.batch * features + weights * self.num_layers

    def changed(self) -> dict[str, object]:
        """Return the options that differ from their defaults."""
        fields = dataclasses.fields(self)
        return {own.name: value for own in fields if (value := getattr(self, own.name)) != own.default}

    def __str__(self) -> str:
        """Return the setting as a Python expression, without defaults."""
        return f"Setting({', '.join(f'{name}={value!r}' for name, value in self.changed().items())})"


def program_of(*settings: Setting, reference: str = "auto") -> str:
    """Return a program that runs settings in turn.

    Args:
        *settings: The settings.
        reference: The device of the float64 reference, as in `trial`.
    """
    given = [str(setting) for setting in settings] + ([] if reference == "auto" else [f"reference={reference!r}"])
    return f"from gatewise.testing.trials import Setting, trial\n\ntrial({', '.join(given)})\n"
