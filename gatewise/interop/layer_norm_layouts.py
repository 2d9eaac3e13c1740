"""The weight layouts of layer-normalized cells in other systems.

| name | gates | matrices | gains and shifts |
|---|---|---|---|
| `haste-layer-norm` | i g f o | [I, 4H], [H, 4H] | gains [2, 4H], shifts [4H]; of the cell state [H] |
| `fastrnns-layer-norm` | i f g o | [4H, I], [4H, H] | gains and shifts of both sums [4H]; of the cell state [H] |
| `tfa-layer-norm` | i f g o | [I, 4H], [H, 4H] | the same, and one more shift [4H] |
| `tf1-layer-norm` | i g f o | one [I + H, 4H] | [H] for each gate and for the cell state |
| `icefall-layer-norm` | i f g o | [4H, I], [4H, H], biases [4H] | [H] for each gate and for the cell state |
| `lingvo-layer-norm` | g i f o | one [I + H, 4H] | gains [4H], shifts [4H] |
| `lingvo-lean` | g i f o | one [I + H, 4H] | [H] for each gate and for the cell state |
| `haste-layer-norm-gru` | z r n | [I, 3H], [H, 3H] | gains [2, 3H], shifts of both sums [3H] |
| `dreamerv3-gru` | r n z | one [H + I, 3H] | gains [3H], shifts [3H] |

Where a system adds several shifts to a sum, the cell has one shift, which is their sum.
"""

from __future__ import annotations

from gatewise.cells import LayerNormGRU, LayerNormLSTM
from gatewise.interop.weight_layout import Bias, Form, Matrix, Parameters, Places, WeightLayout

_NO_BIAS = Bias((), required=False)
_PROJECTION_OF_LINGVO = (r"w_proj[/.]var", "a projection", "")


def _each(kind: str, gates: str) -> tuple[str, ...]:
    return tuple(f"{kind}_{gate}" for gate in gates)


def _scopes(scopes: dict[str, str], gain: str, shift: str) -> tuple[Parameters, ...]:
    """Return the tensors of normalizations that have scopes of their own, given as the scope of each gate or state."""
    gains = [Parameters(f"{scope}/{gain}", (f"gain_{name}",)) for name, scope in scopes.items()]
    return (*gains, *(Parameters(f"{scope}/{shift}", (f"shift_{name}",)) for name, scope in scopes.items()))


def _of_modules(name: str, system: str, cell: LayerNormLSTM, parameters: tuple[Parameters, ...]) -> WeightLayout:
    """Return the layout of a stack of PyTorch modules `layers.<number>.cell`."""
    place = "{name}/layers/{layer}/cell"
    return WeightLayout(
        name=name,
        system=system,
        gates="ifgo",
        input=Matrix("weight_ih", Form.ROWS, 0),
        recurrent=Matrix("weight_hh", Form.ROWS, 0),
        bias=Bias(("bias_ih", "bias_hh"), required=False) if cell.bias else _NO_BIAS,
        places=Places(place, place),
        separator=".",
        layer_numbers=r"(\d+)",
        refuses=(("weight_hr", "a projection", ""),),
        parameters=parameters,
        cell=cell,
    )


