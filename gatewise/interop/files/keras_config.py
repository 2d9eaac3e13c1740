"""The recurrent layers in the config of a Keras model: their order, their connections and their options."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gatewise.interop.description import Description

_CELLS = {"LSTM": "LSTM", "GRU": "GRU", "SimpleRNN": "SimpleRNN", "CuDNNLSTM": "LSTM", "CuDNNGRU": "GRU"}
_CELLS |= {"LSTMCell": "LSTM", "GRUCell": "GRU", "SimpleRNNCell": "SimpleRNN"}
_TRANSPARENT = (
    "InputLayer",
    "Dropout",
    "SpatialDropout1D",
    "GaussianDropout",
    "GaussianNoise",
    "AlphaDropout",
    "ActivityRegularization",
    "Masking",
    "Identity",
)
"""The layers that pass their input on as it is when a model predicts."""


class _Node(NamedTuple):
    """A layer with the places that it has in files.

    Attributes:
        kind: The name of its class.
        config: Its options.
        path: Its path in a file of weights, where layers are numbered for each class.
        names: Its name, after the names of the models that contain it.
    """

    kind: str
    config: Mapping[str, Any]
    path: tuple[str, ...]
    names: tuple[str, ...]

    def inner(self, entry: Mapping[str, Any], attribute: str) -> _Node:
        """Return a layer that this one wraps."""
        config = entry.get("config", {})
        return _Node(_class(entry), config, (*self.path, attribute), (*self.names, str(config.get("name", ""))))

    def layers(self, attribute: str, entries: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], _Node]]:
        """Return the layers in a list of this one, each with its entry."""
        counts: dict[str, int] = {}
        for entry in entries:
            stem = _snake_case(_class(entry))
            number = counts[stem] = counts.get(stem, -1) + 1
            node = self.inner(entry, attribute)
            yield entry, node._replace(path=(*node.path, f"{stem}_{number}" if number else stem))


def described(model: Mapping[str, Any]) -> tuple[Description, ...]:
    """Return descriptions of the recurrent layers of a model, in the order of the model.

    Layers inside of custom layers and custom models are not described.

    Args:
        model: The config of the model, with `class_name` and `config`.
    """
    found: list[Description] = []
    config = model.get("config", {})
    if isinstance(config, list):  # as the oldest versions of Keras store a Sequential model
        config = {"layers": config}
    _visit(_Node(_class(model), config, (), ()), None, found)
    return tuple(found)


def _visit(node: _Node, below: int | None, found: list[Description]) -> int | None:
    """Describe the recurrent layers of a layer; return the index of the one whose outputs the layer returns.

    Args:
        node: The layer.
        below: The index of the recurrent layer whose outputs are the input; None if something else is.
        found: The descriptions so far, to which others are appended.
    """
    config = node.config
    if node.kind in _TRANSPARENT:
        return below
    if isinstance(config.get("layers"), list):
        return _visit_model(node, below, found)
    if node.kind == "Bidirectional":
        forward = node.inner(config["layer"], "forward_layer")
        backward = node.inner(config.get("backward_layer") or config["layer"], "backward_layer")
        refused = [_refused(forward), _refused(backward)]
        if config.get("merge_mode", "concat") != "concat":
            refused.append(f"merge_mode={config['merge_mode']!r}")
        if forward.config.get("go_backwards"):
            refused.append("go_backwards=True of the forward direction")
        relu = _relu(forward)
        if relu != _relu(backward):
            refused.append("ReLU in one direction")
        return _append(node, forward, below, found, refused, relu=relu)
    if node.kind == "RNN" and (cell := config.get("cell", {})).get("class_name") == "StackedRNNCells":
        for _, inner in node.inner(cell, "cell").layers("cells", cell["config"]["cells"]):
            backwards = bool(config.get("go_backwards"))
            if inner.kind in _CELLS:
                below = _append(inner, node, below, found, [_refused(inner)], _relu(inner), backwards)
            else:
                below = None
        return below
    if node.kind in _CELLS or node.kind == "RNN":
        if _cell(node).kind not in _CELLS:
            return None
        backwards = bool(config.get("go_backwards"))
        return _append(node, node, below, found, [_refused(node)], _relu(node), backwards)
    if isinstance(config.get("layer"), Mapping):  # TimeDistributed and other wrappers
        _visit(node.inner(config["layer"], "layer"), None, found)
    return None


def _append(
    node: _Node,
    sequence: _Node,
    below: int | None,
    found: list[Description],
    refused: Sequence[str],
    relu: bool = False,
    backwards: bool = False,
) -> int | None:
    places = (node.names, node.path)
    found.append(Description(places, below, ", ".join(filter(None, dict.fromkeys(refused))), backwards, relu))
    return len(found) - 1 if sequence.config.get("return_sequences") else None


def _visit_model(node: _Node, below: int | None, found: list[Description]) -> int | None:
    entries = node.config["layers"]
    if "input_layers" not in node.config:  # Sequential
        for _, layer in node.layers("layers", entries):
            below = _visit(layer, below, found)
        return below
    outputs: dict[str, int | None] = {}
    inputs = _histories(node.config.get("input_layers"))
    for entry, layer in node.layers("layers", entries):
        name = str(entry.get("name", layer.names[-1]))
        sources = [_source(call) for call in entry.get("inbound_nodes", ())]
        if len(inputs) == 1 and name in inputs:
            outputs[name] = below
        else:
            # A layer that is called several times, or on several tensors, does not continue a single one.
            source = outputs.get(sources[0] or "") if len(sources) == 1 else None
            outputs[name] = _visit(layer, source, found)
    ends = _histories(node.config.get("output_layers"))
    return outputs.get(ends[0]) if len(ends) == 1 else None


def _source(call: Any) -> str | None:
    """Return the name of the only layer whose first output is the input of a call, or None.

    Keras 3 stores the arguments of the call, earlier versions a list of tensors; a layer's further outputs are states.
    """
    histories = list(_tensors(call.get("args", ()))) if isinstance(call, Mapping) else [entry[:3] for entry in call]
    if isinstance(call, Mapping):
        # The mask belongs to the input; other tensors are for example initial states.
        named = {name: value for name, value in (call.get("kwargs") or {}).items() if name != "mask"}
        if len(call.get("args", ())) > 1 or any(_tensors(named)):
            return None
    return str(histories[0][0]) if len(histories) == 1 and list(histories[0][1:]) == [0, 0] else None


def _tensors(value: Any) -> Iterator[Sequence[Any]]:
    if isinstance(value, Mapping):
        if value.get("class_name") == "__keras_tensor__":
            yield value["config"]["keras_history"]
        else:
            yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _histories(value: Any) -> list[str]:
    """Return the names of layers in `input_layers` or `output_layers`: [name, 0, 0], or several of them."""
    if not isinstance(value, list | tuple) or not value:
        return []
    return [value[0]] if isinstance(value[0], str) else [name for item in value for name in _histories(item)]


def _cell(node: _Node) -> _Node:
    """Return the node that has the options of a recurrent layer's cell."""
    if node.kind != "RNN":
        return node
    cell = node.config.get("cell", {})
    return node.inner(cell if isinstance(cell, Mapping) else {}, "cell")


