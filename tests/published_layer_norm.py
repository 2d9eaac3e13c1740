"""Layer-normalized LSTMs and GRUs of other libraries, written from their sources as loops over time.

Each entry of `PUBLISHED` has the tensors of a library by the names and in the shapes of that library, a function that
computes the layer from them, and the parameters of the same layer of gatewise, made of the same tensors. The functions
share no code with gatewise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.cells import Cell, LayerNormGRU, LayerNormLSTM

I, H = 3, 5  # noqa: E741  as in the legend
Tensors = Mapping[str, Tensor]


class Published(NamedTuple):
    """A layer of another library.

    Attributes:
        cell: The cell of gatewise.
        shapes: The shapes of the library's tensors, by name.
        run: The layer: a function of the tensors, of x [T, B, I] and of the initial states that returns the outputs
            and the final states.
        parameters: A function of the tensors that returns the parameters of gatewise's layer, without suffixes.
    """

    cell: Cell
    shapes: Mapping[str, tuple[int, ...]]
    run: Callable[[Tensors, Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]
    parameters: Callable[[Tensors], dict[str, Tensor]]

    def tensors(self, seed: int = 0) -> dict[str, Tensor]:
        """Return random float64 tensors of the library that require gradients."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
            for name, shape in self.shapes.items()
        }


def norm(v, eps):
    centered = v - v.mean(-1, keepdim=True)
    return centered / torch.sqrt((centered * centered).mean(-1, keepdim=True) + eps)


def over_time(step, x, states):
    outputs = []
    for token in x:
        states = step(token, *states)
        outputs.append(states[0])
    return torch.stack(outputs), list(states)


def rows(matrix, order, wanted="ifgo"):
    """Return a matrix [K, G*H] with the gates in `order` as rows [G*H, K] with the gates in the order `wanted`."""
    blocks = dict(zip(order, matrix.chunk(len(order), 1), strict=True))
    return torch.cat([blocks[gate] for gate in wanted], 1).t()


def split_rows(matrix, order, wanted="ifgo"):
    """Return the same for the two matrices of one matrix [I + H, G*H]."""
    return {"weight_ih": rows(matrix[:I], order, wanted), "weight_hh": rows(matrix[I:], order, wanted)}


def vectors(kind, vector, order):
    """Return the parts of a vector [G*H] as parameters with the names of gates in `order`."""
    return {f"{kind}_{gate}": part for gate, part in zip(order, vector.chunk(len(order)), strict=True)}


def haste(tensors, x, states):
    """The function LayerNormLSTMScript of lmnt-com/haste, frameworks/pytorch/layer_norm_lstm.py."""
    w = tensors

    def step(token, h, c):
        v = norm(token @ w["kernel"], 1e-5) * w["gamma"][0] + norm(h @ w["recurrent_kernel"], 1e-5) * w["gamma"][1]
        i, g, f, o = (v + w["bias"]).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(norm(c, 1e-5) * w["gamma_h"] + w["beta_h"]), c

    return over_time(step, x, states)


def of_haste(w):
    return {
        "weight_ih": rows(w["kernel"], "igfo"),
        "weight_hh": rows(w["recurrent_kernel"], "igfo"),
        **vectors("gain_ih", w["gamma"][0], "igfo"),
        **vectors("gain_hh", w["gamma"][1], "igfo"),
        **vectors("shift", w["bias"], "igfo"),
        "gain_c": w["gamma_h"],
        "shift_c": w["beta_h"],
    }


def torchscript(tensors, x, states):
    """The class LayerNormLSTMCell of pytorch/pytorch, benchmarks/fastrnns/custom_lstms.py, with nn.LayerNorm."""
    w = {name.removeprefix("layers.0.cell."): tensor for name, tensor in tensors.items()}

    def affine(v, name):
        return norm(v, 1e-5) * w[f"layernorm_{name}.weight"] + w[f"layernorm_{name}.bias"]

    def step(token, h, c):
        gates = affine(token @ w["weight_ih"].t(), "i") + affine(h @ w["weight_hh"].t(), "h")
        i, f, g, o = gates.chunk(4, -1)
        c = affine(torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g), "c")
        return torch.sigmoid(o) * torch.tanh(c), c

    return over_time(step, x, states)


