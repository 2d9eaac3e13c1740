"""The state: the time that it saves, its conditions of use, and errors."""

import itertools
import warnings

import numpy as np
import pytest
import reference_lstm as reference
import torch

from gatewise import kernel_names, use_kernel
from gatewise.contract.errors import ArgumentError, CheckpointError, DtypeError, KernelRefused, ShapeError
from gatewise.functional import RepeatedForwardWarning
from gatewise.interop import systemml
from gatewise.selection.admit import kernel_named
from tests.pairwise import each_value

SHAPE = (6, 5, 4, 3)
ON_CPU = ["eager", "aten"]
PAIRS = [
    pytest.param("cpu", "eager", "cpu", "aten"),
    pytest.param("cpu", "aten", "cpu", "eager"),
    *[
        pytest.param(*first, *second, marks=pytest.mark.gpu)
        for first in (("cpu", "aten"), ("cpu", "eager"), ("cuda", "cudnn"), ("cuda", "eager"))
        for second in (("cuda", "cudnn"), ("cuda", "aten"), ("cpu", "eager"))
        if first != second and "cuda" in first + second
    ],
]


@pytest.fixture
def forwards(monkeypatch):
    """Names of the kernels whose forward pass ran, one for each time."""
    ran = []

    def counted(kernel):
        run = type(kernel).forward
        monkeypatch.setattr(type(kernel), "forward", lambda *arguments: ran.append(kernel.name) or run(*arguments))

    for name in kernel_names():
        counted(kernel_named(name))
    return ran


@pytest.fixture(params=[True, False], ids=["sequences", "last"])
def sequences(request):
    return request.param


@pytest.fixture
def problem(sequences):
    return reference.problem(SHAPE, sequences)


@pytest.fixture
def expected(problem, sequences):
    return reference.backward(*problem.inputs, sequences, problem.dout, problem.dc)


def assert_gradients(found, expected, allowed=1e-9):
    for result, value in zip(found, expected, strict=True):
        assert reference.error(result.cpu() if isinstance(result, torch.Tensor) else result, value) <= allowed


@pytest.mark.parametrize("kernel", ON_CPU)
def test_backward_with_it_runs_no_forward(problem, expected, sequences, kernel, forwards):
    *_, state = systemml.lstm(*problem.inputs, sequences, kernel=kernel)
    assert state.kernel == kernel
    assert forwards == [kernel]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            found = systemml.lstm_backward(*problem.inputs, sequences, problem.dout, problem.dc, state)
            assert_gradients(found, expected)
    assert forwards == [kernel]


