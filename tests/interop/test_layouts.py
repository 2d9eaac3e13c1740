"""Every layout compared with its system: TensorFlow and Flax by recorded results, others by their equations."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from gatewise.contract.errors import ArgumentError, ShapeError
from gatewise.contract.pytorch import in_pytorch
from gatewise.contract.weights import DirectionWeights
from gatewise.interop.convert import convert
from gatewise.interop.layouts import LAYOUTS, default_target, layout_named
from gatewise.interop.packing import pack, unpack
from tests.pairwise import each_value

REFERENCES = Path(__file__).parent / "references"
IN_PYTORCH = [name for name, layout in LAYOUTS.items() if in_pytorch(layout.cell)]
ONE_DIRECTION = ("systemml", "haste", "haste-gru")


def pytorchs(layout):
    """Return the module of PyTorch that a layout is of, and the name of its layout."""
    return {
        "lstm": (torch.nn.LSTM, "torch"),
        "gru": (torch.nn.GRU, "torch-gru"),
        "rnn_tanh": (torch.nn.RNN, "torch-rnn"),
    }[LAYOUTS[layout].cell.name]


def loaded(tensors, directions=1):
    """Return a torch.nn.LSTM, GRU or RNN that holds the tensors, sized by them."""
    layers = 1 + max(int(name.split("_l")[1][0]) for name in tensors)
    rows, features = tensors["weight_ih_l0"].shape
    units = tensors["weight_hh_l0"].shape[1]
    kind = {4: torch.nn.LSTM, 3: torch.nn.GRU, 1: torch.nn.RNN}[rows // units]
    module = kind(features, units, layers, bias="bias_ih_l0" in tensors, bidirectional=directions == 2).to(
        tensors["weight_ih_l0"].dtype
    )
    module.load_state_dict(tensors)
    return module


@pytest.mark.parametrize(
    ("name", "layout", "directions"),
    [
        ("tf1_basic", "tf1-basic", 1),
        ("tf1_cudnn", "tf1-cudnn", 2),
        ("flax", "flax", 1),
        ("flax_bidirectional", "flax", 2),
        ("nnx_optimized", "flax-nnx", 1),
        ("nnx_lstm", "flax-nnx-lstm", 1),
        ("nnx_bidirectional", "flax-nnx-lstm", 2),
        ("nnx_gru", "flax-nnx-gru", 1),
        ("nnx_rnn", "flax-nnx-rnn", 1),
    ],
)
def test_the_converted_weights_compute_what_their_system_computed(name, layout, directions):
    with np.load(REFERENCES / f"{name}.npz") as reference:
        x, y = torch.from_numpy(reference["x"]), torch.from_numpy(reference["y"])
        weights = {
            key.removeprefix("weights/"): reference[key] for key in reference.files if key.startswith("weights/")
        }
    module = loaded(convert(weights, layout, default_target(layout)), directions)
    torch.testing.assert_close(module(x)[0], y, rtol=0, atol=1e-6)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


@pytest.mark.parametrize("layout", ["haste", "systemml"])
def test_the_converted_weights_compute_the_equations_of_the_layout(layout):
    generator = np.random.default_rng(1)
    kernel, recurrent, bias = (generator.standard_normal(shape) for shape in ((3, 8), (2, 8), (8,)))
    x = generator.standard_normal((5, 2, 3))
    h = c = np.zeros((2, 2))
    outputs = []
    for step in x:
        gates = np.split(step @ kernel + h @ recurrent + bias, 4, -1)
        i, f, g, o = (gates[k] for k in {"haste": (0, 2, 1, 3), "systemml": (0, 1, 3, 2)}[layout])
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        outputs.append(h)
    tensors = (
        {"kernel": kernel, "recurrent_kernel": recurrent, "bias": bias}
        if layout == "haste"
        else {"W": np.vstack([kernel, recurrent]), "b": bias[None]}
    )
    module = loaded(convert(tensors, layout, "torch"))
    np.testing.assert_allclose(module(torch.from_numpy(x))[0].detach(), np.stack(outputs), rtol=0, atol=1e-14)


def of_keras(kernel, recurrent, input_bias, recurrent_bias):
    """Return the tensors of a Keras GRU with reset_after=True: gates z r h."""
    return {"kernel": kernel, "recurrent_kernel": recurrent, "bias": np.stack([input_bias, recurrent_bias])}


def of_haste(kernel, recurrent, input_bias, recurrent_bias):
    """Return the tensors of haste's GRU: gates z r g."""
    return {"kernel": kernel, "recurrent_kernel": recurrent, "bias": input_bias, "recurrent_bias": recurrent_bias}