def of_torchscript(tensors):
    w = {name.removeprefix("layers.0.cell."): tensor for name, tensor in tensors.items()}
    return {
        "weight_ih": w["weight_ih"],
        "weight_hh": w["weight_hh"],
        **vectors("gain_ih", w["layernorm_i.weight"], "ifgo"),
        **vectors("gain_hh", w["layernorm_h.weight"], "ifgo"),
        **vectors("shift", w["layernorm_i.bias"] + w["layernorm_h.bias"], "ifgo"),
        "gain_c": w["layernorm_c.weight"],
        "shift_c": w["layernorm_c.bias"],
    }


def tensorflow_addons(tensors, x, states):
    """The class LayerNormLSTMCell of tensorflow/addons, tensorflow_addons/rnn/layer_norm_lstm_cell.py.

    Its parent class, Keras' LSTMCell, splits the gates as i f c o.
    """
    w = tensors

    def affine(v, name):
        return norm(v, 1e-3) * w[f"{name}/gamma"] + w[f"{name}/beta"]

    def step(token, h, c):
        z = affine(token @ w["kernel"], "kernel_norm") + affine(h @ w["recurrent_kernel"], "recurrent_norm") + w["bias"]
        i, f, g, o = z.chunk(4, -1)
        c = affine(torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g), "state_norm")
        return torch.sigmoid(o) * torch.tanh(c), c

    return over_time(step, x, states)


def of_tensorflow_addons(w):
    return {
        "weight_ih": w["kernel"].t(),
        "weight_hh": w["recurrent_kernel"].t(),
        **vectors("gain_ih", w["kernel_norm/gamma"], "ifgo"),
        **vectors("gain_hh", w["recurrent_norm/gamma"], "ifgo"),
        **vectors("shift", w["kernel_norm/beta"] + w["recurrent_norm/beta"] + w["bias"], "ifgo"),
        "gain_c": w["state_norm/gamma"],
        "shift_c": w["state_norm/beta"],
    }


TF1_SCOPES = {"i": "input", "g": "transform", "f": "forget", "o": "output", "c": "state"}


def tensorflow1(tensors, x, states):
    """The class LayerNormBasicLSTMCell of tensorflow/tensorflow 1.x, tensorflow/contrib/rnn/python/ops/rnn_cell.py.

    The number 1e-12 is that of layer_norm in tensorflow/contrib/layers/python/layers/layers.py. Dropout is left out.
    """
    w = tensors

    def affine(v, gate):
        return norm(v, 1e-12) * w[f"{TF1_SCOPES[gate]}/gamma"] + w[f"{TF1_SCOPES[gate]}/beta"]

    def step(token, h, c):
        i, j, f, o = (torch.cat([token, h], -1) @ w["kernel"]).chunk(4, -1)
        i, j, f, o = affine(i, "i"), affine(j, "g"), affine(f, "f"), affine(o, "o")
        c = affine(c * torch.sigmoid(f + 1.0) + torch.sigmoid(i) * torch.tanh(j), "c")
        return torch.tanh(c) * torch.sigmoid(o), c

    return over_time(step, x, states)


def of_tensorflow1(w):
    own = {f"gain_{gate}": w[f"{scope}/gamma"] for gate, scope in TF1_SCOPES.items()}
    own |= {f"shift_{gate}": w[f"{scope}/beta"] for gate, scope in TF1_SCOPES.items()}
    return split_rows(w["kernel"], "igfo") | own


ICEFALL_NORMS = {"i": "layernorm_i", "f": "layernorm_f", "g": "layernorm_cx", "o": "layernorm_o", "c": "layernorm_cy"}


