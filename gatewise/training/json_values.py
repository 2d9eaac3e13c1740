"""JSON without infinity and NaN, for which it has no representation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def finite_values(value: Any) -> Any:
    """Return a value in which None replaces all numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite_values(each) for name, each in value.items()}
    return [finite_values(each) for each in value] if isinstance(value, list | tuple) else value


def to_json(value: Any, indent: int | None = None) -> str:
    """Return a value as standard JSON, with null for numbers that are not finite."""
    return json.dumps(finite_values(value), indent=indent, ensure_ascii=False, allow_nan=False)
