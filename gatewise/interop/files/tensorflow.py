"""Checkpoints of TensorFlow 1 and 2, which are read and written with TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gatewise.contract.errors import CheckpointError, MissingExtra
from gatewise.files import replacing
from gatewise.interop.convert import as_tensor
from gatewise.interop.description import Content, Description, Place
from gatewise.interop.files.arrays import natural, numpy_arrays
from gatewise.interop.files.keras_config import described
from gatewise.interop.layouts import WeightLayout
from gatewise.interop.stacks import Stack

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_LISTED = re.compile(r"/\d+/\.ATTRIBUTES/VARIABLE_VALUE$")
"""The end of the name of a variable that is known by its number in a list."""


def checkpoint_prefix(path: Path) -> Path | None:
    """Return the prefix of a checkpoint's file names, which is TensorFlow's name for it, or None.

    Args:
        path: The prefix, the `.index` file, or the folder of a SavedModel.
    """
    for prefix in (path, path.with_suffix("") if path.suffix == ".index" else path, path / "variables" / "variables"):
        if Path(f"{prefix}.index").exists():
            return prefix
    return None


def read_checkpoint(path: Path) -> Content:
    """Return the numeric variables of a checkpoint, ordered by name.

    A checkpoint of objects has some variables under their numbers in a list, as the variables of an optimizer or of a
    SavedModel. These have the names that they had in their model.

    Raises:
        CheckpointError: The file is truncated, or not a checkpoint.
        MissingExtra: TensorFlow is not installed.
    """
    prefix = checkpoint_prefix(path)
    if prefix is None:
        raise CheckpointError(f"{path} is no TensorFlow checkpoint: there is no {path.name}.index. Check the path.")
    tensorflow = _tensorflow()
    try:
        reader = tensorflow.train.load_checkpoint(str(prefix))
        # Attributes whose names begin with an underscore are lists in any order.
        names = sorted(reader.get_variable_to_shape_map(), key=lambda name: (name.startswith("_"), natural(name)))
        arrays = {name: np.asarray(reader.get_tensor(name)) for name in names if name != _GRAPH}
        graph = reader.get_tensor(_GRAPH) if _GRAPH in names else None
        titles, of_optimizers = ({}, set()) if graph is None else _names_of_variables(graph)
    except (tensorflow.errors.OpError, ValueError, RuntimeError, IndexError) as error:
        message = f"{prefix} is truncated or not a TensorFlow checkpoint ({_first_line(error)}). Take another copy."
        raise CheckpointError(message) from error
    tensors: dict[str, Tensor] = {}
    places: dict[Place, None] = {}
    for name, array in arrays.items():
        if array.dtype.kind != "f" or name in of_optimizers:
            continue
        title = str(titles.get(name, name)) if _LISTED.search(name) else str(name)
        tensor = as_tensor(name, array)
        if title in tensors:
            if torch.equal(tensors[title], tensor):
                continue
            title = name  # variables of two models with the same names
        tensors[title] = tensor
        parts = title.split("/")
        places |= dict.fromkeys(tuple(parts[:length]) for length in range(1, len(parts)))
    model = _saved_config(prefix)
    if model is not None:
        known = (layer._replace(places=(*layer.places, layer.places[0][-1:])) for layer in described(model))
        return Content(tensors, tuple(known), connected=True, apart=True)
    in_lists = any(_LISTED.search(name) for name in arrays)
    return Content(tensors, tuple(Description((place,)) for place in places) if in_lists else ())


def _saved_config(prefix: Path) -> dict[str, Any] | None:
    """Return the config of the model in a SavedModel of Keras 2, which has it as JSON in a file of its own, or None."""
    try:
        text = (prefix.parent.parent / "keras_metadata.pb").read_text("utf-8", "replace")
        root, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
    except (OSError, ValueError):
        return None
    return root if prefix.name == "variables" and root.get("config", {}).get("layers") else None


def _names_of_variables(graph: bytes) -> tuple[dict[str, str], set[str]]:
    """Return the names that variables had in their model, by their names in a checkpoint of objects.

    The second result has the names in the checkpoint of the variables that optimizers made, such as momenta. Their
    names in the model are like those of the variables that they belong to.
    """
    from tensorflow.core.protobuf import trackable_object_graph_pb2 as protocol  # pyright: ignore

    nodes = protocol.TrackableObjectGraph.FromString(graph).nodes
    titles = {
        attribute.checkpoint_key: attribute.full_name
        for node in nodes
        for attribute in node.attributes
        if attribute.full_name
    }
    of_optimizers = set()
    for node in nodes:
        children = {child.local_name: child.node_id for child in node.children}
        if "_iterations" in children and "_variables" in children:
            made = [nodes[child.node_id] for child in nodes[children["_variables"]].children]
            of_optimizers |= {attribute.checkpoint_key for variable in made for attribute in variable.attributes}
    return titles, of_optimizers


def checkpoint_files(path: Path) -> tuple[Path, Path]:
    """Return the two files that `write_checkpoint` writes for a checkpoint: data and index."""
    data, index = (path.with_name(f"{path.name}.{kind}") for kind in ("data-00000-of-00001", "index"))
    return data, index


def write_checkpoint(path: Path, stacks: Sequence[Stack], layout: WeightLayout) -> None:
    """Write a checkpoint for `tf.train.load_checkpoint` and the Saver of TensorFlow 1."""
    tensorflow = _tensorflow()
    content = numpy_arrays(stacks, layout)
    data, index = checkpoint_files(path)
    with contextlib.ExitStack() as unfinished:
        # The index is renamed last, because a checkpoint exists only if its index does.
        temporary_index = unfinished.enter_context(replacing(index))
        temporary_data = unfinished.enter_context(replacing(data))
        prefix = temporary_index.with_suffix("")
        try:
            tensorflow.raw_ops.SaveV2(
                prefix=str(prefix),
                tensor_names=list(content),
                shape_and_slices=[""] * len(content),
                tensors=[tensorflow.constant(array) for array in content.values()],
            )
        except tensorflow.errors.OpError as error:
            raise CheckpointError(f"{path} cannot be written: {_first_line(error)}. Choose another folder.") from error
        checkpoint_files(prefix)[0].replace(temporary_data)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _tensorflow():  # noqa: ANN202 - the type is the optional module itself
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow  # pyright: ignore[reportMissingModuleSource] - no extra installs it
    except ModuleNotFoundError:
        raise MissingExtra(
            "a TensorFlow checkpoint needs `tensorflow`, which is not installed. Run: pip install tensorflow-cpu"
        ) from None
    return tensorflow
