"""Weight dropout: a call equals a call of PyTorch's layer whose recurrent matrices are multiplied by the same masks."""

import copy
import functools
import itertools
import pickle
import re

import numpy as np
import pytest
import torch
from torch import nn

import gatewise
from gatewise.cells import GRU, LSTM, RNN, CoupledLSTM
from gatewise.contract.errors import ArgumentError
from tests.graphs import captured
from tests.pairwise import each_value, pairwise

T, B, F, H, P = 6, 3, 3, 5, 0.4
PYTORCH = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
OURS = {"lstm": gatewise.LSTM, "gru": gatewise.GRU, "rnn": gatewise.RNN}
CELLS = {"lstm": LSTM(), "gru": GRU(), "rnn": RNN("tanh")}
LENGTHS = [6, 2, 4]


def layer_of(kind, rate=P, dtype=torch.float64, **options):
    """Return a layer: a drop-in, or `Recurrent` with the same cell."""
    torch.manual_seed(0)
    options |= {"weight_dropout": rate, "dtype": dtype}
    name, _, recurrent = kind.partition(" ")
    return gatewise.Recurrent(CELLS[name], F, H, **options) if recurrent else OURS[name](F, H, **options)


def x_of(dtype=torch.float64):
    return torch.randn(T, B, F, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()


def masked(layer):
    """Return the parameters by name, those of the recurrent matrices multiplied by masks that are drawn in order."""
    found = dict(layer.named_parameters())
    for name, weight in found.items():
        if name.startswith("weight_hh"):
            kept = torch.empty(weight.shape, dtype=torch.bool, device=weight.device).bernoulli_(1 - P)
            found[name] = weight * kept.to(weight.dtype) / (1 - P)
    return found


def expected_of(kind, layer, x, lengths=None):
    """Return the output and the final states of PyTorch's layer with masked weights."""
    weights = masked(layer)  # before the layer below draws its initial weights
    options = {"num_layers": layer.num_layers, "bidirectional": layer.bidirectional, "dtype": torch.float64}
    proj = {"proj_size": layer.proj_size} if kind == "lstm" else {}
    theirs = PYTORCH[kind.partition(" ")[0]](F, H, **options, **proj)
    packed = x if lengths is None else nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    y, finals = torch.func.functional_call(theirs, weights, (packed,))
    if lengths is not None:
        y, _ = nn.utils.rnn.pad_packed_sequence(y, total_length=T)
    return [y, *(finals if isinstance(finals, tuple) else (finals,))]


def called(layer, x, **options):
    y, finals = layer(x, **options)
    return [y, *(finals if isinstance(finals, tuple) else (finals,))]


def gradients(outputs, leaves, **options):
    torch.manual_seed(3)
    return torch.autograd.grad(outputs, leaves, [torch.randn_like(output) for output in outputs], **options)


KINDS = [*OURS, *(f"{name} recurrent" for name in OURS)]


@pytest.mark.parametrize(
    ("kind", "num_layers", "bidirectional", "lengths", "memory", "kernel"),
    pairwise(KINDS, [1, 2], [False, True], [None, LENGTHS], ["normal", "lean"], ["auto", "eager"]),
    ids=str,
)
def test_the_recurrent_matrices_are_masked(kind, num_layers, bidirectional, lengths, memory, kernel):
    layer = layer_of(kind, num_layers=num_layers, bidirectional=bidirectional, memory=memory, kernel=kernel)
    x, leaves = x_of(), list(layer.parameters())
    torch.manual_seed(2)
    found = called(layer, x, lengths=lengths)
    torch.manual_seed(2)
    expected = expected_of(kind, layer, x, lengths)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, [x, *leaves]), gradients(expected, [x, *leaves]))


