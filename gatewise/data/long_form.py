"""Tables in long form, with one row per time step, and their conversion to sequences."""

from __future__ import annotations

import dataclasses
from typing import NoReturn

import numpy as np
import torch

from gatewise.contract.errors import DataError
from gatewise.data.sequences import Sequences
from gatewise.data.times import as_text, distance_text, distances

_TOLERANCE = 1e-3
"""The largest relative deviation of a time interval from the median interval that is not a gap."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The roles of the columns of a table.

    Attributes:
        sequence: The column that identifies the sequence of a row.
        time: The column that orders the rows of a sequence, with numbers or dates at equal intervals. An empty string
            means that the rows are in order already.
        label: The column of the target, which is the same in all rows of a sequence. An empty string means that the
            sequences have no labels.
        features: The columns that are the model's inputs. An empty tuple means all other columns.
        allow_gaps: Whether time intervals may differ; the time column then only orders the rows.
    """

    sequence: str = "sequence"
    time: str = "time"
    label: str = "label"
    features: tuple[str, ...] = ()
    allow_gaps: bool = False

    def features_among(self, path: object, header: list[str]) -> list[str]:
        """Return the feature columns of a file.

        Raises:
            DataError: A column is missing, occurs twice or is named twice, the label is a feature, or no column is left
                for the features.
        """
        twice = [name for name in header if header.count(name) > 1]
        if twice:
            raise DataError(f"{path} has two columns named {twice[0]!r}. Rename one of them.")
        named = {"sequence_column": self.sequence, "time_column": self.time, "label_column": self.label}
        needed = [(option, name) for option, name in named.items() if name]
        for option, name in (*needed, *(("features", feature) for feature in self.features)):
            if name not in header:
                ordered = ", or make it empty if the rows are in order" if option == "time_column" else ""
                raise DataError(
                    f"{path} has no column {name!r}; its columns are {', '.join(map(repr, header))}. Rename the right "
                    f"one in the file, or name it by `{option}`{ordered}."
                )
        if self.label and self.label in self.features:  # the model would read its answer there
            raise DataError(
                f"`features` names the column {self.label!r} of {path}, which is the `label_column`. Leave it out."
            )
        again = [name for name in self.features if self.features.count(name) > 1]
        if again:
            raise DataError(f"`features` names the column {again[0]!r} of {path} twice. Name it once.")
        features = list(self.features) or [name for name in header if name not in named.values()]
        if not features:
            raise DataError(f"{path} has no columns beside {', '.join(header)}. Add columns with features.")
        return features


@dataclasses.dataclass(frozen=True, slots=True)
class LongForm:
    """The rows of a table in long form, one per time step.

    Attributes:
        name: The name of the file.
        features: The names of the feature columns.
        rows: The row number of each row in the file, int64 [R].
        ids: The identifier of the sequence that each row belongs to, strings [R].
        times: The time of each row, int64, floats or datetime64 [R]; None when the rows are in order.
        values: The features, float64 [R, F].
        labels: The label of each row, strings or float64 [R]; None when there are none.
    """

    name: str
    features: tuple[str, ...]
    rows: np.ndarray
    ids: np.ndarray
    times: np.ndarray | None
    values: np.ndarray
    labels: np.ndarray | None

    def refuse(self, row: int, what: str) -> NoReturn:
        """Raise a DataError about a row."""
        raise DataError(f"{self.name}, row {self.rows[row]}: {what}")