def icefall(tensors, x, states):
    """The class LayerNormLSTMCell of k2-fsa/icefall, egs/librispeech/ASR/transducer/rnn.py, without a projection."""
    w = {name.removeprefix("layers.0.cell."): tensor for name, tensor in tensors.items()}

    def affine(v, gate):
        return norm(v, 1e-5) * w[f"{ICEFALL_NORMS[gate]}.weight"] + w[f"{ICEFALL_NORMS[gate]}.bias"]

    def step(token, h, c):
        gates = token @ w["weight_ih"].t() + w["bias_ih"] + h @ w["weight_hh"].t() + w["bias_hh"]
        i, f, g, o = gates.chunk(4, -1)
        i, f, g, o = affine(i, "i"), affine(f, "f"), affine(g, "g"), affine(o, "o")
        c = affine(torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g), "c")
        return torch.sigmoid(o) * torch.tanh(c), c

    return over_time(step, x, states)


def of_icefall(tensors):
    w = {name.removeprefix("layers.0.cell."): tensor for name, tensor in tensors.items()}
    own = {f"gain_{gate}": w[f"{name}.weight"] for gate, name in ICEFALL_NORMS.items()}
    own |= {f"shift_{gate}": w[f"{name}.bias"] for gate, name in ICEFALL_NORMS.items()}
    return {name: w[name] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")} | own


def lingvo(tensors, x, states):
    """The class LayerNormalizedLSTMCellSimple of tensorflow/lingvo, lingvo/core/rnn_cell.py.

    Its gates i_i, i_g, f_g and o_g are g, i, f and o here, and its state m is h. `cell_value_cap` is 10.
    """
    w = tensors

    def step(token, m, c):
        gates = (torch.cat([token, m], -1) @ w["wm"]).chunk(4, -1)
        scales, biases = w["ln_scale"].chunk(4), w["b"].chunk(4)
        i_i, i_g, f_g, o_g = (norm(gates[k], 1e-8) * scales[k] + biases[k] for k in range(4))
        c = torch.sigmoid(f_g) * c + torch.sigmoid(i_g) * torch.tanh(i_i)
        c = torch.where(c > 10, 10, torch.where(c < -10, -10, c))
        return torch.sigmoid(o_g) * torch.tanh(c), c

    return over_time(step, x, states)


def of_lingvo(w):
    return split_rows(w["wm"], "gifo") | vectors("gain", w["ln_scale"], "gifo") | vectors("shift", w["b"], "gifo")


LINGVO_GATES = {"g": "i_i", "i": "i_g", "f": "f_g", "o": "o_g", "c": "c"}


def lingvo_lean(tensors, x, states):
    """The class LayerNormalizedLSTMCellLean of tensorflow/lingvo, lingvo/core/rnn_cell.py, with enable_ln_on_c."""
    w = tensors

    def affine(v, name):
        return norm(v, 1e-8) * (w[f"ln_scale_{name}"] + 1.0) + w[f"bias_{name}"]

    def step(token, m, c):
        i_i, i_g, f_g, o_g = (torch.cat([token, m], -1) @ w["wm"]).chunk(4, -1)
        i_i, i_g, f_g, o_g = affine(i_i, "i_i"), affine(i_g, "i_g"), affine(f_g, "f_g"), affine(o_g, "o_g")
        c = torch.sigmoid(f_g) * c + torch.sigmoid(i_g) * torch.tanh(i_i)
        return torch.sigmoid(o_g) * torch.tanh(affine(c, "c")), c

    return over_time(step, x, states)


def of_lingvo_lean(w):
    own = {f"gain_{gate}": w[f"ln_scale_{name}"] for gate, name in LINGVO_GATES.items()}
    own |= {f"shift_{gate}": w[f"bias_{name}"] for gate, name in LINGVO_GATES.items()}
    return split_rows(w["wm"], "gifo") | own


def returnn(joined, in_output, hidden):
    """The class LayerNormVariantsLSTMCell of rwth-i6/returnn, returnn/tf/layers/rec.py.

    Args:
        joined: Its option global_norm_joined; if it is False, global_norm is True.
        in_output: Its option cell_norm_in_output.
        hidden: Its option hidden_norm.
    """

    def run(tensors, x, states):
        w = tensors

        def normalized(v, name, with_beta=True):
            y = norm(v, 1e-12) * w[f"gamma_{name}"]
            return y + w[f"beta_{name}"] if with_beta else y

        def step(token, h, c):
            below, before = token @ w["W_ff"], h @ w["W_re"]
            if joined:
                lstm_in = normalized(below + before, "lstm_in")
            else:
                lstm_in = normalized(below, "input_below") + normalized(before, "state_below", with_beta=False)
            i, j, f, o = lstm_in.chunk(4, -1)
            raw = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(j)
            c = normalized(raw, "new_c")
            h = torch.sigmoid(o) * torch.tanh(c if in_output else raw)
            return normalized(h, "new_h") if hidden else h, c

        return over_time(step, x, states)

    def parameters(w):
        if joined:
            gates = vectors("gain", w["gamma_lstm_in"], "igfo") | vectors("shift", w["beta_lstm_in"], "igfo")
        else:
            gates = vectors("gain_ih", w["gamma_input_below"], "igfo")
            gates |= vectors("gain_hh", w["gamma_state_below"], "igfo")
            gates |= vectors("shift", w["beta_input_below"], "igfo")
        found = {"weight_ih": rows(w["W_ff"], "igfo"), "weight_hh": rows(w["W_re"], "igfo"), **gates}
        found |= {"gain_c": w["gamma_new_c"], "shift_c": w["beta_new_c"]}
        return found | ({"gain_h": w["gamma_new_h"], "shift_h": w["beta_new_h"]} if hidden else {})

    names = ["gamma_lstm_in", "beta_lstm_in"] if joined else []
    names += [] if joined else ["gamma_input_below", "beta_input_below", "gamma_state_below"]
    shapes: dict[str, tuple[int, ...]] = {"W_ff": (I, 4 * H), "W_re": (H, 4 * H)}
    shapes |= dict.fromkeys(names, (4 * H,))
    shapes |= dict.fromkeys(("gamma_new_c", "beta_new_c"), (H,))
    shapes |= dict.fromkeys(("gamma_new_h", "beta_new_h"), (H,)) if hidden else {}
    return shapes, run, parameters


def dreamer(tensors, x, states):
    """The method RSSM._gru of danijar/dreamerv3, dreamerv3/nets.py of 2023, whose norm is jax.nn.standardize."""
    w = tensors

    def step(token, h):
        z = norm(torch.cat([h, token], -1) @ w["gru/kernel"], 1e-3) * w["gru/norm/scale"] + w["gru/norm/bias"]
        reset, cand, update = z.chunk(3, -1)
        cand = torch.tanh(torch.sigmoid(reset) * cand)
        update = torch.sigmoid(update - 1)
        return (update * cand + (1 - update) * h,)

    return over_time(step, x, states)


def of_dreamer(w):
    return {
        "weight_ih": rows(w["gru/kernel"][H:], "rnz", "rzn"),
        "weight_hh": rows(w["gru/kernel"][:H], "rnz", "rzn"),
        **vectors("gain", w["gru/norm/scale"], "rnz"),
        **vectors("shift", w["gru/norm/bias"], "rnz"),
    }


def haste_gru(tensors, x, states):
    """The function LayerNormGRUScript of lmnt-com/haste, frameworks/pytorch/layer_norm_gru.py."""
    w = tensors

    def step(token, h):
        x_z, x_r, x_g = (norm(token @ w["kernel"], 1e-5) * w["gamma"][0] + w["bias"]).chunk(3, -1)
        h_z, h_r, h_g = (norm(h @ w["recurrent_kernel"], 1e-5) * w["gamma"][1] + w["recurrent_bias"]).chunk(3, -1)
        z, r = torch.sigmoid(x_z + h_z), torch.sigmoid(x_r + h_r)
        g = torch.tanh(x_g + r * h_g)
        return (z * h + (1 - z) * g,)

    return over_time(step, x, states)


def of_haste_gru(w):
    (x_z, x_r, x_g), (h_z, h_r, h_g) = w["bias"].chunk(3), w["recurrent_bias"].chunk(3)
    return {
        "weight_ih": rows(w["kernel"], "zrn", "rzn"),
        "weight_hh": rows(w["recurrent_kernel"], "zrn", "rzn"),
        **vectors("gain_ih", w["gamma"][0], "zrn"),
        **vectors("gain_hh", w["gamma"][1], "zrn"),
        "shift_z": x_z + h_z,
        "shift_r": x_r + h_r,
        "shift_ih_n": x_g,
        "shift_hh_n": h_g,
    }


_MODULE = {"layers.0.cell.weight_ih": (4 * H, I), "layers.0.cell.weight_hh": (4 * H, H)}

PUBLISHED: dict[str, Published] = {
    "haste": Published(
        LayerNormLSTM.of("haste"),
        {
            "kernel": (I, 4 * H),
            "recurrent_kernel": (H, 4 * H),
            "bias": (4 * H,),
            "gamma": (2, 4 * H),
            "gamma_h": (H,),
            "beta_h": (H,),
        },
        haste,
        of_haste,
    ),
    "torchscript": Published(
        LayerNormLSTM.of("torchscript"),
        _MODULE
        | {
            f"layers.0.cell.layernorm_{name}.{kind}": (size,)
            for name, size in (("i", 4 * H), ("h", 4 * H), ("c", H))
            for kind in ("weight", "bias")
        },
        torchscript,
        of_torchscript,
    ),
    "tensorflow_addons": Published(
        LayerNormLSTM.of("tensorflow_addons"),
        {"kernel": (I, 4 * H), "recurrent_kernel": (H, 4 * H), "bias": (4 * H,)}
        | {
            f"{name}_norm/{kind}": (size,)
            for name, size in (("kernel", 4 * H), ("recurrent", 4 * H), ("state", H))
            for kind in ("gamma", "beta")
        },
        tensorflow_addons,
        of_tensorflow_addons,
    ),
    "tensorflow1": Published(
        LayerNormLSTM.of("tensorflow1"),
        {"kernel": (I + H, 4 * H)}
        | {f"{scope}/{kind}": (H,) for scope in TF1_SCOPES.values() for kind in ("gamma", "beta")},
        tensorflow1,
        of_tensorflow1,
    ),
    "icefall": Published(
        LayerNormLSTM.of("icefall"),
        _MODULE
        | {"layers.0.cell.bias_ih": (4 * H,), "layers.0.cell.bias_hh": (4 * H,)}
        | {f"layers.0.cell.{name}.{kind}": (H,) for name in ICEFALL_NORMS.values() for kind in ("weight", "bias")},
        icefall,
        of_icefall,
    ),
    "lingvo": Published(
        LayerNormLSTM.of("lingvo"), {"wm": (I + H, 4 * H), "b": (4 * H,), "ln_scale": (4 * H,)}, lingvo, of_lingvo
    ),
    "lingvo_lean": Published(
        LayerNormLSTM.of("lingvo_lean"),
        {"wm": (I + H, 4 * H)}
        | {f"{kind}_{name}": (H,) for name in LINGVO_GATES.values() for kind in ("ln_scale", "bias")},
        lingvo_lean,
        of_lingvo_lean,
    ),
    "returnn": Published(LayerNormLSTM.of("returnn"), *returnn(joined=False, in_output=True, hidden=False)),
    "returnn_joined": Published(
        LayerNormLSTM.of("returnn_joined"), *returnn(joined=True, in_output=False, hidden=False)
    ),
    "returnn_joined with hidden_norm": Published(
        LayerNormLSTM.of("returnn_joined", hidden=True), *returnn(joined=True, in_output=False, hidden=True)
    ),
    "dreamer": Published(
        LayerNormGRU(),
        {"gru/kernel": (H + I, 3 * H), "gru/norm/scale": (3 * H,), "gru/norm/bias": (3 * H,)},
        dreamer,
        of_dreamer,
    ),
    "haste_gru": Published(
        LayerNormGRU(gates="apart"),
        {
            "kernel": (I, 3 * H),
            "recurrent_kernel": (H, 3 * H),
            "bias": (3 * H,),
            "recurrent_bias": (3 * H,),
            "gamma": (2, 3 * H),
        },
        haste_gru,
        of_haste_gru,
    ),
}
