"""What the kernel `cudnn` gives PyTorch's operators, and makes of what they return: with stand-ins, on a CPU."""

import itertools

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU, LSTM, RNN
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs, OutputGradients
from gatewise.contract.weights import copied_together
from gatewise.kernels.cudnn import cudnn
from gatewise.kernels.cudnn.weight_buffer import weight_buffer
from tests.kernels.cudnn_operators import Operators
from tests.pairwise import each_value

MODES = {LSTM(): 2, GRU(): 3, RNN("tanh"): 1, RNN("relu"): 0}  # of cudnnRNNMode_t
CELLS = list(MODES)
WITHOUT_CELL_STATE = CELLS[1:]
CALLS = [
    (case, cell)
    for case in testing.CASES
    for cell in CELLS
    if case.shape.layout is not Layout.DEVICE_LENGTHS and not case.shape.resets
    if cell == LSTM() or not case.shape.proj_size
]


@pytest.fixture
def operators(monkeypatch):
    made = Operators()
    monkeypatch.setattr(torch.ops.aten, "_cudnn_rnn", made.forward)
    monkeypatch.setattr(torch.ops.aten, "_cudnn_rnn_backward", made.backward)
    return made


def small(cell, **options):
    problem = Problem(5, 3, 4, 6, dtype=torch.float64, needs_grad=True, cell=cell, **options)
    inputs = testing.make_inputs(problem)
    return problem, inputs, testing.make_gradients(problem, inputs)


def in_cudnns_buffer(problem, weights):
    """Return views of one buffer, as `flatten_parameters` makes them on a GPU."""
    buffer, views, place = weight_buffer(weights, problem.weights_per_direction), {}, 0
    for index in sorted(range(len(weights)), key=lambda index: weights[index].dim() == 1):
        views[index] = buffer[place : place + weights[index].numel()].view(weights[index].shape)
        place += weights[index].numel()
    return tuple(views[index] for index in range(len(weights)))


def tensors(result, gradients):
    return [*result[:3], *gradients[:3], *gradients.weights]


@pytest.mark.parametrize(("case", "cell"), each_value(CALLS, most=8), ids=lambda own: own.name)
def test_results_and_gradients_are_the_oracles(case, cell, operators):
    problem = case.problem(dtype=torch.float64).replace(cell=cell)
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs)
    found = testing.run_kernel(cudnn, problem, inputs, gradients)
    expected = testing.oracle(problem, inputs, gradients)
    torch.testing.assert_close(tensors(*found), tensors(*expected))
    assert set(operators.modes) == {MODES[problem.cell]}
    assert operators.runs == {}


@pytest.mark.parametrize("cell", CELLS, ids=repr)
def test_states_of_any_strides_are_made_contiguous(cell, operators):
    problem, inputs, gradients = small(cell, num_layers=2)
    turned = inputs._replace(
        h0=inputs.h0.transpose(0, 1).contiguous().transpose(0, 1),
        c0=inputs.c0.transpose(0, 1).contiguous().transpose(0, 1),
    )
    assert not turned.h0.is_contiguous()
    found, expected = (testing.run_kernel(cudnn, problem, given, gradients) for given in (turned, inputs))
    torch.testing.assert_close(tensors(*found), tensors(*expected))


@pytest.mark.parametrize("cell", CELLS, ids=repr)
@pytest.mark.parametrize("needs", [Needs(x=False), Needs(state=False), Needs(weights=False)], ids=str)
def test_only_the_wanted_gradients(cell, needs, operators):
    problem, inputs, gradients = small(cell)
    _, found = testing.run_kernel(cudnn, problem, inputs, gradients, needs)
    assert (found.x is not None) == needs.x
    assert (found.h0 is not None) == (found.c0 is not None) == needs.state
    assert all((weight is not None) == needs.weights for weight in found.weights)


@pytest.mark.parametrize(("cell", "given"), each_value([*itertools.product(CELLS, ["y", "h_n", "c_n", ""])]), ids=repr)
def test_absent_gradients_of_outputs_are_zero(cell, given, operators):
    problem, inputs, gradients = small(cell)
    absent = OutputGradients(*(value if name == given else None for name, value in gradients._asdict().items()))
    zero = OutputGradients(*(value if name == given else value * 0 for name, value in gradients._asdict().items()))
    found, expected = (testing.run_kernel(cudnn, problem, inputs, above) for above in (absent, zero))
    torch.testing.assert_close(tensors(*found), tensors(*expected))