def of_flax(kernel, recurrent, input_bias, recurrent_bias):
    """Return the tensors of Flax' GRUCell, whose gates r and z have one bias each."""
    tensors = {}
    for index, gate in enumerate("zrn"):
        tensors[f"i{gate}/kernel"], tensors[f"h{gate}/kernel"] = (
            np.hsplit(matrix, 3)[index] for matrix in (kernel, recurrent)
        )
        tensors[f"i{gate}/bias"] = np.split(input_bias, 3)[index]
    tensors["hn/bias"] = np.split(recurrent_bias, 3)[2]
    return tensors


@pytest.mark.parametrize(
    ("layout", "tensors_of"), [("keras-gru", of_keras), ("haste-gru", of_haste), ("flax-gru", of_flax)]
)
def test_a_converted_gru_computes_the_equations_of_its_system(layout, tensors_of):
    generator = np.random.default_rng(4)
    kernel, recurrent, input_bias, recurrent_bias = (
        generator.standard_normal(shape) for shape in ((3, 6), (2, 6), (6,), (6,))
    )
    if layout == "flax-gru":
        recurrent_bias[:4] = 0
    x = generator.standard_normal((5, 2, 3))
    h, outputs = np.zeros((2, 2)), []
    for step in x:
        x_z, x_r, x_n = np.split(step @ kernel + input_bias, 3, -1)
        h_z, h_r, h_n = np.split(h @ recurrent + recurrent_bias, 3, -1)
        z, r = sigmoid(x_z + h_z), sigmoid(x_r + h_r)
        h = z * h + (1 - z) * np.tanh(x_n + r * h_n)
        outputs.append(h)
    module = loaded(convert(tensors_of(kernel, recurrent, input_bias, recurrent_bias), layout, "torch-gru"))
    np.testing.assert_allclose(module(torch.from_numpy(x))[0].detach(), np.stack(outputs), rtol=0, atol=1e-14)


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
@pytest.mark.parametrize("layout", ["keras-rnn", "flax-rnn"])
def test_a_converted_rnn_computes_the_equations_of_its_system(layout, nonlinearity):
    generator = np.random.default_rng(6)
    kernel, recurrent, bias = (generator.standard_normal(shape) for shape in ((3, 2), (2, 2), (2,)))
    x = generator.standard_normal((5, 2, 3))
    h, outputs = np.zeros((2, 2)), []
    for step in x:
        total = step @ kernel + bias + h @ recurrent
        h = np.tanh(total) if nonlinearity == "tanh" else np.maximum(total, 0)
        outputs.append(h)
    names = ("kernel", "recurrent_kernel", "bias") if layout == "keras-rnn" else ("i/kernel", "h/kernel", "i/bias")
    converted = convert(dict(zip(names, (kernel, recurrent, bias), strict=True)), layout, "torch-rnn")
    module = torch.nn.RNN(3, 2, nonlinearity=nonlinearity).double()
    module.load_state_dict(converted)
    np.testing.assert_allclose(module(torch.from_numpy(x))[0].detach(), np.stack(outputs), rtol=0, atol=1e-14)


def test_cudnn_weights_of_a_keras_gru_are_packed_as_keras_does():
    generator = np.random.default_rng(5)
    kernel, recurrent, bias = (generator.standard_normal(shape) for shape in ((3, 6), (2, 6), (2, 6)))
    packed = {
        "kernel": np.hstack([gate.T.reshape(gate.shape) for gate in np.hsplit(kernel, 3)]),
        "recurrent_kernel": np.hstack([gate.T for gate in np.hsplit(recurrent, 3)]),
        "bias": bias.reshape(-1),
    }
    plain = {"kernel": kernel, "recurrent_kernel": recurrent, "bias": bias}
    for given, source, target, expected in (
        (packed, "keras-cudnn-gru", "keras-gru", plain),
        (plain, "keras-gru", "keras-cudnn-gru", packed),
    ):
        converted = convert(given, source, target)
        assert converted.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(converted[name], array, err_msg=name)


