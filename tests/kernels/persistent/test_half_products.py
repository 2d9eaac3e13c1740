"""Float16 factors of the products after the loop, on the CPU: as accurate as TF32 rounds, for values of any size."""

import functools
import itertools

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU, LSTM, Regularised
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.kernels.cuda import deep_products, toolchain
from gatewise.kernels.persistent import dry_run, replay
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.launches import SOURCES, builds
from gatewise.kernels.persistent.launches import half_products as launches_of_half_products
from gatewise.kernels.persistent.sizes import exactness, half_operands, layer_pairs
from tests.kernels.persistent.half_factors import (
    UNIT,
    Given,
    of_different_sizes,
    sizes_of_columns,
    with_columns_of_different_size,
    worst_column,
)
from tests.kernels.persistent.sources_on_cpu import launch_on_cpu
from tests.pairwise import each_value, every_pair, exhaustive, exhaustive_unless, pairwise

DEVICE = Device.named("a100").replace(multiprocessors=6)  # as in test_sources_on_cpu
H200 = Device.named("h200")
RAGGED = {"layout": Layout.DEVICE_LENGTHS}
PROBLEM = Problem(6, 9, 5, 8, dtype=torch.float32, needs_grad=True, allow_tf32=True)
DTYPE = {"DTYPE": 2}