@pytest.mark.parametrize("cell", WITHOUT_CELL_STATE, ids=repr)
def test_absent_cell_states_are_no_views_of_the_initial_ones(cell, operators):
    problem, inputs, _ = small(cell)
    result = cudnn.forward(problem, inputs)
    assert result.c_n.shape == inputs.c0.shape == (1, 3, 0)
    assert result.c_n is not inputs.c0


@pytest.mark.parametrize(
    ("form", "layout", "cell"),
    each_value(
        [
            *itertools.product(
                [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}],
                [Layout.DENSE, Layout.PACKED],
                WITHOUT_CELL_STATE,
            )
        ]
    ),
    ids=repr,
)
def test_pytorchs_own_call_is_that_of_the_cell(cell, form, layout):
    problem, inputs, _ = small(cell, layout=layout, **form)
    assert cudnn.recorded(problem, inputs) is None  # PyTorch would lay out the weights anew in every call
    found = cudnn.recorded(problem, inputs._replace(weights=in_cudnns_buffer(problem, inputs.weights)))
    assert found is not None
    expected, _ = testing.oracle(problem, inputs)
    torch.testing.assert_close(found[:3], expected[:3])


@pytest.mark.parametrize(("cell", "gates", "kept"), [(GRU(), 0.75, 0.8), (RNN(), 0.25, 0.2)], ids=repr)
def test_other_cells_state_the_work_and_the_memory_of_their_own_gates(cell, gates, kept):
    lstm = Problem(100, 64, 512, 512, dtype=torch.bfloat16, needs_grad=True)
    other, device = lstm.replace(cell=cell), Device.named("h200")
    of_lstm, of_other = cudnn.work(lstm, device), cudnn.work(other, device)
    assert of_other.matmul_flops == pytest.approx(gates * of_lstm.matmul_flops)
    assert of_other.bytes_moved < of_lstm.bytes_moved
    assert cudnn.workspace_bytes(other, device) < cudnn.workspace_bytes(lstm, device)
    kept_by_lstm, kept_by_other = (sum(spec.nbytes for spec in cudnn.kept(each, device)) for each in (lstm, other))
    assert kept_by_other == kept * kept_by_lstm


@pytest.mark.parametrize(
    ("hidden_size", "dtype", "persistent"),
    [(128, torch.float32, 2), (160, torch.float32, 1), (200, torch.float32, 0), (160, torch.float16, 0)],
    ids=str,
)
def test_the_loops_of_both_passes_are_stated_each(hidden_size, dtype, persistent):
    problem = Problem(100, 8, 64, hidden_size, num_layers=2, dtype=dtype, needs_grad=True)
    work = cudnn.work(problem, Device.named("h200"))
    assert work.exchanges == persistent * 2 * 100
    # A product over all steps and its sum, and two launches for the steps of each layer or for each of them.
    assert work.launches == 2 * 2 * (2 + persistent + (2 - persistent) * 100)
    assert (work.cached_bytes > 0) == (persistent < 2)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_gradients_of_copies_of_float32_weights_are_float32(cell, dropout, operators):
    problem = Problem(5, 3, 8, 8, num_layers=2, dropout=dropout, dtype=torch.bfloat16, needs_grad=True, cell=cell)
    inputs = testing.make_inputs(problem)
    inputs = inputs._replace(weights=copied_together([each.float() for each in inputs.weights], torch.bfloat16))
    gradients = testing.make_gradients(problem, inputs)
    _, expected = testing.run_kernel(cudnn, problem, inputs, gradients)
    _, found = testing.run_kernel(cudnn, problem.replace(float32_gradients=True), inputs, gradients)
    for one, other in zip(found.weights, expected.weights, strict=True):
        assert (one.dtype, other.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(one, other.float())
    buffer = weight_buffer(inputs.weights, problem.weights_per_direction)
    assert buffer.data_ptr() == inputs.weights[0].data_ptr(), "the copies are read where they are"
    # PyTorch's own call would return them to autograd, which knows nothing of the copies.
    assert cudnn.recorded(problem.replace(float32_gradients=True), inputs) is None