def test_cudnn_weights_of_keras_are_packed_as_keras_documents_it():
    generator = np.random.default_rng(2)
    kernel, recurrent, bias = (generator.standard_normal(shape) for shape in ((3, 8), (2, 8), (8,)))

    def gate_by_gate(matrix, change):
        return np.hstack([change(gate) for gate in np.hsplit(matrix, 4)])

    packed = {
        "kernel": gate_by_gate(kernel, lambda gate: gate.T.reshape(gate.shape)),
        "recurrent_kernel": gate_by_gate(recurrent, lambda gate: gate.T),
        "bias": np.tile(0.5 * bias, 2),
    }
    plain = {"kernel": kernel, "recurrent_kernel": recurrent, "bias": bias}
    assert not np.array_equal(packed["kernel"], kernel)
    for given, source, target, expected in (
        (packed, "keras-cudnn", "keras", plain),
        (plain, "keras", "keras-cudnn", packed),
    ):
        converted = convert(given, source, target)
        assert converted.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(converted[name], array, err_msg=name)


def without_recurrent_bias_of_n(module):
    for name, parameter in module.named_parameters():
        if "bias_hh" in name:
            torch.nn.init.zeros_(parameter[-module.hidden_size :])


@pytest.mark.parametrize(
    ("layout", "sizes", "dtype"),
    each_value(
        [
            *itertools.product(
                IN_PYTORCH,
                [(1, 1), (3, 1), (1, 2), (2, 2)],
                [torch.float32, torch.float64, torch.float16, torch.bfloat16],
            )
        ]
    ),
    ids=str,
)
def test_round_trips_are_exact(layout, sizes, dtype):
    layers, directions = sizes
    torch.manual_seed(0)
    kind, own = pytorchs(layout)
    module = kind(3, 2, layers, bidirectional=directions == 2).to(dtype)
    if layout == "flax-nnx-gru":
        without_recurrent_bias_of_n(module)
    if directions == 2 and layout in ONE_DIRECTION:
        with pytest.raises(ArgumentError, match="second direction"):
            convert(module.state_dict(), own, layout)
        return
    there = convert(module.state_dict(), own, layout)
    back = convert(there, layout, own, stack=True)
    again = convert(back, own, layout)
    assert again.keys() == there.keys()
    for name, tensor in there.items():
        assert tensor.dtype == dtype
        assert torch.equal(again[name], tensor), name
    for name, tensor in module.state_dict().items():
        if name.startswith("weight"):
            assert torch.equal(back[name], tensor), name
        elif "bias_ih" in name and layout not in ("torch", "keras-cudnn"):
            # One bias is the sum, and the second is what the layout adds at run time, or zero.
            other = name.replace("bias_ih", "bias_hh")
            total = tensor + module.state_dict()[other]
            tolerance = {"rtol": 0, "atol": 4 * torch.finfo(dtype).eps}
            torch.testing.assert_close(back[name] + back[other], total, **tolerance)


@pytest.mark.parametrize("layout", IN_PYTORCH)
def test_without_biases(layout):
    kind, own = pytorchs(layout)
    module = kind(3, 2, bias=False).double()
    there = convert(module.state_dict(), own, layout)
    assert any("bias" in name or name == "b" for name in there) == LAYOUTS[layout].bias.required
    x = torch.randn(4, 2, 3).double()
    torch.testing.assert_close(loaded(convert(there, layout, own))(x)[0], module(x)[0], rtol=0, atol=1e-15)


def test_the_forget_bias_of_run_time_is_folded_in_and_taken_out():
    tensors = convert(torch.nn.LSTM(3, 2).double().state_dict(), "torch", "tf1-basic")
    folded = convert(tensors, "tf1-basic", "torch")
    assert folded["bias_hh_l0"].tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    assert torch.equal(folded["bias_ih_l0"][2:4], tensors["rnn/basic_lstm_cell/bias"][4:6])
    single = convert(tensors, "tf1-basic", "keras")["bias"]
    assert torch.equal(single[2:4], tensors["rnn/basic_lstm_cell/bias"][4:6] + 1)
    other = dataclasses.replace(LAYOUTS["tf1-basic"], forget_bias=0.5)
    assert convert(tensors, other, "torch")["bias_hh_l0"].tolist() == [0, 0, 0.5, 0.5, 0, 0, 0, 0]


def test_projections_stay_in_the_layout_that_has_them():
    module = torch.nn.LSTM(3, 4, proj_size=2, num_layers=2, bidirectional=True)
    same = convert(module.state_dict(), "torch", "torch")
    assert same.keys() == module.state_dict().keys()
    assert all(torch.equal(same[name], tensor) for name, tensor in module.state_dict().items())
    with pytest.raises(ArgumentError, match=r"`weights` must be without a projection, got w_hr \[2, 4\]"):
        convert(module.state_dict(), "torch", "keras")


