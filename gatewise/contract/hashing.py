"""The hash of a frozen dataclass with many fields, computed once: problems and devices are looked up in every call."""

from __future__ import annotations

import dataclasses
from typing import Any


def hash_once(value: Any) -> int:
    """Return the hash of a frozen dataclass's compared fields, and keep it in its field `_hash`.

    It is computed when it is first asked for: while a graph is traced, fields may be symbolic and have none.
    """
    kept = value._hash
    if kept is None:
        names = (field.name for field in dataclasses.fields(value) if field.compare)
        kept = hash(tuple(getattr(value, name) for name in names))
        object.__setattr__(value, "_hash", kept)
    return kept
