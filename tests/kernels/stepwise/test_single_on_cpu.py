"""Single steps in one launch a layer, on the CPU: the CUDA source compiled as C++, with the threads of its blocks."""

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU, LSTM, RNN, SHIPPED, Averaged, LayerNormLSTM
from gatewise.contract.device import Device
from gatewise.contract.errors import DeviceError, DtypeError, ShapeError
from gatewise.contract.problem import Problem
from gatewise.derivation.trace import is_pointwise
from gatewise.kernels.stepwise import single
from gatewise.kernels.stepwise.products import state_dtype
from tests.kernels.persistent.sources_on_cpu import launch_on_cpu
from tests.nn.test_stream import Erf, Momentum
from tests.pairwise import each_value, pairwise

T = 3
H200 = Device.named("h200")
CELLS = [*filter(is_pointwise, SHIPPED), Averaged(LSTM(), (0.0, 0.3)), Momentum()]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Vectors of one value up to 16 bytes, sizes below and above what a warp loads at once, and more than one block.
SIZES = ((5, 7), (8, 16), (1, 1), (40, 264))


@pytest.fixture
def launched(monkeypatch):
    single._binary.cache_clear()
    yield launch_on_cpu(monkeypatch, H200).launched
    single._binary.cache_clear()


def case(cell, dtype, batch, layers, bias, sizes):
    options = {"num_layers": layers, "bias": bias, "dtype": dtype, "cell": cell, "needs_grad": False}
    problem = Problem(T, batch, *sizes, **options)
    return problem, testing.make_inputs(problem)


def steps_of(problem, inputs):
    others = inputs.c0.chunk(len(problem.cell.states), -1) if problem.cell.states else ()
    inner = state_dtype(problem.dtype)
    states = zip(*[each.to(inner).unbind(0) for each in (inputs.h0, *others)], strict=True)
    return single.SingleSteps(problem.cell, list(states), problem.dtype)


def weights_of(problem, inputs):
    each = problem.weights_per_direction
    return [inputs.weights[start : start + each] for start in range(0, len(inputs.weights), each)]


@pytest.mark.parametrize(
    ("cell", "dtype", "batch", "layers", "bias", "sizes"),
    each_value(pairwise(CELLS, DTYPES, (1, 2, 3, 5, 8), (1, 2), (True, False), SIZES)),
    ids=str,
)
def test_steps_agree_with_the_oracle(cell, dtype, batch, layers, bias, sizes, launched):
    problem, inputs = case(cell, dtype, batch, layers, bias, sizes)
    steps, weights = steps_of(problem, inputs), weights_of(problem, inputs)
    y = torch.stack([steps.step(x, weights) for x in inputs.x])
    h, *others = (torch.stack(each).to(dtype) for each in zip(*steps.read(), strict=True))
    found = {"y": y, "h_n": h, "c_n": torch.cat(others, -1) if others else h.new_zeros(layers, batch, 0)}
    exact = testing.named(problem, *testing.oracle(problem, inputs))
    allowed = testing.budgets(problem, inputs, None, exact, "cpu")
    errors = {name: testing.relative_error(value, exact[name]) for name, value in found.items()}
    assert all(errors[name] <= allowed[name] for name in errors), (errors, allowed)
    assert launched == ["single_step"] * (T * layers)


@pytest.mark.usefixtures("launched")
def test_a_step_leaves_its_states_where_it_found_them():
    problem, inputs = case(GRU(), torch.float32, 3, 2, True, (5, 7))
    steps, weights = steps_of(problem, inputs), weights_of(problem, inputs)
    held = steps._hidden, steps._carried, steps._finished
    addresses = [tensor.data_ptr() for tensor in held]
    again = steps.read()
    first = [steps.step(x, weights) for x in inputs.x]
    steps.write(again)
    second = [steps.step(x, weights) for x in inputs.x]
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert [tensor.data_ptr() for tensor in (steps._hidden, steps._carried, steps._finished)] == addresses
    assert not steps._finished.any()


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("cell", [LSTM(), GRU()], ids=repr)
def test_nan_stays_in_its_row(cell):
    problem, inputs = case(cell, torch.float32, 3, 2, True, (5, 7))
    weights = weights_of(problem, inputs)
    clean, spoiled = steps_of(problem, inputs), steps_of(problem, inputs)
    x = inputs.x.clone()
    x[0, 1, 2] = float("nan")
    for one, other in zip(inputs.x, x, strict=True):
        expected, found = clean.step(one, weights), spoiled.step(other, weights)
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2]], expected[[0, 2]])


