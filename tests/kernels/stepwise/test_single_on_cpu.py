"""Single steps in one launch a layer, on the CPU: the CUDA source compiled as C++, with the threads of its blocks."""

import contextlib

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU, LSTM, RNN, SHIPPED, Averaged, Cell, LayerNormLSTM, Regularised
from gatewise.contract.device import Device
from gatewise.contract.errors import ShapeError
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Inputs
from gatewise.derivation.trace import is_pointwise
from gatewise.kernels.cuda import driver
from gatewise.kernels.stepwise import single, single_criteria, single_form
from gatewise.kernels.stepwise.kernel import stepwise
from gatewise.kernels.stepwise.products import state_dtype
from gatewise.kernels.stepwise.single_criteria import CRITERIA, is_single_call, refusals_of
from tests.nn.test_stream import Erf, Momentum
from tests.pairwise import each_value, exhaustive, pairwise

T = 3
H200 = Device.named("h200")
CELLS = [*filter(is_pointwise, SHIPPED), Averaged(LSTM(), (0.0, 0.3)), Momentum()]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Pieces of one value up to 16 bytes, different ones of both matrices, one warp to four, and rows of several rounds.
SIZES = ((5, 7), (8, 16), (1, 1), (40, 132), (33, 264), (600, 12))


def case(cell, dtype, batch, layers, bias, sizes):
    options = {"num_layers": layers, "bias": bias, "dtype": dtype, "cell": cell, "needs_grad": False}
    problem = Problem(T, batch, *sizes, **options)
    return problem, testing.make_inputs(problem)


def call(cell, dtype, batch, layers, bias, sizes):
    options = {"num_layers": layers, "bias": bias, "dtype": dtype, "cell": cell, "needs_grad": False}
    problem = Problem(1, batch, *sizes, **options)
    return problem, testing.make_inputs(problem)


def steps_of(problem, inputs):
    others = inputs.c0.chunk(len(problem.cell.states), -1) if problem.cell.states else ()
    inner = state_dtype(problem.dtype)
    states = zip(*[each.to(inner).unbind(0) for each in (inputs.h0, *others)], strict=True)
    steps = single.SingleSteps(problem.cell, list(states), problem.dtype)
    steps.prepare(inputs.weights)
    return steps


@pytest.mark.parametrize(
    ("cell", "dtype", "batch", "layers", "bias", "sizes"),
    each_value(pairwise(CELLS, DTYPES, (1, 2, 3, 5, 8), (1, 2), (True, False), SIZES), most=4),
    ids=str,
)
def test_steps_agree_with_the_oracle(cell, dtype, batch, layers, bias, sizes, launched):
    problem, inputs = case(cell, dtype, batch, layers, bias, sizes)
    steps = steps_of(problem, inputs)
    y = torch.stack([steps.step(x) for x in inputs.x])
    h, *others = (torch.stack(each).to(dtype) for each in zip(*steps.read(), strict=True))
    found = {"y": y, "h_n": h, "c_n": torch.cat(others, -1) if others else h.new_zeros(layers, batch, 0)}
    exact = testing.named(problem, *testing.oracle(problem, inputs))
    allowed = testing.budgets(problem, inputs, None, exact, "cpu")
    errors = {name: testing.relative_error(value, exact[name]) for name, value in found.items()}
    assert all(errors[name] <= allowed[name] for name in errors), (errors, allowed)
    assert launched == ["single_step"] * (T * layers)


@pytest.mark.parametrize(
    ("cell", "dtype", "batch", "layers", "bias", "sizes"),
    each_value(pairwise(CELLS, DTYPES, (1, 2, 3, 5, 8), (1, 2, 3), (True, False), SIZES), most=4),
    ids=str,
)
def test_calls_of_one_step_agree_with_the_oracle(cell, dtype, batch, layers, bias, sizes, launched):
    problem, inputs = call(cell, dtype, batch, layers, bias, sizes)
    before = [tensor.clone() for tensor in (inputs.x, inputs.h0, inputs.c0, *inputs.weights)]
    found = stepwise.forward(problem, inputs)
    assert launched == ["single_call"] * layers
    exact = testing.named(problem, *testing.oracle(problem, inputs))
    allowed = testing.budgets(problem, inputs, None, exact, "cpu")
    values = testing.named(problem, found)
    errors = {name: testing.relative_error(values[name], exact[name]) for name in exact}
    assert all(errors[name] <= allowed[name] for name in errors), (errors, allowed)
    assert all(tensor.dtype == dtype for tensor in found[:3])
    for tensor, former in zip((inputs.x, inputs.h0, inputs.c0, *inputs.weights), before, strict=True):
        assert torch.equal(tensor, former)


