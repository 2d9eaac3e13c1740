"""Float16 factors of the products after the loop on a device: held to the budgets of TF32."""

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.kernels.cuda.deep_products import widens
from gatewise.kernels.persistent import dry_run, replay
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.sizes import half_operands, memory
from tests.kernels.persistent.half_factors import (
    UNIT,
    Given,
    of_different_sizes,
    sizes_of_columns,
    with_columns_of_different_size,
    worst_column,
)
from tests.kernels.persistent.test_tf32_on_gpu import CASES, RANGES, SHAPES, compare, in_tf32

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not widens(), reason="needs products that widen their factors")]

LONG = Problem(1441, 8, 264, 264)  # a depth of which cuBLAS omits terms


def _forget():
    for remembered in (replay._replays, replay.stack_of, dry_run._memory_of, half_operands.uses_halves):
        getattr(remembered, "cache_clear", lambda: None)()


@pytest.fixture
def choose(monkeypatch):
    """Use float16 factors wherever products are rounded to TF32, whatever they save; or nowhere."""

    def chosen(halves):
        monkeypatch.setattr(
            half_operands,
            "uses_halves",
            lambda problem, features, device, *, x, weights: (
                halves and (x or weights) and half_operands.halves_factors(problem, device)
            ),
        )
        _forget()

    yield chosen
    monkeypatch.undo()
    _forget()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_edges(choose, case):
    choose(halves=True)
    for name, (error, theirs, band) in compare(in_tf32(case.shape)).items():
        assert error <= 2 * (theirs + band), name


@pytest.mark.parametrize("name", [*SHAPES, "deep"])
def test_shapes(choose, name):
    choose(halves=True)
    for tensor, (error, theirs, band) in compare(in_tf32(SHAPES.get(name, LONG))).items():
        assert error <= 2 * (theirs + band), tensor


@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e-4, 1e6, 1e25])
def test_gradients_of_any_size(choose, size):
    choose(halves=True)

    def change(inputs, gradients):
        for gradient in gradients:
            gradient.mul_(size)
        gradients.y.mul_(torch.logspace(-14, 0, 24, device="cuda")[:, None, None])

    for tensor, (error, theirs, band) in compare(in_tf32(RANGES), change).items():
        assert error <= 2 * (theirs + band), tensor


def errors_of_both(choose, problem, inputs, error):
    """Return the errors of both kinds of products against float64, of each output and gradient by name."""
    gradients = testing.make_gradients(problem, inputs)
    exact = testing.named(problem, *testing.oracle(problem, inputs, gradients))
    errors = []
    for halves in (False, True):
        choose(halves=halves)
        found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
        errors.append({name: error(found[name], value) for name, value in exact.items()})
    return errors


@pytest.mark.parametrize("sizes", [(100, 64, 512, 512), (30, 64, 1024, 1024), (35, 20, 650, 650)])
def test_no_less_precise_than_tf32_products(choose, sizes):
    problem = in_tf32(Problem(*sizes))
    inputs = testing.make_inputs(problem, "cuda")
    of_tf32, of_halves = errors_of_both(choose, problem, inputs, testing.relative_error)
    for name, error in of_halves.items():
        assert error <= 1.2 * of_tf32[name], name


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("features", [13, 40, 120])
def test_products_of_small_factors(features, directions):
    Given((4, 3, features, 11), directions, device="cuda").check()


