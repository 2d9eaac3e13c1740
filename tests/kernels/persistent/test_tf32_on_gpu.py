"""float32 with TF32 products on a device: held to what rounding to TF32 costs, and to what cuDNN makes of it."""

import pytest
import torch

from gatewise import testing
from gatewise.contract.errors import ExchangeTimeout
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import OutputGradients
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.launches import failure

pytestmark = pytest.mark.gpu

UNIT = 2.0**-11  # the largest relative error of rounding to TF32
# Small ones too, which the kernel computes but its criteria leave to cuDNN.
CASES = [case for case in testing.CASES if not case.shape.proj_size]
SHAPES = {
    "ptb-small": Problem(20, 20, 200, 200),
    "ptb-medium": Problem(12, 20, 650, 650),
    "ptb-large": Problem(8, 20, 1500, 1500),
    "largest": Problem(5, 9, 64, 2000),
    "tagger": Problem(9, 40, 64, 256, bidirectional=True, num_layers=2),
    "ragged": Problem(17, 70, 40, 256, layout=Layout.DEVICE_LENGTHS, bidirectional=True),
    "batch-beyond-one-pass": Problem(5, 300, 64, 512),
    "clusters": Problem(9, 64, 128, 1024),
    "one-row": Problem(30, 1, 64, 1024),
    "long": Problem(300, 16, 128, 128),
    "padded-rows": Problem(17, 9, 40, 328, layout=Layout.DEVICE_LENGTHS, bidirectional=True),
}


def in_tf32(problem):
    return problem.replace(dtype=torch.float32, allow_tf32=True, needs_grad=True)


def nudged(inputs, gradients, seed):
    """Everything that may be rounded, moved up or down by the most that rounding does."""
    generator = torch.Generator().manual_seed(seed)

    def moved(tensor):
        signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return tensor.cpu().double() * (1 + UNIT * signs)

    weights = tuple(moved(weight) for weight in inputs.weights)
    others = inputs._replace(x=moved(inputs.x), h0=moved(inputs.h0), weights=weights)
    return others, gradients and OutputGradients(*map(moved, gradients))


def compare(problem, change=lambda inputs, gradients: None):
    """Errors of the kernel and of PyTorch against float64, and what rounding costs, for each output and gradient."""
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs) if problem.needs_grad else None
    change(inputs, gradients)
    exact = testing.named(problem, *testing.oracle(problem, inputs, gradients))
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        there = testing.reference(problem, inputs, gradients, dtype=torch.float32, device="cuda")
    theirs = testing.named(problem, *there)
    bands = dict.fromkeys(exact, 0.0)
    for seed in range(3):
        there = testing.named(problem, *testing.oracle(problem, *nudged(inputs, gradients, seed)))
        bands = {name: max(bands[name], testing.relative_error(there[name], exact[name])) for name in exact}
    return {
        name: (
            testing.relative_error(found[name], exact[name]),
            testing.relative_error(theirs[name], exact[name]),
            bands[name],
        )
        for name in exact
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_edges(case):
    for name, (error, theirs, band) in compare(in_tf32(case.shape)).items():
        assert error <= 2 * (theirs + band), name


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    for tensor, (error, theirs, band) in compare(in_tf32(SHAPES[name])).items():
        assert error <= 2 * (theirs + band), tensor


@pytest.mark.parametrize("sizes", [(30, 2, 512, 512), (35, 20, 650, 650), (1, 64, 512, 512), (30, 64, 1024, 1024)])
def test_never_less_precise_than_cudnn(sizes):
    problem = in_tf32(Problem(*sizes))
    assert testing.why_not(persistent, problem, "cuda") == []
    for tensor, (error, theirs, _) in compare(problem).items():
        assert error <= 1.2 * theirs, tensor


RANGES = Problem(24, 40, 64, 320, bidirectional=True)


@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e-4, 1e6, 1e25])
def test_gradients_of_any_size(size):
    """Products are made in float16 of what is left when powers of two are taken out."""

    def change(inputs, gradients):
        for gradient in gradients:
            gradient.mul_(size)

    for tensor, (error, theirs, band) in compare(in_tf32(RANGES), change).items():
        assert error <= 2 * (theirs + band), tensor