# Rows that end inside of what a warp multiplies at once, and more than one round of all warps.
TILED_SIZES = ((8, 8), (40, 24), (16, 72), (296, 16))


@pytest.mark.parametrize(
    ("cell", "dtype", "batch", "layers", "bias", "sizes"),
    each_value(
        pairwise(CELLS, (torch.bfloat16, torch.float16), (1, 8, 9, 16, 33), (1, 2), (True, False), TILED_SIZES), most=4
    ),
    ids=str,
)
def test_tensor_cores_compute_calls_and_steps_of_more_sequences(cell, dtype, batch, layers, bias, sizes, launched):
    assert single_criteria.is_tiled(cell, 2, *sizes)
    test_calls_of_one_step_agree_with_the_oracle(cell, dtype, batch, layers, bias, sizes, launched)
    launched.clear()
    test_steps_agree_with_the_oracle(cell, dtype, batch, layers, bias, sizes, launched)


class Many(Cell):
    """A cell with as many sums as `count` says."""

    gates = ()

    def __init__(self, count):
        self.gates = tuple(f"g{number}" for number in range(count))

    def step(self, gate, state):
        return torch.tanh(sum(torch.sigmoid(getattr(gate, name)) for name in self.gates) + state.h), {}

    def __eq__(self, other):
        return type(other) is Many and self.gates == other.gates

    def __hash__(self):
        return hash(self.gates)


@pytest.mark.parametrize(("sums", "most"), [(5, 64), (6, 32), (10, 32), (11, 16), (40, 8), (41, 8)])
def test_cells_with_many_sums_take_fewer_sequences(sums, most):
    problem = Problem(1, most, 8, 8, dtype=torch.bfloat16, cell=Many(sums), needs_grad=False)
    assert not refusals_of(problem, H200)
    assert refusals_of(problem.replace(batch=most + 1), H200)
    assert single_criteria.is_tiled(problem.cell, 2, 8, 8) == (sums <= 40)
    form = single_form.Form.of(problem.cell, 2, most, (0, 512), (0, 512))
    assert form.warps * form.units * sums * form.rows * 4 <= 40 << 10


@pytest.mark.parametrize(("sums", "batch"), [(7, 17), (13, 9)])
def test_cells_with_many_sums_agree_with_the_oracle(sums, batch, launched):
    test_calls_of_one_step_agree_with_the_oracle(Many(sums), torch.bfloat16, batch, 1, True, (40, 24), launched)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("cell", [LSTM(), *exhaustive(GRU(), Averaged(LSTM(), (0.0, 0.3)))], ids=repr)
