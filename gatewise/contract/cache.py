"""The folder for results that later processes use again: compiled kernels and measured times."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder named by GATEWISE_CACHE, by default `gatewise` in the user's cache folder."""
    named = os.environ.get("GATEWISE_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gatewise"