@pytest.mark.parametrize("kernel", ["aten", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel_of_a_cpu_reads_the_same_masks(kind, kernel):
    layer, x = layer_of(kind, kernel=kernel, num_layers=2), x_of()
    torch.manual_seed(2)
    found = called(layer, x)
    torch.manual_seed(2)
    torch.testing.assert_close(found, expected_of(kind, layer, x))


def test_with_a_projection_and_resets():
    layer, x = layer_of("lstm", proj_size=2), x_of()
    torch.manual_seed(2)
    found = called(layer, x, resets=torch.zeros(T, B, dtype=torch.bool))
    torch.manual_seed(2)
    torch.testing.assert_close(found, expected_of("lstm", layer, x))
    resets = torch.zeros(T, B, dtype=torch.bool)
    resets[2] = True
    torch.manual_seed(2)
    y, _ = layer(x, resets=resets)
    torch.manual_seed(2)
    torch.testing.assert_close(y[2:], expected_of("lstm", layer, x[2:])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_dropped_in_eval_mode_or_at_rate_zero(kind):
    x, plain = x_of(), layer_of(kind, rate=0.0, num_layers=2)
    layer = layer_of(kind, num_layers=2).eval()
    state = torch.random.get_rng_state()
    found = called(layer, x)
    torch.testing.assert_close(found, called(plain, x), rtol=0, atol=0)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.equal(layer.train()(x)[0], found[0])


def test_each_call_draws_new_masks_and_a_seed_repeats_them():
    layer, x = layer_of("lstm"), x_of()
    torch.manual_seed(5)
    first, second = layer(x)[0], layer(x)[0]
    torch.manual_seed(5)
    torch.testing.assert_close(layer(x)[0], first, rtol=0, atol=0)
    assert not torch.equal(first, second)
    torch.testing.assert_close(first[0], second[0])  # the first step reads no hidden state


def test_about_the_given_share_of_elements_is_dropped():
    layer = gatewise.GRU(F, 40, weight_dropout=P, dtype=torch.float64)
    layer(x_of())[0].square().sum().backward()
    dropped = (layer.weight_hh_l0.grad == 0).double().mean().item()
    assert abs(dropped - P) < 4 * (P * (1 - P) / 4800) ** 0.5


@pytest.mark.parametrize("kind", ["lstm", "gru recurrent"])
def test_double_backward(kind):
    layer, x = layer_of(kind, kernel="eager"), x_of()
    leaves = [x, *layer.parameters()]

    def second(outputs):
        dx, *_ = gradients(outputs[:1], leaves, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), leaves[1:3])

    torch.manual_seed(2)
    found = second(called(layer, x))
    torch.manual_seed(2)
    torch.testing.assert_close(found, second(expected_of(kind, layer, x)))


def test_gradcheck_of_second_order():
    layer, x = layer_of("lstm"), torch.randn(3, 1, F, dtype=torch.float64, requires_grad=True)

    def call(x, w_hh):
        torch.manual_seed(2)
        return torch.func.functional_call(layer, {"weight_hh_l0": w_hh}, (x,))[0]

    leaves = x, layer.weight_hh_l0.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("kind", ["lstm", "gru recurrent"])
def test_transforms_of_torch_func(kind):
    layer, x = layer_of(kind), x_of()
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,))[0].square().sum()

    torch.manual_seed(2)
    found = torch.func.grad(loss)(parameters, x)
    torch.manual_seed(2)
    expected = torch.autograd.grad(loss(parameters, x), [*parameters.values()])
    torch.testing.assert_close([*found.values()], [*expected])
    of_samples = torch.func.vmap(torch.func.grad(loss), (None, 1), randomness="different")(parameters, x.unsqueeze(2))
    assert len({tuple((gradient == 0).flatten().tolist()) for gradient in of_samples["weight_hh_l0"]}) == B


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_converts_the_masked_matrices(kind):
    layer, x = layer_of(kind, dtype=torch.float32), x_of(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(2)
        found = called(layer, x)
        torch.manual_seed(2)
        weights = masked(layer)
        expected = torch.func.functional_call(layer.eval(), weights, (x,))
    assert found[0].dtype == torch.bfloat16
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    "kind", [*[pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("lstm", "gru")], "lstm recurrent"]
)
def test_compiled_in_one_graph(kind):
    torch.compiler.reset()
    layer, x = layer_of(kind), x_of()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.manual_seed(2)
    found = compiled(x)[0]
    leaves = [x, *layer.parameters()]
    torch.manual_seed(2)
    expected = layer(x)[0]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients([found], leaves), gradients([expected], leaves))
    assert not torch.equal(compiled(x)[0], found)
    for rate in (0.25, 0.75, 0.0):  # a rate that changes becomes a symbol
        layer.weight_dropout = rate
        compiled(x)
    torch.testing.assert_close(compiled(x)[0], layer(x)[0])
    torch.compiler.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_copies_keep_the_rate_and_repr_shows_it(kind):
    layer, x = layer_of(kind), x_of()
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.manual_seed(2)
        found = copied(x)[0]
        torch.manual_seed(2)
        torch.testing.assert_close(found, layer(x)[0])
    assert f"weight_dropout={P}" in repr(layer)
    assert "weight_dropout" not in repr(layer_of(kind, rate=0.0))
    assert [*layer.state_dict()] == [*layer_of(kind, rate=0.0).state_dict()]


