"""The GRU and RNN layers and their cells are drop-ins for PyTorch's: classes, weights, calls, options, bad input."""

import copy
import functools
import io

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import gatewise
from tests.pairwise import each_value, pairwise

FORMS = [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}, {"batch_first": True}]
KINDS = {"gru": ("GRU", {}), "rnn_tanh": ("RNN", {}), "rnn_relu": ("RNN", {"nonlinearity": "relu"})}


@pytest.fixture(params=KINDS)
def kind(request):
    """Return the name of a layer's class and the options that make it a layer of the cell."""
    return KINDS[request.param]


def pair(kind, **form):
    """Return a layer of PyTorch, and one of gatewise with its weights."""
    name, options = kind
    torch.manual_seed(0)
    theirs = getattr(torch.nn, name)(4, 5, **options, **form)
    torch.manual_seed(0)
    ours = getattr(gatewise, name)(4, 5, **options, **form)
    return theirs, ours, torch.randn(3, 3, 4)


def assert_same(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_it_is_pytorchs_layer_with_the_same_seed(kind, form):
    theirs, ours, x = pair(kind, **form)
    assert isinstance(ours, torch.nn.RNNBase)
    assert ours.mode == theirs.mode
    assert_same(ours.parameters(), theirs.parameters())
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert_same(ours(x), theirs(x))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradients_of_a_training_step(kind, form):
    theirs, ours, x = pair(kind, **form)
    for layer in (theirs, ours):
        (layer(x)[0].square().sum() + layer(x)[1].sum()).backward()
    assert_same([weight.grad for weight in ours.parameters()], [weight.grad for weight in theirs.parameters()])


def test_packed_batches_keep_their_order(kind):
    theirs, ours, x = pair(kind)
    packed = pack_padded_sequence(x, torch.tensor([1, 3, 2]), enforce_sorted=False)
    h0 = torch.randn(1, 3, 5)
    (found, h_n), (expected, expected_h) = ours(packed, h0), theirs(packed, h0)
    assert isinstance(found, PackedSequence)
    assert_same([found.data, h_n], [expected.data, expected_h])


def test_lengths_are_those_of_a_packed_batch(kind):
    theirs, ours, x = pair(kind, bidirectional=True)
    packed, expected_h = theirs(pack_padded_sequence(x, torch.tensor([1, 3, 2]), enforce_sorted=False))
    y, h_n = ours(x, lengths=[1, 3, 2])
    assert_same([y, h_n], [pad_packed_sequence(packed)[0], expected_h])


def test_one_sequence(kind):
    theirs, ours, x = pair(kind, num_layers=2)
    h0 = torch.randn(2, 5)
    assert_same(ours(x[:, 0], h0), theirs(x[:, 0], h0))


def test_weights_are_looked_up_in_every_call(kind):
    _, ours, x = pair(kind)
    before = ours(x)[0]
    weights = {name: torch.zeros_like(weight) for name, weight in ours.named_parameters()}
    assert float(torch.func.functional_call(ours, weights, (x,))[0].abs().sum()) == 0
    assert_same([ours(x)[0]], [before])
    ours.weight_hh_l0 = torch.nn.Parameter(torch.zeros_like(ours.weight_hh_l0))
    assert not torch.equal(ours(x)[0], before)


def test_copies_and_files_keep_options(kind):
    _, ours, _ = pair(kind)
    ours.kernel, ours.memory = "eager", "lean"
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for other in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert (other.kernel, other.memory) == ("eager", "lean")
        assert "kernel=eager, memory=lean" in repr(other)
        assert ("nonlinearity=relu" in repr(other)) == (other.mode == "RNN_RELU")
        x = torch.randn(3, 2, 4)
        assert_same(other(x), ours(x))


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


each_kind_with = functools.partial(pytest.mark.parametrize, indirect=["kind"], ids=str)


@pytest.mark.usefixtures("fresh_compiler")
@each_kind_with(("kind", "form"), each_value(pairwise([*KINDS], FORMS), most=1))
def test_it_compiles_to_one_graph(kind, form):
    theirs, ours, x = pair(kind, **form)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert_same(compiled(x), theirs(x))
    for layer in (compiled, theirs):
        layer(x)[0].square().sum().backward()
    assert_same([weight.grad for weight in ours.parameters()], [weight.grad for weight in theirs.parameters()])


def outputs_and_gradients(call, layer, *given):
    layer.zero_grad()
    x = given[0].clone().requires_grad_()
    outputs = call(x, *given[1:])
    sum(output.square().sum() for output in outputs).backward()
    return [*outputs, x.grad, *(weight.grad.clone() for weight in layer.parameters())]


@pytest.mark.usefixtures("fresh_compiler")
@each_kind_with(("kind", "extra"), each_value(pairwise([*KINDS], ["state", "lengths", "one sequence"]), most=2))
def test_compiled_with_a_state_and_lengths(kind, extra):
    _, ours, x = pair(kind, num_layers=2, bidirectional=True)
    given = {
        "state": (x, torch.randn(4, 3, 5)),
        "lengths": (x, None, torch.tensor([1, 3, 2])),
        "one sequence": (x[:, 0],),
    }[extra]
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert_same(outputs_and_gradients(compiled, ours, *given), outputs_and_gradients(ours, ours, *given))


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "bidirectional": True}, {"memory": "lean"}, {"kernel": "cudnn"}, {"kernel": "eager"}],
    ids=str,
)
@pytest.mark.parametrize("extra", ["nothing", "state", "lengths"])
def test_on_a_gpu_compiled_and_not_it_is_pytorchs(kind, dtype, options, extra, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    name, own = kind
    layer = getattr(gatewise, name)(24, 32, device="cuda", dtype=dtype, **own, **options)
    exact = getattr(torch.nn, name)(24, 32, layer.num_layers, bidirectional=layer.bidirectional, **own).double()
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(9, 5, 24, device="cuda", dtype=dtype)
    rows = layer.num_layers * (1 + layer.bidirectional)
    state = torch.randn(rows, 5, 32, device="cuda", dtype=dtype) if extra == "state" else None
    # The kernel cudnn reads lengths on the CPU alone.
    where = "cpu" if options.get("kernel") == "cudnn" else "cuda"
    lengths = torch.tensor([9, 1, 4, 7, 3], device=where) if extra == "lengths" else None

    def reference(x, state, lengths):
        if lengths is None:
            return exact(x, state)
        packed, h_n = exact(pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False), state)
        return pad_packed_sequence(packed)[0], h_n

    there = None if state is None else state.cpu().double()
    expected = outputs_and_gradients(reference, exact, x.cpu().double(), there, lengths)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 4e-2}[dtype]
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        for mine, theirs in zip(outputs_and_gradients(call, layer, x, state, lengths), expected, strict=True):
            mine, theirs = mine.detach().cpu().double(), theirs.detach()
            if own.get("nonlinearity") == "relu" and dtype == torch.bfloat16:
                # Rounding moves some sums across the kink of the ReLU, where the slope jumps from 0 to 1.
                assert float((mine - theirs).norm() / theirs.norm()) < 2.5 * tolerance
                continue
            bound = tolerance * float(theirs.abs().max())
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=bound)


