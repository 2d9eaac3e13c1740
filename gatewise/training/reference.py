"""What a step that was not finite is repeated on, to tell a fault of its implementation from training that diverged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A slow and simple implementation of the same model, which is trusted.

    Attributes:
        context: Returns a context in which the model is computed by it.
        name: What it is called in a sentence.
        running: What computes the model outside of that context, in a sentence.
        advice: What to do when only the reference gives finite numbers: how to repeat the step, and how to go on.
        facts: What the report of the step holds about the two: JSON values.
    """

    context: Callable[[], AbstractContextManager[Any]]
    name: str
    running: str
    advice: str
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
