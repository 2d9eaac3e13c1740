"""Training calls of one step, on the CPU: the CUDA sources compiled as C++, with the threads of their blocks."""

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU, LSTM, SHIPPED, Averaged, Cell, LayerNormLSTM, Regularised
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Inputs, Needs
from gatewise.derivation.trace import is_pointwise
from gatewise.kernels.stepwise import stepwise
from gatewise.kernels.stepwise.single_criteria import is_single_training
from tests.kernels.stepwise.test_passes_on_cpu import Unrefused
from tests.nn.test_stream import Momentum
from tests.pairwise import each_value, exhaustive, pairwise

H200 = Device.named("h200")


class AllApart(Cell):
    """A cell whose recurrent products are all sums of their own, behind those of the input."""

    gates = ("a", "g")
    apart = ("a", "g")

    def step(self, gate, state):
        a = torch.sigmoid(gate.a.input + 0.5 * gate.a.recurrent)
        return a * state.h + (1 - a) * torch.tanh(gate.g.input * gate.g.recurrent), {}


CELLS = [*filter(is_pointwise, SHIPPED), Averaged(LSTM(), (0.0, 0.3)), Momentum(), AllApart()]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Pieces of one value up to 16 bytes, different ones of both matrices, and rows of several rounds.
SIZES = ((5, 7), (8, 16), (1, 1), (40, 132), (33, 264), (600, 12))


def call(cell, dtype, batch, sizes, layers=1, **options):
    options |= {"num_layers": layers, "dtype": dtype, "cell": cell, "needs_grad": True}
    problem = Problem(1, batch, *sizes, **options)
    inputs = testing.make_inputs(problem)
    return problem, inputs, testing.make_gradients(problem, inputs)


def gradients_of(problem, inputs, gradients, needs=Needs()):  # noqa: B008  an immutable tuple
    return testing.named(problem, *testing.run_kernel(stepwise, problem, inputs, gradients, needs))


@pytest.mark.parametrize(
    ("cell", "dtype", "batch", "layers", "bias", "sizes"),
    each_value(pairwise(CELLS, DTYPES, (1, 2, 3, 5, 8), (1, 2, 3), (True, False), SIZES), most=7),
    ids=str,
)
def test_agrees_with_the_oracle(cell, dtype, batch, layers, bias, sizes, launched):
    options = {"num_layers": layers, "bias": bias, "dtype": dtype, "cell": cell, "needs_grad": True}
    problem = Problem(1, batch, *sizes, **options)
    testing.check_kernel(Unrefused(), problem, "cpu")
    backward = ["single_adjoint", "single_products"]
    assert launched == ["single_call"] * layers + backward * layers


@pytest.mark.parametrize(
    ("cell", "dtype", "batch", "layers", "sizes"),
    each_value(
        pairwise(
            [LSTM(), GRU(), Momentum(), AllApart()],
            (torch.bfloat16, torch.float16),
            (9, 33),
            (1, 2),
            ((8, 8), (40, 24), (16, 72)),
        )
    ),
    ids=str,
)
def test_the_library_multiplies_more_sequences(cell, dtype, batch, layers, sizes, launched):
    problem = Problem(1, batch, *sizes, num_layers=layers, dtype=dtype, cell=cell, needs_grad=True)
    testing.check_kernel(Unrefused(), problem, "cpu")
    assert launched == ["single_call"] * layers + ["single_adjoint"] * layers


@pytest.mark.usefixtures("launched")
def test_dropout_between_layers():
    problem = Problem(1, 3, 8, 16, num_layers=3, dropout=0.4, needs_grad=True)
    testing.check_kernel(Unrefused(), problem, "cpu")


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("dtype", [torch.bfloat16, *exhaustive(torch.float16)], ids=str)
def test_float32_gradients_of_16_bit_weights(dtype):
    problem, inputs, gradients = call(GRU(), dtype, 5, (40, 24), layers=2)
    narrow = gradients_of(problem, inputs, gradients)
    wide = gradients_of(problem.replace(float32_gradients=True), inputs, gradients)
    of_weights = [name for name in wide if wide[name].dtype == torch.float32]
    assert len(of_weights) == 8
    for name, value in wide.items():
        assert torch.equal(value.to(dtype), narrow[name])