def test_dropout_acts_in_training_only(kind):
    _, layer, x = pair(kind, num_layers=2, dropout=0.5)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


def test_dropout_that_drops_nothing_is_warned_of_once(kind):
    with pytest.warns(UserWarning, match="non-zero dropout expects num_layers greater than 1") as caught:
        layer = getattr(gatewise, kind[0])(4, 5, dropout=0.5, **kind[1])
    assert [warning.filename for warning in caught] == [__file__]
    assert layer.dropout == 0.5


@pytest.mark.parametrize("cell", KINDS)
def test_the_decision_names_the_cell(cell):
    theirs, ours, _ = pair(KINDS[cell])
    decision = gatewise.explain(ours, (7, 3, 4), device="h200")
    assert decision.problem.cell.name == cell
    assert decision.chosen == "persistent"
    assert all(decision.verdict(kernel).accepted for kernel in ("aten", "cudnn", "stepwise", "eager"))
    assert gatewise.explain(theirs, (7, 3, 4)).chosen == gatewise.explain(ours, (7, 3, 4)).chosen == "aten"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_no_loop_that_sums_gradients_in_sixteen_bits_trains_on_a_gpu(kind, dtype):
    name, options = kind
    layer = getattr(gatewise, name)(34, 16, dtype=dtype, **options)
    trained = gatewise.explain(layer, (1135, 52, 34), device="h200", training=True)
    assert trained.chosen != "aten"
    (refusal,) = trained.verdict("aten").refusals
    assert "sums gradients of weights in the dtype" in str(refusal)
    assert gatewise.explain(layer, (1135, 52, 34), device="h200", training=False).verdict("aten").accepted
    assert gatewise.explain(layer, (1135, 52, 34), device="cpu", training=True).verdict("aten").accepted
    layer.float()
    assert gatewise.explain(layer, (1135, 52, 34), device="h200", training=True).verdict("aten").accepted