def test_gradients_that_grow_and_fall_from_step_to_step():
    """Powers of two taken from the step before are wrong for the next one; and some rows have no gradient for long."""

    def change(inputs, gradients):
        for gradient in gradients:
            gradient[..., 5:9, :].zero_()
        order = torch.randperm(24, generator=torch.Generator().manual_seed(3))
        gradients.y.mul_(torch.logspace(-14, 0, 24)[order, None, None].to("cuda"))
        gradients.y[:, 5] = 0
        gradients.y[12, 5] = 1e8

    for tensor, (error, theirs, band) in compare(in_tf32(RANGES), change).items():
        assert error <= 2 * (theirs + band), tensor


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-5, 1e4, 1e20])
def test_initial_states_of_any_size(size):
    def change(inputs, gradients):
        inputs.h0.mul_(size)
        inputs.h0[:, 3].mul_(1e-3)

    for tensor, (error, theirs, band) in compare(in_tf32(RANGES), change).items():
        assert error <= 2 * (theirs + band), tensor


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-9, 1e-3, 10.0])
def test_weights_of_any_size(size):
    def change(inputs, gradients):
        for weight in inputs.weights[1::4]:
            weight.mul_(size)
            weight[:7].mul_(1e-4)

    for tensor, (error, theirs, band) in compare(in_tf32(RANGES), change).items():
        assert error <= 2 * (theirs + band), tensor


def test_the_setting_for_products_is_the_callers_again_afterwards():
    problem = in_tf32(Problem(5, 4, 64, 64))
    before = torch.backends.cuda.matmul.allow_tf32
    testing.run_kernel(persistent, problem, testing.make_inputs(problem, "cuda"))
    assert torch.backends.cuda.matmul.allow_tf32 == before


@pytest.mark.parametrize("bits", [-1, 0x7FFFFFFF, 0x7F800001], ids=["pattern", "plain", "signalling"])
@pytest.mark.parametrize("place", ["x", "h0", "c0", "weights"])
def test_nan_comes_out_as_nan(place, bits):
    """Rounding by adding to the bits would make a number of some; the pattern of ones means "not yet written"."""
    problem = in_tf32(Problem(12, 9, 16, 64))
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    target = inputs.weights[1] if place == "weights" else getattr(inputs, place)
    target.view(torch.int32).view(-1)[3] = bits
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    exact = testing.named(problem, *testing.oracle(problem, inputs, gradients))
    assert found["y"].isnan().any()
    for name in ("y", "h_n", "c_n"):
        assert torch.equal(found[name].isnan().cpu(), exact[name].isnan().cpu())
    assert found["dweight_hh_l0"].isnan().any()


def test_the_same_bits_every_run():
    problem = in_tf32(Problem(50, 40, 64, 512, bidirectional=True))
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    first = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    for _ in range(3):
        again = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_activations_are_as_exact_as_float32():
    """Without a product there is nothing to round: x and h0 are zero, and the biases are the gate sums."""
    problem = in_tf32(Problem(1, 3, 4, 256, needs_grad=False)).replace(needs_grad=False)
    inputs = testing.make_inputs(problem, "cuda")
    inputs.x.zero_(), inputs.h0.zero_()
    inputs.weights[2].copy_(torch.linspace(-12, 12, 1024))
    inputs.weights[3].zero_()
    exact = testing.named(problem, *testing.oracle(problem, inputs))
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs))
    assert testing.relative_error(found["y"], exact["y"]) < 2e-7
    assert testing.relative_error(found["c_n"], exact["c_n"]) < 2e-7


def test_captured_in_a_graph():
    problem = in_tf32(Problem(20, 16, 64, 256, bidirectional=True, num_layers=2))
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        testing.run_kernel(persistent, problem, inputs, gradients)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = testing.run_kernel(persistent, problem, inputs, gradients)
    inputs.x.copy_(testing.make_inputs(problem, "cuda", seed=5).x)
    graph.replay()
    torch.cuda.synchronize()
    expected = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    found = testing.named(problem, *captured)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_wait_given_up_comes_out_as_nan(monkeypatch):
    """The pattern that was waited for must not be rounded to a number."""
    problem = in_tf32(Problem(50, 64, 16, 1024))
    inputs = testing.make_inputs(problem, "cuda")
    expected = persistent.forward(problem, inputs).y
    monkeypatch.setattr(failure, "PATIENCE", 0)
    lost = persistent.forward(problem, inputs).y
    torch.cuda.synchronize()
    monkeypatch.undo()
    assert lost.isnan().any()
    # What is a number is right, but for how it was rounded.
    torch.testing.assert_close(lost.where(~lost.isnan(), 0), expected.where(~lost.isnan(), 0), atol=2e-3, rtol=0)
    with pytest.raises(ExchangeTimeout):
        persistent.forward(problem, inputs)
    assert torch.equal(persistent.forward(problem, inputs).y, expected)
