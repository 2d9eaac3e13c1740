"""The description of a weight layout, as data."""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal, NamedTuple

from gatewise.cells import LSTM, Cell
from gatewise.contract.pytorch import in_pytorch, pytorch_layer


class Form(enum.Enum):
    """The memory layout of a gate's matrix, which is [H, K] in PyTorch."""

    ROWS = "[H, K]"
    COLUMNS = "[K, H]"
    RESHAPED = "[K, H], with the numbers in the order in which [H, K] has them in memory"
    BLOCKS = "[N, H/N, K/N], the blocks of N heads, outside of which the matrix is zero"
    COLUMN_BLOCKS = "[N, K/N, H/N], the same with each block transposed"
    ROWS_OF_BLOCKS = "[H, K/N], the rows of the same blocks"

    @property
    def in_blocks(self) -> bool:
        """Whether the matrix is stored as the blocks of heads."""
        return self in (Form.BLOCKS, Form.COLUMN_BLOCKS, Form.ROWS_OF_BLOCKS)

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return 3 if self in (Form.BLOCKS, Form.COLUMN_BLOCKS) else 2


class Matrix(NamedTuple):
    """The input or the recurrent weights.

    Attributes:
        name: The name of the tensor. `{gate}` stands for the letter of a gate.
        form: The memory layout of each gate's matrix.
        gates_along: The dimension along which the gates are concatenated; None if every gate has its own tensor.
    """

    name: str
    form: Form
    gates_along: Literal[0, 1, 2] | None


class Bias(NamedTuple):
    """The biases of one direction.

    Attributes:
        names: The names of the tensors, as in `Matrix`; two if both biases of PyTorch exist.
        halves: Whether there is one tensor [2*G*H]: the input bias followed by the recurrent bias.
        rows: Whether the tensor is a matrix with one row for each bias.
        required: Whether there is always a bias, which may be zero.
        second: The gates that have a second bias; empty for all. The bias of the others is the sum of PyTorch's two.
        by_heads: Whether the tensor has all gates of one head after the other: [N*G*H/N].
    """

    names: tuple[str, ...]
    halves: bool = False
    rows: bool = False
    required: bool = True
    second: str = ""
    by_heads: bool = False

    @property
    def told_apart(self) -> int:
        """The number of separate biases, 1 or 2."""
        return 2 if self.halves else len(self.names)


class Parameters(NamedTuple):
    """A tensor that has learned parameters of the cell, [H] each, one after the other.

    If several tensors have the same parameter, the parameter is their sum. It is written to the first of them, and the
    others are written with zeros in its place.

    Attributes:
        tensor: The name of the tensor.
        names: The names of the parameters in the cell, in their order in the tensor.
        rows: The number of rows of the tensor; 0 for a vector.
        required: Whether the tensor is always there.
    """

    tensor: str
    names: tuple[str, ...]
    rows: int = 0
    required: bool = True


