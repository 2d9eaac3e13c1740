"""The operators of SystemDS 3.4.0: its recorded results, and agreement with the operators of SystemML."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import reference_lstm as reference
import torch

from gatewise.contract.errors import ArgumentError, ShapeError
from gatewise.interop import systemds, systemml

N, T, D, M = 3, 4, 2, 5
CACHES = ("cache_out", "cache_c", "cache_ifog")
GRADIENTS = {
    "lstm": ("dX", "dW", "db", "dout0", "dc0"),
    "bilstm": ("dX", "dW", "db", "dW_reverse", "db_reverse", "dout0", "dc0"),
}


@pytest.fixture(params=["lstm", "bilstm"])
def recorded(request):
    """The arguments and the results of SystemDS for one layer, by name; and the name of the layer."""
    with np.load(Path(__file__).parent / "references" / "systemds.npz") as file:
        values = {name.removeprefix(f"{request.param}/"): file[name] for name in file.files}
    return {name: value for name, value in values.items() if "/" not in name} | {"name": request.param}


def weights_of(values):
    if values["name"] == "lstm":
        return [values["W"], values["b"]]
    return [values[name] for name in ("W", "W_reverse", "b", "b_reverse")]


def forward(values, sequences=True):
    arguments = values["X"], *weights_of(values)
    states = values["out0"], values["c0"]
    if values["name"] == "lstm":
        return systemds.lstm(*arguments, *states, sequences)
    return systemds.bilstm_forward(*arguments, T, D, sequences, *states)


def backward(values, dout, caches, sequences=True):
    arguments = values["X"], *weights_of(values)
    states = values["out0"], values["c0"]
    if values["name"] == "lstm":
        return systemds.lstm_backward(*arguments, *states, sequences, dout, values["dc"], *caches)
    return systemds.bilstm_backward(dout, values["dc"], *arguments, T, D, sequences, *states, *caches)


def test_results_are_those_of_systemds(recorded):
    for name, found in zip(("out", "c", *CACHES), forward(recorded), strict=True):
        assert reference.error(found, recorded[name]) <= 1e-14, name


def test_gradients_from_the_caches_of_systemds_are_those_of_systemds(recorded):
    found = backward(recorded, recorded["dout"], [recorded[name] for name in CACHES])
    for name, gradient in zip(GRADIENTS[recorded["name"]], found, strict=True):
        assert gradient.shape == recorded[name].shape
        assert reference.error(gradient, recorded[name]) <= 1e-13, name


@pytest.mark.parametrize("sequences", [True, False])
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
@pytest.mark.filterwarnings("error")
def test_both_forms_agree(recorded, sequences, kind):
    values = {name: value if isinstance(value, str) else kind(value) for name, value in recorded.items()}
    two = values["name"] == "bilstm"
    out, c, *caches = forward(values, sequences)
    dout = kind(np.random.default_rng(0).standard_normal(tuple(out.shape)))
    found = backward(values, dout, caches, sequences)

    def beside(states):
        """Return the two directions' states side by side, as systemml.bilstm has them."""
        return kind(np.hstack(np.vsplit(np.asarray(states), 2))) if two else states

    names = [values["X"], *weights_of(values), values["out0"], values["c0"], sequences]
    run, run_back = (systemml.bilstm, systemml.bilstm_backward) if two else (systemml.lstm, systemml.lstm_backward)
    other, other_c, state = run(*names)
    gradients = run_back(*names, dout, beside(values["dc"]), state)
    if two:
        dX, dW, dW_reverse, db, db_reverse, *rest = gradients
        gradients = (dX, dW, db, dW_reverse, db_reverse, *rest)
    for mine, theirs in zip((out, beside(c), *found), (other, other_c, *gradients), strict=True):
        assert type(mine) is type(theirs)
        assert reference.error(np.asarray(mine), np.asarray(theirs)) <= 1e-13


def test_sparse_matrices_and_single_precision():
    sparse = pytest.importorskip("scipy.sparse")
    problem = reference.problem((6, 5, 4, 3), True, density_x=0.2)
    out, c, *caches = systemds.lstm(*problem.inputs, True)
    given = (sparse.csr_array(problem.X), sparse.csr_array(problem.W), *problem.inputs[2:])
    np.testing.assert_array_equal(systemds.lstm(*given, True)[0], out)
    dense = systemds.lstm_backward(*problem.inputs, True, out, c, *caches)
    for found, expected in zip(systemds.lstm_backward(*given, True, out, c, *caches), dense, strict=True):
        np.testing.assert_array_equal(found, expected)
    single = [array.astype("f4") for array in problem.inputs]
    out, c, *caches = systemds.lstm(*single, True)
    for found, expected in zip(systemds.lstm_backward(*single, True, out, c, *caches), dense, strict=True):
        assert found.dtype == np.float32
        assert reference.error(found, expected) <= 1e-5


def test_a_smaller_last_batch_takes_the_first_rows_in_the_forward_pass_only(recorded):
    full, *_ = forward(recorded)
    small = recorded | {"X": recorded["X"][:2]}
    if recorded["name"] == "bilstm":
        with pytest.raises(ShapeError, match="must be of as many rows as X in the backward pass, 4, got 6"):
            backward(small, recorded["dout"], forward(small)[2:])
    out, _, *caches = forward(small)
    np.testing.assert_allclose(out, full[:2], rtol=1e-12)
    with pytest.raises(ShapeError, match="must be of as many rows as X in the backward pass"):
        backward(small, recorded["dout"][:2], caches)


def test_wrong_arguments_are_named(recorded):
    out, c, *caches = forward(recorded)
    with pytest.raises(ArgumentError, match="must be True or False, got 'FALSE'"):
        forward(recorded, "FALSE")
    with pytest.raises(ArgumentError, match="must be True or False, got 'TRUE'"):
        backward(recorded, out, caches, "TRUE")
    with pytest.raises(ShapeError, match=r"`cache_c` must be .* It is a result of the forward pass"):
        backward(recorded, out, [caches[0], caches[1][:, 1:], caches[2]])
    with pytest.raises(ArgumentError, match="`cache_ifog` must be the matrix that the forward pass returned, got None"):
        backward(recorded, out, [*caches[:2], None])
    with pytest.raises(ShapeError, match="`dc` must be"):
        backward(recorded | {"dc": c[:, 1:]}, out, caches)
    arguments = [recorded[name] for name in ("X", "W", "W_reverse", "b", "b_reverse")]
    if recorded["name"] == "bilstm":
        with pytest.raises(ShapeError, match="`T and D` must be 4 and 2, by the shapes of X and W, got 2 and 4"):
            systemds.bilstm_forward(*arguments, 2, 4, True, recorded["out0"], recorded["c0"])
