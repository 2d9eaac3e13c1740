"""The reference implementation, on which a step that was not finite is repeated to find the cause."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A slow and simple implementation of the same model, which is trusted.

    Attributes:
        context: A function that returns a context in which the model uses the reference implementation.
        name: The name of the reference, for sentences.
        running: The name of the implementation that trains the model, for sentences.
        advice: The advice if only the reference gives finite numbers: how to repeat the step, and how to continue.
        facts: Information about both implementations for the record of the step, as JSON values.
    """

    context: Callable[[], AbstractContextManager[Any]]
    name: str
    running: str
    advice: str
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
