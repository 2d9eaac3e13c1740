"""Cached hashes of frozen dataclasses with many fields, because problems and devices are looked up in every call."""

from __future__ import annotations

import dataclasses
from typing import Any


def hash_once(value: Any) -> int:
    """Return the hash of a frozen dataclass's compared fields, and store it in its field `_hash`.

    The hash is computed on first use, because fields can be symbolic, and not hashable, while a graph is traced.
    """
    kept = value._hash
    if kept is None:
        names = (field.name for field in dataclasses.fields(value) if field.compare)
        kept = hash(tuple(getattr(value, name) for name in names))
        object.__setattr__(value, "_hash", kept)
    return kept