@pytest.mark.parametrize("layout", ["keras-gru", "keras-cudnn-gru", "haste-gru"])
def test_both_biases_of_a_gru_are_moved_and_not_added(layout):
    module = torch.nn.GRU(3, 2)
    back = convert(convert(module.state_dict(), "torch-gru", layout), layout, "torch-gru")
    assert all(torch.equal(back[name], tensor) for name, tensor in module.state_dict().items())


def test_the_gates_of_flax_that_have_one_bias_get_the_sum():
    module = torch.nn.GRU(3, 2)
    there = convert(module.state_dict(), "torch-gru", "flax-gru")
    first, second = module.bias_ih_l0.detach().chunk(3), module.bias_hh_l0.detach().chunk(3)
    assert torch.equal(there["cell/ir/bias"], first[0] + second[0])
    assert torch.equal(there["cell/in/bias"], first[2])
    assert torch.equal(there["cell/hn/bias"], second[2])
    assert not {"cell/hr/bias", "cell/hz/bias"} & there.keys()
    x = torch.randn(4, 2, 3)
    torch.testing.assert_close(loaded(convert(there, "flax-gru", "torch-gru"))(x)[0], module(x)[0])


def test_a_recurrent_bias_that_a_layout_does_not_have_is_refused():
    module = torch.nn.GRU(3, 2)
    message = (
        "`the recurrent bias of n` must be zero, got numbers that are not. GRUCell of Flax nnx has one bias for each"
    )
    with pytest.raises(ArgumentError, match=message):
        convert(module.state_dict(), "torch-gru", "flax-nnx-gru")
    without_recurrent_bias_of_n(module)
    there = convert(module.state_dict(), "torch-gru", "flax-nnx-gru")
    x = torch.randn(4, 2, 3)
    torch.testing.assert_close(loaded(convert(there, "flax-nnx-gru", "torch-gru"))(x)[0], module(x)[0])


def test_the_gate_whose_name_is_a_keyword_is_spelled_as_nnx_does():
    there = convert(torch.nn.LSTM(3, 2).state_dict(), "torch", "flax-nnx-lstm")
    assert {"cell/if_/kernel", "cell/ig/kernel", "cell/hf/kernel", "cell/hf/bias"} <= there.keys()
    with pytest.raises(ArgumentError, match=r"got no if/kernel\. The names are those of the layout flax-nnx-lstm\."):
        convert(there, "flax", "torch")
    saved = {f"{name}/value": tensor for name, tensor in there.items()}  # as the leaves of a state are saved
    assert convert(saved, "flax-nnx-lstm", "torch").keys() == torch.nn.LSTM(3, 2).state_dict().keys()


@pytest.mark.parametrize("constant", [0.0, 0.5, 2.0])
def test_the_forget_bias_of_cells_made_with_another_one(constant):
    generator = np.random.default_rng(2)
    kernel, bias = generator.standard_normal((5, 8)), generator.standard_normal(8)
    x = generator.standard_normal((5, 2, 3))
    h = c = np.zeros((2, 2))
    outputs = []
    for step in x:
        i, g, f, o = np.split(np.hstack([step, h]) @ kernel + bias, 4, -1)
        c = sigmoid(f + constant) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        outputs.append(h)
    tensors = {"rnn/basic_lstm_cell/kernel": kernel, "rnn/basic_lstm_cell/bias": bias}
    module = loaded(convert(tensors, "tf1-basic", "torch", forget_bias=constant))
    np.testing.assert_allclose(module(torch.from_numpy(x))[0].detach(), np.stack(outputs), rtol=0, atol=1e-14)
    again = convert(module.state_dict(), "torch", "tf1-basic", forget_bias=constant)
    assert torch.equal(again["rnn/basic_lstm_cell/bias"], torch.from_numpy(bias))


def test_a_forget_bias_is_refused_where_no_cell_adds_one():
    message = (
        "`forget_bias` must be left out for the target keras and the source torch, got 0.5. "
        "Only the layouts tf1-basic and tf1-layer-norm have one."
    )
    with pytest.raises(ArgumentError, match=message):
        convert(torch.nn.LSTM(3, 2).state_dict(), "torch", "keras", forget_bias=0.5)


def test_a_layout_of_another_cell_is_refused():
    message = (
        r"`the layout of the target` must be that of a GRU as the source's, got torch\. Choose one of torch-gru, keras"
    )
    with pytest.raises(ArgumentError, match=message):
        convert(torch.nn.GRU(3, 2).state_dict(), "torch-gru", "torch")


