"""Keras' documented examples, small, with the layer swapped in: the same predictions, and the same course of training.

The models are those of keras.io: the guides "Working with RNNs" and "Understanding masking and padding", and the
examples addition_rnn, bidirectional_lstm_imdb, lstm_character_level_text_generation, lstm_seq2seq and
timeseries_weather_forecasting. Sizes are cut, and the data made up.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("gatewise.interop.keras", exc_type=ImportError)

from gatewise.interop.keras import LSTM
from gatewise.interop.keras.backend import keras_on_torch

keras = keras_on_torch()
layers = keras.layers

WORDS, TIME, SAMPLES = 20, 9, 16


@pytest.fixture(autouse=True)
def exact_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def words():
    """Return padded sequences of word numbers, 0 for padding."""
    generator = np.random.default_rng(0)
    x = generator.integers(1, WORDS, (SAMPLES, TIME))
    x[np.arange(TIME) >= generator.integers(2, TIME + 1, (SAMPLES, 1))] = 0
    return x


def vectors(features=4):
    return np.random.default_rng(1).standard_normal((SAMPLES, TIME, features)).astype("f4")


def classes(count):
    return np.random.default_rng(2).integers(0, count, SAMPLES)


def working_with_rnns(lstm):
    model = keras.Sequential([layers.Embedding(WORDS, 8), lstm(16), layers.Dense(10)])
    return model, words(), classes(10), keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def encoder_and_decoder_with_state(lstm):
    encoder_input = layers.Input((None,))
    embedded = layers.Embedding(WORDS, 8)(encoder_input)
    _, state_h, state_c = lstm(8, return_state=True, name="encoder")(embedded)
    decoder_input = layers.Input((None,))
    embedded = layers.Embedding(WORDS, 8)(decoder_input)
    output = lstm(8, name="decoder")(embedded, initial_state=[state_h, state_c])
    model = keras.Model([encoder_input, decoder_input], layers.Dense(10)(output))
    return model, [words(), words()[::-1]], classes(10), keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def bidirectional_stack(lstm):
    model = keras.Sequential([keras.Input((TIME, 4))])
    model.add(layers.Bidirectional(lstm(8, return_sequences=True)))
    model.add(layers.Bidirectional(lstm(4)))
    model.add(layers.Dense(10))
    return model, vectors(), classes(10), keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def masking_by_embedding(lstm):
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(WORDS, 8, mask_zero=True)(inputs)
    model = keras.Model(inputs, layers.Dense(1)(lstm(8)(x)))
    return model, words(), classes(2), "mse"


def masking_layer(lstm):
    x = vectors()
    x[3:9, 5:] = 0
    x[5, 1:3] = 0
    model = keras.Sequential([keras.Input((TIME, 4)), layers.Masking(), lstm(8, return_sequences=True), lstm(3)])
    return model, x, np.zeros((SAMPLES, 3)), "mse"


def bidirectional_with_masks(lstm):
    model = keras.Sequential([keras.Input((None,)), layers.Embedding(WORDS, 8, mask_zero=True)])
    model.add(layers.Bidirectional(lstm(8, return_sequences=True)))
    model.add(layers.Bidirectional(lstm(8)))
    model.add(layers.Dense(1, activation="sigmoid"))
    return model, words(), classes(2), "binary_crossentropy"


def addition_rnn(lstm):
    model = keras.Sequential([keras.Input((TIME, 4)), lstm(16), layers.RepeatVector(3)])
    model.add(lstm(16, return_sequences=True))
    model.add(layers.Dense(5, activation="softmax"))
    return model, vectors(), np.stack([classes(5)] * 3, 1), "sparse_categorical_crossentropy"


def bidirectional_lstm_imdb(lstm):
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(WORDS, 8)(inputs)
    x = layers.Bidirectional(lstm(8, return_sequences=True))(x)
    x = layers.Bidirectional(lstm(8))(x)
    return keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x)), words(), classes(2), "binary_crossentropy"


def character_level_text_generation(lstm):
    model = keras.Sequential([keras.Input((TIME, WORDS)), lstm(16), layers.Dense(WORDS, activation="softmax")])
    return model, np.eye(WORDS)[words()], np.eye(WORDS)[classes(WORDS)], "categorical_crossentropy"


def sequence_to_sequence(lstm):
    encoder_inputs = keras.Input((None, 4))
    _, *states = lstm(8, return_state=True)(encoder_inputs)
    decoder_inputs = keras.Input((None, 4))
    outputs, _, _ = lstm(8, return_sequences=True, return_state=True)(decoder_inputs, initial_state=states)
    outputs = layers.Dense(5, activation="softmax")(outputs)
    target = np.stack([classes(5)] * TIME, 1)
    model = keras.Model([encoder_inputs, decoder_inputs], outputs)
    return model, [vectors(), vectors()[::-1]], target, "sparse_categorical_crossentropy"


def timeseries_weather_forecasting(lstm):
    inputs = keras.Input((TIME, 4))
    return keras.Model(inputs, layers.Dense(1)(lstm(32)(inputs))), vectors(), classes(2), "mse"


EXAMPLES = [
    working_with_rnns,
    encoder_and_decoder_with_state,
    bidirectional_stack,
    masking_by_embedding,
    masking_layer,
    bidirectional_with_masks,
    addition_rnn,
    bidirectional_lstm_imdb,
    character_level_text_generation,
    sequence_to_sequence,
    timeseries_weather_forecasting,
]


# These have no call of the layer that the others do not have, but for calls without a mask: test_keras_layer.py.
ALIKE = {
    *(working_with_rnns, masking_layer, masking_by_embedding, bidirectional_stack, bidirectional_lstm_imdb),
    *(character_level_text_generation, timeseries_weather_forecasting),
}


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(example, marks=pytest.mark.exhaustive if example in ALIKE else (), id=example.__name__)
        for example in EXAMPLES
    ],
)
def test_an_example_predicts_and_trains_the_same(example):
    courses = []
    for lstm in (LSTM, keras.layers.LSTM):
        keras.utils.set_random_seed(0)
        model, x, y, loss = example(lstm)
        before = model.predict(x, verbose=0)
        model.compile(keras.optimizers.Adam(0.01), loss)
        history = model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        courses.append((before, history.history["loss"], model.predict(x, verbose=0)))
    ours, theirs = courses
    assert ours[1][-1] < ours[1][0]
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_state_across_batches():
    """The guide's "Cross-batch statefulness": paragraphs, one after another, then a reset."""
    paragraphs = [vectors()[index : index + 4] for index in (0, 4, 8)]
    outputs = []
    for lstm in (LSTM, keras.layers.LSTM):
        keras.utils.set_random_seed(0)
        layer = lstm(8, stateful=True)
        found = [layer(paragraph) for paragraph in paragraphs]
        layer.reset_state()
        found.append(layer(paragraphs[0]))
        outputs.append([keras.ops.convert_to_numpy(output) for output in found])
    for one, other in zip(*outputs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(outputs[0][0], outputs[0][3])
    assert not np.allclose(outputs[0][1], outputs[0][3])


def test_the_example_of_the_layer():
    inputs = np.random.default_rng(0).random((32, 10, 8))
    assert LSTM(4)(inputs).shape == (32, 4)
    sequence, memory, carry = LSTM(4, return_sequences=True, return_state=True)(inputs)
    assert (sequence.shape, memory.shape, carry.shape) == ((32, 10, 4), (32, 4), (32, 4))