ARCHITECTURES = "sm_80", "sm_90", "sm_120"
SOURCES_AND_MACROS = [
    *(("half_rows", {"WIDTH": width, "THREADS": 256, **DTYPE}) for width in (32, 4096, 12000)),
    *(
        (
            "half_columns",
            {"THREADS": 256, "AT_ONCE": 8, "BYTES": word, "HALVES": 1, "RESETS": word // 8 % 2, **DTYPE},
        )
        for word in (4, 8, 16)
    ),
    *(("half_results", {"BYTES": word, "AT_ONCE": 4, **DTYPE}) for word in (4, 8, 16)),
    *(("operands", {"BYTES": word, "RESETS": word // 8, "HALVES": 1, "AT_ONCE": 8, **DTYPE}) for word in (4, 16)),
    *(("fit", {"BYTES": word, "HALVES": 1, "AT_ONCE": 4, **DTYPE}) for word in (4, 8, 16)),
]


# No source asks for an architecture.
@pytest.mark.parametrize(
    ("architecture", "source"),
    exhaustive_unless(
        [*zip(itertools.cycle(ARCHITECTURES), SOURCES_AND_MACROS[::4], strict=False)],
        itertools.product(ARCHITECTURES, SOURCES_AND_MACROS),
    ),
    ids=str,
)
def test_compiles_without_spills(architecture, source):
    pytest.importorskip("cuda.core")
    name, macros = source
    _, taken = toolchain.compile_afresh(SOURCES / f"{name}.cu", architecture, macros)
    assert taken.spilled_bytes == taken.stack_bytes == 0


def widened(mm, left, right, out, **options):
    """What a GPU computes: products of float16 numbers are exact, and added up in float32, here in float64."""
    if out.dtype == left.dtype:
        return mm(left, right, out, **options)
    assert left.dtype == right.dtype == torch.float16
    return out.copy_(left.double() @ right.double())


@pytest.fixture
def sources(monkeypatch):
    """Run the sources on the CPU, with float16 factors."""
    monkeypatch.setattr(deep_products, "mm", functools.partial(widened, deep_products.mm))
    monkeypatch.setattr(half_operands, "uses_halves", lambda *given, x, weights: x or weights)
    for limit in ("_UNROUNDED_HIDDEN", "_SMALL_HIDDEN"):  # so that small layers round, too
        monkeypatch.setattr(exactness, limit, 0)
    return launch_on_cpu(monkeypatch, DEVICE)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.exhaustive),
        pytest.param({"bidirectional": True, "num_layers": 2, **RAGGED}, marks=pytest.mark.exhaustive),
        {"bidirectional": True, "resets": True, **RAGGED},
        pytest.param(
            {"bidirectional": True, "hidden_size": 13, "input_size": 31, "cell": GRU(), "bias": False},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param({"hidden_size": 16, "cell": GRU()}, marks=pytest.mark.exhaustive),
        pytest.param({"bidirectional": True, "proj_size": 3, **RAGGED}, marks=pytest.mark.exhaustive),
        pytest.param({"input_size": 50}, marks=pytest.mark.exhaustive),
        pytest.param({"bidirectional": True, "input_size": 40}, marks=pytest.mark.exhaustive),
        pytest.param({"bidirectional": True, "input_size": 24, "traced": True}, marks=pytest.mark.exhaustive),
        pytest.param({"cell": Regularised(LSTM(), 0.3, (0.1, 0.2), 0.25)}, marks=pytest.mark.exhaustive),
        pytest.param({"time": 1}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_gradients_agree_with_float64(sources, options):
    problem = PROBLEM.replace(**options)
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs)
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    for name, value in testing.named(problem, *testing.oracle(problem, inputs, gradients)).items():
        assert testing.relative_error(found[name], value) < 5e-3, name
    rounded = problem.num_layers * ["recurrent_half_rows"]
    assert [name for name in sources.launched if name == "recurrent_half_rows"] == rounded


def test_kept_gates_are_left_as_they_are_where_gradients_have_memory_of_their_own(sources):
    problem = PROBLEM.replace(bidirectional=True, traced=True, **RAGGED)
    inputs = testing.make_inputs(problem)
    above = testing.make_gradients(problem, inputs)
    result = persistent.forward(problem, inputs)
    for kept in result.kept[:2]:  # of each direction, step and row
        outside = torch.arange(problem.time)[:, None] >= inputs.lengths
        kept[:, outside] = torch.nan
    kept = [tensor.clone().view(torch.int32) for tensor in result.kept]
    persistent.backward(problem, inputs, result, above, Needs())
    assert all(torch.equal(own, tensor.view(torch.int32)) for own, tensor in zip(kept, result.kept, strict=True))
    assert "recurrent_half_rows" in sources.launched


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e20])
def test_initial_states_of_any_size(sources, size):
    """Large ones saturate the gates of the step that reads them, so that its gradients are zero."""
    problem = PROBLEM.replace(bidirectional=True, **RAGGED)
    inputs = testing.make_inputs(problem)
    inputs.h0.mul_(size)
    gradients = testing.make_gradients(problem, inputs)
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    for name, value in testing.named(problem, *testing.oracle(problem, inputs, gradients)).items():
        assert testing.relative_error(found[name], value) < 5e-3, name


@pytest.mark.parametrize(
    "options",
    [
        {"bidirectional": True, "num_layers": 2, **RAGGED},
        *exhaustive({}, {"bidirectional": True, "resets": True, **RAGGED}),
        *exhaustive({"hidden_size": 13, "input_size": 31, "cell": GRU()}, {"input_size": 60}),
    ],
    ids=str,
)
def test_inputs_with_columns_of_very_different_size(sources, options):
    """The weights have the inverse sizes, so that every column counts; its gradients then have the input's sizes."""
    problem = PROBLEM.replace(**options)
    inputs = testing.make_inputs(problem)
    sizes = sizes_of_columns(problem.input_size)
    inputs.x.mul_(sizes)
    for weight in inputs.weights:
        if weight.shape[-1] == problem.input_size and weight.shape[0] == problem.gate_rows:
            weight.div_(sizes)
    gradients = testing.make_gradients(problem, inputs)
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    columns = 0
    for name, value in testing.named(problem, *testing.oracle(problem, inputs, gradients)).items():
        if value.shape[-1] == problem.input_size:  # the gradients of x and of the first layer's matrices
            columns += 1
            assert worst_column(found[name].flatten(0, -2), value.flatten(0, -2)) < 5e-3, name
        else:
            assert testing.relative_error(found[name], value) < 5e-3, name
    assert columns == 1 + problem.num_directions


def test_layers_in_pairs(monkeypatch, sources):
    monkeypatch.setattr(layer_pairs, "stacked_cut", layer_pairs.room_for_two)
    test_gradients_agree_with_float64(sources, {"num_layers": 2, "dropout": 0.4})
    assert sources.launched.count("recurrent_backward") == 1


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 2, "bidirectional": True, "input_size": 120, **RAGGED},
        {"hidden_size": 13, "input_size": 131, "resets": True},
    ],
    ids=str,
)
def test_memory_is_as_predicted(sources, options):
    problem = PROBLEM.replace(**options)
    for remembered in (replay._replays, replay.stack_of, dry_run._memory_of):
        remembered.cache_clear()
    inputs = testing.make_inputs(problem)
    testing.run_kernel(persistent, problem, inputs, testing.make_gradients(problem, inputs))
    taken = replay._replays("backward", problem, False, Needs()).scratch_bytes
    assert taken
    assert persistent.workspace_bytes(problem, DEVICE) == taken
    dry_run._memory_of.cache_clear()


