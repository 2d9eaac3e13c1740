"""Reduction of a failing setting to a smaller one that still fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from gatewise.testing.trials.setting import Setting

_SIZES = ("time", "batch", "num_layers", "input_size", "hidden_size", "proj_size", "calls", "frozen")
_KEPT = ("device", "kernel", "dtype", "seed")  # options that identify a failure and do not make it large


def shrunk(setting: Setting, fails: Callable[[Setting], bool], most: int = 200) -> Setting:
    """Return a failing setting with as many options at their defaults, and as small sizes, as can be found.

    Args:
        setting: A setting that fails.
        fails: A function that returns whether a setting fails.
        most: The maximum number of settings to try.
    """
    tried = 0
    while True:
        for simpler in _simpler(setting):
            tried += 1
            if tried > most:
                return setting
            if fails(simpler):
                setting = simpler
                break
        else:
            return setting


def _simpler(setting: Setting) -> Iterator[Setting]:
    """Yield settings that are one step simpler, the largest steps first."""
    for own in dataclasses.fields(setting):
        if own.name not in (*_KEPT, *_SIZES) and getattr(setting, own.name) != own.default:
            yield dataclasses.replace(setting, **{own.name: own.default})
    for name in _SIZES:
        value, least = getattr(setting, name), 0 if name in ("proj_size", "frozen") else 1
        if name == "time" and setting.lengths in ("int8", "uint8"):
            least = 1
        for smaller in sorted({least, value // 2, value - 16, value - 1}):
            if least <= smaller < value:
                yield dataclasses.replace(setting, **{name: smaller})