@pytest.mark.parametrize("batch", [3, 12])
@pytest.mark.parametrize("cell", [LSTM(), GRU()], ids=repr)
def test_only_what_is_needed_is_computed(cell, batch, launched):
    problem, inputs, gradients = call(cell, torch.bfloat16, batch, (8, 16))
    every = gradients_of(problem, inputs, gradients)
    parts = {"x": ["dx"], "state": ["dh0", "dc0"], "weights": ["dweight_ih_l0", "dweight_hh_l0", "dbias_ih_l0"]}
    for part, names in parts.items():
        launched.clear()
        needs = Needs(**{name: name == part for name in parts})
        found = gradients_of(problem, inputs, gradients, needs)
        there = {name: value for name, value in found.items() if name.startswith("d") and value is not None}
        assert set(names) & set(every) <= set(there) < {name for name in every if name.startswith("d")}
        assert all(torch.equal(value, every[name]) for name, value in there.items())
    launched.clear()
    gradients_of(problem, inputs, gradients, Needs(x=False, state=False, weights=False))
    assert "single_products" not in launched


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("missing", ["y", "h_n", "c_n"])
def test_gradients_that_are_missing_are_zero(missing):
    problem, inputs, gradients = call(LSTM(), torch.float32, 3, (8, 16), layers=2)
    without = gradients._replace(**{missing: None})
    zeros = gradients._replace(**{missing: torch.zeros_like(getattr(gradients, missing))})
    found, expected = gradients_of(problem, inputs, without), gradients_of(problem, inputs, zeros)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("dtype", [torch.bfloat16, *exhaustive(torch.float32)], ids=str)
def test_tensors_with_other_strides_and_addresses_are_read(dtype):
    problem, inputs, gradients = call(LSTM(), dtype, 2, (16, 16), layers=2)
    expected = gradients_of(problem, inputs, gradients)

    def moved(tensor):
        return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)

    def turned(tensor):
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2) if tensor.dim() > 1 else tensor

    for change in (moved, turned):
        others = Inputs(*map(change, inputs[:3]), tuple(map(change, inputs.weights)))
        found = gradients_of(problem, others, type(gradients)(*map(change, gradients)))
        torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("batch", [3, 12])
def test_nan_in_a_sequence_stays_out_of_other_sequences(batch):
    problem, inputs, gradients = call(LSTM(), torch.bfloat16, batch, (40, 24))
    clean = gradients_of(problem, inputs, gradients)
    spoiled = inputs.x.clone()
    spoiled[0, 1] = float("nan")
    found = gradients_of(problem, inputs._replace(x=spoiled), gradients)
    others = [row for row in range(batch) if row != 1]
    for name in ("y", "dx", "dh0", "dc0"):
        assert found[name][0, 1].isnan().all()
        assert torch.equal(found[name][:, others], clean[name][:, others])
    assert found["dweight_hh_l0"].isnan().all()


@pytest.mark.usefixtures("launched")
def test_a_second_backward_pass_gives_the_same_gradients():
    problem, inputs, gradients = call(GRU(), torch.float32, 3, (8, 16), layers=2)
    result = stepwise.forward(problem, inputs)
    first, second = [
        testing.named(problem, result, stepwise.backward(problem, inputs, result, gradients, Needs())) for _ in range(2)
    ]
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_calls_that_are_computed_so():
    problem = Problem(1, 8, 40, 16, dtype=torch.bfloat16, needs_grad=True)
    for own in (problem, problem.replace(batch=64), problem.replace(num_layers=3), problem.replace(dropout=0.5)):
        assert is_single_training(own, H200)
    assert stepwise.work(problem.replace(num_layers=3), H200).launches == 9
    many, gru = problem.replace(batch=64), problem.replace(batch=64, cell=GRU())
    assert [stepwise.work(each, H200).launches for each in (many, gru)] == [6, 6]
    # The gradients of a GRU's recurrent products are a matrix of their own.
    together = AllApart(), 64 * 16 * 2 * (4 + 4)
    apart = GRU(), 64 * 16 * 2 * (4 + 4 + 3)
    for cell, expected in (together, apart):
        assert stepwise.workspace_bytes(many.replace(cell=cell), H200) == expected
    assert [spec.shape for spec in stepwise.kept(problem.replace(num_layers=2), H200)] == [(1, 8, 16), (8, 64), (8, 64)]
    for change in (
        {"time": 2},
        {"batch": 65},
        {"batch": 9, "input_size": 36},
        {"needs_grad": False},
        {"traced": True},
        {"bidirectional": True},
        {"proj_size": 8},
        {"resets": True},
        {"layout": Layout.DEVICE_LENGTHS},
        {"cell": LayerNormLSTM()},
        {"cell": Regularised(LSTM(), recurrent_dropout=0.5)},
    ):
        assert not is_single_training(problem.replace(**change), H200)
