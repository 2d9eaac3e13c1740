"""The weight layouts of other systems: one `WeightLayout` each, as data.

| name | gates | matrices | biases |
|---|---|---|---|
| `torch` | i f g o | [4H, I], [4H, H] | two [4H] |
| `keras` | i f g o | [I, 4H], [H, 4H] | one [4H] |
| `keras-cudnn` | i f g o | [I, 4H] in cuDNN's order in memory, [H, 4H] of transposed gates | one [8H], two halves |
| `tf1-basic` | i g f o | one [I + H, 4H] | one [4H]; 1 is added to f at run time |
| `tf1-cudnn` | i g f o | one [I + H, 4H] | one [4H] |
| `systemml` | i f o g | one [I + H, 4H] | one [1, 4H] |
| `haste` | i g f o | [I, 4H], [H, 4H] | one [4H] |
| `torch-gru` | r z n | [3H, I], [3H, H] | two [3H] |
| `keras-gru` | z r n | [I, 3H], [H, 3H] | one [2, 3H] |
| `keras-cudnn-gru` | z r n | [I, 3H] in cuDNN's order in memory, [H, 3H] of transposed gates | one [6H] |
| `haste-gru` | z r n | [I, 3H], [H, 3H] | two [3H] |
| `torch-rnn` | one | [H, I], [H, H] | two [H] |
| `keras-rnn` | one | [I, H], [H, H] | one [H] |
| `xlstm-slstm` | one tensor each | [N, I/N, I/N], [N, H/N, 4H/N] for N heads | one [4H], head by head |
| `xlstm-slstm-vanilla` | one tensor each | [N, I/N, I/N], [N, 4H/N, H/N] for N heads | one [4H] |

The layouts of RNNs are the same for tanh and ReLU; the weights do not say which of the two their layer computes. The
layouts of Flax are in `flax_layouts`, those of layer-normalized cells in `layer_norm_layouts`.

Every layout names its system in `system`. The functions that interpret the table are in `packing`.
"""

from __future__ import annotations

import dataclasses
import math
import numbers

from gatewise.cells import GRU, RNN, SLSTM, Cell
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.contract.pytorch import in_pytorch
from gatewise.interop.flax_layouts import FLAX_LAYOUTS
from gatewise.interop.layer_norm_layouts import LAYER_NORM_LAYOUTS
from gatewise.interop.weight_layout import Bias, Form, Matrix, Parameters, Places, WeightLayout

_KERAS_PLACES = Places(
    bidirectional="{name}/{direction}",
    stacked_bidirectional="{name}/{direction}",
    directions=("forward_layer", "backward_layer"),
)
_KERAS_GRU_PLACES = _KERAS_PLACES._replace(names=("gru", "bidirectional"))
_KERAS_RNN_PLACES = _KERAS_PLACES._replace(names=("simple_rnn", "bidirectional"))
_OF_XLSTM = "slstm_cell/_recurrent_kernel_"
_RESET_BEFORE = (
    "A bias of 3H is that of reset_after=False, which multiplies the state by the reset gate before the recurrent "
    "product: no torch.nn.GRU computes that."
)
_OTHER_CELLS_OF_TF1 = (
    (r"w_[ifo]_diag", "peepholes", ""),
    (r"projection/(kernel|bias)", "a projection", ""),
    (r"(input|transform|forget|output|state)/(gamma|beta)", "layer normalisation", "tf1-layer-norm"),
)

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
            refuses=((r"(kernel|recurrent|state)_norm[/.](gamma|beta)", "layer normalisation", "tfa-layer-norm"),),
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
            refuses=_OTHER_CELLS_OF_TF1,
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
            refuses=_OTHER_CELLS_OF_TF1,
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
            name="haste",
            system="haste_pytorch.LSTM",
            gates="igfo",
            input=Matrix("kernel", Form.COLUMNS, 1),
            recurrent=Matrix("recurrent_kernel", Form.COLUMNS, 1),
            bias=Bias(("bias",)),
            places=Places(),
            separator=".",
            refuses=((r"gamma|gamma_h|beta_h", "layer normalisation", "haste-layer-norm"),),
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
            name="haste-gru",
            system="haste_pytorch.GRU",
            gates="zrn",
            input=Matrix("kernel", Form.COLUMNS, 1),
            recurrent=Matrix("recurrent_kernel", Form.COLUMNS, 1),
            bias=Bias(("bias", "recurrent_bias")),
            places=Places(names=("gru", "")),
            separator=".",
            refuses=((r"gamma", "layer normalisation", "haste-layer-norm-gru"),),
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
        *(
            WeightLayout(
                name=name,
                system=f"sLSTMLayer of xlstm, backend {backend}",
                gates="ifzo",
                input=Matrix("{gate}gate/weight", Form.BLOCKS, None),
                recurrent=recurrent,
                bias=Bias(("slstm_cell/_bias_",), by_heads=backend == "cuda"),
                places=Places(names=("slstm", "")),
                separator=".",
                # The layer computes the sum of gate i by its module `fgate`, and that of gate f by `igate`.
                spelled=(("igate/weight", "fgate/weight"), ("fgate/weight", "igate/weight")),
                convolved=("conv1d/conv/weight", "if"),
                in_stacks=False,
                advice=f"The recurrent weights of the backend {other} are those of the layout {other_name}.",
                cell=SLSTM(),
            )
            for name, backend, recurrent, other_name, other in (
                ("xlstm-slstm", "cuda", Matrix(_OF_XLSTM, Form.COLUMN_BLOCKS, 2), "xlstm-slstm-vanilla", "vanilla"),
                ("xlstm-slstm-vanilla", "vanilla", Matrix(_OF_XLSTM, Form.BLOCKS, 1), "xlstm-slstm", "cuda"),
            )
        ),
        *FLAX_LAYOUTS,
        *LAYER_NORM_LAYOUTS,
    )
}
"""All layouts by name."""