def test_a_call_equals_a_step_of_a_stream(cell):
    problem, inputs = call(cell, torch.float32, 3, 2, True, (8, 16))
    steps = steps_of(problem, inputs)
    y = steps.step(inputs.x[0])
    found = stepwise.forward(problem, inputs)
    assert torch.equal(found.y[0], y)
    h, *others = (torch.stack(each) for each in zip(*steps.read(), strict=True))
    assert torch.equal(found.h_n, h)
    assert torch.equal(found.c_n, torch.cat(others, -1) if others else h.new_zeros(2, 3, 0))


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_of_a_call_with_other_strides_and_addresses_are_read(dtype):
    problem, inputs = call(LSTM(), dtype, 2, 2, True, (16, 16))
    expected = stepwise.forward(problem, inputs)

    def moved(tensor):
        return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)

    def turned(tensor):
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2) if tensor.dim() > 1 else tensor

    for change in (moved, turned):
        x, h0, c0 = change(inputs.x), change(inputs.h0), change(inputs.c0)
        same = Inputs(x, h0, c0, inputs.weights)
        for one, other in zip(stepwise.forward(problem, same)[:3], expected[:3], strict=True):
            assert torch.equal(one, other)
        weights = tuple(change(weight) for weight in inputs.weights)
        for one, other in zip(stepwise.forward(problem, same._replace(weights=weights))[:3], expected[:3], strict=True):
            torch.testing.assert_close(one, other)
    # Launches that were made for some weights are used for others of the same sizes.
    doubled = inputs._replace(weights=tuple(2 * weight for weight in inputs.weights))
    exact = testing.oracle(problem, doubled)[0]
    torch.testing.assert_close(stepwise.forward(problem, doubled).y, exact.y.to(dtype))


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(
    ("cell", "name", "dtype", "sizes"),
    [
        *[(LSTM(), name, torch.float32, (5, 7)) for name in ("x", "h0", "c0")],
        *[(GRU(), name, torch.float32, (5, 7)) for name in ("x", "h0")],
        *[(LSTM(), name, torch.bfloat16, (40, 24)) for name in ("x", "h0", "c0")],
    ],
    ids=str,
)
def test_nan_in_a_call_stays_in_its_row(cell, name, dtype, sizes):
    problem, inputs = call(cell, dtype, 3, 2, True, sizes)
    clean, spoiled = stepwise.forward(problem, inputs), getattr(inputs, name).clone()
    spoiled[0, 1] = float("nan")
    found = stepwise.forward(problem, inputs._replace(**{name: spoiled}))
    assert found.y[0, 1].isnan().all()
    for one, other in zip(found[:3], clean[:3], strict=True):
        assert torch.equal(one[:, [0, 2]], other[:, [0, 2]])


def test_calls_of_more_than_one_launch_are_told_apart():
    problem = Problem(1, 8, 40, 16, dtype=torch.bfloat16, needs_grad=False)
    assert is_single_call(problem, H200)
    assert stepwise.work(problem.replace(num_layers=3), H200).launches == 3
    assert stepwise.workspace_bytes(problem, H200) == 0
    for change in (
        {"time": 2},
        {"batch": 65},
        {"batch": 9, "input_size": 36},
        {"needs_grad": True},
        {"bidirectional": True},
        {"proj_size": 8},
        {"resets": True},
        {"layout": Layout.DEVICE_LENGTHS},
        {"cell": LayerNormLSTM()},
        {"cell": Regularised(LSTM(), recurrent_dropout=0.5)},
    ):
        other = problem.replace(**change)
        assert not is_single_call(other, H200)
        assert stepwise.work(other, H200).launches > 1


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("steps_before", [1, 2])
def test_states_stay_at_their_addresses_whichever_buffer_is_read_next(steps_before):
    problem, inputs = case(GRU(), torch.float32, 3, 2, True, (5, 7))
    steps = steps_of(problem, inputs)
    held = steps._hidden, steps._carried, steps._begun
    addresses = [tensor.data_ptr() for tensor in held]
    again = steps.read()
    first = [steps.step(x) for x in inputs.x[:steps_before]]
    assert (steps._begun == (steps_before % 2) * 7).all()
    steps.write(again)
    second = [steps.step(x) for x in inputs.x[:steps_before]]
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    torch.testing.assert_close([each[0] for each in steps.read()][-1], second[-1], rtol=0, atol=0)
    assert [tensor.data_ptr() for tensor in (steps._hidden, steps._carried, steps._begun)] == addresses


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("cell", [LSTM(), GRU()], ids=repr)
def test_nan_stays_in_its_row_until_it_is_reset(cell):
    problem, inputs = case(cell, torch.float32, 3, 2, True, (5, 7))
    clean, spoiled = steps_of(problem, inputs), steps_of(problem, inputs)
    x = inputs.x.clone()
    x[0, 1, 2] = float("nan")
    for one, other in zip(inputs.x, x, strict=True):
        expected, found = clean.step(one), spoiled.step(other)
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2]], expected[[0, 2]])
    rows = torch.tensor([False, True, False])
    spoiled.reset(rows)
    clean.reset(rows)
    torch.testing.assert_close(spoiled.step(x[1]), clean.step(x[1]), rtol=0, atol=0)