def _relu(node: _Node) -> bool:
    cell = _cell(node)
    return _CELLS.get(cell.kind) == "SimpleRNN" and _function(cell.config.get("activation", "tanh")) == "relu"


def _refused(node: _Node) -> str:
    """Return the options of a recurrent layer that its weights do not express, as text."""
    cell = _cell(node)
    known = _CELLS.get(cell.kind)
    if known is None:
        return f"the class {cell.kind}"
    if cell.kind.startswith("CuDNN"):
        return ""
    expected = {"activation": ("tanh", "relu") if known == "SimpleRNN" else ("tanh",)}
    if known != "SimpleRNN":
        expected["recurrent_activation"] = ("sigmoid",)
    found = {option: _function(cell.config.get(option, allowed[0])) for option, allowed in expected.items()}
    refused = [f"{option}={found[option]!r}" for option, allowed in expected.items() if found[option] not in allowed]
    if known == "GRU" and cell.config.get("reset_after") is False:
        refused.append("reset_after=False")
    return ", ".join(refused)


def _function(value: Any) -> str:
    """Return the name of an activation, which newer versions store as an object."""
    if isinstance(value, Mapping):
        value = value.get("config") if isinstance(value.get("config"), str) else value.get("class_name")
    return str(value)


def _class(entry: Mapping[str, Any]) -> str:
    """Return the name of a class without its package: older files have `gatewise>LSTM`."""
    return str(entry.get("class_name", "")).rpartition(">")[2]


def _snake_case(name: str) -> str:
    """Return the name of a class as Keras writes it in paths, such as conv_lstm2d for ConvLSTM2D."""
    return re.sub(r"(?<=.)(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])", "_", name).lower()
