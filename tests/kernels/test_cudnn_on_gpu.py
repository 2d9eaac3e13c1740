"""cuDNN through its explicit operators: the flat buffer, the single-use reserve, what PyTorch's modules compute."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import gatewise
from gatewise import functional
from gatewise.cells import GRU, LSTM, RNN
from gatewise.contract.saved import Inputs
from gatewise.contract.weights import in_one_buffer
from gatewise.functional.execution import prepare
from gatewise.functional.plan import plan_of
from gatewise.kernels.cudnn import cudnn, weight_buffer

pytestmark = pytest.mark.gpu
FORMS = [
    {},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 2, "bias": False},
    {"proj_size": 8, "num_layers": 2},
]
CELLS = {"LSTM": LSTM(), "GRU": GRU(), "RNN_TANH": RNN("tanh"), "RNN_RELU": RNN("relu")}
CALLS = [(cell, form) for cell in CELLS for form in FORMS if cell == "LSTM" or "proj_size" not in form]


def layer(module, cell, *sizes, **options):
    """Return a layer of a cell from `torch.nn` or `gatewise`, on the GPU."""
    name, *nonlinearity = cell.split("_")
    own = {"nonlinearity": nonlinearity[0].lower()} if nonlinearity else {}
    return getattr(module, name)(*sizes, device="cuda", **own, **options)


def make(form, dtype=torch.float32, cell="LSTM"):
    torch.manual_seed(0)
    theirs = layer(torch.nn, cell, 16, 32, dtype=dtype, **form)
    ours = layer(gatewise, cell, 16, 32, dtype=dtype, kernel="cudnn", **form)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours, torch.randn(7, 5, 16, device="cuda", dtype=dtype, requires_grad=True)


def outputs(module, *given):
    """Return y and the final states, one or two, in one list."""
    y, final = module(*given)
    return [y, *([final] if isinstance(final, torch.Tensor) else final)]


def gradients(module, x):
    found = outputs(module, x)
    torch.manual_seed(1)
    above = [torch.randn_like(tensor) for tensor in found]
    return [*found, *torch.autograd.grad(found, [x, *module.parameters()], above)]


def state_of(module, *tensors):
    return tensors if isinstance(module, gatewise.LSTM) else tensors[0]


@pytest.mark.parametrize(("cell", "form"), CALLS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_very_numbers_of_pytorchs_module(cell, form, dtype):
    theirs, ours, x = make(form, dtype, cell)
    torch.testing.assert_close(gradients(ours, x), gradients(theirs, x), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("cell", "form"), [(cell, form) for cell, form in CALLS if form.get("bias", True)], ids=str)
def test_under_autocast_weights_are_copied_once_and_read_where_they_are(cell, form, dtype, monkeypatch):
    _, ours, x = make(form, cell=cell)

    def step():
        plan_of.cache_clear()
        with torch.autocast("cuda", dtype):
            return gradients(ours, x)

    monkeypatch.setattr(type(cudnn), "widens_gradients", False)
    expected = step()
    monkeypatch.setattr(type(cudnn), "widens_gradients", True)
    monkeypatch.setattr(weight_buffer, "cudnn_order", lambda flat: pytest.fail("packed"))
    found = step()
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert {each.dtype for each in found[-len(list(ours.parameters())) :]} == {torch.float32}


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_state_may_have_any_strides(dropout, cell):
    module = layer(gatewise, cell, 16, 32, 2, dropout=dropout, kernel="cudnn").eval()
    x = torch.randn(7, 5, 16, device="cuda", requires_grad=True)
    h0, c0 = (torch.randn(5, 2, 32, device="cuda").transpose(0, 1) for _ in range(2))
    strided = outputs(module, x, state_of(module, h0, c0))
    plain = outputs(module, x, state_of(module, h0.contiguous(), c0.contiguous()))
    torch.testing.assert_close(strided, plain, rtol=0, atol=0)


@pytest.mark.parametrize(("cell", "form"), CALLS, ids=str)
def test_flat_weights_are_seen_and_read_in_place(cell, form):
    _, ours, x = make(form, cell=cell)
    flat = tuple(ours.parameters())
    options = None, None, form.get("bidirectional", False), 0.0, False, "cudnn", "normal", CELLS[cell]
    plan, inputs = prepare(x.detach(), None, flat, *options)
    problem = plan.problem
    assert in_one_buffer(flat, problem.weights_per_direction)
    with torch.no_grad():
        from_buffer = cudnn.forward(problem, inputs)
        apart = Inputs(*inputs[:3], tuple(weight.detach().clone() for weight in flat))
        copied = cudnn.forward(problem, apart)
    torch.testing.assert_close(from_buffer[:3], copied[:3], rtol=0, atol=0)


def test_a_second_backward_repeats_the_forward_because_the_reserve_is_used_up():
    theirs, _, x = make({"num_layers": 2})
    (y, _), saved = functional.forward(x, None, theirs.all_weights, kernel="cudnn")
    first = functional.backward(saved, torch.ones_like(y))
    assert saved.spent
    second = functional.backward(saved, torch.ones_like(y))
    torch.testing.assert_close(first.x, second.x, rtol=0, atol=0)
    torch.testing.assert_close(first.weights, second.weights, rtol=0, atol=0)


@pytest.mark.parametrize("cell", CELLS)
def test_backward_in_eval_mode(cell):
    _, ours, x = make({"num_layers": 2, "dropout": 0.5}, cell=cell)
    ours.eval()
    ours(x)[0].sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("cell", CELLS)
def test_dropout_follows_the_seed(cell):
    _, ours, x = make({"num_layers": 3, "dropout": 0.5}, cell=cell)
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        runs.append(ours(x)[0])
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_runs_in_its_own_dtype(dtype, cell):
    _, ours, x = make({"num_layers": 2}, cell=cell)
    with torch.autocast("cuda", dtype):
        found = outputs(ours, x)
    assert all(tensor.dtype == dtype for tensor in found)
    found[0].float().sum().backward()
    assert ours.weight_hh_l0.grad.dtype == torch.float32


@pytest.mark.parametrize("cell", CELLS)
def test_lengths_on_the_gpu_wait_for_nothing(cell):
    module = layer(gatewise, cell, 16, 32, num_layers=2, bidirectional=True)
    x = torch.randn(7, 3, 16, device="cuda", requires_grad=True)
    lengths = torch.tensor([3, 7, 0], device="cuda")
    module(x, lengths=lengths)[0].sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y, _ = module(x, lengths=lengths)
        y.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("cell", ["GRU", "RNN_TANH", "RNN_RELU"])
@pytest.mark.parametrize("form", [{"num_layers": 2}, {"bidirectional": True}], ids=str)
def test_a_packed_batch_is_pytorchs(form, cell):
    theirs, ours, x = make(form, torch.float64, cell)
    packed = pack_padded_sequence(x, torch.tensor([7, 4, 4, 2, 1]))
    (found, h_n), (expected, expected_h) = ours(packed), theirs(packed)
    torch.testing.assert_close([found.data, h_n], [expected.data, expected_h], rtol=0, atol=0)
    above = torch.randn_like(found.data)
    mine, others = (
        torch.autograd.grad(y.data, [x, *module.parameters()], above, retain_graph=True)  # both share the packing
        for y, module in ((found, ours), (expected, theirs))
    )
    torch.testing.assert_close(mine, others, rtol=0, atol=0)


@pytest.mark.parametrize("cell", CELLS)
def test_a_cuda_graph_replays_a_training_step(cell):
    _, ours, x = make({"num_layers": 2}, cell=cell)
    parameters = list(ours.parameters())

    def step():
        return torch.autograd.grad(ours(x)[0].square().sum(), parameters)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = [step() for _ in range(3)][-1]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    for tensor in replayed:
        tensor.fill_(torch.nan)
    graph.replay()
    torch.testing.assert_close(replayed, expected)


def test_switched_off_cudnn_is_refused():
    _, ours, x = make({})
    with (
        torch.backends.cudnn.flags(enabled=False),
        pytest.raises(gatewise.KernelRefused, match="absent or switched off"),
    ):
        ours(x)
    assert ours(x)[0].shape == (7, 5, 32)


@pytest.mark.parametrize("cell", CELLS)
def test_dropout_is_pytorchs_own_unless_results_must_be_repeatable(cell):
    _, ours, x = make({"num_layers": 3, "dropout": 0.5, "bidirectional": True}, torch.float64, cell)
    torch.use_deterministic_algorithms(False)
    assert "CudnnRnn" in ours(x)[0].grad_fn.name()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(2)
    y, _ = ours(x)
    ours.kernel = "eager"
    torch.manual_seed(2)
    expected = outputs(ours, x)[0]
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