@pytest.mark.parametrize("needs", [Needs(x=False), Needs(weights=False), Needs(state=False)], ids=str)
def test_what_is_not_wanted_is_left_out(sources, needs):
    problem = PROBLEM.replace(bidirectional=True)
    inputs = testing.make_inputs(problem)
    above = testing.make_gradients(problem, inputs)
    every = persistent.backward(problem, inputs, persistent.forward(problem, inputs), above, Needs())
    found = persistent.backward(problem, inputs, persistent.forward(problem, inputs), above, needs)
    for wanted, one, other in ((needs.x, [found.x], [every.x]), (needs.weights, found.weights, every.weights)):
        assert all(torch.equal(*both) if wanted else both[0] is None for both in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 2, "bidirectional": True, **RAGGED},
        {"hidden_size": 13, "input_size": 31, "resets": True},
        pytest.param({"hidden_size": 16, "input_size": 6, "cell": GRU()}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_the_kernels_around_products_are_built_ahead(sources, monkeypatch, options):
    """All that a call compiles and nothing else: they would otherwise be compiled in the first step."""
    monkeypatch.setattr(half_operands, "halves_factors", lambda problem, device: True)
    problem = PROBLEM.replace(**options)
    inputs = testing.make_inputs(problem)
    testing.run_kernel(persistent, problem, inputs, testing.make_gradients(problem, inputs))
    around = "half_rows.cu", "half_columns.cu", "half_results.cu", "operands.cu", "fit.cu"

    def with_halves(compiled):
        return {own for own in compiled if own[0] in around and dict(own[1]).get("HALVES", 1)}

    found = with_halves(sources.compiled)
    ahead = launch_on_cpu(monkeypatch, DEVICE)
    for each in builds.copies_of(problem, DEVICE):
        each.compile()
    assert {name for name, _ in found} == set(around)
    assert found == with_halves(ahead.compiled)


# The products by themselves.


@pytest.mark.parametrize(("directions", "features", "by_row"), every_pair([1, 2], [13, 40, 120], [False, True]))
def test_products(sources, directions, features, by_row):
    Given((4, 3, features, 11), directions, by_row=by_row).check()


def test_the_error_of_each_token_is_that_of_its_own_gradients(sources):
    """A row of dx does not lose what the gradients of another token are larger by."""
    given = Given()
    given.dgates *= torch.logspace(0, -30, 12, base=2).view(4, 3, 1)
    given.check()
    exact, found = given.expected()[0], given.found()[0]
    for one, other in zip(exact.flatten(0, 1), found.flatten(0, 1), strict=True):
        assert testing.relative_error(other, one) < 3 * UNIT


@pytest.mark.parametrize(("features", "directions"), each_value(pairwise([13, 40, 120], [1, 2])))
def test_columns_of_very_different_size(sources, directions, features):
    """Each column of the gradients keeps its bits, whatever the others are: of inputs, hidden states and weights."""
    given = with_columns_of_different_size((4, 3, features, 11), directions)
    given.check()
    for found, exact in zip(given.found(), given.expected(), strict=True):
        assert worst_column(found.flatten(0, -2), exact.flatten(0, -2)) < 3 * UNIT


@pytest.mark.parametrize("lengths", [None, [4, 0, 2]], ids=str)
def test_a_column_that_is_zero_but_where_gradients_are_tiny(sources, lengths):
    """A rare feature has its own largest terms: those of other features in other tokens do not matter."""
    given = Given(directions=2, lengths=None if lengths is None else torch.tensor(lengths))
    given.dgates[:, 1, 2] *= 1e-25
    given.x[..., 4] = 0
    given.x[1, 2, 4] = 1e-9
    given.y[..., 3] = 0
    given.y[0, 2, 3] = 1e-9  # read by the next step, of the one direction
    given.h0[..., 3] = 0
    given.check()
    for found, exact in zip(given.found()[1:], given.expected()[1:], strict=True):
        assert worst_column(found, exact) < 3 * UNIT


@pytest.mark.parametrize(
    ("name", "value"), each_value(pairwise(["x", "y", "w_ih"], [0.0, torch.nan, torch.inf, 1e30]), times=2)
)
def test_a_column_changes_no_other(sources, name, value):
    """Whatever one column holds, in one row or in all: the others keep every bit."""
    given = Given((4, 3, 120, 11))
    before = given.found()
    values = {"x": given.x, "y": given.y, "w_ih": given.weights[0].w_ih}[name].flatten(0, -2)
    changed, column = {"x": (1, 60), "y": (2, 5), "w_ih": (0, 60)}[name]
    for rows in (slice(4, 5), slice(None)):
        values[rows, column] = value
        found, exact = given.found(), given.expected()
        for number, (one, other) in enumerate(zip(before, found, strict=True)):
            others = torch.arange(other.shape[-1]) != (column if number == changed else -1)
            assert torch.equal(one[..., others], other[..., others])
        own, there = found[changed][..., column], exact[changed][..., column]
        assert torch.equal(own.isfinite(), there.isfinite())
        assert own[there.isnan()].isnan().all()
        if value < torch.inf:
            assert testing.relative_error(own, there) < 3 * UNIT if there.any() else not own.any()


@pytest.mark.parametrize(
    ("values", "gradients"),
    each_value(pairwise([1e-42, 1e-20, 1.0, 1e15], [1e-44, 1e-38, 1e-30, 1e-4, 1e20, 1e37]), times=2),
)
def test_values_of_any_size(sources, gradients, values):
    """Subnormal numbers too, and results that are."""
    given = Given()
    given.dgates *= gradients
    for tensor in (given.x, given.y, given.h0, *given.weights[0][:2]):
        tensor *= values
    if gradients * values < 1e36:
        given.check()
    else:
        assert all(
            torch.equal(own.isinf(), other.float().isinf())
            for own, other in zip(given.found(), given.expected(), strict=True)
        )


@pytest.mark.parametrize(
    ("values", "gradients"), each_value(pairwise([1e-42, 1e-20, 1.0, 1e15], [1e-44, 1e-38, 1e-4, 1e20]), times=2)
)
def test_values_of_very_different_size(sources, gradients, values):
    of_different_sizes(gradients, values).check()


@pytest.mark.parametrize(("gradient", "name"), each_value(pairwise([0.0, 1e-30, 1e-20], ["x", "h0", "y"]), times=2))
def test_a_huge_value_whose_gradients_are_small_costs_other_terms_nothing(sources, name, gradient):
    """A large hidden state saturates the gates of the step that reads it."""
    given = Given(directions=2)
    values = getattr(given, name)
    values[(1, 2) if name != "h0" else (slice(None), 2)] *= 1e20
    # The tokens that read these values: x those of the same step, h those of the next one in each direction.
    steps = {"x": [(0, 1), (1, 1)], "y": [(0, 2), (1, 0)], "h0": [(0, 0), (1, 3)]}[name]
    for direction, step in steps:
        given.dgates[direction, step, 2] *= gradient
    given.check()
    if gradient * 1e20 < 1:
        for found, exact in zip(given.found(), given.expected(), strict=True):
            assert testing.relative_error(found, exact) < 3 * UNIT


@pytest.mark.parametrize("name", ["x", "y"])
def test_the_largest_values_without_gradients_cost_the_smallest_terms_nothing(sources, name):
    """A term that is zero is smaller than any other, whatever its factors are."""
    given = Given()
    given.dgates *= 1e-30
    for tensor in (given.x, given.y, given.h0):
        tensor *= 1e-10
    getattr(given, name)[1, 2] = 1e38
    given.dgates[0, {"x": 1, "y": 2}[name], 2] = 0
    given.check()
    for found, exact in zip(given.found()[1:], given.expected()[1:], strict=True):
        assert testing.relative_error(found, exact) < 3 * UNIT


@pytest.mark.parametrize("place", [250, pytest.param(260, marks=pytest.mark.exhaustive), 520])
def test_wide_inputs_with_the_largest_values_anywhere(sources, place):
    """Blocks read some of the columns."""
    given = Given((4, 3, 523, 11))
    given.x[..., place] *= 1e10
    given.check()


@pytest.mark.parametrize("blocks", [1, 5])
def test_blocks_that_take_several_tokens(sources, monkeypatch, blocks):
    for name in ("_MOST_BLOCKS", "_COLUMN_BLOCKS"):
        monkeypatch.setattr(launches_of_half_products, name, blocks)
    given = Given((12, 9, 13, 11), directions=2)  # more tokens than all blocks read at a time
    given.dgates *= torch.logspace(-30, 0, 108, base=2).view(12, 9, 1)  # the last ones have the largest terms
    given.check()


def test_a_tiny_gradient_with_the_largest_terms_counts(sources):
    given = Given()
    given.dgates *= 1e-10
    given.dgates[0, 2, 1] *= 1e-10
    given.x[2, 1] *= 1e30
    given.check()
    found, exact = given.found()[1], given.expected()[1]
    assert testing.relative_error(found, exact) < 3 * UNIT


@pytest.mark.parametrize("name", ["dgates", "x", "h"])
@pytest.mark.parametrize("time", [1, 4])
def test_what_is_zero_in_every_token(sources, name, time):
    given = Given((time, 3, 13, 11), directions=2)
    for tensor in (given.y, given.h0) if name == "h" else (getattr(given, name),):
        tensor.zero_()
    given.check()
    zeros = [not found.any() for found in given.found()]
    assert zeros == [name == "dgates", *2 * [name in ("dgates", "x"), name in ("dgates", "h")]]


@pytest.mark.parametrize(
    ("size", "lengths", "by_row"), every_pair([1.0, 1e25], [None, [4, 0, 2]], [False, True]), ids=str
)
def test_hidden_states_before_a_reset_count_for_nothing(sources, size, lengths, by_row):
    """A hidden state that no step reads may have any size."""
    resets = torch.zeros(4, 3, dtype=torch.bool)
    resets[0, 0] = resets[2, 0] = resets[1, 2] = True
    lengths = None if lengths is None else torch.tensor(lengths)
    given = Given(directions=2, by_row=by_row, lengths=lengths, resets=resets)
    # Step 1 hands its state over the border before step 2 to the one direction, step 2 to the other.
    given.y[1, 0, :11] *= size
    given.y[2, 0, 11:] *= size
    given.h0[0, 0] *= size
    given.check()
    for found, exact in zip(given.found(), given.expected(), strict=True):
        assert testing.relative_error(found, exact) < 3 * UNIT


def test_zeros(sources):
    given = Given(directions=2)
    given.dgates[0] = 0
    given.dgates[1, 2, 1] = 0
    given.check()
    for tensor in (given.x, given.y, given.h0, *(own.w_ih for own in given.weights)):
        tensor.zero_()
    assert all(not own.any() for own in given.found())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", ["dgates", "x", "y", "h0", "w_ih"])
def test_what_is_not_finite_stays_where_products_have_it(sources, place, value):
    given = Given()
    tensor = given.weights[0].w_ih if place == "w_ih" else getattr(given, place)
    tensor.view(-1)[3] = value  # of y in a step that another step reads
    for found, exact in zip(given.found(), given.expected(), strict=True):
        assert torch.equal(found.isfinite(), exact.isfinite())
        if value != value:
            assert torch.equal(found.isnan(), exact.isnan())
        finite = exact.isfinite()
        assert testing.relative_error(found.where(finite, 0), exact.where(finite, 0)) < 3 * UNIT


def test_values_after_the_end_of_a_sequence_count_for_nothing(sources):
    lengths = torch.tensor([4, 0, 2])
    given = Given(lengths=lengths)
    clean = given.found()
    given.x[2:, 2], given.x[:, 1], given.h0[:, 1] = 1e30, torch.nan, torch.inf
    given.y[2:, 2], given.y[:, 1] = 0, 0  # as outputs are
    again = given.found()
    given.x[2:, 2], given.x[:, 1], given.h0[:, 1] = -1e-30, 1e38, 7.0
    assert all(torch.equal(*both) for both in zip(again, given.found(), strict=True))
    assert torch.equal(again[1], clean[1])


@pytest.mark.skipif(
    not hasattr(torch._C, "_set_cublas_allow_fp16_accumulation"), reason="PyTorch 2.6 has no such setting"
)
def test_sums_stay_in_float32_where_the_user_allows_float16(sources, monkeypatch):
    allowed, mm = [], deep_products.mm
    monkeypatch.setattr(
        deep_products, "mm", lambda *given: allowed.append(torch._C._get_cublas_allow_fp16_accumulation()) or mm(*given)
    )
    torch._C._set_cublas_allow_fp16_accumulation(True)
    try:
        Given().found()
        assert torch._C._get_cublas_allow_fp16_accumulation()
    finally:
        torch._C._set_cublas_allow_fp16_accumulation(False)
    assert allowed
    assert not any(allowed)


# The choice.

widening = pytest.mark.skipif(
    not deep_products.widens(), reason="PyTorch 2.6 has no product of float16 with a float32 result"
)
TWO_LAYERS = Problem(100, 64, 1024, 1024, num_layers=2, dtype=torch.float32, allow_tf32=True, needs_grad=True)


@widening
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"time": 1, "batch": 2}, False),
        ({"allow_tf32": False}, False),
        ({"dtype": torch.bfloat16}, False),
        ({"lean": True}, False),
    ],
    ids=str,
)
def test_float16_factors_are_used_where_they_save_time(changes, expected):
    problem = TWO_LAYERS.replace(**changes)
    wanted = {"x": True, "weights": True}
    assert half_operands.uses_halves(problem, 1024, H200, **wanted) is expected
    assert bool(persistent.work(problem, H200).half_flops) is expected
    assert not half_operands.uses_halves(problem, 1024, H200, x=False, weights=False)
    assert not half_operands.uses_halves(problem, 1024, Device.named("a100"), **wanted)


