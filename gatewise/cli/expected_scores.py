"""The expected scores of a recipe, which hold for the values that the recipe has."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from gatewise.cli.recipe import differences

_SECTIONS = ("expect", "sample")
_KEYS = (
    *("name", "description", "threads", "memory_budget", "model.kernel", "model.attention_kernel", "training.seed"),
    *("training.cuda_graph", "training.checkpoint_seconds", "training.checkpoint_evaluations"),
    *("training.checkpoint_steps", "translation.examples"),
)
"""Values that scores do not depend on, beyond what the limits of a recipe leave room for, as another seed."""


def with_valid_expectations(before: Any, after: Any, section: str, paths: tuple[str, ...]) -> Any:
    """Return a changed recipe without the expected scores of the recipe as it was, if its scores can be others.

    Args:
        before: The recipe before the change.
        after: The recipe after the change; scores that were changed themselves are kept.
        section: The section that names the training data.
        paths: The keys of that section that are paths. A file of the same name in another folder is the same data.
    """
    changed = differences(before, after)
    moved = [key for key in changed if _is_moved(key, before, after, section, paths)]
    if all(key.partition(".")[0] in _SECTIONS or key in (*_KEYS, *moved) for key in changed):
        return after
    given = {name: getattr(after.expect, name) for key in changed if (name := key.removeprefix("expect.")) != key}
    return dataclasses.replace(after, expect=type(after.expect)(**given))


def _is_moved(key: str, before: Any, after: Any, section: str, paths: tuple[str, ...]) -> bool:
    owner, _, name = key.partition(".")
    if owner != section or name not in paths:
        return False
    old, new = (Path(getattr(getattr(each, section), name)).name for each in (before, after))
    return bool(old) and old == new