class Places(NamedTuple):
    """The names under which the tensors of a direction are written; when reading, any prefix is accepted.

    `{name}` stands for the module, `{layer}` for the layer's number, `{direction}` for one of `directions`. If
    `{layer}` occurs neither here nor in the layout's `suffix`, every layer is a separate module.

    Attributes:
        single: The name for one layer and one direction.
        stacked: The name for several layers.
        bidirectional: The name for one layer and two directions; empty if the layout has no second direction.
        stacked_bidirectional: The name for several layers and two directions.
        directions: The names of the directions.
        names: The default names of modules with one direction and with two.
    """

    single: str = "{name}"
    stacked: str = "{name}"
    bidirectional: str = ""
    stacked_bidirectional: str = ""
    directions: tuple[str, str] = ("", "")
    names: tuple[str, str] = ("lstm", "bidirectional")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WeightLayout:
    """The way in which one system stores the weights of a cell.

    Attributes:
        name: The name of the layout.
        system: The name of the system.
        gates: The order of the gates, a permutation of the cell's.
        input: The input weights; if `recurrent` is None, they are followed by the rows of the recurrent weights.
        recurrent: The recurrent weights; None if both are one matrix.
        recurrent_first: Whether the rows of the recurrent weights come first where both are one matrix.
        bias: The biases.
        heads: The number of heads that is written, for matrices in blocks.
        convolved: The name of a tensor that a layer has if some gates read its input after a convolution, and these
            gates. The input of the layer is then the convolved input, [I/2], beside the input itself.
        in_stacks: Whether layers of the system follow each other directly, so that they can be one stack.
        places: The prefixes of the tensors' names in a file.
        suffix: The suffix of every name: `{layer}` stands for the layer's number, `{reverse}` for `_reverse` in the
            second direction.
        separator: The separator between the parts of a name.
        layer_numbers: A pattern for the part of a name that has the layer's number; empty if there is none.
        marker: A pattern for the innermost scope of a cell, for layouts whose tensor names do not identify it.
        forget_bias: The constant that the system adds to the forget gate at run time.
        shift_of_forget: The constant that the system adds to the forget gate at run time, less the cell's own
            `forget_bias`; it is part of the cell's shift.
        spelled: Names of tensors, without prefix and suffix, that the system spells in another way, in pairs: the name
            that follows from the templates, and the system's.
        projection: The name of the projection's tensor; empty if the layout has none.
        refuses: Patterns of the names of further tensors that make the cell one of another kind, descriptions of
            them, and the names of the layouts of that kind, which are empty if there is none.
        parameters: The tensors that have the parameters of the cell.
        advice: The advice to the user when shapes do not fit.
        not_found: The advice to the user when no layer is found.
        cell: The cell.
    """

    name: str
    system: str
    gates: str
    input: Matrix
    recurrent: Matrix | None
    bias: Bias
    places: Places
    recurrent_first: bool = False
    heads: int = 1
    convolved: tuple[str, str] = ("", "")
    in_stacks: bool = True
    suffix: str = ""
    separator: str = "/"
    layer_numbers: str = ""
    marker: str = ""
    forget_bias: float = 0.0
    shift_of_forget: float = 0.0
    spelled: tuple[tuple[str, str], ...] = ()
    projection: str = ""
    refuses: tuple[tuple[str, str, str], ...] = ()
    parameters: tuple[Parameters, ...] = ()
    advice: str = "Check the layout."
    not_found: str = "Check the file and the layout."
    cell: Cell = LSTM()  # noqa: RUF009  an immutable statement

    @property
    def gates_of_pytorch(self) -> str:
        """The gates in the order of PyTorch, cuDNN and `DirectionWeights`."""
        return "".join(self.cell.gates)

    @property
    def layer(self) -> str:
        """The name of PyTorch's layer for the cell, "LSTM", "GRU" or "RNN", or of the cell's class if there is none."""
        return pytorch_layer(self.cell).name if in_pytorch(self.cell) else type(self.cell).__name__

    @property
    def called(self) -> str:
        """The layer's name in a sentence, with its article."""
        return f"{'an' if self.layer in ('LSTM', 'RNN') else 'a'} {self.layer}"

    @property
    def adds_to_forget(self) -> float:
        """The constant that the system adds to the forget gate at run time."""
        own = getattr(self.cell, "forget_bias", 0.0) if "shift_f" in self.cell.parameters else 0.0
        return self.forget_bias + self.shift_of_forget + own

    def adding_to_forget(self, constant: float) -> WeightLayout:
        """Return the layout of cells that were made with another `forget_bias`.

        Args:
            constant: The constant that these cells add to the forget gate at run time.
        """
        if self.forget_bias:
            return dataclasses.replace(self, forget_bias=constant)
        return dataclasses.replace(self, shift_of_forget=self.shift_of_forget + constant - self.adds_to_forget)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The one or two weight matrices."""
        return (self.input,) if self.recurrent is None else (self.input, self.recurrent)

    @property
    def in_blocks(self) -> bool:
        """Whether some matrix is stored as the blocks of heads."""
        return any(matrix.form.in_blocks for matrix in self.matrices)
