"""The HDF5 files of Keras: `.weights.h5` of Keras 3, and the older `.h5` of whole models or weights.

A `.weights.h5` file numbers the variables of each layer in a group called `vars` and does not name them: their shapes
tell which they are. An older file stores the names of layers and variables in attributes.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gatewise.cells import RNN
from gatewise.contract.errors import CheckpointError, MissingExtra
from gatewise.contract.pytorch import pytorch_layer
from gatewise.contract.weights import DirectionWeights
from gatewise.files import replacing
from gatewise.interop.convert import as_tensor
from gatewise.interop.description import Content, Description
from gatewise.interop.files.arrays import natural, numpy_arrays, refuse_expansion
from gatewise.interop.files.keras_config import described
from gatewise.interop.layouts import WeightLayout
from gatewise.interop.packing import pack
from gatewise.interop.stacks import Stack

_RECURRENT = ("kernel", "recurrent_kernel", "bias")
_DIRECTIONS = ("forward", "backward")
_OLD_LAYERS = "_layer_checkpoint_dependencies"
"""The name that Keras in TensorFlow 2.12 to 2.15 gives to the group `layers`."""
_NAMES = {"LSTM": "lstm", "GRU": "gru", "RNN": "simple_rnn"}


class KerasLayer(NamedTuple):
    """One layer in the form of Keras: `LSTM`, `GRU` or `SimpleRNN`, or `Bidirectional` around one.

    Attributes:
        kind: "lstm", "gru", "simple_rnn" or "bidirectional".
        name: The name of the layer.
        directions: The weights of one or two directions.
        cell: "lstm", "gru" or "simple_rnn".
        relu: Whether the layer computes ReLU in place of tanh.
    """

    kind: str
    name: str
    directions: tuple[DirectionWeights, ...]
    cell: str
    relu: bool


def keras_layers(stacks: Sequence[Stack]) -> list[KerasLayer]:
    """Return the layers of stacks in the form of Keras, each with a unique name."""
    counts: dict[str, int] = {}
    layers = []
    for stack in stacks:
        for directions in stack.layers:
            cell = _NAMES[pytorch_layer(stack.cell).name]
            kind = cell if len(directions) == 1 else "bidirectional"
            number = counts[kind] = counts.get(kind, -1) + 1
            own = stack.name.replace("/", "_") if len(stack.layers) == 1 else ""
            taken = {"", *(layer.name for layer in layers)}
            numbered = (f"{kind}_{each}" if each else kind for each in itertools.count(number))
            name = next(name for name in itertools.chain((own,), numbered) if name not in taken)
            layers.append(KerasLayer(kind, name, directions, cell, stack.cell == RNN("relu")))
    return layers


def read_hdf5(path: Path, content: IO[bytes] | None = None, model: Mapping[str, Any] | None = None) -> Content:
    """Return the variables of the layers in a Keras file; optimizer variables are left out.

    Args:
        path: The path of the file, or of the archive that contains it, for error messages.
        content: The file in the archive; None to read `path`.
        model: The config of the model; None to look for it in the file.

    Returns:
        Tensors by the layer's name and the variable's, such as `bidirectional/forward_lstm/lstm_cell/kernel`, and what
        the config of the model says of its recurrent layers; without one, the order in which the file has its layers.

    Raises:
        CheckpointError: The file is truncated, or not an HDF5 file.
    """
    h5py = _h5py()
    try:
        with h5py.File(content or path, "r") as file:
            weights = file.get("model_weights", file)
            if model is None and "model_config" in file.attrs:
                model = json.loads(_text(file.attrs["model_config"]))
            known = () if model is None else described(model)
            if _names(weights, "layer_names"):
                found, layers = list(_by_attributes(weights)), known or _listed(weights)
            else:
                found, layers = _numbered(file, known)
            for name, dataset in found:
                refuse_expansion(path, name, dataset.id.get_storage_size(), dataset.nbytes)
            tensors = {name: _tensor(name, dataset) for name, dataset in found if dataset.dtype.kind in "fiubV"}
            return Content(tensors, layers, model is not None, apart=True)
    except CheckpointError:
        raise
    except (OSError, KeyError, RuntimeError, ValueError, AttributeError, TypeError, MemoryError) as error:
        raise CheckpointError(
            f"{path} is truncated or not an HDF5 file of Keras ({error}). Take another copy."
        ) from error


def write_weights_h5(path: Path | IO[bytes], stacks: Sequence[Stack], layout: WeightLayout) -> None:
    """Write a file for `load_weights` of Keras 3, for a model with these layers in this order."""
    if isinstance(path, Path):
        with replacing(path) as temporary:
            _write_numbered(temporary, stacks, layout)
    else:
        _write_numbered(path, stacks, layout)


def write_h5(path: Path, stacks: Sequence[Stack], layout: WeightLayout) -> None:
    """Write a weight file in the older format, for `load_weights` of Keras 1, 2 and 3.

    Raises:
        ArgumentError: The weights are in bfloat16, which the format does not support.
    """
    for stack in stacks:
        numpy_arrays([stack], layout)  # refuses bfloat16; layers get names of their own below
    with replacing(path) as temporary, _h5py().File(temporary, "w") as file:
        layers = keras_layers(stacks)
        file.attrs["layer_names"] = [layer.name.encode() for layer in layers]
        file.attrs["backend"] = b"tensorflow"
        file.attrs["keras_version"] = b"2.15.0"
        for layer in layers:
            group = file.create_group(layer.name)
            names = []
            for direction, weights in zip(_DIRECTIONS, layer.directions, strict=False):
                place = f"{layer.name}/{direction}_{layer.cell}" if layer.kind == "bidirectional" else layer.name
                for variable, tensor in pack(weights, layout).items():
                    names.append(f"{place}/{layer.cell}_cell/{variable}:0".encode())
                    group.create_dataset(names[-1], data=tensor.numpy())
            group.attrs["weight_names"] = names


def _write_numbered(target: Path | IO[bytes], stacks: Sequence[Stack], layout: WeightLayout) -> None:
    with _h5py().File(target, "w") as file:
        file.create_group("vars")  # older versions require the group even if it is empty
        counts: dict[str, int] = {}
        for layer in keras_layers(stacks):
            number = counts[layer.kind] = counts.get(layer.kind, -1) + 1
            group = file.create_group(f"layers/{layer.kind}_{number}" if number else f"layers/{layer.kind}")
            group.create_group("vars").attrs["name"] = layer.name
            for direction, weights in zip(_DIRECTIONS, layer.directions, strict=False):
                inner = group.create_group(f"{direction}_layer") if layer.kind == "bidirectional" else group
                inner.require_group("vars")
                variables = inner.create_group("cell/vars")
                for index, tensor in enumerate(pack(weights, layout).values()):
                    _store(variables, str(index), tensor)


def _store(group: Any, name: str, tensor: Tensor) -> None:
    dataset = group.create_dataset(name, data=_array(tensor))
    if tensor.dtype == torch.bfloat16:
        dataset.attrs["dtype"] = "bfloat16"


def _array(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        # As in Keras: two bytes of a dtype without a name in NumPy.
        return tensor.contiguous().view(torch.int16).numpy().view("V2")
    return tensor.numpy()


def _tensor(name: str, dataset: Any) -> Tensor:
    array = dataset[()]
    if dataset.attrs.get("dtype") == "bfloat16":
        return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
    return as_tensor(name, array)


def _names(group: Any, attribute: str) -> list[str]:
    """Return an attribute that lists names; a long list is split into several attributes."""
    pieces = [attribute] if attribute in group.attrs else []
    while not pieces or pieces[-1] != attribute:
        if f"{attribute}{len(pieces)}" not in group.attrs:
            break
        pieces.append(f"{attribute}{len(pieces)}")
    names = [name for piece in pieces for name in group.attrs[piece]]
    return [_text(name) for name in names]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _by_attributes(weights: Any) -> Iterator[tuple[str, Any]]:
    for layer in _names(weights, "layer_names"):
        for variable in _names(weights[layer], "weight_names"):
            parts = variable.removesuffix(":0").split("/")
            inner = parts[len(parts) - parts[::-1].index(layer) :] if layer in parts else parts
            yield "/".join([layer, *inner]), weights[layer][variable]


def _listed(weights: Any) -> tuple[Description, ...]:
    """Return the layers that an older file lists, in its order."""
    return tuple(Description(((name,),)) for name in _names(weights, "layer_names"))


def _numbered(file: Any, known: tuple[Description, ...]) -> tuple[list[tuple[str, Any]], tuple[Description, ...]]:
    """Return the variables by name, and the layers with the places that they have in this file."""
    groups = []
    file.visititems(lambda path, item: groups.append(path) if path.rpartition("/")[2] == "vars" else None)
    owners = sorted((path.rpartition("/")[0] for path in groups if not path.startswith("optimizer")), key=natural)
    owners = [owner for owner in owners if owner]
    titles = {owner: _title(file, owner) for owner in owners}
    unique = {owner: title for owner, title in titles.items() if list(titles.values()).count(title) == 1}
    found = []
    for owner in owners:
        variables = [file[owner]["vars"][key] for key in sorted(file[owner]["vars"], key=natural)]
        names = _RECURRENT if _looks_recurrent(variables) else map(str, range(len(variables)))
        named = zip(names, variables, strict=False)
        found += [(f"{unique.get(owner, owner)}/{name}", variable) for name, variable in named]
    if not found:
        return _datasets(file), ()
    paths = {tuple(owner.replace(_OLD_LAYERS, "layers").split("/")): owner for owner in owners}
    if known:
        with_owners = [(layer, paths.get(layer.places[-1])) for layer in known]
    else:
        inner = {"forward_layer", "backward_layer"}
        with_owners = [(Description((path,)), owner) for path, owner in paths.items() if not inner & set(path)]
    return found, tuple(
        layer
        if owner is None
        else layer._replace(places=(tuple(titles[owner].split("/")), tuple(owner.split("/")), layer.places[-1]))
        for layer, owner in with_owners
    )


def _looks_recurrent(variables: Sequence[Any]) -> bool:
    if len(variables) not in (2, 3) or any(len(variable.shape) != 2 for variable in variables[:2]):
        return False
    return variables[0].shape[1] == variables[1].shape[1]


def _title(file: Any, owner: str) -> str:
    """Return the path of a layer with the names that the user gave: `mine/cell` for `layers/lstm/cell`."""
    title = []
    path = ""
    for part in owner.split("/"):
        path = f"{path}/{part}"
        if part in ("layers", _OLD_LAYERS):
            continue
        variables = file[path].get("vars")
        inner = part == "cell" or re.fullmatch(r"(forward|backward)_layer", part)
        title.append(str(variables.attrs["name"]) if variables and "name" in variables.attrs and not inner else part)
    return "/".join(title)


def _datasets(file: Any) -> list[tuple[str, Any]]:
    found = []
    file.visititems(lambda path, item: found.append((path, item)) if hasattr(item, "dtype") else None)
    return found


def _h5py():  # noqa: ANN202 - the type is the optional module itself
    try:
        import h5py
    except ModuleNotFoundError:
        raise MissingExtra.for_package("h5py", "a file of Keras", "keras") from None
    return h5py
