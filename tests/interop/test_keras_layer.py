"""`gatewise.interop.keras.LSTM` compared with `keras.layers.LSTM`: results, gradients, states, files, errors."""

from __future__ import annotations

import copy
import importlib
import itertools
import pickle
import sys
import warnings

import numpy as np
import pytest
import torch

pytest.importorskip("gatewise.interop.keras", exc_type=ImportError)

from gatewise import use_kernel
from gatewise.contract.errors import ArgumentError, KernelRefused, MissingExtra
from gatewise.interop.keras import LSTM, SlowerKernelWarning
from gatewise.interop.keras import lstm as module
from gatewise.interop.keras.backend import keras_on_torch
from tests.pairwise import each_value, every_pair, exhaustive

keras = keras_on_torch()

BATCH, TIME, FEATURES, UNITS = 4, 7, 3, 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GENERATOR = np.random.default_rng(0)
MASKS = {
    "none": None,
    "all": np.ones((BATCH, TIME), bool),
    "right": np.arange(TIME) < np.array([[3], [7], [1], [0]]),
    "left": np.arange(TIME) >= np.array([[3], [0], [6], [7]]),
    "holes": GENERATOR.random((BATCH, TIME)) > 0.4,
}


@pytest.fixture(autouse=True)
def exact_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def pair(dtype="float64", **options):
    """Return our layer and Keras' layer with the same random weights."""
    ours = LSTM(UNITS, dtype=dtype, **options)
    own = {name: value for name, value in options.items() if name not in ("kernel", "use_cudnn")}
    theirs = keras.layers.LSTM(UNITS, dtype=dtype, use_cudnn=False, **own)
    for layer in (ours, theirs):
        layer.build((BATCH, TIME, FEATURES))
    weights = [np.random.default_rng(1).standard_normal(weight.shape) for weight in theirs.get_weights()]
    ours.set_weights(weights)
    theirs.set_weights(weights)
    return ours, theirs


def tensor(shape, seed, dtype=torch.float64):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(DEVICE, dtype).requires_grad_()


def results(layer, mask, initial=False, training=False):
    """Return all outputs, then all gradients."""
    dtype = getattr(torch, layer.compute_dtype)
    x = tensor((BATCH, TIME, FEATURES), 2, dtype)
    state = [tensor((BATCH, UNITS), seed, dtype) for seed in (3, 4)] if initial else None
    mask = None if mask is None else torch.from_numpy(mask).to(DEVICE)
    outputs = keras.tree.flatten(layer(x, initial_state=state, mask=mask, training=training))
    loss = sum((output * tensor(output.shape, 5 + i, dtype)).sum() for i, output in enumerate(outputs))
    sources = [x, *(state or []), *(weight.value for weight in layer.trainable_weights)]
    return [output.detach() for output in outputs], torch.autograd.grad(loss, sources)


def agree(ours, theirs, mask, tolerance=2e-6, **options):
    """Compare everything. Keras' loop rounds to float32 on its way in float64 too, by some 1e-8 here."""
    for found, expected in zip(results(ours, mask, **options), results(theirs, mask, **options), strict=True):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("mask", "sequences", "state", "backwards"), every_pair(MASKS, *3 * [(False, True)]))
def test_outputs_states_and_gradients_are_those_of_keras(mask, sequences, state, backwards):
    ours, theirs = pair(return_sequences=sequences, return_state=state, go_backwards=backwards)
    agree(ours, theirs, MASKS[mask], initial=True)


OPTIONS = (
    {"use_bias": False},
    {"zero_output_for_mask": True},
    {"zero_output_for_mask": True, "return_sequences": True},
    {"unroll": True, "return_sequences": True},
    {"kernel": "eager"},
    {"use_cudnn": False, "return_state": True},
    {"unit_forget_bias": False, "bias_initializer": "ones"},
)


@pytest.mark.parametrize(
    ("options", "mask"), each_value([*itertools.product(OPTIONS, MASKS)], times=2, most=7), ids=str
)
def test_options_keep_the_fast_kernels_and_agree(mask, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowerKernelWarning)
        ours, theirs = pair(**options)
    agree(ours, theirs, MASKS[mask])