GATEWISE = "gatewise"
"""The name of the layout of a `gatewise.Recurrent` with the cell of the other layout of a conversion."""


def layout_named(layout: str | WeightLayout, argument: str = "layout", others: tuple[str, ...] = ()) -> WeightLayout:
    """Return a layout given by its name, or a `WeightLayout` unchanged.

    Args:
        layout: The name or the layout.
        argument: The argument that has it, for the error.
        others: Further names that the argument may have, for the error.

    Raises:
        ArgumentError: There is no layout of this name; the message lists the known ones.
    """
    if isinstance(layout, WeightLayout):
        return layout
    if layout not in LAYOUTS:
        raise ArgumentError(sentence(argument, f"one of {', '.join([*LAYOUTS, *others])}", repr(layout)))
    return LAYOUTS[layout]


def default_target(source: str | WeightLayout) -> str:
    """Return the name of PyTorch's layout for the cell of a layout, or "gatewise" if PyTorch does not have the cell.

    Raises:
        ArgumentError: There is no such layout, or it is "gatewise", which does not say what the cell is.
    """
    if source == GATEWISE:
        advice = "It takes its cell from the layout of the target."
        raise ArgumentError(sentence("the layout of the target", "given for the source gatewise", "none", advice))
    cell = layout_named(source, "source_layout", (GATEWISE,)).cell
    if not in_pytorch(cell):
        return GATEWISE
    return next(name for name, layout in LAYOUTS.items() if name.startswith("torch") and layout.cell == cell)


def layouts_of_conversion(source: str | WeightLayout, target: str | WeightLayout) -> tuple[WeightLayout, WeightLayout]:
    """Return the layouts of a conversion, given by their names or as they are.

    Args:
        source: The layout of the source, or "gatewise".
        target: The layout of the target, or "gatewise".

    Raises:
        ArgumentError: There is no such layout; the layouts are of different cells; or both are "gatewise".
    """
    if source == GATEWISE and target == GATEWISE:
        raise ArgumentError(sentence("layout", "that of another system on one side", "gatewise on both sides"))
    if source == GATEWISE:
        target = layout_named(target, "target_layout")
        return _layout_of_gatewise(target.cell), target
    source = layout_named(source, "source_layout", (GATEWISE,))
    target = (
        _layout_of_gatewise(source.cell) if target == GATEWISE else layout_named(target, "target_layout", (GATEWISE,))
    )
    if source.cell != target.cell:
        known = [layout.name for layout in LAYOUTS.values() if layout.cell == source.cell]
        raise ArgumentError(
            sentence(
                "the layout of the target",
                f"that of {source.called} as the source's",
                target.name,
                f"Choose one of {', '.join([*known, GATEWISE])}.",
            )
        )
    return source, target


def adding_to_forget(
    source: WeightLayout, target: WeightLayout, constant: float | None
) -> tuple[WeightLayout, WeightLayout]:
    """Return the layouts of a conversion, of cells that were made with another `forget_bias` where they have one.

    Args:
        source: The layout of the source.
        target: The layout of the target.
        constant: The constant that the cells of TensorFlow 1 add to the forget gate at run time; None for the default
            of each layout.

    Raises:
        ArgumentError: Neither layout is of cells that add a constant, or it is no finite number.
    """
    if constant is None:
        return source, target
    if not isinstance(constant, numbers.Real) or not math.isfinite(constant):
        raise ArgumentError(sentence("forget_bias", "a finite number", repr(constant)))
    if not (source.adds_to_forget or target.adds_to_forget) or GATEWISE == source.name == target.name:
        known = " and ".join(name for name, layout in LAYOUTS.items() if layout.adds_to_forget)
        expectation = f"left out for the target {target.name} and the source {source.name}"
        raise ArgumentError(sentence("forget_bias", expectation, constant, f"Only the layouts {known} have one."))
    source, target = (
        layout.adding_to_forget(constant) if layout.name != GATEWISE and layout.adds_to_forget else layout
        for layout in (source, target)
    )
    return source, target


def with_heads(target: WeightLayout, heads: int | None) -> WeightLayout:
    """Return the layout of a target whose matrices are written in the blocks of so many heads.

    Args:
        target: The layout.
        heads: The number of heads; None for the layout's default.

    Raises:
        ArgumentError: The layout has no blocks, or the number is not positive.
    """
    if heads is None:
        return target
    if not target.in_blocks:
        known = " and ".join(name for name, layout in LAYOUTS.items() if layout.in_blocks)
        advice = f"Only the targets {known} have heads, and {GATEWISE} for a source of theirs."
        raise ArgumentError(sentence("heads", f"left out for the target {target.name}", heads, advice))
    if heads < 1:
        raise ArgumentError(sentence("heads", "a positive number", heads))
    return dataclasses.replace(target, heads=heads)


def _layout_of_gatewise(cell: Cell) -> WeightLayout:
    in_blocks = any(layout.in_blocks for layout in LAYOUTS.values() if layout.cell == cell)
    return WeightLayout(
        name=GATEWISE,
        system="gatewise.Recurrent",
        gates="".join(cell.gates),
        input=Matrix("weight_ih", Form.ROWS, 0),
        recurrent=Matrix("weight_hh", Form.ROWS_OF_BLOCKS if in_blocks else Form.ROWS, 0),
        bias=Bias(("bias_ih", "bias_hh"), required=False),
        places=Places("{name}", "{name}", "{name}", "{name}", names=("recurrent", "bidirectional")),
        suffix="_l{layer}{reverse}",
        separator=".",
        parameters=tuple(Parameters(name, (name,)) for name in cell.parameters),
        cell=cell,
    )