@pytest.mark.usefixtures("launched")
def test_initial_values_of_states_are_those_of_the_cell():
    problem, inputs = case(Momentum(), torch.float32, 3, 2, True, (5, 7))
    steps = steps_of(problem, inputs)
    steps.step(inputs.x[0])
    steps.reset(None)
    for states in steps.read():
        for name, state in zip(("h", *problem.cell.states), states, strict=True):
            assert (state == problem.cell.initial_value(name)).all()


@pytest.mark.usefixtures("launched")
def test_weights_and_inputs_with_other_strides_and_addresses_are_read():
    problem, inputs = case(LSTM(), torch.float32, 2, 1, True, (8, 16))
    plain = inputs.weights
    odd = [torch.empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor) for tensor in plain]
    turned = [tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for tensor in plain]
    found = []
    for weights in (plain, odd, turned):
        steps = steps_of(problem, inputs)
        steps.prepare(weights)
        found.append(steps.step(inputs.x[0]))
    torch.testing.assert_close(found[1], found[0])
    assert torch.equal(found[2], found[0])
    for x in (inputs.x[0].t().contiguous().t(), torch.empty(17)[1:].view(2, 8).copy_(inputs.x[0])):
        assert torch.equal(steps_of(problem, inputs).step(x), found[0])


@pytest.mark.usefixtures("launched")
def test_launches_are_for_the_addresses_and_forms_of_the_weights():
    problem, inputs = case(RNN("tanh"), torch.float32, 2, 1, False, (8, 8))
    w_ih, w_hh = inputs.weights
    steps, x = steps_of(problem, inputs), inputs.x[0]
    start = steps.read()

    def check(*weights):
        steps.prepare(weights)
        steps.write(start)
        expected = torch.tanh(x @ weights[0].T + start[0][0] @ weights[1].T)
        torch.testing.assert_close(steps.step(x), expected)

    assert steps.is_prepared_for((w_ih, w_hh))
    w_hh.mul_(2)  # at the same address: the launch is the same, and reads other values
    assert steps.is_prepared_for((w_ih, w_hh))
    steps.write(start)
    torch.testing.assert_close(steps.step(x), torch.tanh(x @ w_ih.T + start[0][0] @ w_hh.T))
    others = ((w_ih, w_hh.t()), (w_hh, w_ih), (w_ih.t(), w_hh.clone()))
    for weights in (*others, (w_ih, w_hh[:4]), (w_ih, w_hh.view(torch.int32)), (w_ih,)):
        assert not steps.is_prepared_for(weights)
    for weights in others:
        check(*weights)
    check(w_ih, w_hh.t())
    # What was copied for a call is copied again for the next one.
    assert not steps.is_prepared_for((w_ih, w_hh.t()))
    w_hh.mul_(2)
    check(w_ih, w_hh.t())


@pytest.mark.parametrize("layer", [0, 1])
def test_launches_that_were_not_all_made_are_made_again(layer, launched, monkeypatch):
    problem, inputs = case(LSTM(), torch.float32, 2, 2, True, (8, 16))
    steps, x = steps_of(problem, inputs), inputs.x[0]
    others = [2 * weight for weight in inputs.weights]
    expected = steps_of(problem, inputs._replace(weights=others)).step(x)
    asked, binary = [], single._binary

    def interrupted(*given):
        asked.append(given)
        if len(asked) == layer + 1:
            raise KeyboardInterrupt
        return binary(*given)

    with monkeypatch.context() as patched:
        patched.setattr(single, "_binary", interrupted)
        with pytest.raises(KeyboardInterrupt):
            steps.prepare(others)
    assert not steps.is_prepared_for(others)
    assert not steps.is_prepared_for(inputs.weights)
    steps.prepare(others)
    assert torch.equal(steps.step(x), expected)
    assert launched == ["single_step"] * 4


@pytest.mark.usefixtures("launched")
def test_kernels_are_loaded_and_launched_on_the_device_of_the_states(monkeypatch):
    problem, inputs = case(LSTM(), torch.float32, 2, 2, True, (8, 16))
    steps, x = steps_of(problem, inputs), inputs.x[0]
    current, found, prepared = [0], [], driver.prepared

    @contextlib.contextmanager
    def entered(device):
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    def noted(binary, entry, shape, arguments, device):
        found.append(("prepared", device.index, current[0]))
        launch = prepared(binary, entry, shape, arguments, device)
        return lambda: (found.append(("launched", device.index, current[0])), launch())

    monkeypatch.setattr(driver, "prepared", noted)
    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    steps.device = torch.device("cuda:1")
    steps.prepare(inputs.weights)
    steps.step(x)
    assert found == [("prepared", 1, 1)] * 2 + [("launched", 1, 1)] * 2
    assert current == [0]