@pytest.mark.parametrize("state", [False, True])
def test_a_masked_row_is_the_row_of_its_steps_alone(state):
    layer, _ = pair(return_sequences=True, return_state=state)
    x = tensor((BATCH, TIME, FEATURES), 2).detach()
    mask = torch.from_numpy(MASKS["holes"]).to(DEVICE)
    together = keras.tree.flatten(layer(x, mask=mask))
    for row in range(BATCH):
        alone = keras.tree.flatten(layer(x[row : row + 1, mask[row]]))
        torch.testing.assert_close(together[0][row][mask[row]], alone[0][0], rtol=0, atol=1e-14)
        for one, other in zip(together[1:], alone[1:], strict=True):
            torch.testing.assert_close(one[row], other[0], rtol=0, atol=1e-14)


def test_the_options_of_masks_and_of_direction_change_the_result():
    plain = results(pair(return_sequences=True)[0], MASKS["holes"])[0][0]
    for options in ({"zero_output_for_mask": True}, {"go_backwards": True}, {"use_bias": False}):
        other = results(pair(return_sequences=True, **options)[0], MASKS["holes"])[0][0]
        assert not torch.allclose(plain, other), options


@pytest.mark.parametrize("mask", ["none", "holes"])
def test_dropout_of_the_input_is_that_of_keras(mask):
    options = {"dropout": 0.5, "seed": 3, "return_sequences": True}
    ours, theirs = pair(**options)
    agree(ours, theirs, MASKS[mask], training=True)
    at_test_time = results(ours, MASKS[mask])[0][0]
    assert not torch.allclose(at_test_time, results(ours, MASKS[mask], training=True)[0][0])


def test_what_stands_at_masked_steps_is_not_read():
    ours, _ = pair(return_sequences=True)
    x = tensor((BATCH, TIME, FEATURES), 2).detach()
    mask = torch.from_numpy(MASKS["holes"]).to(DEVICE)
    bad = torch.where(mask.unsqueeze(2), x, torch.nan).requires_grad_()
    y = ours(bad, mask=mask)
    torch.testing.assert_close(y, ours(x, mask=mask), rtol=0, atol=0)
    y.sum().backward()
    assert torch.isfinite(bad.grad).all()
    assert torch.isfinite(ours.trainable_weights[0].value.grad).all()


@pytest.mark.parametrize("mask", ["none", "right", "holes"])
def test_a_stateful_layer_goes_on_where_it_stopped(mask):
    ours, theirs = pair(stateful=True, return_sequences=True)
    for _ in range(2):
        agree(ours, theirs, MASKS[mask])
    first = results(ours, None)[0][0]
    assert not torch.allclose(results(ours, None)[0][0], first)
    for layer in (ours, theirs):
        layer.reset_state()
    agree(ours, theirs, MASKS[mask])


@pytest.mark.parametrize(
    ("policy", "tolerance"), [("float32", 1e-5), ("mixed_float16", 5e-3), ("mixed_bfloat16", 5e-2)]
)
def test_every_precision_of_keras(policy, tolerance):
    ours, theirs = pair(dtype=policy, return_sequences=True)
    assert results(ours, None)[0][0].dtype == getattr(torch, ours.compute_dtype)
    agree(ours, theirs, MASKS["right"], tolerance=tolerance)


def test_integers_are_taken_as_keras_takes_them():
    ours, theirs = pair(dtype="float32")
    x = np.arange(BATCH * TIME * FEATURES).reshape(BATCH, TIME, FEATURES) % 3
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