@widening
def test_single_layers_and_first_layers_use_them():
    assert half_operands.uses_halves(TWO_LAYERS, 256, H200, x=True, weights=True)
    assert half_operands.uses_halves(TWO_LAYERS, 1024, H200, x=False, weights=True)
    assert persistent.work(TWO_LAYERS.replace(num_layers=1), H200).half_flops
    assert [features for features, _ in half_operands.layers(TWO_LAYERS.replace(input_size=400), H200)] == [400, 1024]


def test_without_products_that_widen_nothing_changes(monkeypatch):
    monkeypatch.setattr(half_operands, "widens", lambda: False)
    assert not half_operands.uses_halves.__wrapped__(TWO_LAYERS, 1024, H200, x=True, weights=True)


@widening
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bidirectional": True},
        {"num_layers": 1, "input_size": 8192},
        {"num_layers": 1, "input_size": 8191, "bidirectional": True},
        {"input_size": 5000, "hidden_size": 650, "bidirectional": True, **RAGGED},
    ],
    ids=str,
)
def test_float16_factors_take_no_more_memory(monkeypatch, changes):
    """They take that of the gradients, besides the input weights; copies of hidden states are no longer made."""
    problem = TWO_LAYERS.replace(time=50, **changes)
    dry_run._memory_of.cache_clear()
    assert [*half_operands.layers(problem, H200)]
    found = persistent.workspace_bytes(problem, H200)
    monkeypatch.setattr(half_operands, "uses_halves", lambda *given, **wanted: False)
    dry_run._memory_of.cache_clear()
    plain = persistent.workspace_bytes(problem, H200)
    dry_run._memory_of.cache_clear()
    weights = 2 * 4 * 1024 * max(problem.layer_input_size(layer) for layer in range(problem.num_layers))
    assert found - plain <= weights + (1 << 18)  # with the exponents of tokens and columns
