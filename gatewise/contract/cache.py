"""Where a machine keeps from one program to the next what took it time: compiled kernels, measured times."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return GATEWISE_CACHE, otherwise a folder in the user's cache."""
    named = os.environ.get("GATEWISE_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gatewise"
