"""The GRU layer and its cell are drop-ins for PyTorch's: classes, weights, calls, options and bad input."""

import copy
import io

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import gatewise

FORMS = [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}, {"batch_first": True}]


def pair(**form):
    """A layer of PyTorch's and ours with its weights."""
    torch.manual_seed(0)
    theirs = torch.nn.GRU(4, 5, **form)
    torch.manual_seed(0)
    ours = gatewise.GRU(4, 5, **form)
    return theirs, ours, torch.randn(3, 3, 4)


def assert_same(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_it_is_pytorchs_layer_with_the_same_seed(form):
    theirs, ours, x = pair(**form)
    assert isinstance(ours, torch.nn.RNNBase)
    assert ours.mode == "GRU"
    assert_same(ours.parameters(), theirs.parameters())
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert_same(ours(x), theirs(x))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradients_of_a_training_step(form):
    theirs, ours, x = pair(**form)
    for layer in (theirs, ours):
        (layer(x)[0].square().sum() + layer(x)[1].sum()).backward()
    assert_same([weight.grad for weight in ours.parameters()], [weight.grad for weight in theirs.parameters()])


def test_packed_batches_keep_their_order():
    theirs, ours, x = pair()
    packed = pack_padded_sequence(x, torch.tensor([1, 3, 2]), enforce_sorted=False)
    h0 = torch.randn(1, 3, 5)
    (found, h_n), (expected, expected_h) = ours(packed, h0), theirs(packed, h0)
    assert isinstance(found, PackedSequence)
    assert_same([found.data, h_n], [expected.data, expected_h])


def test_lengths_are_those_of_a_packed_batch():
    theirs, ours, x = pair(bidirectional=True)
    packed, expected_h = theirs(pack_padded_sequence(x, torch.tensor([1, 3, 2]), enforce_sorted=False))
    y, h_n = ours(x, lengths=[1, 3, 2])
    assert_same([y, h_n], [pad_packed_sequence(packed)[0], expected_h])


def test_one_sequence():
    theirs, ours, x = pair(num_layers=2)
    h0 = torch.randn(2, 5)
    assert_same(ours(x[:, 0], h0), theirs(x[:, 0], h0))


def test_weights_are_looked_up_in_every_call():
    _, ours, x = pair()
    before = ours(x)[0]
    weights = {name: torch.zeros_like(weight) for name, weight in ours.named_parameters()}
    assert float(torch.func.functional_call(ours, weights, (x,))[0].abs().sum()) == 0
    assert_same([ours(x)[0]], [before])
    ours.weight_hh_l0 = torch.nn.Parameter(torch.zeros_like(ours.weight_hh_l0))
    assert not torch.equal(ours(x)[0], before)


def test_copies_and_files_keep_options():
    ours = gatewise.GRU(4, 5, kernel="eager", memory="lean")
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for other in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert (other.kernel, other.memory) == ("eager", "lean")
        assert "kernel=eager, memory=lean" in repr(other)
        x = torch.randn(3, 2, 4)
        assert_same(other(x), ours(x))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_it_compiles_to_one_graph(form):
    theirs, ours, x = pair(**form)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert_same(compiled(x), theirs(x))
    for layer in (compiled, theirs):
        layer(x)[0].square().sum().backward()
    assert_same([weight.grad for weight in ours.parameters()], [weight.grad for weight in theirs.parameters()])


def test_dropout_acts_in_training_only():
    layer, x = gatewise.GRU(4, 5, 2, dropout=0.5), torch.randn(3, 2, 4)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


def test_the_decision_names_the_cell_and_its_refusals():
    layer = gatewise.GRU(4, 5)
    decision = gatewise.explain(layer, (7, 3, 4), device="h200")
    assert decision.problem.cell.name == "gru"
    assert "cell is gru, allowed: lstm" in str(decision)
    assert gatewise.explain(torch.nn.GRU(4, 5), (7, 3, 4)).chosen == "aten"
    with pytest.raises(gatewise.ArgumentError, match="an LSTM or GRU"):
        gatewise.explain(torch.nn.RNN(4, 5), (7, 3, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_no_loop_that_sums_gradients_in_sixteen_bits_trains_on_a_gpu(dtype):
    layer = gatewise.GRU(34, 16, dtype=dtype)
    trained = gatewise.explain(layer, (1135, 52, 34), device="h200", training=True)
    assert trained.chosen != "aten"
    (refusal,) = trained.verdict("aten").refusals
    assert "sums gradients of weights in the dtype" in str(refusal)
    assert gatewise.explain(layer, (1135, 52, 34), device="h200", training=False).verdict("aten").accepted
    assert gatewise.explain(layer, (1135, 52, 34), device="cpu", training=True).verdict("aten").accepted
    layer.float()
    assert gatewise.explain(layer, (1135, 52, 34), device="h200", training=True).verdict("aten").accepted


def test_a_named_kernel_runs_or_refuses():
    x = torch.randn(3, 2, 4)
    assert gatewise.GRU(4, 5, kernel="eager")(x)[0].shape == (3, 2, 5)
    with pytest.raises(gatewise.KernelRefused, match="cell is gru"):
        gatewise.GRU(4, 5, kernel="stepwise")(x)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: gatewise.GRU(0, 5), "`input_size` must be a positive integer"),
        (lambda: gatewise.GRU(4, 5, kernel="foo"), "foo"),
        (lambda: gatewise.GRU(4, 5, memory="little"), "`memory`"),
        (lambda: gatewise.GRU(4, 5, dropout=2), "`dropout`"),
        (lambda: gatewise.GRU(4, 5)([1.0]), "`input` must be a tensor"),
        (lambda: gatewise.GRU(4, 5)(torch.zeros(4)), "`input` must be"),
        (lambda: gatewise.GRU(4, 5)(torch.zeros(3, 2, 6)), "4 features"),
        (
            lambda: gatewise.GRU(4, 5)(torch.zeros(3, 2, 4), (torch.zeros(1, 2, 5),) * 2),
            "`hx` must be None or a tensor",
        ),
        (lambda: gatewise.GRU(4, 5)(torch.zeros(3, 2, 4), torch.zeros(1, 5)), "`hx` must be"),
        (lambda: gatewise.GRU(4, 5)(torch.zeros(3, 2, 4), torch.zeros(1, 2, 6)), "`h0` must be"),
        (lambda: gatewise.GRU(4, 5)(torch.zeros(3, 4), torch.zeros(1, 1, 5)), "`hx` must be"),
        (lambda: gatewise.GRU(4, 5)(torch.zeros(3, 4), lengths=[3]), "`lengths` must be None"),
        (lambda: gatewise.GRUCell(4, 5)(torch.zeros(2, 3)), "4 features"),
        (lambda: gatewise.GRUCell(4, 5)(torch.zeros(2, 4), torch.zeros(2, 4)), "`hx` must be of shape"),
        (lambda: gatewise.GRUCell(4, 5)(torch.zeros(2, 4, dtype=torch.float64)), "float32"),
        (lambda: gatewise.GRUCell(4, -5), "`hidden_size` must be a positive integer"),
    ],
)
def test_bad_input_is_named(call, what):
    with pytest.raises(gatewise.GatewiseError) as raised:
        call()
    assert what in str(raised.value)


@pytest.mark.parametrize("way", [torch.jit.script, lambda layer: torch.jit.trace(layer, torch.zeros(3, 2, 4))])
def test_torchscript_is_refused(way):
    with pytest.raises(gatewise.ArgumentError, match=r"torch\.nn\.GRU"):
        way(gatewise.GRU(4, 5))


@pytest.mark.parametrize("bias", [True, False])
def test_the_cell_is_pytorchs(bias):
    torch.manual_seed(0)
    theirs = torch.nn.GRUCell(4, 5, bias)
    torch.manual_seed(0)
    ours = gatewise.GRUCell(4, 5, bias)
    assert isinstance(ours, torch.nn.GRUCell)
    for x, h in ((torch.randn(2, 4), torch.randn(2, 5)), (torch.randn(4), None)):
        assert_same([ours(x, h)], [theirs(x, h)])
