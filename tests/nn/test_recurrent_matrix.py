"""Recurrent matrices of blocks and of factors: held to loops over heads or factors, and to layers of full matrices."""

import copy
import itertools
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

import gatewise
from gatewise import functional
from gatewise.cells import GRU, LSTM, SHIPPED, SLSTM, CoupledLSTM, LayerNormLSTM, PeepholeLSTM
from gatewise.contract.errors import ArgumentError
from tests.graphs import captured
from tests.pairwise import each_value, pairwise

T, B, F, H = 5, 3, 3, 6
LENGTHS = [5, 2, 4]
STRUCTURES: list[dict[str, Any]] = [{"heads": 3}, {"heads": 6}, {"recurrent_rank": 2}]


def layer_of(cell, *, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return gatewise.Recurrent(cell, F, H, dtype=dtype, **options)


def x_of(*shape, dtype=torch.float64):
    return torch.randn(*(shape or (T, B, F)), dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()


def recurrent_sums(weights, h, suffix):
    """Return W_hh h for all gates, head by head or factor by factor."""
    if f"weight_rh{suffix}" in weights:
        return (h @ weights[f"weight_hr{suffix}"].T) @ weights[f"weight_rh{suffix}"].T
    rows, units = weights[f"weight_hh{suffix}"], weights[f"weight_hh{suffix}"].shape[1]
    found = [h[:, u // units * units :][:, :units] @ row for gate in rows.split(H) for u, row in enumerate(gate)]
    return torch.stack(found, 1)


def lstm(read, recurrent, h, c):
    i, f, g, o = (read + recurrent).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru(read, recurrent, h):
    r, z, n = read.chunk(3, 1)
    of_r, of_z, of_n = recurrent.chunk(3, 1)
    z, n = (z + of_z).sigmoid(), (n + (r + of_r).sigmoid() * of_n).tanh()
    return (1 - z) * n + z * h, h * 0


EQUATIONS = {LSTM(): lstm, GRU(): gru}


def looped(layer, x):
    """Return the output as plain loops over layers, directions and steps compute it."""
    weights = dict(layer.named_parameters())
    for number in range(layer.num_layers):
        outputs = []
        for way in ("", "_reverse")[: 1 + layer.bidirectional]:
            suffix = f"_l{number}{way}"
            states, rows = [x.new_zeros(B, H) for _ in range(1 + len(layer.cell.states))], []
            for row in x.flip(0) if way else x:
                read = row @ weights[f"weight_ih{suffix}"].T + weights[f"bias_ih{suffix}"]
                recurrent = recurrent_sums(weights, states[0], suffix) + weights[f"bias_hh{suffix}"]
                states = EQUATIONS[layer.cell](read, recurrent, *states)[: len(states)]
                rows.append(states[0])
            outputs.append(torch.stack(rows[::-1] if way else rows))
        x = torch.cat(outputs, 2)
    return x


def full_weights(weights):
    """Return parameters for a layer of full matrices that has the same sums."""
    found = {}
    for name, weight in weights.items():
        kind, number, suffix = name.rpartition("_l") if "_l" in name else (name, "", "")
        if kind == "weight_rh":
            found[f"weight_hh{number}{suffix}"] = weight @ weights[f"weight_hr{number}{suffix}"]
        elif kind == "weight_hh":
            units = weight.shape[1]
            found[name] = torch.cat([torch.block_diag(*gate.split(units)) for gate in weight.split(H)])
        elif kind != "weight_hr":
            found[name] = weight
    return found


def called(layer, x, **options):
    y, finals = layer(x, **options)
    return [y, *(finals if isinstance(finals, tuple) else (finals,))]


def called_full(layer, x, weights=None, **options):
    """Return the results of a layer of full matrices with the same weights."""
    weights = full_weights(dict(layer.named_parameters())) if weights is None else weights
    plain = gatewise.Recurrent(
        layer.cell,
        F,
        H,
        num_layers=layer.num_layers,
        bidirectional=layer.bidirectional,
        bias=layer.bias,
        reverse=layer.reverse,
        kernel=layer.kernel,
    )
    y, finals = torch.func.functional_call(plain.train(layer.training), weights, (x,), options)
    return [y, *(finals if isinstance(finals, tuple) else (finals,))]


def gradients(outputs, leaves, **options):
    torch.manual_seed(3)
    return torch.autograd.grad(outputs, leaves, [torch.randn_like(output) for output in outputs], **options)


each_structure = pytest.mark.parametrize("structure", STRUCTURES, ids=str)


@each_structure
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
@pytest.mark.parametrize("cell", EQUATIONS, ids=repr)
def test_loops_over_heads_and_factors_give_the_same(cell, options, structure):
    layer, x = layer_of(cell, **options, **structure), x_of()
    y, expected = layer(x)[0], looped(layer, x)
    torch.testing.assert_close(y, expected)
    leaves = [x, *layer.parameters()]
    found = gradients([y], leaves)
    torch.testing.assert_close(found, gradients([expected], leaves))
    assert all(gradient.any() for gradient in found)


@pytest.mark.parametrize(("cell", "structure"), each_value([*itertools.product(SHIPPED, STRUCTURES)]), ids=str)
def test_every_cell_is_that_of_full_matrices(cell, structure):
    layer, x = layer_of(cell, num_layers=2, bidirectional=True, **structure), x_of()
    found, expected = called(layer, x, lengths=LENGTHS), called_full(layer, x, lengths=LENGTHS)
    torch.testing.assert_close(found, expected)
    leaves = [x, *layer.parameters()]
    torch.testing.assert_close(gradients(found, leaves), gradients(expected, leaves))


RESETS = torch.zeros(T, B, dtype=torch.bool)
RESETS[2, 1] = RESETS[4] = True


@pytest.mark.parametrize(
    ("structure", "memory", "lengths", "resets", "reverse"),
    pairwise(STRUCTURES, ["normal", "lean"], [None, LENGTHS], [None, RESETS], [False, True]),
    ids=lambda value: "resets" if isinstance(value, torch.Tensor) else str(value),
)
def test_options_of_layer_and_call(structure, memory, lengths, resets, reverse):
    layer, x = layer_of(GRU(), memory=memory, reverse=reverse, **structure), x_of()
    options = {"lengths": lengths, "resets": resets}
    found, expected = called(layer, x, **options), called_full(layer, x, **options)
    torch.testing.assert_close(found, expected)
    leaves = [x, *layer.parameters()]
    torch.testing.assert_close(gradients(found, leaves), gradients(expected, leaves))


@each_structure
@pytest.mark.parametrize("kernel", ["aten", "eager"])
def test_every_kernel_of_a_cpu(kernel, structure):
    layer, x = layer_of(LSTM(), kernel=kernel, num_layers=2, **structure), x_of()
    found, expected = called(layer, x), looped(layer, x)
    torch.testing.assert_close(found[0], expected)
    leaves = [x, *layer.parameters()]
    torch.testing.assert_close(gradients(found[:1], leaves), gradients([expected], leaves))


@each_structure
def test_packed_batches_and_the_steps_of_a_call(structure):
    layer, x = layer_of(LSTM(), **structure), x_of()
    packed = nn.utils.rnn.pack_padded_sequence(x, LENGTHS, enforce_sorted=False)
    y, _ = nn.utils.rnn.pad_packed_sequence(layer(packed)[0])
    torch.testing.assert_close(y, layer(x, lengths=LENGTHS)[0])
    expected, _, (steps,) = layer(x, return_steps=True)
    torch.testing.assert_close(expected, layer(x)[0])
    torch.testing.assert_close(steps.states["h"], expected)


# Numerical derivatives take a call for each number, so that the layer has as few as the structures allow.
@pytest.mark.parametrize(
    ("cell", "structure"),
    each_value(
        pairwise(
            [LSTM(), SLSTM(), LayerNormLSTM.of("haste")],
            [{"heads": 2}, {"heads": 4}, {"recurrent_rank": 2}],
        ),
        most=2,
    ),
    ids=str,
)
def test_second_derivatives(cell, structure):
    torch.manual_seed(0)
    layer, x = gatewise.Recurrent(cell, 1, 4, dtype=torch.float64, **structure), x_of(2, 2, 1)
    names = [name for name in dict(layer.named_parameters()) if name.startswith("weight")]

    def call(x, *weights):
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))[0]

    leaves = [x, *(layer.get_parameter(name).detach().clone().requires_grad_() for name in names)]
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@each_structure
def test_weight_dropout_drops_elements_of_the_matrix(structure):
    layer, x = layer_of(LSTM(), num_layers=2, weight_dropout=0.4, **structure), x_of()
    torch.manual_seed(2)
    found = called(layer, x)
    torch.manual_seed(2)
    weights = full_weights(dict(layer.named_parameters()))
    for name in ("weight_hh_l0", "weight_hh_l1"):
        kept = torch.empty(weights[name].shape, dtype=torch.bool).bernoulli_(1 - 0.4)
        weights[name] = weights[name] * kept / (1 - 0.4)
    expected = called_full(layer, x, weights)
    torch.testing.assert_close(found, expected)
    leaves = [x, *layer.parameters()]
    torch.testing.assert_close(gradients(found, leaves), gradients(expected, leaves))
    torch.testing.assert_close(called(layer.eval(), x), called_full(layer, x))


@each_structure
def test_other_dropout_and_zoneout_read_the_matrix(structure):
    options = {"recurrent_dropout": 0.3, "candidate_dropout": 0.2, "zoneout": 0.1}
    layer, x = layer_of(GRU(), **options, **structure), x_of()
    plain = layer_of(GRU(), **options)
    torch.manual_seed(2)
    found = called(layer, x)
    torch.manual_seed(2)
    y, h_n = torch.func.functional_call(plain, full_weights(dict(layer.named_parameters())), (x,))
    torch.testing.assert_close(found, [y, h_n])


@each_structure
def test_autocast(structure):
    layer, x = layer_of(LSTM(), dtype=torch.float32, **structure), x_of(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(x)
        expected = called_full(layer, x)[0]
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    y.float().square().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 and parameter.grad.any() for parameter in layer.parameters())


@each_structure
def test_transforms_of_torch_func(structure):
    layer, x = layer_of(LSTM(), **structure), x_of()
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,))[0].square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 1))(parameters, x.unsqueeze(2))
    for row in range(B):
        expected = torch.func.grad(loss)(parameters, x[:, [row]])
        torch.testing.assert_close({name: each[row] for name, each in found.items()}, expected)


