"""One LSTM call as shapes, dtypes and flags, without any tensor.

The legend used everywhere in gatewise (shapes in brackets, `[T, B, I]`):

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

Gates stand in the order of PyTorch and cuDNN: `i f g o` for the LSTM (input, forget, cell candidate, output), `r z n`
for the GRU (reset, update, candidate).
"""

from __future__ import annotations

import dataclasses
import enum

import torch

from gatewise.cells import LSTM, Cell
from gatewise.contract.hashing import hash_once

NORMAL, LEAN = "normal", "lean"
"""What a call may keep for its backward pass, the argument `memory`: whatever makes it fastest, or little."""


class Layout(enum.Enum):
    """How the sequences of a batch lie in memory."""

    DENSE = "dense"  # [T, B, I], every sequence T steps long
    HOST_LENGTHS = "lengths on the CPU"  # [T, B, I] padded at the end, lengths readable without a device sync
    DEVICE_LENGTHS = "lengths on the GPU"  # [T, B, I] padded at the end, lengths readable only by kernels
    PACKED = "packed"  # [N, I] as torch's PackedSequence: longest first, batch_sizes on the CPU


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """What is asked of a kernel: hashable, so that choices can be cached and tested without a GPU.

    Attributes:
        time: T, the number of time steps (the longest sequence's).
        batch: B, the number of sequences.
        input_size: I, features of the input.
        hidden_size: H, hidden units.
        proj_size: P, features of the projected hidden state; 0 for none.
        num_layers: L.
        bidirectional: Whether D is 2.
        bias: Whether both bias vectors exist.
        dtype: Of input, state and weights.
        layout: How sequences of different length are given.
        dropout: Probability of dropping an output between layers in this call; 0 when not training.
        needs_grad: Whether a backward pass may follow, so that something must be kept for it.
        allow_tf32: Whether float32 products may be rounded to TF32 in this call (the user's PyTorch settings).
        traced: Whether the call is being compiled, so that only tensors can be kept for backward.
        projected: Whether x holds the first layer's input products `W_ih x` already, D * G * H features, instead of its
            input; `input_size` is 0 then.
        lean: Whether a forward pass that keeps something for backward must keep little: nothing that can be computed
            again from x, the outputs and the cell states.
        captured: Whether the call is recorded in a CUDA graph, whose replays cost the CPU nothing.
        announced: Whether the calls that warm up the capture choose as it does (`gatewise.for_cuda_graph`), so that the
            kernel it takes has been set up by then, whichever it is.
        cell: The cell.
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
    cell: Cell = LSTM()  # noqa: RUF009  an immutable statement
    _hash: int | None = dataclasses.field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return self._hash or hash_once(self)

    @property
    def num_directions(self) -> int:
        """D: 2 when bidirectional, otherwise 1."""
        return 2 if self.bidirectional else 1

    @property
    def state_size(self) -> int:
        """R: features of the hidden state that travels between steps and layers."""
        return self.proj_size or self.hidden_size

    @property
    def output_size(self) -> int:
        """Features of the output, D * R."""
        return self.num_directions * self.state_size

    @property
    def gate_rows(self) -> int:
        """Rows of the weight matrices, G * H."""
        return len(self.cell.gates) * self.hidden_size

    @property
    def states_size(self) -> int:
        """Features of the states beside the hidden state, S * H."""
        return len(self.cell.states) * self.hidden_size

    def layer_input_size(self, layer: int) -> int:
        """Features that layer `layer` (from 0) reads."""
        return self.input_size if layer == 0 else self.output_size

    @property
    def x_size(self) -> int:
        """Features of x: I, or those of its products with the input weights."""
        return self.gate_rows * self.num_directions if self.projected else self.input_size

    @property
    def weights_per_direction(self) -> int:
        """How many tensors one direction of one layer has: 2, +2 with bias, +1 with projection."""
        return 2 + 2 * self.bias + (self.proj_size > 0)

    @property
    def parameter_count(self) -> int:
        """Elements of all the weights."""
        per_direction = [
            self.gate_rows * (self.layer_input_size(layer) + self.state_size + 2 * self.bias)
            + self.proj_size * self.hidden_size
            for layer in range(self.num_layers)
        ]
        return self.num_directions * sum(per_direction)

    @property
    def matmul_flops(self) -> float:
        """Floating-point operations of every matrix product of a forward pass; a multiply-add counts two."""
        biases = 2 * self.gate_rows * self.num_layers * self.num_directions * self.bias
        return 2.0 * self.time * self.batch * (self.parameter_count - biases)

    @property
    def rebuilds_gates(self) -> bool:
        """Whether a backward pass computes gates again that the forward pass did not keep: `lean`, in training."""
        return self.lean and self.needs_grad

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of `dtype`."""
        return self.dtype.itemsize

    def replace(self, **changes: object) -> Problem:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """One line: sizes, dtype and every flag that differs from the plain case."""
        sizes = f"T {self.time}, B {self.batch}, I {self.input_size}, H {self.hidden_size}"
        extras = [
            f"P {self.proj_size}" if self.proj_size else "",
            self.cell.name if type(self.cell) is not LSTM else "",
            f"{self.num_layers} layers" if self.num_layers != 1 else "",
            "2 directions" if self.bidirectional else "",
            "" if self.bias else "no bias",
            "input products given" if self.projected else "",
            self.layout.value if self.layout is not Layout.DENSE else "",
            f"dropout {self.dropout:g}" if self.dropout else "",
            str(self.dtype).removeprefix("torch."),
            "TF32 allowed" if self.allow_tf32 and self.dtype == torch.float32 else "",
            "training" if self.needs_grad else "inference",
            "lean memory" if self.rebuilds_gates else "",
            "in a CUDA graph" if self.captured else "",
        ]
        return ", ".join([sizes, *filter(None, extras)])
