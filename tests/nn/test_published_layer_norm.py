"""Layer-normalized cells compared in float64 with the layers of the libraries that published their forms."""

import itertools

import pytest
import torch
from torch.func import functional_call

import gatewise
from gatewise.cells import LayerNormLSTM
from gatewise.cells.layer_norm_lstm import FORMS
from tests.pairwise import each_value
from tests.published_layer_norm import PUBLISHED, H, I

T, B = 4, 3


def layer_of(published, **options):
    return gatewise.Recurrent(published.cell, I, H, dtype=torch.float64, **options)


def given(published, scale=1.0):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, B, I, dtype=torch.float64, generator=generator).requires_grad_()
    shape = 1 + len(published.cell.states), B, H
    states = torch.randn(shape, dtype=torch.float64, generator=generator) * scale
    return x, [state.requires_grad_() for state in states.unbind()]


def called(layer, published, tensors, x, states):
    """Return the output and the final states of a layer whose parameters are made of the library's tensors."""
    parameters = {f"{name}_l0": value for name, value in published.parameters(tensors).items()}
    assert parameters.keys() == dict(layer.named_parameters()).keys()
    h, *others = [state.unsqueeze(0) for state in states]
    y, finals = functional_call(layer, parameters, (x, (h, *others) if others else h))
    return y, [final[0] for final in (finals if others else [finals])]


def test_every_form_is_tested():
    assert FORMS.keys() <= PUBLISHED.keys()


@pytest.mark.parametrize(("memory", "name"), each_value([*itertools.product(["normal", "lean"], PUBLISHED)]), ids=str)
def test_values_and_all_gradients(name, memory):
    published = PUBLISHED[name]
    tensors = published.tensors()
    x, states = given(published)
    results = [
        called(layer_of(published, memory=memory), published, tensors, x, states),
        published.run(tensors, x, states),
    ]
    (y, finals), (expected, expected_finals) = results
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(finals, expected_finals)
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(value.shape, dtype=value.dtype, generator=generator) for value in (y, *finals)]
    leaves = [x, *states, *tensors.values()]
    found, wanted = (
        torch.autograd.grad([output, *final], leaves, [weight.clone() for weight in weights])
        for output, final in results
    )
    torch.testing.assert_close(found, wanted)
    assert all(gradient.abs().max() > 0 for gradient in found)


def test_lingvo_bounds_the_cell_state():
    published = PUBLISHED["lingvo"]
    tensors = published.tensors()
    x, states = given(published, scale=40)
    _, after_one_step = called(layer_of(published), published, tensors, x[:1], states)
    assert (after_one_step[1].abs() == 10).sum() > 1
    y, _ = called(layer_of(published), published, tensors, x, states)
    expected, _ = published.run(tensors, x, states)
    torch.testing.assert_close(y, expected)
    leaves = [x, *tensors.values()]
    found, wanted = (torch.autograd.grad(each.square().sum(), leaves) for each in (y, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "name", [pytest.param("torchscript", marks=pytest.mark.exhaustive), "returnn_joined", "haste_gru"]
)
def test_second_derivatives(name):
    published = PUBLISHED[name]
    tensors = published.tensors()
    x, states = given(published)
    layer = layer_of(published)
    leaves = [x[:2, :1].detach().requires_grad_(), *(tensor for tensor in tensors.values())]

    def run(x, *values):
        own = dict(zip(tensors, values, strict=True))
        return called(layer, published, own, x, [state[:1] for state in states])[0]

    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_has_the_biases_of_its_form(form):
    layer = gatewise.Recurrent(LayerNormLSTM.of(form), I, H)
    assert layer.bias == (form == "icefall")
    assert ("bias_ih_l0" in dict(layer.named_parameters())) == layer.bias
    assert gatewise.Recurrent(LayerNormLSTM.of(form), I, H, bias=True).bias
    assert not gatewise.Recurrent(LayerNormLSTM.of(form), I, H, bias=False).bias


# In `make test` a layer with the published norms of LayerNormLSTM is compiled: test_compile.py.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("haste", "icefall", "haste_gru")),
        "returnn_joined with hidden_norm",
    ],
)
def test_a_compiled_layer_computes_its_own_form(name):
    layer = layer_of(PUBLISHED[name])
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, _ = given(PUBLISHED[name])
    leaves = [x, *layer.parameters()]
    results = [each(x)[0] for each in (compiled, layer)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), leaves) for y in results))