@pytest.mark.parametrize("bias", [(6,), (2, 9), (1, 6), (12,)])
def test_a_bias_of_another_gru_is_refused_and_says_why(bias):
    tensors = {"kernel": torch.zeros(3, 6), "recurrent_kernel": torch.zeros(2, 6), "bias": torch.zeros(bias)}
    message = r"must be those of a GRU in the layout keras-gru, got .* A bias of 3H is that of reset_after=False"
    with pytest.raises(ShapeError, match=message):
        convert(tensors, "keras-gru", "torch-gru")
    with pytest.raises(ShapeError, match=r"A bias \[2, 3H\] is that of Keras' GRU: the layout keras-gru"):
        unpack(tensors | {"bias": torch.zeros(2, 6)}, "keras-cudnn-gru")


def test_unpacking_is_differentiable():
    kernel, recurrent, bias = (torch.randn(shape, requires_grad=True) for shape in ((3, 8), (2, 8), (8,)))
    weights = unpack({"kernel": kernel, "recurrent_kernel": recurrent, "bias": bias}, "haste")
    (weights.w_ih.sum() + weights.w_hh.sum() + weights.b_ih.sum()).backward()
    assert all(torch.equal(tensor.grad, torch.ones_like(tensor)) for tensor in (kernel, recurrent, bias))


def test_the_converted_tensors_share_no_memory_with_the_source():
    tensors = {name: tensor.clone() for name, tensor in torch.nn.LSTM(3, 2).state_dict().items()}
    for tensor in convert(tensors, "torch", "torch").values():
        tensor.fill_(9)
    assert all((tensor != 9).all() for tensor in tensors.values())


def test_an_unknown_layout_lists_the_known():
    with pytest.raises(ArgumentError, match=r"`layout` must be one of torch, keras, keras-cudnn, .*, got 'caffe'"):
        layout_named("caffe")


@pytest.mark.parametrize(
    ("layout", "tensors"),
    [
        ("keras", {"kernel": (3, 8), "recurrent_kernel": (2, 8), "bias": (16,)}),
        ("keras", {"kernel": (3, 12), "recurrent_kernel": (2, 8), "bias": (8,)}),
        ("keras", {"kernel": (3, 8), "recurrent_kernel": (2, 8), "bias": (7,)}),
        ("keras", {"kernel": (3, 0), "recurrent_kernel": (2, 0), "bias": (0,)}),
        ("keras", {"kernel": (3, 8, 1), "recurrent_kernel": (2, 8), "bias": (8,)}),
        ("keras-cudnn", {"kernel": (3, 8), "recurrent_kernel": (2, 8), "bias": (8,)}),
        ("keras-cudnn", {"kernel": (3, 12), "recurrent_kernel": (3, 12), "bias": (12,)}),
        ("keras-cudnn", {"kernel": (3, 12), "recurrent_kernel": (3, 12), "bias": (9,)}),
        ("tf1-basic", {"kernel": (2, 8), "bias": (8,)}),
        ("flax", {f"{k}{g}/kernel": (3, 2) for k in "ih" for g in "ifgo"} | {f"h{g}/bias": (2,) for g in "ifgo"}),
        ("torch", {"weight_ih": (8, 3), "weight_hh": (8, 3), "bias_ih": (8,), "bias_hh": (8,)}),
    ],
)
def test_shapes_that_do_not_fit_are_named(layout, tensors):
    with pytest.raises(ShapeError, match=rf"`weights` must be those of an LSTM in the layout {layout}, got .*\["):
        unpack({name: torch.zeros(shape) for name, shape in tensors.items()}, layout)


def test_the_other_layout_of_keras_is_suggested():
    with pytest.raises(ShapeError, match="the layout keras-cudnn"):
        unpack({"kernel": torch.zeros(3, 8), "recurrent_kernel": torch.zeros(2, 8), "bias": torch.zeros(16)}, "keras")
    with pytest.raises(ShapeError, match="the layout keras"):
        unpack(
            {"kernel": torch.zeros(3, 8), "recurrent_kernel": torch.zeros(2, 8), "bias": torch.zeros(8)}, "keras-cudnn"
        )


def test_halves_add_up_to_the_bias_even_where_a_half_is_rounded():
    smallest = torch.tensor([5e-324] * 8, dtype=torch.float64)
    weights = DirectionWeights(torch.zeros(8, 3).double(), torch.zeros(8, 2).double(), smallest)
    packed = pack(weights, "keras-cudnn")
    assert torch.equal(packed["bias"][:8] + packed["bias"][8:], smallest)