@pytest.mark.parametrize("gradients", [1e-44, 1e-38, 1e-4, 1e20])
@pytest.mark.parametrize("values", [1e-42, 1e-20, 1.0, 1e15])
def test_values_of_any_size(gradients, values):
    of_different_sizes(gradients, values, "cuda").check()


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("sizes", [(4, 3, 13, 11), (4, 3, 120, 11), (40, 30, 523, 64), (50, 64, 512, 128)], ids=str)
def test_columns_of_very_different_size(sizes, directions):
    """Each column of the gradients keeps its bits, whatever the others are: of inputs, hidden states and weights."""
    given = with_columns_of_different_size(sizes, directions, "cuda")
    given.check()
    for found, exact in zip(given.found(), given.expected(), strict=True):
        assert worst_column(found.flatten(0, -2), exact.flatten(0, -2)) < 3 * UNIT


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("name", ["x", "y"])
def test_a_column_changes_no_other(name, value):
    given = Given((40, 30, 136, 64), device="cuda")
    before = given.found()
    changed, column = {"x": (1, 60), "y": (2, 5)}[name]
    getattr(given, name)[7, 3, column] = value
    found, exact = given.found(), given.expected()
    for number, (one, other) in enumerate(zip(before, found, strict=True)):
        others = torch.arange(other.shape[-1]) != (column if number == changed else -1)
        assert torch.equal(one[..., others], other[..., others])
    own, there = found[changed][..., column], exact[changed][..., column]
    assert torch.equal(own.isfinite(), there.isfinite())
    if value < torch.inf:
        assert testing.relative_error(own, there) < 3 * UNIT


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cell": GRU()},
        {"bidirectional": True, "num_layers": 2, "layout": Layout.DEVICE_LENGTHS},
        {"input_size": 2000},
    ],
    ids=str,
)
def test_inputs_with_columns_of_very_different_size(choose, options):
    """The weights have the inverse sizes, so that every column counts; its gradients then have the input's sizes."""
    problem = in_tf32(Problem(24, 40, 65, 320)).replace(**options)
    inputs = testing.make_inputs(problem, "cuda")
    sizes = sizes_of_columns(problem.input_size, "cuda")
    inputs.x.mul_(sizes)
    for weight in inputs.weights:
        if weight.shape == (problem.gate_rows, problem.input_size):
            weight.div_(sizes)

    def error(found, exact):
        if exact.shape[-1] != problem.input_size:
            return testing.relative_error(found, exact)
        return worst_column(found.cpu().flatten(0, -2), exact.cpu().flatten(0, -2))

    of_tf32, of_halves = errors_of_both(choose, problem, inputs, error)
    assert sum(weight.shape[-1] == problem.input_size for weight in inputs.weights) == problem.num_directions
    for name, found in of_halves.items():
        # Both kinds of products round every factor by as much; a column has few values.
        assert found <= 2 * of_tf32[name], name


def test_what_is_not_finite_stays_where_products_have_it():
    for place in ("dgates", "x", "y", "h0"):
        for value in (torch.nan, torch.inf):
            given = Given(device="cuda")
            getattr(given, place).view(-1)[3] = value
            for found, exact in zip(given.found(), given.expected(), strict=True):
                assert torch.equal(found.isfinite(), exact.isfinite()), (place, value)


@pytest.mark.parametrize("sizes", [(100, 64, 1024, 1024), (70, 80, 400, 1150), (500, 32, 1024, 512)])
def test_products_of_large_factors(sizes):
    given = Given(sizes, 2, device="cuda")
    for found, exact in zip(given.found(), given.expected(), strict=True):
        assert testing.relative_error(found, exact) < UNIT


@pytest.mark.parametrize("traced", [False, True])
def test_the_same_bits_wherever_gradients_are(choose, monkeypatch, traced):
    """Kept gates are left as they are where gradients have memory of their own."""
    choose(halves=True)
    problem = in_tf32(Problem(17, 70, 40, 264, layout=Layout.DEVICE_LENGTHS, bidirectional=True, num_layers=2))
    inputs = testing.make_inputs(problem, "cuda")
    above = testing.make_gradients(problem, inputs)
    first = persistent.backward(problem, inputs, persistent.forward(problem, inputs), above, Needs())
    if not traced:
        monkeypatch.setattr(memory, "exchanges_in_gates", lambda problem: False)
    _forget()
    problem = problem.replace(traced=traced)
    result = persistent.forward(problem, inputs)
    # As bits, because what is behind the end of a sequence may be NaN.
    kept = [tensor.clone().view(torch.int32) for tensor in result.kept]
    second = persistent.backward(problem, inputs, result, above, Needs())
    for number, (before, after) in enumerate(zip(kept, result.kept, strict=True)):
        changed = (before != after.view(torch.int32)).nonzero()
        assert not len(changed), (
            f"kept tensor {number} {list(before.shape)}: {len(changed)} from {changed[0].tolist()} on"
        )
    assert torch.equal(first.x, second.x)
    assert all(torch.equal(*both) for both in zip(first.weights, second.weights, strict=True))


def test_replays_and_captures_compute_the_same(choose):
    choose(halves=True)
    problem = in_tf32(Problem(20, 40, 64, 256, bidirectional=True, num_layers=2))
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    first = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    for _ in range(4):
        again = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
        assert all(torch.equal(first[name], again[name]) for name in first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = testing.run_kernel(persistent, problem, inputs, gradients)
    graph.replay()
    torch.cuda.synchronize()
    again = testing.named(problem, *captured)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("layers", [1, 2])
def test_float16_factors_are_used(layers):
    problem = in_tf32(Problem(100, 64, 512, 512, num_layers=layers))
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    _forget()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        testing.run_kernel(persistent, problem, inputs, gradients)
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    for part in ("rows", "columns", "results"):
        assert any(f"recurrent_half_{part}" in name for name in names)