@pytest.mark.usefixtures("launched")
def test_weights_of_another_size_than_the_states_are_refused():
    problem, inputs = case(LSTM(), torch.float32, 2, 2, True, (8, 16))
    steps = steps_of(problem, inputs)
    for layers, units in ((2, 15), (1, 16), (4, 16)):
        _, others = case(LSTM(), torch.float32, 2, layers, True, (8, units))
        got = f"got {layers} layers with {units} units"
        with pytest.raises(
            ShapeError, match=f"`weights` must be those of 2 layers with 16 units, as the states are, {got}"
        ):
            steps.prepare(others.weights)


def test_the_width_follows_sizes_and_addresses():
    assert [single_form.width_of(1024, 2 * size, 2) for size in (128, 4, 6, 7)] == [8, 4, 2, 1]
    assert [single_form.width_of(1024 + offset, 128, 2) for offset in (16, 8, 4, 2)] == [8, 4, 2, 1]
    assert [single_form.width_of(1024, 128, itemsize) for itemsize in (4, 8)] == [4, 2]


def test_warps_share_the_rows_of_a_unit_if_one_would_load_several_times():
    assert [single_form.warps_of(loads, 32, 4) for loads in (1, 32, 33, 64, 65, 128, 129, 4096)] == [
        1,
        1,
        2,
        2,
        4,
        4,
        4,
        4,
    ]
    assert [single_form.rows_of(batch) for batch in range(1, 9)] == [1, 2, 4, 4, 8, 8, 8, 8]


def test_each_criterion_refuses_what_violates_it():
    problem = Problem(1, 8, 40, 16, dtype=torch.bfloat16)
    assert not refusals_of(problem, H200)
    for cell in CELLS:
        assert not refusals_of(problem.replace(cell=cell), H200)
    for criterion in CRITERIA:
        refused = criterion.violation(problem, H200)
        assert criterion.quantity in [refusal.quantity for refusal in refusals_of(*refused)]
    allowed = "at most 8, or up to 64 in 16-bit dtypes with sizes that are multiples of 8 and not too large"
    for changes in ({"batch": 65}, {"batch": 9, "input_size": 36}, {"batch": 9, "dtype": torch.float32}):
        (refusal,) = refusals_of(problem.replace(**changes), H200)
        assert str(refusal) == f"batch is {changes['batch']}, allowed: {allowed}"
    assert not refusals_of(problem.replace(batch=64), H200)
    # The bytes that all blocks read of inputs and states are at most 32 MiB, which 8 sequences may exceed.
    for size, most in ((512, 64), (1024, 32), (1448, 16), (2048, 8), (8192, 8)):
        for layers, inputs in ((1, size), (2, 8)):
            wide = problem.replace(input_size=inputs, hidden_size=size, num_layers=layers)
            assert not refusals_of(wide.replace(batch=most), H200)
            assert refusals_of(wide.replace(batch=most + 1), H200)
    assert refusals_of(problem, H200.replace(kind="cpu"))
    for cell in (LayerNormLSTM(), Erf()):
        assert [refusal.quantity for refusal in refusals_of(problem.replace(cell=cell), H200)] == ["cell"]


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("name", ["x", "h0"])
def test_infinity_at_the_beginning_of_a_row_gives_no_nan(name):
    # A lane whose part of a row is beyond its end must not multiply zeros by values from elsewhere.
    problem, inputs = call(LSTM(), torch.bfloat16, 3, 1, True, (40, 24))
    getattr(inputs, name)[0, 1, 0] = torch.inf
    weights = [weight.abs() + 0.1 for weight in inputs.weights]
    found = stepwise.forward(problem, inputs._replace(weights=weights))
    assert found.y.isfinite().all()
    opened = torch.tanh(inputs.c0[0, 1].float() + 1)  # all gates are open
    torch.testing.assert_close(found.y[0, 1].float(), opened, rtol=0.02, atol=0.02)
