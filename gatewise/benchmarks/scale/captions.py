"""What the report says about the rows of each model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

NO_GRAPH = "no CUDA graph"
"""The words in the note of a row whose step could not be captured, after which the reason follows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Caption:
    """What the report says about the rows of a model.

    Attributes:
        title: A function that returns the main sizes of the model from the settings of a record.
        words: The words that are counted.
        legend: The text below the tables.
    """

    title: Callable[[Mapping[str, Any]], str]
    words: str
    legend: str


def _language_model(sizes: Mapping[str, Any]) -> str:
    return (
        f"{sizes['name']} ({sizes['num_layers']} x {sizes['hidden_size']}, T {sizes['time']}, "
        f"{sizes['vocabulary']:,} words)"
    )


def _translation(sizes: Mapping[str, Any]) -> str:
    layers = f"{sizes['encoder_layers']} + {sizes['decoder_layers']} x {sizes['hidden_size']}"
    lengths = f"S {sizes['source']}, T {sizes['target']}"
    return f"{sizes['name'].partition('-')[0]} ({layers}, {lengths}, {sizes['target_size']:,} words)"


_COMMON = (
    "Before it is timed, each row trains some steps with the losses of the first row and bitwise equal weights in all "
    "processes."
)

CAPTIONS = {
    "lm": Caption(
        _language_model,
        "words",
        "Words a second of all processes together; in brackets the efficiency, their number over that of as many times "
        "one process. DDP is DistributedDataParallel around a loop in plain PyTorch, and `gatewise train lm` the step "
        "of that command, replayed as a CUDA graph on GPUs. A step is forward, loss, backward, exchange of gradients, "
        f"clipping and SGD. {_COMMON}",
    ),
    "nmt": Caption(
        _translation,
        "target words",
        "Target words a second of all processes together, with the end of each sentence; in brackets the efficiency, "
        "their number over that of as many times one process. DDP is DistributedDataParallel around the model in plain "
        "PyTorch, with attention and input feeding, and `gatewise train nmt` the step of that command, replayed as a "
        "CUDA graph on GPUs. A step is forward, loss, backward, exchange of gradients, clipping and Adam. "
        f"{_COMMON}",
    ),
}
"""The captions by model, in the order of the report."""


def model_of(settings: Mapping[str, Any]) -> str:
    """Return the model of a record from its settings; records without one are of the language model."""
    return settings.get("model", "lm")
