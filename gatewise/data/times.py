"""The column of a table that orders the rows of a sequence: whole numbers and dates are kept exactly."""

from __future__ import annotations

import datetime
import re
from array import array
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

Kind = Literal["whole", "number", "date"]

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)
_FINER = re.compile(r"[.,]\d{6}0*[1-9]")  # an ISO date with more than microseconds, which Python would cut off
_SECONDS_A_DAY = 86400.0


class TimeColumn:
    """The times of the rows of a file, as they are read from text.

    Whole numbers of up to 64 bits are kept as such, and dates in microseconds: as seconds since 1970 in float64,
    neighbouring times of fast recordings would be the same.
    """

    def __init__(self) -> None:
        self._kind: Kind | None = None
        self._exact = array("q")
        self._numbers = array("d")

    @property
    def expected(self) -> str:
        """The words for what the next time may be, for errors."""
        if self._kind is None:
            return "a number or an ISO date such as 2024-01-31"
        return f"{'an ISO date' if self._kind == 'date' else 'a number'}, as the times before are"

    def append(self, text: str) -> None:
        """Add the time of the next row.

        Raises:
            ValueError: It is neither a number nor a date, or it is one of them and those before are the other.
        """
        kind, value = _parsed(text)
        if self._kind is None:
            self._kind = kind
        elif (self._kind == "date") != (kind == "date"):
            raise ValueError(text)
        if self._kind == "whole" and kind == "number":
            self._numbers, self._kind = array("d", self._exact), "number"
        if self._kind == "number":
            self._numbers.append(value)
        else:
            self._exact.append(int(value))

    def values(self) -> np.ndarray:
        """Return the times: int64, float64 or datetime64 [R]."""
        if self._kind == "number":
            return np.array(self._numbers)
        whole = np.array(self._exact, dtype=np.int64)
        return whole.astype("datetime64[us]") if self._kind == "date" else whole


def column_of(values: np.ndarray, refuse: Callable[[int, str], Exception]) -> np.ndarray:
    """Return the times of a column that has types: int64, floats, or datetime64 in the column's own unit [R].

    Args:
        values: The column; text is read as that of a CSV file.
        refuse: A function from the index of a row that is no time, and what it should be, to the error that is raised.
    """
    if values.dtype.kind in "Mf" or values.dtype == np.int64:
        return values
    if values.dtype.kind in "biu":
        fits = not len(values) or int(values.max()) <= np.iinfo(np.int64).max
        return values.astype(np.int64 if fits else np.float64)
    times = TimeColumn()
    for row, value in enumerate(values):
        try:
            times.append(str(value))
        except ValueError:
            raise refuse(row, times.expected) from None
    return times.values()


def seconds(values: np.ndarray) -> np.ndarray:
    """Return dates as seconds since 1970, float64; the dates may be in any unit."""
    return (values - np.datetime64(0, "s")) / np.timedelta64(1, "s")


def distances(times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distances of neighbouring times, float64, and how far rounding of the times can put them off."""
    if times.dtype.kind == "f":
        rounding = np.spacing(np.abs(times)).astype(np.float64)
        return np.diff(times.astype(np.float64)), rounding[1:] + rounding[:-1]
    whole = times.astype(np.int64)
    fits = not len(whole) or int(whole.max()) - int(whole.min()) < 1 << 63
    found = np.diff(whole if fits else whole.astype(np.float64)).astype(np.float64)
    return found, np.zeros_like(found)


def as_text(time: Any) -> str:
    """Return a time as it may stand in a file."""
    return f"{time:.15g}" if isinstance(time, np.float64) else str(time)


def distance_text(distance: float, times: np.ndarray) -> str:
    """Return a distance of times as text, with its unit if the times are dates."""
    if times.dtype.kind != "M":
        return f"{distance:.6g}"
    unit, count = np.datetime_data(times.dtype)
    length = distance * count * float(np.timedelta64(1, unit) / np.timedelta64(1, "s"))
    if length < _SECONDS_A_DAY:
        return f"{length:.6g} s"
    return "1 day" if length == _SECONDS_A_DAY else f"{length / _SECONDS_A_DAY:.6g} days"


def _parsed(text: str) -> tuple[Kind, float]:
    try:
        whole = int(text)
    except ValueError:
        try:
            return "number", float(text)
        except ValueError:
            return "date", _microseconds(text.strip())
    return ("whole", whole) if -(1 << 63) <= whole < 1 << 63 else ("number", float(text))


def _microseconds(text: str) -> int:
    if _FINER.search(text):
        raise ValueError(text)
    moment = datetime.datetime.fromisoformat(text)
    return ((moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)) - _EPOCH) // _MICROSECOND