@pytest.mark.parametrize(
    ("cell", "structure"), each_value(pairwise([LSTM(), PeepholeLSTM()], STRUCTURES), most=1), ids=str
)
def test_compiled_in_one_graph(cell, structure):
    torch.compiler.reset()
    layer, x = layer_of(cell, bidirectional=True, **structure), x_of()
    found, expected = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)[0], layer(x)[0]
    torch.testing.assert_close(found, expected)
    leaves = [x, *layer.parameters()]
    torch.testing.assert_close(gradients([found], leaves), gradients([expected], leaves))
    torch.compiler.reset()


@pytest.mark.parametrize(("cell", "structure"), each_value(pairwise([LSTM(), SLSTM()], STRUCTURES), most=1), ids=str)
def test_exported(cell, structure):
    if torch.__version__ < "2.13" and type(cell) is LSTM:
        pytest.skip("PyTorch 2.11 decomposes its own LSTM into one whose final states have another shape")
    layer, x = layer_of(cell, dtype=torch.float32, **structure).eval(), x_of(2, B, F, dtype=torch.float32).detach()
    exported = torch.export.export(layer, (x,), strict=False).run_decompositions()
    torch.testing.assert_close(exported.module()(x), layer(x))


# It is made of graphs like those above.
@pytest.mark.exhaustive
@pytest.mark.parametrize("structure", [STRUCTURES[0], STRUCTURES[2]], ids=str)
def test_onnx(structure, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    layer, x = layer_of(LSTM(), dtype=torch.float32, **structure).eval(), x_of(dtype=torch.float32).detach()
    torch.onnx.export(layer, (x,), tmp_path / "layer.onnx", dynamo=True, input_names=["x"], verbose=False)
    session = runtime.InferenceSession(tmp_path / "layer.onnx", providers=["CPUExecutionProvider"])
    y = torch.from_numpy(session.run(None, {"x": x.numpy()})[0])
    torch.testing.assert_close(y, layer(x)[0].detach(), rtol=1e-4, atol=1e-5)


@each_structure
def test_copies_state_dicts_and_the_representation(structure):
    (name, value), *_ = structure.items()
    layer, x = layer_of(CoupledLSTM(), num_layers=2, **structure), x_of()
    other = gatewise.Recurrent(CoupledLSTM(), F, H, num_layers=2, dtype=torch.float64, **structure)
    other.load_state_dict(layer.state_dict())
    for same in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(called(same, x), called(layer, x), rtol=0, atol=0)
    assert repr(layer) == f"Recurrent(CoupledLSTM(), 3, 6, num_layers=2, {name}={value})"
    assert "heads" not in repr(layer_of(LSTM()))
    assert "rank" not in repr(layer_of(LSTM()))
    kinds = ["weight_ih", *(["weight_rh", "weight_hr"] if name == "recurrent_rank" else ["weight_hh"])]
    kinds += ["bias_ih", "bias_hh"]
    assert [*layer.state_dict()] == [f"{kind}_l{number}" for number in range(2) for kind in kinds]


def test_the_shapes_are_those_of_blocks_and_factors():
    assert layer_of(LSTM(), heads=3).weight_hh_l0.shape == (4 * H, H // 3)
    layer = layer_of(GRU(), bidirectional=True, recurrent_rank=2)
    assert layer.weight_rh_l0_reverse.shape == (3 * H, 2)
    assert layer.weight_hr_l0_reverse.shape == (2, H)
    assert layer_of(GRU(), recurrent_rank=H).weight_hr_l0.shape == (H, H)


def test_one_head_and_rank_zero_are_the_plain_layer():
    layer, plain, x = layer_of(LSTM(), heads=1, recurrent_rank=0), layer_of(LSTM()), x_of()
    torch.testing.assert_close(layer.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert layer.all_weights[0][1] is layer.weight_hh_l0
    torch.testing.assert_close(called(layer, x), called(plain, x), rtol=0, atol=0)


@each_structure
def test_all_weights_are_those_of_a_call(structure):
    layer, x = layer_of(LSTM(), num_layers=2, **structure), x_of()
    torch.testing.assert_close(functional.lstm(x, None, layer.all_weights), layer(x))
    assert layer.all_weights[1][1].shape == (4 * H, H)


@pytest.mark.parametrize("structure", [{"heads": 4}, {"recurrent_rank": 64}], ids=str)
def test_initial_sums_have_the_variance_of_those_of_full_matrices(structure):
    torch.manual_seed(0)
    layer = gatewise.Recurrent(LSTM(), 1, 256, **structure)
    matrix = layer.all_weights[0][1]
    # A row of U(-1/sqrt(H), 1/sqrt(H)) has H elements with the variance 1 / (3 H) each.
    assert abs(matrix.square().sum(1).mean().item() - 1 / 3) < 0.02
    state = copy.deepcopy(layer.state_dict())
    torch.manual_seed(0)
    layer.reset_parameters()
    torch.testing.assert_close(layer.state_dict(), state, rtol=0, atol=0)
    assert layer.bias_hh_l0.abs().max() < 1 / 16


@each_structure
@pytest.mark.parametrize("cell", [LSTM(), PeepholeLSTM(), SLSTM()], ids=repr)
def test_one_step_is_that_of_a_layer(cell, structure):
    torch.manual_seed(0)
    module = gatewise.RecurrentCell(cell, F, H, dtype=torch.float64, **structure)
    layer, x = layer_of(cell, **structure), x_of()
    names = [f"{name}_l0" for name in module.state_dict()]
    assert names == [*layer.state_dict()]
    torch.testing.assert_close([*module.state_dict().values()], [*layer.state_dict().values()], rtol=0, atol=0)
    states, outputs = None, []
    for row in x:
        states = module(row, states)
        outputs.append(states[0])
    y, finals = layer(x)
    found = [torch.stack(outputs), *states]
    torch.testing.assert_close(found, [y, *(state[0] for state in finals)])
    expected = gradients([y], [x, *layer.parameters()])
    torch.testing.assert_close(gradients(found[:1], [x, *module.parameters()]), expected)
    ((name, value),) = structure.items()
    assert repr(module).endswith(f", 3, 6, {name}={value})")
    torch.testing.assert_close(pickle.loads(pickle.dumps(module))(x[0]), module(x[0]))


@pytest.mark.parametrize(("structure", "bound"), [*zip(STRUCTURES, [2**-0.5, 1.0, 2**-0.5], strict=True)], ids=str)
def test_parametrized_weights_are_computed_and_initialised(structure, bound):
    layer, x = layer_of(LSTM(), **structure), x_of()
    name = "weight_rh_l0" if "recurrent_rank" in structure else "weight_hh_l0"
    nn.utils.parametrize.register_parametrization(layer, name, nn.Tanh())
    expected = layer_of(LSTM(), **structure)
    with torch.no_grad():
        expected.get_parameter(name).tanh_()
    torch.testing.assert_close(called(layer, x), called(expected, x))
    layer.reset_parameters()
    assert H**-0.5 < layer.get_parameter(f"parametrizations.{name}.original").abs().max() <= bound


@pytest.mark.parametrize("structure", [{"heads": 8}, {"recurrent_rank": 16}], ids=str)
def test_the_choice_of_a_kernel_is_that_of_a_full_matrix(structure):
    layer, plain = (gatewise.Recurrent(CoupledLSTM(), 512, 512, **options) for options in (structure, {}))
    found, expected = (gatewise.explain(each, (100, 64, 512), device="h200") for each in (layer, plain))
    assert found.chosen == "persistent"
    assert str(found) == str(expected)
    assert len(gatewise.verify(layer, torch.randn(3, 2, 512)).layers) == 1
    model = nn.Sequential(layer)
    assert gatewise.accelerate(model, verbose=False)[0] is layer
    with pytest.warns(UserWarning, match=r"0: stays: it is a gatewise\.Recurrent, which torch\.nn does not have"):
        assert gatewise.restore(model)[0] is layer


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no heads": ({"heads": 0}, "`heads` must be a positive integer that divides hidden_size = 6, got 0."),
    "heads": ({"heads": 4}, "`heads` must be a positive integer that divides hidden_size = 6, got 4."),
    "type of heads": ({"heads": 2.0}, "`heads` must be a positive integer that divides hidden_size = 6, got 2.0."),
    "flag of heads": ({"heads": True}, "`heads` must be a positive integer that divides hidden_size = 6, got True."),
    "rank": ({"recurrent_rank": 7}, "`recurrent_rank` must be an integer from 0 to hidden_size = 6, got 7."),
    "negative": ({"recurrent_rank": -1}, "`recurrent_rank` must be an integer from 0 to hidden_size = 6, got -1."),
    "type of rank": ({"recurrent_rank": "2"}, "`recurrent_rank` must be an integer from 0 to hidden_size = 6, got '2'"),
    "both": ({"heads": 2, "recurrent_rank": 2}, "`recurrent_rank` must be 0 with heads = 2, got 2."),
}


@pytest.mark.parametrize(
    ("make", "name"), each_value([*itertools.product([gatewise.Recurrent, gatewise.RecurrentCell], WRONG)]), ids=str
)
def test_structures_out_of_range_are_refused(name, make):
    options, message = WRONG[name]
    with pytest.raises(ArgumentError, match=re.escape(message)):
        make(LSTM(), F, H, **options)


def test_parameters_of_a_cell_have_other_names():
    class Clashing(gatewise.Cell):
        gates = ("a",)
        parameters = {"weight_rh": 0.0}  # noqa: RUF012

        def step(self, gate, state, parameter):
            return torch.tanh(gate.a + parameter.weight_rh), {}

    with pytest.raises(gatewise.cells.StatementError, match="weight_rh"):
        gatewise.Recurrent(Clashing(), F, H)


@pytest.mark.gpu
@pytest.mark.parametrize("structure", [{"heads": 4}, {"recurrent_rank": 5}], ids=str)
@pytest.mark.parametrize("cell", [LSTM(), GRU(), SLSTM(), LayerNormLSTM.of("haste")], ids=repr)
@pytest.mark.parametrize("kernel", ["persistent", "stepwise", "eager"])
def test_every_kernel_of_a_gpu_computes_them(kernel, cell, structure, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    layer = gatewise.Recurrent(cell, 32, 64, num_layers=2, dtype=torch.float64, **structure)
    x = torch.randn(T, B, 32, dtype=torch.float64, requires_grad=True)
    expected = layer(x)[0]
    above = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [x, *layer.parameters()], above)
    layer, moved = layer.float().cuda(), x.detach().float().cuda().requires_grad_()
    layer.kernel = kernel
    for _ in range(3):  # kernels that record and replay their launches read new matrices in every call
        y = layer(moved)[0]
        torch.testing.assert_close(y.cpu().double(), expected, rtol=1e-3, atol=1e-4)
        found = torch.autograd.grad(y, [moved, *layer.parameters()], above.float().cuda())
        torch.testing.assert_close([each.cpu().double() for each in found], [*wanted], rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@each_structure
def test_a_replayed_graph_reads_the_parameters_anew(structure):
    torch.manual_seed(0)
    layer = gatewise.Recurrent(LSTM(), 32, 66, device="cuda", **structure)
    x = torch.randn(T, B, 32, device="cuda")
    with gatewise.for_cuda_graph(), torch.no_grad():
        graph, (y, _) = captured(lambda: layer(x))
        layer.reset_parameters()
        graph.replay()
        torch.testing.assert_close(y, layer(x)[0])
