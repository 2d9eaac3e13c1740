"""The weight layouts of other systems: one `WeightLayout` each, as data.

| name | gates | matrices | biases |
|---|---|---|---|
| `torch` | i f g o | [4H, I], [4H, H] | two [4H] |
| `keras` | i f g o | [I, 4H], [H, 4H] | one [4H] |
| `keras-cudnn` | i f g o | [I, 4H] in cuDNN's order in memory, [H, 4H] of transposed gates | one [8H], two halves |
| `tf1-basic` | i g f o | one [I + H, 4H] | one [4H]; 1 is added to f at run time |
| `tf1-cudnn` | i g f o | one [I + H, 4H] | one [4H] |
| `systemml` | i f o g | one [I + H, 4H] | one [1, 4H] |
| `flax` | one tensor each | [I, H], [H, H] | one [H] each |
| `haste` | i g f o | [I, 4H], [H, 4H] | one [4H] |
| `torch-gru` | r z n | [3H, I], [3H, H] | two [3H] |
| `keras-gru` | z r n | [I, 3H], [H, 3H] | one [2, 3H] |
| `keras-cudnn-gru` | z r n | [I, 3H] in cuDNN's order in memory, [H, 3H] of transposed gates | one [6H] |
| `flax-gru` | one tensor each | [I, H], [H, H] | one [H] each, and a second one of n |
| `haste-gru` | z r n | [I, 3H], [H, 3H] | two [3H] |
| `torch-rnn` | one | [H, I], [H, H] | two [H] |
| `keras-rnn` | one | [I, H], [H, H] | one [H] |
| `flax-rnn` | one | [I, H], [H, H] | one [H] |

The layouts of RNNs are the same for tanh and ReLU; the weights do not say which of the two their layer computes.

Every layout names its system in `system`. The functions that interpret the table are in `packing`.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal, NamedTuple

from gatewise.cells import GRU, LSTM, RNN, Cell
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.contract.pytorch import pytorch_layer


class Form(enum.Enum):
    """The memory layout of a gate's matrix, which is [H, K] in PyTorch."""

    ROWS = "[H, K]"
    COLUMNS = "[K, H]"
    RESHAPED = "[K, H], with the numbers in the order in which [H, K] has them in memory"


class Matrix(NamedTuple):
    """The input or the recurrent weights.

    Attributes:
        name: The name of the tensor. `{gate}` stands for the letter of a gate.
        form: The memory layout of each gate's matrix.
        gates_along: The dimension along which the gates are concatenated; None if every gate has its own tensor.
    """

    name: str
    form: Form
    gates_along: Literal[0, 1] | None