# Options that no kernel supports


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"activation": "relu"}, "activation='relu'"),
        ({"activation": None}, "activation='linear'"),
        ({"recurrent_activation": "hard_sigmoid"}, "recurrent_activation='hard_sigmoid'"),
        ({"recurrent_dropout": 0.5}, "recurrent_dropout=0.5"),
        ({"activation": "relu", "recurrent_dropout": 0.5}, "activation='relu', recurrent_dropout=0.5"),
    ],
)
def test_options_that_no_kernel_has_are_named_with_what_runs_instead(options, named):
    expected = f"no kernel of gatewise supports {named}: Keras' own loop over time steps runs instead, which is slower"
    with pytest.warns(SlowerKernelWarning, match=expected) as caught:
        LSTM(UNITS, **options)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, theirs = pair(seed=1, return_sequences=True, **options)
    agree(ours, theirs, MASKS["holes"], training=True)
    for choice in ({"use_cudnn": True}, {"kernel": "eager"}):
        with pytest.raises(KernelRefused, match=named):
            LSTM(UNITS, **options, **choice)


# The choice of the kernel


@pytest.mark.parametrize(
    ("options", "kernel", "cudnn"),
    [
        ({}, "auto", True),
        ({"use_cudnn": "auto"}, "auto", True),
        ({"use_cudnn": True}, "cudnn", True),
        ({"use_cudnn": False}, "auto", False),
        ({"kernel": "eager"}, "eager", True),
        ({"kernel": "aten", "use_cudnn": False}, "aten", False),
    ],
)
def test_use_cudnn_chooses_the_kernel(monkeypatch, options, kernel, cudnn):
    seen = []

    def called(x, state, weights, *, lengths, kernel):
        seen.append((kernel, torch.backends.cudnn.enabled))
        return x.new_zeros(*x.shape[:2], UNITS), state

    monkeypatch.setattr(module, "lstm", called)
    LSTM(UNITS, **options)(np.zeros((BATCH, TIME, FEATURES), "f4"))
    assert seen == [(kernel, cudnn)]
    assert torch.backends.cudnn.enabled


def test_a_kernel_that_is_unknown_is_refused_when_the_layer_is_made():
    with pytest.raises(KernelRefused, match=r"`kernel` must be one of 'auto', .* got 'foo'"):
        LSTM(UNITS, kernel="foo")


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernel can run")
def test_a_kernel_that_cannot_run_is_an_error_and_the_next_call_works():
    x = np.zeros((BATCH, TIME, FEATURES), "f4")
    with pytest.raises(KernelRefused, match="a CUDA GPU"):
        LSTM(UNITS, use_cudnn=True)(x)
    layer = LSTM(UNITS)
    with use_kernel("cudnn"), pytest.raises(KernelRefused, match="named by `use_kernel`"):
        layer(x)
    assert layer(x).shape == (BATCH, UNITS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "eager", "use_cudnn": True}, "`kernel` must be 'auto' with use_cudnn=True, got 'eager'"),
        ({"kernel": "cudnn", "use_cudnn": False}, "`kernel` must be 'auto' with use_cudnn=False, got 'cudnn'"),
        ({"kernel": None}, "`kernel` must be 'auto' or the name of a kernel, got None"),
    ],
)
def test_contradictions_are_errors(options, message):
    with pytest.raises(ArgumentError, match=message):
        LSTM(UNITS, **options)


# Files and clones


@pytest.mark.parametrize(
    ("suffix", "wrapped"), each_value([*itertools.product([".keras", ".weights.h5"], [False, True])]), ids=str
)
def test_weights_go_both_ways_between_the_layers(tmp_path, suffix, wrapped):
    x = np.random.default_rng(0).standard_normal((BATCH, TIME, FEATURES)).astype("f4")

    def model(layer):
        recurrent = layer(UNITS)
        return keras.Sequential(
            [keras.Input((TIME, FEATURES)), keras.layers.Bidirectional(recurrent) if wrapped else recurrent]
        )

    for first, second in ((LSTM, keras.layers.LSTM), (keras.layers.LSTM, LSTM)):
        saved, loaded = model(first), model(second)
        path = tmp_path / f"{'mine' if first is LSTM else 'theirs'}{suffix}"
        saved.save(path) if suffix == ".keras" else saved.save_weights(path)
        loaded.load_weights(path)
        np.testing.assert_allclose(loaded.predict(x, verbose=0), saved.predict(x, verbose=0), rtol=0, atol=1e-6)