def test_layers_of_pytorch_drop_nothing_after_the_swap():
    for theirs in (nn.LSTM(F, H), nn.GRU(F, H), nn.RNN(F, H)):
        ours = gatewise.accelerate(theirs, verbose=False)
        assert ours.weight_dropout == 0
        ours(torch.randn(T, B, F))


@pytest.mark.parametrize(
    ("rate", "make"),
    each_value(
        [
            *itertools.product(
                [1.0, 1, -0.1, 1.5, float("nan"), True, "0.5", None],
                [*OURS.values(), functools.partial(gatewise.Recurrent, CoupledLSTM())],
            )
        ]
    ),
    ids=str,
)
def test_rates_outside_of_the_range_are_refused(make, rate):
    message = f"`weight_dropout` must be a probability in [0, 1), got {rate!r}."
    with pytest.raises(ArgumentError, match=re.escape(message)):
        make(F, H, weight_dropout=rate)


@pytest.mark.parametrize(
    ("training", "rate", "make"),
    each_value(
        [
            *itertools.product(
                [True, False],
                [1, 2, -0.1, float("nan"), True, "0.5", "", None, torch.tensor([0.1, 0.2])],
                [*OURS.values(), functools.partial(gatewise.Recurrent, CoupledLSTM())],
            )
        ]
    ),
    ids=str,
)
def test_rates_that_are_assigned_are_checked_by_the_next_call(make, rate, training):
    layer, x = make(F, H).train(training), torch.randn(T, B, F)
    layer.weight_dropout = rate
    with pytest.raises(ArgumentError, match=re.escape("`weight_dropout` must be a probability in [0, 1), got ")):
        layer(x)
    layer.weight_dropout = 0
    expected, _ = layer(x)
    layer.weight_dropout = np.float32(0.25)
    assert training == (not torch.equal(layer(x)[0], expected))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["lstm", "gru", "lstm recurrent"])
@pytest.mark.parametrize("kernel", ["persistent", "stepwise", "cudnn", "eager"])
def test_every_kernel_of_a_gpu_reads_the_same_masks(kind, kernel, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    name, _, recurrent = kind.partition(" ")
    options = {"num_layers": 2, "weight_dropout": P, "device": "cuda", "kernel": kernel}
    layer = gatewise.Recurrent(CELLS[name], 32, 64, **options) if recurrent else OURS[name](32, 64, **options)
    x = torch.randn(T, B, 32, device="cuda")
    for _ in range(3):  # kernels that record and replay their launches read new matrices in every call
        torch.manual_seed(2)
        found = layer(x)[0]
        torch.manual_seed(2)
        weights = masked(layer)
        expected = torch.func.functional_call(layer.eval(), weights, (x,))[0]
        layer.train()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [gatewise.LSTM, gatewise.GRU])
def test_weights_have_forward_mode_derivatives(kind):
    layer, x = kind(3, 5, weight_dropout=P, dtype=torch.float64), torch.randn(4, 2, 3, dtype=torch.float64)
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}

    def loss(weights):
        torch.manual_seed(1)
        return torch.func.functional_call(layer, weights, (x,))[0].square().sum()

    _, found = torch.func.jvp(loss, (weights,), (weights,))
    gradients = torch.func.grad(loss)(weights)
    expected = sum((gradients[name] * weight).sum() for name, weight in weights.items())
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
def test_a_captured_graph_draws_new_masks_at_each_replay():
    torch.manual_seed(0)
    layer = gatewise.LSTM(32, 64, device="cuda", weight_dropout=P)
    x = torch.randn(T, B, 32, device="cuda")
    with gatewise.for_cuda_graph(), torch.no_grad():
        graph, (y, _) = captured(lambda: layer(x))
    found = []
    for _ in range(2):
        graph.replay()
        found.append(y.clone())
    assert not torch.equal(*found)