LAYER_NORM_LAYOUTS = (
    WeightLayout(
        name="haste-layer-norm",
        system="haste_pytorch.LayerNormLSTM",
        gates="igfo",
        input=Matrix("kernel", Form.COLUMNS, 1),
        recurrent=Matrix("recurrent_kernel", Form.COLUMNS, 1),
        bias=_NO_BIAS,
        places=Places(),
        separator=".",
        parameters=(
            Parameters("gamma", (*_each("gain_ih", "igfo"), *_each("gain_hh", "igfo")), rows=2),
            Parameters("bias", _each("shift", "igfo")),
            Parameters("gamma_h", ("gain_c",)),
            Parameters("beta_h", ("shift_c",)),
        ),
        cell=LayerNormLSTM.of("haste"),
    ),
    _of_modules(
        "fastrnns-layer-norm",
        "script_lnlstm of PyTorch's benchmarks/fastrnns",
        LayerNormLSTM.of("torchscript"),
        (
            Parameters("layernorm_i/weight", _each("gain_ih", "ifgo")),
            Parameters("layernorm_h/weight", _each("gain_hh", "ifgo")),
            Parameters("layernorm_c/weight", ("gain_c",)),
            Parameters("layernorm_i/bias", _each("shift", "ifgo")),
            Parameters("layernorm_h/bias", _each("shift", "ifgo")),
            Parameters("layernorm_c/bias", ("shift_c",)),
        ),
    ),
    WeightLayout(
        name="tfa-layer-norm",
        system="LayerNormLSTMCell of TensorFlow Addons",
        gates="ifgo",
        input=Matrix("kernel", Form.COLUMNS, 1),
        recurrent=Matrix("recurrent_kernel", Form.COLUMNS, 1),
        bias=_NO_BIAS,
        places=Places(
            bidirectional="{name}/{direction}",
            stacked_bidirectional="{name}/{direction}",
            directions=("forward_layer", "backward_layer"),
            names=("rnn", "bidirectional"),
        ),
        parameters=(
            Parameters("kernel_norm/gamma", _each("gain_ih", "ifgo")),
            Parameters("recurrent_norm/gamma", _each("gain_hh", "ifgo")),
            Parameters("state_norm/gamma", ("gain_c",)),
            Parameters("kernel_norm/beta", _each("shift", "ifgo")),
            Parameters("recurrent_norm/beta", _each("shift", "ifgo")),
            Parameters("bias", _each("shift", "ifgo"), required=False),
            Parameters("state_norm/beta", ("shift_c",)),
        ),
        cell=LayerNormLSTM.of("tensorflow_addons"),
    ),
    WeightLayout(
        name="tf1-layer-norm",
        system="LayerNormBasicLSTMCell of TensorFlow 1",
        gates="igfo",
        input=Matrix("kernel", Form.COLUMNS, 1),
        recurrent=None,
        bias=_NO_BIAS,
        places=Places(
            "{name}/rnn/layer_norm_basic_lstm_cell",
            "{name}/rnn/multi_rnn_cell/cell_{layer}/layer_norm_basic_lstm_cell",
            "{name}/bidirectional_rnn/{direction}/layer_norm_basic_lstm_cell",
            "{name}/stack_bidirectional_rnn/cell_{layer}/bidirectional_rnn/{direction}/layer_norm_basic_lstm_cell",
            ("fw", "bw"),
        ),
        layer_numbers=r"cell_(\d+)",
        marker="lstm",
        parameters=_scopes(
            {"i": "input", "g": "transform", "f": "forget", "o": "output", "c": "state"}, "gamma", "beta"
        ),
        cell=LayerNormLSTM.of("tensorflow1"),
    ),
    _of_modules(
        "icefall-layer-norm",
        "LayerNormLSTM of icefall",
        LayerNormLSTM.of("icefall"),
        _scopes(
            {"i": "layernorm_i", "f": "layernorm_f", "g": "layernorm_cx", "o": "layernorm_o", "c": "layernorm_cy"},
            "weight",
            "bias",
        ),
    ),
    WeightLayout(
        name="lingvo-layer-norm",
        system="LayerNormalizedLSTMCellSimple of Lingvo",
        gates="gifo",
        input=Matrix("wm/var", Form.COLUMNS, 1),
        recurrent=None,
        bias=_NO_BIAS,
        places=Places(names=("rnn", "")),
        refuses=(_PROJECTION_OF_LINGVO,),
        parameters=(
            Parameters("ln_scale/var", _each("gain", "gifo")),
            Parameters("b/var", _each("shift", "gifo")),
        ),
        cell=LayerNormLSTM.of("lingvo"),
    ),
    WeightLayout(
        name="lingvo-lean",
        system="LayerNormalizedLSTMCellLean of Lingvo",
        gates="gifo",
        input=Matrix("wm/var", Form.COLUMNS, 1),
        recurrent=None,
        bias=_NO_BIAS,
        places=Places(names=("rnn", "")),
        refuses=(_PROJECTION_OF_LINGVO, (r"b[/.]var", "enable_lstm_bias", "")),
        parameters=tuple(
            Parameters(f"{kind}_{scope}/var", (f"{own}_{name}",))
            for kind, own in (("ln_scale", "gain"), ("bias", "shift"))
            for name, scope in {"g": "i_i", "i": "i_g", "f": "f_g", "o": "o_g", "c": "c"}.items()
        ),
        cell=LayerNormLSTM.of("lingvo_lean"),
    ),
    WeightLayout(
        name="haste-layer-norm-gru",
        system="haste_pytorch.LayerNormGRU",
        gates="zrn",
        input=Matrix("kernel", Form.COLUMNS, 1),
        recurrent=Matrix("recurrent_kernel", Form.COLUMNS, 1),
        bias=_NO_BIAS,
        places=Places(names=("gru", "")),
        separator=".",
        parameters=(
            Parameters("gamma", (*_each("gain_ih", "zrn"), *_each("gain_hh", "zrn")), rows=2),
            Parameters("bias", ("shift_z", "shift_r", "shift_ih_n")),
            Parameters("recurrent_bias", ("shift_z", "shift_r", "shift_hh_n")),
        ),
        cell=LayerNormGRU(gates="apart"),
    ),
    WeightLayout(
        name="dreamerv3-gru",
        system="RSSM of DreamerV3 (2023)",
        gates="rnz",
        input=Matrix("gru/kernel", Form.COLUMNS, 1),
        recurrent=None,
        recurrent_first=True,
        bias=_NO_BIAS,
        places=Places(names=("rssm", "")),
        parameters=(
            Parameters("gru/norm/scale", _each("gain", "rnz")),
            Parameters("gru/norm/bias", _each("shift", "rnz")),
        ),
        not_found=(
            "The block GRU of 2024 (dyngru or dyncore) reads its state through layers with activations: "
            "it is no cell of gatewise."
        ),
        cell=LayerNormGRU(),
    ),
)
"""The layouts of layer-normalized LSTMs and GRUs."""