@pytest.mark.usefixtures("launched")
def test_weights_with_other_strides_and_addresses_are_read():
    problem, inputs = case(LSTM(), torch.float32, 2, 1, True, (8, 16))
    (plain,) = weights_of(problem, inputs)
    odd = [torch.empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor) for tensor in plain]
    turned = [tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for tensor in plain]
    steps = [steps_of(problem, inputs) for _ in range(3)]
    found = [own.step(inputs.x[0], [weights]) for own, weights in zip(steps, (plain, odd, turned), strict=True)]
    torch.testing.assert_close(found[1], found[0])
    assert torch.equal(found[2], found[0])


def test_launches_are_made_anew_where_an_address_a_shape_or_a_dtype_is_another_one(launched):
    problem, inputs = case(RNN("tanh"), torch.float32, 2, 1, False, (8, 8))
    w_ih, w_hh = inputs.weights
    steps, start = steps_of(problem, inputs), steps_of(problem, inputs).read()

    def found(x, *weights):
        steps.write(start)
        return steps.step(x, [weights])

    def expected(x, *weights):
        return torch.tanh(x @ weights[0].T + start[0][0] @ weights[1].T)

    x = inputs.x[0]
    torch.testing.assert_close(found(x, w_ih, w_hh), expected(x, w_ih, w_hh))
    known = steps._launches[0]
    w_hh.mul_(2)  # at the same address: the launch is the same, and reads other values
    torch.testing.assert_close(found(x, w_ih, w_hh), expected(x, w_ih, w_hh))
    assert steps._launches[0] is known
    for weights in ((w_ih, w_hh.t()), (w_hh, w_ih), (w_ih.t(), w_hh.clone())):
        torch.testing.assert_close(found(x, *weights), expected(x, *weights))
    other = torch.stack([x, -x])[1]
    torch.testing.assert_close(found(other, w_ih, w_hh), expected(other, w_ih, w_hh))
    count = len(launched)
    found(x, w_ih, w_hh)
    for wrong, error in (
        (w_hh.view(4, 16), ShapeError),
        (w_hh.view(torch.int32), DtypeError),
        (w_hh.to("meta"), DeviceError),
    ):
        with pytest.raises(error, match="`weights, w_hh,` must be"):
            found(x, w_ih, wrong)
    assert len(launched) == count + 1


def test_the_width_follows_sizes_and_addresses():
    def of(*sizes, dtype=torch.bfloat16, offset=0):
        return single.width_of([torch.empty(size + offset, dtype=dtype)[offset:].view(1, size) for size in sizes])

    assert [of(64, 128), of(64, 4), of(64, 6), of(64, 7)] == [8, 4, 2, 1]
    assert [of(64, offset=4), of(64, offset=1)] == [4, 1]
    assert [of(64, dtype=torch.float32), of(64, dtype=torch.float64), of(3, dtype=torch.float64)] == [4, 2, 1]


def test_blocks_have_several_warps_only_where_every_multiprocessor_has_a_block():
    assert [single.warps_of(units, 132) for units in (1, 131, 263, 264, 527, 528, 4096)] == [1, 1, 1, 2, 2, 4, 4]
    assert [single.rows_of(batch) for batch in range(1, 9)] == [1, 2, 4, 4, 8, 8, 8, 8]


def test_what_it_takes():
    given = LSTM(), torch.bfloat16, 8, False
    assert single.takes(*given, H200)
    assert all(single.takes(cell, *given[1:], H200) for cell in CELLS)
    assert not single.takes(*given, Device.named("t4"))
    assert not single.takes(*given, H200.replace(compiles=False))
    assert not single.takes(*given, H200.replace(kind="cpu"))
    assert not single.takes(LSTM(), torch.bfloat16, 9, False, H200)
    assert not single.takes(LSTM(), torch.bfloat16, 8, True, H200)
    assert not single.takes(LSTM(), torch.float8_e5m2, 8, False, H200)
    assert not single.takes(LayerNormLSTM(), *given[1:], H200)
    assert not single.takes(Erf(), *given[1:], H200)
