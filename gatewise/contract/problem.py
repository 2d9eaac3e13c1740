"""The description of one call of a recurrent layer by sizes, dtypes and flags, without any tensor.

These letters are used everywhere in gatewise (shapes are in brackets, `[T, B, I]`):

| letter | meaning |
|---|---|
| `T` | time steps |
| `B` | sequences in the batch |
| `I` | input features |
| `H` | hidden units |
| `P` | features of a projected hidden state; 0 without projection |
| `R` | features of the hidden state: `P` with projection, otherwise `H` |
| `G` | gates of the cell |
| `S` | states of the cell beside the hidden state |
| `L` | layers |
| `D` | directions, 1 or 2 |
| `N` | tokens of a packed batch: the sum of the lengths |
| `h`, `c` | hidden state, cell state |

The order of gates is that of PyTorch and cuDNN: `i f g o` for the LSTM (input, forget, cell candidate, output), `r z n`
for the GRU (reset, update, candidate).
"""

from __future__ import annotations

import dataclasses
import enum

import torch

from gatewise.cells import LSTM, Cell
from gatewise.contract.hashing import hash_once

NORMAL, LEAN = "normal", "lean"
"""The values of the argument `memory`: keep whatever makes the backward pass fastest, or keep little and recompute."""


class Layout(enum.Enum):
    """The way in which the lengths of sequences are given."""

    DENSE = "dense"  # [T, B, I]; every sequence has T steps
    HOST_LENGTHS = "lengths on the CPU"  # [T, B, I], padded at the end; the lengths are read without a device sync
    DEVICE_LENGTHS = "lengths on the GPU"  # [T, B, I], padded at the end; only GPU kernels read the lengths
    PACKED = "packed"  # [N, I] as in PackedSequence: longest sequence first, batch_sizes on the CPU


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """The description of one call: hashable, so that choices can be cached, and tested without a GPU.

    Attributes:
        time: T, the number of time steps of the longest sequence.
        batch: B, the number of sequences.
        input_size: I, the number of input features.
        hidden_size: H, the number of hidden units.
        proj_size: P, the number of features of the projected hidden state; 0 without a projection.
        num_layers: L, the number of layers.
        bidirectional: Whether there are two directions (D = 2).
        bias: Whether the two bias vectors exist.
        dtype: The dtype of input, states and weights.
        layout: The way in which the lengths of sequences are given.
        dropout: The probability of dropping an output between layers in this call; 0 in evaluation mode.
        needs_grad: Whether a backward pass may follow, for which tensors must be kept.
        allow_tf32: Whether the user's PyTorch settings allow TF32 in float32 products.
        traced: Whether the call is compiled, so that only tensors can be kept for the backward pass.
        projected: Whether x already contains the products `W_ih x` of the first layer, with D * G * H features;
            `input_size` is 0 then.
        lean: Whether the forward pass must keep only tensors that cannot be recomputed from x, the outputs and the cell
            states (gradient checkpointing); without effect if `needs_grad` is False.
        captured: Whether the call is captured in a CUDA graph, whose replay takes almost no CPU time.
        announced: Whether the warm-up calls of the capture choose their kernel in the same way
            (`gatewise.for_cuda_graph`), so that the chosen kernel has been initialised before the capture.
        cell: The cell, which states the equations of one step.
        resets: Whether the states are reset to zero before the steps that the caller marks.
        reserved: The number of multiprocessors that backward passes leave free, see `gatewise.for_data_parallel`.
        float32_gradients: Whether the weights are copies that autocast made of float32 parameters, so that their
            gradients are wanted in float32. A backward pass may return them in `dtype` all the same.
    """

    time: int
    batch: int
    input_size: int
    hidden_size: int
    proj_size: int = 0
    num_layers: int = 1
    bidirectional: bool = False
    bias: bool = True
    dtype: torch.dtype = torch.float32
    layout: Layout = Layout.DENSE
    dropout: float = 0.0
    needs_grad: bool = False
    allow_tf32: bool = False
    traced: bool = False
    projected: bool = False
    lean: bool = False
    captured: bool = False
    announced: bool = False
    cell: Cell = LSTM()  # noqa: RUF009  cells are immutable
    resets: bool = False
    reserved: int = 0
    float32_gradients: bool = False
    _hash: int | None = dataclasses.field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return self._hash or hash_once(self)

    @property
    def num_directions(self) -> int:
        """D, the number of directions: 2 if bidirectional, otherwise 1."""
        return 2 if self.bidirectional else 1

    @property
    def state_size(self) -> int:
        """R, the number of features of the hidden state."""
        return self.proj_size or self.hidden_size

    @property
    def output_size(self) -> int:
        """The number of features of the output, D * R."""
        return self.num_directions * self.state_size

    @property
    def gate_rows(self) -> int:
        """The number of rows of the weight matrices, G * H."""
        return len(self.cell.gates) * self.hidden_size

    @property
    def states_size(self) -> int:
        """The number of features of the states other than the hidden state, S * H."""
        return len(self.cell.states) * self.hidden_size

    def layer_input_size(self, layer: int) -> int:
        """Return the number of input features of a layer, counted from 0."""
        return self.input_size if layer == 0 else self.output_size

    @property
    def x_size(self) -> int:
        """The number of features of x: I, or those of its products with the input weights."""
        return self.gate_rows * self.num_directions if self.projected else self.input_size

    @property
    def weights_per_direction(self) -> int:
        """The number of tensors of one direction of one layer: 2, 2 with bias, 1 with projection, and parameters."""
        return 2 + 2 * self.bias + (self.proj_size > 0) + len(self.cell.parameters)

    @property
    def parameter_count(self) -> int:
        """The number of elements of all weights."""
        per_direction = [
            self.gate_rows * (self.layer_input_size(layer) + self.state_size + 2 * self.bias)
            + (self.proj_size + len(self.cell.parameters)) * self.hidden_size
            for layer in range(self.num_layers)
        ]
        return self.num_directions * sum(per_direction)

    @property
    def matmul_flops(self) -> float:
        """The floating-point operations of the matrix products of a forward pass; a multiply-add counts as two."""
        vectors = 2 * self.gate_rows * self.bias + len(self.cell.parameters) * self.hidden_size
        vectors *= self.num_layers * self.num_directions
        return 2.0 * self.time * self.batch * (self.parameter_count - vectors)

    @property
    def rebuilds_gates(self) -> bool:
        """Whether the backward pass recomputes gates that the forward pass did not keep: `lean`, in training."""
        return self.lean and self.needs_grad

    @property
    def element_bytes(self) -> int:
        """The size of one element of `dtype` in bytes."""
        return self.dtype.itemsize

    def replace(self, **changes: object) -> Problem:
        """Return a copy with the given fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """Return one line: the sizes, the dtype, and every flag that differs from its default."""
        sizes = f"T {self.time}, B {self.batch}, I {self.input_size}, H {self.hidden_size}"
        extras = [
            f"P {self.proj_size}" if self.proj_size else "",
            self.cell.name if type(self.cell) is not LSTM else "",
            f"{self.num_layers} layers" if self.num_layers != 1 else "",
            "2 directions" if self.bidirectional else "",
            "" if self.bias else "no bias",
            "input products given" if self.projected else "",
            self.layout.value if self.layout is not Layout.DENSE else "",
            "resets" if self.resets else "",
            f"dropout {self.dropout:g}" if self.dropout else "",
            str(self.dtype).removeprefix("torch."),
            "TF32 allowed" if self.allow_tf32 and self.dtype == torch.float32 else "",
            "training" if self.needs_grad else "inference",
            "lean memory" if self.rebuilds_gates else "",
            "in a CUDA graph" if self.captured else "",
            f"{self.reserved} multiprocessors left free" if self.reserved else "",
        ]
        return ", ".join([sizes, *filter(None, extras)])
