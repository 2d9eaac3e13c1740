"""cuDNN through its explicit operators: the flat buffer, the single-use reserve, what torch.nn.LSTM computes."""

import pytest
import torch

import gatewise
from gatewise import functional
from gatewise.contract.saved import Inputs
from gatewise.contract.weights import in_one_buffer
from gatewise.functional.validate import prepare
from gatewise.kernels.cudnn import cudnn

pytestmark = pytest.mark.gpu
FORMS = [
    {},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 2, "bias": False},
    {"proj_size": 8, "num_layers": 2},
]


def make(form, dtype=torch.float32):
    torch.manual_seed(0)
    theirs = torch.nn.LSTM(16, 32, device="cuda", dtype=dtype, **form)
    ours = gatewise.LSTM(16, 32, device="cuda", dtype=dtype, kernel="cudnn", **form)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours, torch.randn(7, 5, 16, device="cuda", dtype=dtype, requires_grad=True)


def gradients(module, x):
    y, (h, c) = module(x)
    torch.manual_seed(1)
    above = [torch.randn_like(tensor) for tensor in (y, h, c)]
    return [y, h, c, *torch.autograd.grad([y, h, c], [x, *module.parameters()], above)]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_very_numbers_of_torch_nn_lstm(form, dtype):
    theirs, ours, x = make(form, dtype)
    torch.testing.assert_close(gradients(ours, x), gradients(theirs, x), rtol=0, atol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_state_may_have_any_strides(dropout):
    module = gatewise.LSTM(16, 32, 2, dropout=dropout, device="cuda", kernel="cudnn").eval()
    x = torch.randn(7, 5, 16, device="cuda", requires_grad=True)
    h0, c0 = (torch.randn(5, 2, 32, device="cuda").transpose(0, 1) for _ in range(2))
    strided, plain = module(x, (h0, c0)), module(x, (h0.contiguous(), c0.contiguous()))
    torch.testing.assert_close(strided, plain, rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_flat_weights_are_seen_and_read_in_place(form):
    _, ours, x = make(form)
    flat = tuple(ours.parameters())
    options = {"lengths": None, "batch_sizes": None, "dropout": 0.0, "needs_grad": False}
    problem, inputs = prepare(x.detach(), None, flat, bidirectional=form.get("bidirectional", False), **options)
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


def test_backward_in_eval_mode():
    _, ours, x = make({"num_layers": 2, "dropout": 0.5})
    ours.eval()
    ours(x)[0].sum().backward()
    assert torch.isfinite(x.grad).all()


def test_dropout_follows_the_seed():
    _, ours, x = make({"num_layers": 3, "dropout": 0.5})
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        runs.append(ours(x)[0])
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_runs_in_its_own_dtype(dtype):
    _, ours, x = make({"num_layers": 2})
    with torch.autocast("cuda", dtype):
        y, (h, c) = ours(x)
    assert y.dtype == h.dtype == c.dtype == dtype
    y.float().sum().backward()
    assert ours.weight_hh_l0.grad.dtype == torch.float32


def test_lengths_on_the_gpu_wait_for_nothing():
    module = gatewise.LSTM(16, 32, num_layers=2, bidirectional=True, device="cuda")
    x = torch.randn(7, 3, 16, device="cuda", requires_grad=True)
    lengths = torch.tensor([3, 7, 0], device="cuda")
    module(x, lengths=lengths)[0].sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y, _ = module(x, lengths=lengths)
        y.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_cuda_graph_replays_a_training_step():
    _, ours, x = make({"num_layers": 2})
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


def test_dropout_is_pytorchs_own_unless_results_must_be_repeatable():
    _, ours, x = make({"num_layers": 3, "dropout": 0.5, "bidirectional": True}, torch.float64)
    torch.use_deterministic_algorithms(False)
    assert "CudnnRnn" in ours(x)[0].grad_fn.name()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(2)
    y, _ = ours(x)
    torch.manual_seed(2)
    weights = [parameter.detach().clone() for parameter in ours.parameters()]
    (expected, _), _ = functional.forward(x, None, weights, bidirectional=True, dropout=0.5, kernel="eager")
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
