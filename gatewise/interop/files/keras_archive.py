"""The `.keras` archive of Keras 3, which holds the model as JSON and its weights as HDF5."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gatewise.contract.errors import DAMAGED_ARCHIVE, CheckpointError
from gatewise.files import replacing
from gatewise.interop.description import Content
from gatewise.interop.files.arrays import refuse_expansion
from gatewise.interop.files.hdf5 import KerasLayer, keras_layers, read_hdf5, write_weights_h5
from gatewise.interop.layouts import WeightLayout
from gatewise.interop.stacks import Stack, joined

_CONFIG, _WEIGHTS = "config.json", "model.weights.h5"
_CLASSES = {"lstm": "LSTM", "gru": "GRU", "simple_rnn": "SimpleRNN"}


def read_keras(path: Path) -> Content:
    """Return the variables of the model's layers; see `read_hdf5`."""
    try:
        with zipfile.ZipFile(path) as archive:
            for name in (_WEIGHTS, _CONFIG):
                member = archive.getinfo(name)
                refuse_expansion(path, name, member.compress_size, member.file_size)
            content = archive.read(_WEIGHTS)
            model = json.loads(archive.read(_CONFIG))
    except CheckpointError:
        raise
    except DAMAGED_ARCHIVE as error:
        message = f"{path} is truncated or not a model of Keras 3 ({error}). Take another copy."
        raise CheckpointError(message) from error
    return read_hdf5(path, io.BytesIO(content), model)


def write_keras(path: Path, stacks: Sequence[Stack], layout: WeightLayout) -> None:
    """Write a model for `keras.saving.load_model`: a `Sequential` of the layers, which returns sequences.

    Raises:
        ArgumentError: There are several stacks whose sizes do not fit each other.
    """
    stack = joined(stacks)
    weights = io.BytesIO()
    write_weights_h5(weights, [stack], layout)
    with replacing(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        archive.writestr("metadata.json", json.dumps({"keras_version": "3.5.0", "date_saved": ""}))
        archive.writestr(_CONFIG, json.dumps(_sequential(stack)))
        archive.writestr(_WEIGHTS, weights.getvalue())


def _sequential(stack: Stack) -> dict[str, Any]:
    dtype = str(stack.layers[0][0].w_ih.dtype).removeprefix("torch.")
    shape = [None, None, stack.input_size]
    entry = _entry("InputLayer", {"batch_shape": shape, "dtype": dtype, "name": "input"})
    found = keras_layers([stack])
    layers = [entry, *(_layer(layer, dtype) for layer in found)]
    return _entry("Sequential", {"name": found[0].cell, "layers": layers, "build_input_shape": shape}, "keras")


def _layer(layer: KerasLayer, dtype: str) -> dict[str, Any]:
    first = layer.directions[0]
    config = {
        "name": layer.name,
        "dtype": dtype,
        "units": first.w_hh.shape[1],
        "use_bias": first.b_ih is not None,
        "return_sequences": True,
    }
    cell = _CLASSES[layer.cell]
    if cell == "GRU":
        config["reset_after"] = True
    if layer.relu:
        config["activation"] = "relu"
    if layer.kind == layer.cell:
        return _entry(cell, config)
    forward = _entry(cell, config | {"name": f"forward_{layer.cell}"})
    backward = _entry(cell, config | {"name": f"backward_{layer.cell}", "go_backwards": True})
    wrapped = {"name": layer.name, "dtype": dtype, "merge_mode": "concat", "layer": forward, "backward_layer": backward}
    return _entry("Bidirectional", wrapped)


def _entry(name: str, config: dict[str, Any], module: str = "keras.layers") -> dict[str, Any]:
    return {"module": module, "class_name": name, "config": config, "registered_name": None}