@pytest.mark.parametrize("shape", [SHAPE, (1, 5, 4, 3), (6, 1, 4, 3)], ids=["batch", "one row", "one step"])
@pytest.mark.parametrize("kernel", ON_CPU)
def test_what_it_saves_is_its_own(shape, sequences, kernel):
    """The state does not change with the arrays that the forward pass was given."""
    problem = reference.problem(shape, sequences)
    expected = reference.backward(*problem.inputs, sequences, problem.dout, problem.dc)
    given = [array.copy() for array in problem.inputs]
    *_, state = systemml.lstm(*given, sequences, kernel=kernel)
    for array in given:
        array.fill(np.nan)
    assert_gradients(systemml.lstm_backward(*problem.inputs, sequences, problem.dout, problem.dc, state), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tensors", [True, False], ids=["tensors", "numpy"])
@pytest.mark.parametrize("kernel", ["eager", "aten", "cudnn"])
def test_backward_with_it_runs_no_forward_on_a_gpu(problem, expected, sequences, kernel, tensors, forwards):
    options = {} if tensors else {"device": "cuda"}
    given = [torch.from_numpy(array).cuda() if tensors else array for array in problem]
    *_, state = systemml.lstm(*given[:5], sequences, kernel=kernel, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_gradients(systemml.lstm_backward(*given[:5], sequences, *given[5:], state), expected)
    assert forwards == [kernel]


def test_the_state_serves_whether_or_not_sequences_were_returned(problem, expected, sequences, forwards):
    *_, state = systemml.lstm(*problem.inputs, not sequences)
    assert_gradients(systemml.lstm_backward(*problem.inputs, sequences, problem.dout, problem.dc, state), expected)
    assert len(forwards) == 1


def test_sparse_products_are_not_repeated_either(sequences, forwards):
    sparse = pytest.importorskip("scipy.sparse")
    problem = reference.problem(SHAPE, sequences, density_x=0.05)
    inputs = (sparse.csr_array(problem.X), *problem.inputs[1:])
    *_, state = systemml.lstm(*inputs, sequences)
    assert state.projected
    expected = reference.backward(*problem.inputs, sequences, problem.dout, problem.dc)
    assert_gradients(systemml.lstm_backward(*inputs, sequences, problem.dout, problem.dc, state), expected)
    assert forwards == ["eager"]


@pytest.mark.parametrize(("device", "first", "other_device", "second"), PAIRS)
@pytest.mark.parametrize("by", ["argument", "block"])
def test_mixed_operators_repeat_the_forward_with_one_warning(
    problem, expected, sequences, device, first, other_device, second, by, forwards
):
    *_, state = systemml.lstm(*problem.inputs, sequences, kernel=first, device=device)
    named = {"kernel": second} if by == "argument" else {}
    with (
        use_kernel(second if by == "block" else "auto"),
        pytest.warns(RepeatedForwardWarning, match=f"forward pass ran on '{first}'.*backward on '{second}'") as caught,
    ):
        found = systemml.lstm_backward(
            *problem.inputs, sequences, problem.dout, problem.dc, state, device=other_device, **named
        )
    assert len(caught) == 1
    assert caught[0].filename == __file__
    if device != other_device:
        assert f"({state.device}); backward" in str(caught[0].message)
        assert f"({other_device}" in str(caught[0].message).partition("backward")[2]
    assert forwards == [first, second]
    assert_gradients(found, expected)


@pytest.mark.gpu
def test_tensors_that_moved_take_the_backward_pass_with_them(problem, expected, sequences):
    cpu = [torch.from_numpy(array) for array in problem]
    gpu = [tensor.cuda() for tensor in cpu]
    for first, second in ((cpu, gpu), (gpu, cpu)):
        *_, state = systemml.lstm(*first[:5], sequences)
        with pytest.warns(RepeatedForwardWarning, match="repeats it there"):
            found = systemml.lstm_backward(*second[:5], sequences, *second[5:], state)
        assert all(result.device == second[0].device for result in found)
        assert_gradients(found, expected)


def test_without_a_state_the_forward_is_repeated_with_one_warning(problem, expected, sequences, forwards):
    message = r"no state of the forward pass was given; backward on 'aten' \(cpu\) repeats it there"
    with pytest.warns(RepeatedForwardWarning, match=message) as caught:
        found = systemml.lstm_backward(*problem.inputs, sequences, problem.dout, problem.dc, None, kernel="aten")
    assert len(caught) == 1
    assert forwards == ["aten"]
    assert_gradients(found, expected)


def test_a_sparse_state_and_a_kernel_that_wants_dense_matrices(sequences, forwards):
    sparse = pytest.importorskip("scipy.sparse")
    problem = reference.problem(SHAPE, sequences, density_x=0.05, density_w=0.05)
    inputs = (sparse.csr_array(problem.X), sparse.csr_array(problem.W), *problem.inputs[2:])
    expected = reference.backward(*problem.inputs, sequences, problem.dout, problem.dc)
    *_, state = systemml.lstm(*inputs, sequences)
    message = r"ran on 'eager' \(cpu\); backward on 'aten' \(cpu\)"
    with pytest.warns(RepeatedForwardWarning, match=message) as caught:
        found = systemml.lstm_backward(*inputs, sequences, problem.dout, problem.dc, state, kernel="aten")
    assert len(caught) == 1
    assert forwards == ["eager", "aten"]
    assert_gradients(found, expected)
    with pytest.raises(KernelRefused, match="no-such"):
        systemml.lstm_backward(*inputs, sequences, problem.dout, problem.dc, state, kernel="no-such")


@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["double", "single"])
@pytest.mark.parametrize("kernel", ON_CPU)
def test_saved_and_restored(problem, sequences, kernel, dtype, tmp_path, forwards):
    arrays = [array.astype(dtype) for array in problem]
    *_, state = systemml.lstm(*arrays[:5], sequences, kernel=kernel)
    expected = systemml.lstm_backward(*arrays[:5], sequences, *arrays[5:], state)
    state.save(tmp_path / "state.safetensors")
    restored = systemml.State.load(tmp_path / "state.safetensors")
    assert repr(restored) == repr(state)
    forwards.clear()
    graph = kernel == "aten" and dtype == np.float64  # PyTorch's native loop
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = systemml.lstm_backward(*arrays[:5], sequences, *arrays[5:], restored)
    assert len(caught) == len(forwards) == graph
    if graph:
        assert "the state of 'aten' (cpu) is used up, or cannot be read by these versions" in str(caught[0].message)
    for result, value in zip(found, expected, strict=True):
        assert reference.error(result, value) <= (1e-12 if graph else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["eager", "cudnn"])
def test_saved_and_restored_on_a_gpu(problem, expected, sequences, kernel, tmp_path, forwards):
    *_, state = systemml.lstm(*problem.inputs, sequences, kernel=kernel, device="cuda")
    state.save(tmp_path / "state.safetensors")
    restored = systemml.State.load(tmp_path / "state.safetensors", device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = systemml.lstm_backward(*problem.inputs, sequences, problem.dout, problem.dc, restored)
    assert forwards == [kernel]
    assert_gradients(found, expected)
    elsewhere = systemml.State.load(tmp_path / "state.safetensors")
    with pytest.warns(RepeatedForwardWarning):
        found = systemml.lstm_backward(*problem.inputs, sequences, problem.dout, problem.dc, elsewhere)
    assert_gradients(found, expected)


@pytest.mark.gpu
def test_a_state_of_cudnn_serves_once(problem, expected, sequences, forwards):
    *_, state = systemml.lstm(*problem.inputs, sequences, kernel="cudnn", device="cuda")
    arguments = (*problem.inputs, sequences, problem.dout, problem.dc, state)
    assert_gradients(systemml.lstm_backward(*arguments), expected)
    with pytest.warns(RepeatedForwardWarning, match="'cudnn' .* is used up"):
        assert_gradients(systemml.lstm_backward(*arguments), expected)
    assert len(forwards) == 2


def test_a_state_of_another_problem_is_refused(problem, sequences):
    *_, state = systemml.lstm(*problem.inputs, sequences)
    for shape in ((5, 5, 4, 3), (6, 4, 4, 3), (6, 5, 5, 3), (6, 5, 4, 2)):
        other = reference.problem(shape, sequences)
        sizes = "N {}, T {}, D {}, M {}".format(*shape)
        with pytest.raises(ShapeError, match=f"`state` must be of a problem of {sizes}, got one of N 6, T 5, D 4, M 3"):
            systemml.lstm_backward(*other.inputs, sequences, other.dout, other.dc, state)
    single = [array.astype(np.float32) for array in problem]
    with pytest.raises(DtypeError, match=r"`state` must be of torch\.float32 like X, got torch\.float64"):
        systemml.lstm_backward(*single[:5], sequences, *single[5:], state)
    with pytest.raises(ArgumentError, match="`state` must be the third result of lstm, got tuple"):
        systemml.lstm_backward(*problem.inputs, sequences, problem.dout, problem.dc, (1, 2))
    two = reference.problem((12, 5, 4, 3), sequences)
    inputs = (problem.X, problem.W, problem.W, problem.b, problem.b, two.out0, two.c0)
    with pytest.raises(ShapeError, match="M 3, 2 directions, got one of N 6, T 5, D 4, M 3"):
        systemml.bilstm_backward(*inputs, sequences, None, None, state)


@pytest.mark.parametrize(
    ("name", "density", "restored"),
    each_value([*itertools.product(["X", "W", "b", "out0", "c0"], [1.0, 0.05], [False, True])]),
    ids=str,
)
def test_a_state_of_other_values_is_refused(sequences, name, density, restored, tmp_path):
    problem = reference.problem(SHAPE, sequences, density_x=density)
    inputs = list(problem.inputs)
    if density < 1:
        inputs[0] = pytest.importorskip("scipy.sparse").csr_array(inputs[0])
    *_, state = systemml.lstm(*inputs, sequences)
    if restored:
        state.save(tmp_path / "state.safetensors")
        state = systemml.State.load(tmp_path / "state.safetensors")
    index = ["X", "W", "b", "out0", "c0"].index(name)
    # Two rows or two columns are exchanged, so that only their places are others.
    changed = problem.inputs[index].copy()
    changed = changed[:, ::-1].copy() if name == "b" else changed[::-1].copy()
    other = [*inputs[:index], changed, *inputs[index + 1 :]]
    above = (sequences, problem.dout, problem.dc, state)
    with pytest.raises(ArgumentError, match=f"`state` must be that of a forward pass with this {name}, got one of an"):
        systemml.lstm_backward(*other, *above)
    # The same numbers, in another form and in other memory
    same = [problem.X, *(array.copy() for array in inputs[1:])]
    expected = systemml.lstm_backward(*inputs, *above)
    for found, value in zip(systemml.lstm_backward(*same, *above[:3], state), expected, strict=True):
        assert reference.error(found, value) <= 1e-12


def test_arguments_that_changed_since_are_another_problem(sequences):
    problem = reference.problem(SHAPE, sequences)
    X = problem.X.copy()
    *_, state = systemml.lstm(X, *problem.inputs[1:], sequences)
    X[0, 0] += 1
    with pytest.raises(ArgumentError, match="with this X, got one of another"):
        systemml.lstm_backward(X, *problem.inputs[1:], sequences, problem.dout, problem.dc, state)


@pytest.mark.parametrize("value", ["FALSE", "TRUE", 1, None])
def test_a_flag_that_is_no_boolean_is_refused(problem, value):
    message = f"must be True or False, got {value!r}. The Booleans TRUE and FALSE of a script are True and False"
    with pytest.raises(ArgumentError, match=f"`return_sequences` {message}"):
        systemml.lstm(*problem.inputs, value)
    with pytest.raises(ArgumentError, match=f"`given_sequences` {message}"):
        systemml.lstm_backward(*problem.inputs, value, problem.dout, problem.dc)
    assert systemml.lstm(*problem.inputs, np.bool_(True))[0].shape == (6, 15)


def test_changing_results_in_place_does_not_reach_the_state(problem, expected, sequences):
    out, c, state = systemml.lstm(*problem.inputs, sequences)
    out[:] = np.nan
    c[:] = np.nan
    assert_gradients(systemml.lstm_backward(*problem.inputs, sequences, problem.dout, problem.dc, state), expected)
    for shape in ((1, 3, 2, 2), (4, 1, 2, 2)):
        small = reference.problem(shape, True)
        out, c, state = systemml.lstm(*small.inputs, True)
        out[:] = c[:] = np.nan
        wanted = reference.backward(*small.inputs, True, small.dout, small.dc)
        assert_gradients(systemml.lstm_backward(*small.inputs, True, small.dout, small.dc, state), wanted)


def test_files_that_hold_no_state(problem, sequences, tmp_path):
    from safetensors.numpy import save_file

    *_, state = systemml.lstm(*problem.inputs, sequences)
    path = tmp_path / "state.safetensors"
    state.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="truncated"):
        systemml.State.load(path)
    torch.save({"a": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match="truncated or not a safetensors file"):
        systemml.State.load(path)
    save_file({"a": np.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"holds no state of systemml\.lstm"):
        systemml.State.load(path)
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        systemml.State.load(tmp_path / "missing")
    path.write_bytes(whole)
    assert systemml.State.load(path).kernel == state.kernel


def test_a_file_that_cannot_be_written_stays_as_it_was(problem, sequences, tmp_path):
    *_, state = systemml.lstm(*problem.inputs, sequences)
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(CheckpointError, match="cannot be written"):
        state.save(folder)
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]
