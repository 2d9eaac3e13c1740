"""Checks of the options that the constructors of cells take."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any


def check_choice(option: str, value: object, allowed: Iterable[str]) -> None:
    """Check that an option is one of several words.

    Args:
        option: The name of the option.
        value: Its value.
        allowed: The words.

    Raises:
        ValueError: It is another one, or no word.
    """
    words = tuple(allowed)
    if value not in words:
        stated = " or ".join(map(repr, words)) if len(words) == 2 else f"one of {', '.join(map(repr, words))}"
        raise ValueError(f"`{option}` must be {stated}, got {value!r}.")


def check_flag(option: str, value: object) -> None:
    """Check that an option is True or False.

    Raises:
        ValueError: It is neither.
    """
    if not isinstance(value, bool):
        raise ValueError(f"`{option}` must be True or False, got {value!r}.")


def checked_number(option: str, value: Any, *, positive: bool = False, otherwise: str = "") -> float:
    """Return a number, which may be one of NumPy, as a number of Python.

    The name of a cell contains its options, and a number of Python can be read from the name again.

    Args:
        option: The name of the option.
        value: Its value.
        positive: Whether it must be greater than 0.
        otherwise: The end of the requirement in the error, such as " or None".

    Raises:
        ValueError: It is no finite number, or not greater than 0 although it must be.
    """
    number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or (positive and number <= 0):
        kind = "positive" if positive else "finite"
        raise ValueError(f"`{option}` must be a {kind} number{otherwise}, got {value!r}.")
    return value if type(value) is int else number