def sequences_of(table: LongForm, allow_gaps: bool = False) -> Sequences:
    """Collect the rows of each sequence in order of time; sequences keep the order of their first rows.

    Raises:
        DataError: There are no rows, a number is missing, times leave a gap or occur twice, or a sequence has two
            labels. The message names the row.
    """
    if not len(table.rows):
        raise DataError(f"{table.name} has no rows of data. Give a file with one row per time step.")
    _check_numbers(table)
    _, first, code = np.unique(table.ids, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[first.argsort(kind="stable")] = np.arange(len(first))
    code = rank[code]
    # `lexsort` sorts by its last key first. It is stable, so that rows without times keep their order.
    order = np.lexsort((code,)) if table.times is None else np.lexsort((table.times, code))
    code = code[order]
    begins = np.flatnonzero(np.r_[True, code[1:] != code[:-1]])
    lengths = np.diff(np.r_[begins, len(code)])
    if table.times is not None:
        _check_times(table, table.times, order, code, allow_gaps)
    if table.labels is not None:
        _check_labels(table, table.labels[order], order, np.repeat(begins, lengths))
    heads = order[begins]
    return Sequences(
        name=table.name,
        features=table.features,
        values=torch.from_numpy(table.values[order].astype(np.float32)),
        lengths=torch.from_numpy(lengths.astype(np.int64)),
        labels=None if table.labels is None else table.labels[heads],
        ids=table.ids[heads],
        rows=table.rows[heads],
    )


def first_not_finite(values: np.ndarray) -> int | None:
    """Return the index of the first number that is NaN or infinite in float32, in which training computes, or None."""
    with np.errstate(over="ignore"):  # values beyond the range of float32 become infinite
        finite = np.isfinite(values.astype(np.float32))
    return None if finite.all() else int(finite.argmin())


def _check_numbers(table: LongForm) -> None:
    with np.errstate(over="ignore"):  # values beyond the range of float32 become infinite and are rejected
        bad = np.argwhere(~np.isfinite(table.values.astype(np.float32)))
    if len(bad):
        row, column = bad[0]
        table.refuse(
            row,
            f"the feature {table.features[column]!r} is {table.values[row, column]:g}, not a finite number of "
            "float32. Correct the value, or leave the sequence out.",
        )
    if table.times is not None and not np.isfinite(table.times).all():
        row = int((~np.isfinite(table.times)).argmax())
        what = "missing" if np.isnan(table.times[row]) else f"{as_text(table.times[row])}, not a finite number"
        table.refuse(row, f"the time is {what}. Fill it in.")
    if table.labels is not None and table.labels.dtype == np.float64:
        row = first_not_finite(table.labels)
        if row is not None:
            table.refuse(row, f"the label is not a finite number of float32, but {table.labels[row]:g}. Correct it.")


def _check_times(table: LongForm, unordered: np.ndarray, order: np.ndarray, code: np.ndarray, allow_gaps: bool) -> None:
    times = unordered[order]
    within = code[1:] == code[:-1]
    distance, rounding = distances(times)
    repeated = within & (distance == 0)
    if repeated.any():
        later = order[1 + int(repeated.argmax())]
        table.refuse(
            later,
            f"the sequence {str(table.ids[later])!r} has the time {as_text(unordered[later])} twice. Remove one "
            "of the rows.",
        )
    if allow_gaps or not within.any():
        return
    usual = float(np.median(distance[within]))
    uneven = within & (np.abs(distance - usual) > _TOLERANCE * usual + rounding)
    if uneven.any():
        place = int(uneven.argmax())
        later = order[place + 1]
        table.refuse(
            later,
            f"the sequence {str(table.ids[later])!r} goes from time {as_text(times[place])} to "
            f"{as_text(times[place + 1])}, where steps of {distance_text(usual, times)} are usual. Fill the gap in, or "
            "set `allow_gaps`: time then only orders the rows.",
        )


def _check_labels(table: LongForm, labels: np.ndarray, order: np.ndarray, heads: np.ndarray) -> None:
    other = labels != labels[heads]
    if other.any():
        place = int(other.argmax())
        row = order[place]
        table.refuse(
            row,
            f"the sequence {str(table.ids[row])!r} has the label {str(labels[place])!r} here and "
            f"{str(labels[heads[place]])!r} in row {table.rows[order[heads[place]]]}. Give all its rows one label.",
        )