class Bias(NamedTuple):
    """The biases of one direction.

    Attributes:
        names: The names of the tensors, as in `Matrix`; two if both biases of PyTorch exist.
        halves: Whether there is one tensor [2*G*H]: the input bias followed by the recurrent bias.
        rows: Whether the tensor is a matrix with one row for each bias.
        required: Whether there is always a bias, which may be zero.
        second: The gates that have a second bias; empty for all. The bias of the others is the sum of PyTorch's two.
    """

    names: tuple[str, ...]
    halves: bool = False
    rows: bool = False
    required: bool = True
    second: str = ""

    @property
    def told_apart(self) -> int:
        """The number of separate biases, 1 or 2."""
        return 2 if self.halves else len(self.names)


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
        bias: The biases.
        places: The prefixes of the tensors' names in a file.
        suffix: The suffix of every name: `{layer}` stands for the layer's number, `{reverse}` for `_reverse` in the
            second direction.
        separator: The separator between the parts of a name.
        layer_numbers: A pattern for the part of a name that has the layer's number; empty if there is none.
        marker: A pattern for the innermost scope of a cell, for layouts whose tensor names do not identify it.
        forget_bias: The constant that the system adds to the forget gate at run time.
        projection: The name of the projection's tensor; empty if the layout has none.
        refuses: Patterns of the names of further tensors that make the cell one of another kind, and descriptions of
            them.
        advice: The advice to the user when shapes do not fit.
        cell: The cell.
    """

    name: str
    system: str
    gates: str
    input: Matrix
    recurrent: Matrix | None
    bias: Bias
    places: Places
    suffix: str = ""
    separator: str = "/"
    layer_numbers: str = ""
    marker: str = ""
    forget_bias: float = 0.0
    projection: str = ""
    refuses: tuple[tuple[str, str], ...] = ()
    advice: str = "Check the layout."
    cell: Cell = LSTM()  # noqa: RUF009  an immutable statement

    @property
    def gates_of_pytorch(self) -> str:
        """The gates in the order of PyTorch, cuDNN and `DirectionWeights`."""
        return "".join(self.cell.gates)

    @property
    def layer(self) -> str:
        """The name of PyTorch's layer for the cell: "LSTM", "GRU" or "RNN"."""
        return pytorch_layer(self.cell).name

    @property
    def called(self) -> str:
        """The layer's name in a sentence, with its article."""
        return f"{'a' if self.layer == 'GRU' else 'an'} {self.layer}"

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The one or two weight matrices."""
        return (self.input,) if self.recurrent is None else (self.input, self.recurrent)


_KERAS_PLACES = Places(
    bidirectional="{name}/{direction}",
    stacked_bidirectional="{name}/{direction}",
    directions=("forward_layer", "backward_layer"),
)
_KERAS_GRU_PLACES = _KERAS_PLACES._replace(names=("gru", "bidirectional"))
_KERAS_RNN_PLACES = _KERAS_PLACES._replace(names=("simple_rnn", "bidirectional"))
_FLAX_PLACES = Places(
    "{name}/cell",
    "{name}/cell",
    "{name}/{direction}/cell",
    "{name}/{direction}/cell",
    ("forward_rnn", "backward_rnn"),
    ("rnn", "bidirectional"),
)
_NORMALISED = ((r"gamma|gamma_h|beta_h", "layer normalisation"),)
_RESET_BEFORE = (
    "A bias of 3H is that of reset_after=False, which multiplies the state by the reset gate before the recurrent "
    "product: no torch.nn.GRU computes that."
)
_PEEPHOLES = ((r"w_[ifo]_diag", "peepholes"), (r"projection/(kernel|bias)", "a projection"))

LAYOUTS: dict[str, WeightLayout] = {
    layout.name: layout
    for layout in (
        WeightLayout(
            name="torch",
            system="torch.nn.LSTM, gatewise.LSTM",
            gates="ifgo",
            input=Matrix("weight_ih", Form.ROWS, 0),
            recurrent=Matrix("weight_hh", Form.ROWS, 0),
            bias=Bias(("bias_ih", "bias_hh"), required=False),
            places=Places("{name}", "{name}", "{name}", "{name}"),
            suffix="_l{layer}{reverse}",
            separator=".",
            projection="weight_hr",
        ),
        WeightLayout(
            name="keras",
            system="LSTM of Keras 2 and 3",
            gates="ifgo",
            input=Matrix("kernel", Form.COLUMNS, 1),
            recurrent=Matrix("recurrent_kernel", Form.COLUMNS, 1),
            bias=Bias(("bias",), required=False),
            places=_KERAS_PLACES,
            advice="A bias of 8H is that of CuDNNLSTM: the layout keras-cudnn.",
        ),
        WeightLayout(
            name="keras-cudnn",
            system="CuDNNLSTM of Keras 2 and TensorFlow 1",
            gates="ifgo",
            input=Matrix("kernel", Form.RESHAPED, 1),
            recurrent=Matrix("recurrent_kernel", Form.ROWS, 1),
            bias=Bias(("bias",), halves=True),
            places=_KERAS_PLACES,
            advice="A bias of 4H is that of Keras' LSTM: the layout keras.",
        ),
        WeightLayout(
            name="tf1-basic",
            system="BasicLSTMCell, LSTMBlockCell, LSTMCell of TensorFlow 1",
            gates="igfo",
            input=Matrix("kernel", Form.COLUMNS, 1),
            recurrent=None,
            bias=Bias(("bias",)),
            places=Places(
                "{name}/rnn/basic_lstm_cell",
                "{name}/rnn/multi_rnn_cell/cell_{layer}/basic_lstm_cell",
                "{name}/bidirectional_rnn/{direction}/basic_lstm_cell",
                "{name}/stack_bidirectional_rnn/cell_{layer}/bidirectional_rnn/{direction}/basic_lstm_cell",
                ("fw", "bw"),
            ),
            layer_numbers=r"cell_(\d+)",
            marker="lstm",
            forget_bias=1.0,
            refuses=_PEEPHOLES,
        ),
        WeightLayout(
            name="tf1-cudnn",
            system="CudnnLSTM of TensorFlow 1, in its canonical form",
            gates="igfo",
            input=Matrix("kernel", Form.COLUMNS, 1),
            recurrent=None,
            bias=Bias(("bias",)),
            places=Places(
                "{name}/cudnn_lstm/rnn/multi_rnn_cell/cell_{layer}/cudnn_compatible_lstm_cell",
                "{name}/cudnn_lstm/rnn/multi_rnn_cell/cell_{layer}/cudnn_compatible_lstm_cell",
                "{name}/cudnn_lstm/stack_bidirectional_rnn/cell_{layer}/bidirectional_rnn/{direction}/cudnn_compatible_lstm_cell",
                "{name}/cudnn_lstm/stack_bidirectional_rnn/cell_{layer}/bidirectional_rnn/{direction}/cudnn_compatible_lstm_cell",
                ("fw", "bw"),
            ),
            layer_numbers=r"cell_(\d+)",
            marker="lstm",
            refuses=_PEEPHOLES,
        ),
        WeightLayout(
            name="systemml",
            system="the lstm layer of SystemML and SystemDS",
            gates="ifog",
            input=Matrix("W", Form.COLUMNS, 1),
            recurrent=None,
            bias=Bias(("b",), rows=True),
            places=Places(),
        ),
        WeightLayout(
            name="flax",
            system="LSTMCell, OptimizedLSTMCell of Flax linen",
            gates="ifgo",
            input=Matrix("i{gate}/kernel", Form.COLUMNS, None),
            recurrent=Matrix("h{gate}/kernel", Form.COLUMNS, None),
            bias=Bias(("h{gate}/bias",)),
            places=_FLAX_PLACES,
        ),
        WeightLayout(
            name="haste",
            system="haste_pytorch.LSTM",
            gates="igfo",
            input=Matrix("kernel", Form.COLUMNS, 1),
            recurrent=Matrix("recurrent_kernel", Form.COLUMNS, 1),
            bias=Bias(("bias",)),
            places=Places(),
            separator=".",
            refuses=_NORMALISED,
        ),
        WeightLayout(
            name="torch-gru",
            system="torch.nn.GRU, gatewise.GRU",
            gates="rzn",
            input=Matrix("weight_ih", Form.ROWS, 0),
            recurrent=Matrix("weight_hh", Form.ROWS, 0),
            bias=Bias(("bias_ih", "bias_hh"), required=False),
            places=Places("{name}", "{name}", "{name}", "{name}", names=("gru", "bidirectional")),
            suffix="_l{layer}{reverse}",
            separator=".",
            cell=GRU(),
        ),
        WeightLayout(
            name="keras-gru",
            system="GRU of Keras 2 and 3 with reset_after=True",
            gates="zrn",
            input=Matrix("kernel", Form.COLUMNS, 1),
            recurrent=Matrix("recurrent_kernel", Form.COLUMNS, 1),
            bias=Bias(("bias",), halves=True, rows=True, required=False),
            places=_KERAS_GRU_PLACES,
            advice=f"{_RESET_BEFORE} A bias of 6H is that of CuDNNGRU: the layout keras-cudnn-gru.",
            cell=GRU(),
        ),
        WeightLayout(
            name="keras-cudnn-gru",
            system="CuDNNGRU of Keras 2 and TensorFlow 1",
            gates="zrn",
            input=Matrix("kernel", Form.RESHAPED, 1),
            recurrent=Matrix("recurrent_kernel", Form.ROWS, 1),
            bias=Bias(("bias",), halves=True),
            places=_KERAS_GRU_PLACES,
            advice=f"A bias [2, 3H] is that of Keras' GRU: the layout keras-gru. {_RESET_BEFORE}",
            cell=GRU(),
        ),
        WeightLayout(
            name="flax-gru",
            system="GRUCell of Flax linen",
            gates="rzn",
            input=Matrix("i{gate}/kernel", Form.COLUMNS, None),
            recurrent=Matrix("h{gate}/kernel", Form.COLUMNS, None),
            bias=Bias(("i{gate}/bias", "h{gate}/bias"), second="n"),
            places=_FLAX_PLACES,
            cell=GRU(),
        ),
        WeightLayout(
            name="haste-gru",
            system="haste_pytorch.GRU",
            gates="zrn",
            input=Matrix("kernel", Form.COLUMNS, 1),
            recurrent=Matrix("recurrent_kernel", Form.COLUMNS, 1),
            bias=Bias(("bias", "recurrent_bias")),
            places=Places(names=("gru", "")),
            separator=".",
            refuses=_NORMALISED,
            cell=GRU(),
        ),
        WeightLayout(
            name="torch-rnn",
            system="torch.nn.RNN, gatewise.RNN",
            gates="z",
            input=Matrix("weight_ih", Form.ROWS, 0),
            recurrent=Matrix("weight_hh", Form.ROWS, 0),
            bias=Bias(("bias_ih", "bias_hh"), required=False),
            places=Places("{name}", "{name}", "{name}", "{name}", names=("rnn", "bidirectional")),
            suffix="_l{layer}{reverse}",
            separator=".",
            cell=RNN(),
        ),
        WeightLayout(
            name="keras-rnn",
            system="SimpleRNN of Keras 2 and 3",
            gates="z",
            input=Matrix("kernel", Form.COLUMNS, 1),
            recurrent=Matrix("recurrent_kernel", Form.COLUMNS, 1),
            bias=Bias(("bias",), required=False),
            places=_KERAS_RNN_PLACES,
            cell=RNN(),
        ),
        WeightLayout(
            name="flax-rnn",
            system="SimpleCell of Flax linen without residual connection",
            gates="z",
            input=Matrix("i/kernel", Form.COLUMNS, 1),
            recurrent=Matrix("h/kernel", Form.COLUMNS, 1),
            bias=Bias(("i/bias",)),
            places=_FLAX_PLACES,
            cell=RNN(),
        ),
    )
}
"""All layouts by name."""


def layout_named(layout: str | WeightLayout) -> WeightLayout:
    """Return a layout given by its name, or a `WeightLayout` unchanged.

    Raises:
        ArgumentError: There is no layout of this name; the message lists the known ones.
    """
    if isinstance(layout, WeightLayout):
        return layout
    if layout not in LAYOUTS:
        raise ArgumentError(sentence("layout", f"one of {', '.join(LAYOUTS)}", repr(layout)))
    return LAYOUTS[layout]


def layout_of_pytorch(cell: Cell) -> WeightLayout:
    """Return the layout of PyTorch's own module for a cell."""
    return next(layout for layout in LAYOUTS.values() if layout.name.startswith("torch") and layout.cell == cell)


def check_same_cell(source: WeightLayout, target: WeightLayout) -> None:
    """Raise `ArgumentError` unless two layouts are of one cell."""
    if source.cell != target.cell:
        known = ", ".join(layout.name for layout in LAYOUTS.values() if layout.cell == source.cell)
        advice = f"Choose one of {known}."
        raise ArgumentError(
            sentence("the layout of the target", f"that of {source.called} as the source's", target.name, advice)
        )