def test_a_saved_model_comes_back_as_it_was(tmp_path):
    options = {"kernel": "eager", "use_cudnn": False, "return_sequences": True, "dropout": 0.25, "name": "mine"}
    saved = keras.Sequential([keras.Input((TIME, FEATURES)), LSTM(UNITS, **options), LSTM(2, use_cudnn=True)])
    saved.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for before, after in zip(saved.layers, loaded.layers, strict=True):
        assert type(after) is LSTM
        assert after.get_config() == before.get_config()
        for one, other in zip(before.get_weights(), after.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
    assert {name: getattr(loaded.layers[0], name) for name in options} == options
    assert loaded.layers[1].use_cudnn is True
    assert type(keras.models.clone_model(saved).layers[0]) is LSTM


@pytest.mark.parametrize("options", [{"kernel": "eager"}, *exhaustive({}, {"use_cudnn": False})], ids=str)
def test_plain_keras_loads_a_saved_model(tmp_path, monkeypatch, options):
    inner = keras.Sequential([LSTM(UNITS, return_sequences=True, go_backwards=True, **options)])
    layers = [inner, keras.layers.Bidirectional(LSTM(2, **options)), keras.layers.Dense(1)]
    saved = keras.Sequential([keras.Input((TIME, FEATURES)), *layers])
    saved.compile("adam", "mse")
    saved.save(tmp_path / "model.keras")
    monkeypatch.delitem(keras.saving.get_custom_objects(), "gatewise>LSTM")  # as where gatewise was not imported
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.layers[0].layers[0]) is keras.layers.LSTM
    assert type(loaded.layers[1].backward_layer) is keras.layers.LSTM
    x = np.random.default_rng(0).standard_normal((BATCH, TIME, FEATURES)).astype("f4")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), saved.predict(x, verbose=0), rtol=0, atol=1e-6)


def test_the_class_and_its_layers_can_be_copied_and_pickled():
    layer = LSTM(UNITS, kernel="eager")
    layer.build((None, TIME, FEATURES))
    assert repr(LSTM) == "<class 'gatewise.interop.keras.lstm.LSTM'>"
    for change in (copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        assert change(LSTM) is LSTM
        assert change(_Subclass) is _Subclass
        found = change(layer)
        assert (type(found), found.kernel) == (LSTM, "eager")
        np.testing.assert_array_equal(found.get_weights()[0], layer.get_weights()[0])


class _Subclass(LSTM):
    """A layer of a user."""


def test_a_configuration_of_keras_makes_our_layer():
    config = keras.layers.LSTM(UNITS, return_sequences=True, go_backwards=True).get_config()
    assert LSTM.from_config(config).go_backwards


def test_arguments_may_be_given_by_place_as_for_keras():
    with pytest.warns(SlowerKernelWarning):
        layer = LSTM(UNITS, "relu", "sigmoid", False)
    assert (layer.activation, layer.use_bias) == (keras.activations.relu, False)


# The backend


def test_another_backend_is_a_clear_error(monkeypatch):
    for name in [name for name in sys.modules if name == "keras" or name.startswith("gatewise.interop.keras")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    expected = r"`KERAS_BACKEND` must be torch for gatewise.interop.keras, got 'jax'. Put KERAS_BACKEND=torch"
    with pytest.raises(ArgumentError, match=expected):
        importlib.import_module("gatewise.interop.keras")


def test_keras_that_already_runs_on_another_backend_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    with pytest.raises(ArgumentError, match=r"`the backend of Keras` must be torch for .*, got 'tensorflow'"):
        keras_on_torch()


def test_without_keras_there_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", None)
    with pytest.raises(MissingExtra, match=r"the Keras layer needs `keras`.*pip install 'gatewise\[keras\]'"):
        keras_on_torch()


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", [{}, {"use_cudnn": True}, {"use_cudnn": False}, {"kernel": "eager"}], ids=str)
@pytest.mark.parametrize("state", [False, True])
def test_every_choice_agrees_on_a_gpu(mask, options, state):
    ours, theirs = pair(dtype="float32", return_sequences=True, return_state=state, **options)
    agree(ours, theirs, MASKS[mask], tolerance=5e-5)