def test_a_named_kernel_runs_or_refuses(kind):
    _, layer, x = pair(kind)
    layer.kernel = "eager"
    assert layer(x)[0].shape == (3, 3, 5)
    layer.kernel = "stepwise"
    with pytest.raises(gatewise.KernelRefused, match="device is CPU"):
        layer(x)


@pytest.mark.parametrize("name", ["GRU", "RNN"])
@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda layer, cell: layer(0, 5), "`input_size` must be a positive integer"),
        (lambda layer, cell: layer(4, 5, kernel="foo"), "foo"),
        (lambda layer, cell: layer(4, 5, memory="little"), "`memory`"),
        (lambda layer, cell: layer(4, 5, dropout=2), "`dropout`"),
        (lambda layer, cell: layer(4, 5)([1.0]), "`input` must be a tensor"),
        (lambda layer, cell: layer(4, 5)(torch.zeros(4)), "`input` must be"),
        (lambda layer, cell: layer(4, 5)(torch.zeros(3, 2, 6)), "4 features"),
        (
            lambda layer, cell: layer(4, 5)(torch.zeros(3, 2, 4), (torch.zeros(1, 2, 5),) * 2),
            "`hx` must be None or a tensor",
        ),
        (lambda layer, cell: layer(4, 5)(torch.zeros(3, 2, 4), torch.zeros(1, 5)), "`hx` must be"),
        (lambda layer, cell: layer(4, 5)(torch.zeros(3, 2, 4), torch.zeros(1, 2, 6)), "`hx` must be [1, 2, 5]"),
        (lambda layer, cell: layer(4, 5)(torch.zeros(3, 4), torch.zeros(1, 1, 5)), "`hx` must be"),
        (lambda layer, cell: layer(4, 5)(torch.zeros(3, 4), lengths=[3]), "`lengths` must be None"),
        (lambda layer, cell: cell(4, 5)(torch.zeros(2, 3)), "4 features"),
        (lambda layer, cell: cell(4, 5)(torch.zeros(2, 4), torch.zeros(2, 4)), "`hx` must be of shape"),
        (lambda layer, cell: cell(4, 5)(torch.zeros(2, 4, dtype=torch.float64)), "float32"),
        (lambda layer, cell: cell(4, -5), "`hidden_size` must be a positive integer"),
    ],
)
def test_bad_input_is_named(name, call, what):
    with pytest.raises(gatewise.GatewiseError) as raised:
        call(getattr(gatewise, name), getattr(gatewise, f"{name}Cell"))
    assert what in str(raised.value)


@pytest.mark.parametrize("bias", [True, False])
def test_the_cell_is_pytorchs(kind, bias):
    name, options = f"{kind[0]}Cell", kind[1]
    torch.manual_seed(0)
    theirs = getattr(torch.nn, name)(4, 5, bias, **options)
    torch.manual_seed(0)
    ours = getattr(gatewise, name)(4, 5, bias, **options)
    assert isinstance(ours, getattr(torch.nn, name))
    for x, h in ((torch.randn(2, 4), torch.randn(2, 5)), (torch.randn(4), None)):
        assert_same([ours(x, h)], [theirs(x, h)])
