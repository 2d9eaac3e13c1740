"""Readers of sequences from CSV and Parquet files in long form and from NumPy's .npz files.

CSV is read row by row with Python's `csv` module: it knows the line number of each record, so that every error can name
it, and needs no other package. Parquet is for data that is too large for CSV, and needs pyarrow.
"""

from __future__ import annotations

import csv
import zipfile
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gatewise.contract.errors import DAMAGED_ARCHIVE, DataError, MissingExtra
from gatewise.data.encoding import HEAD, conversion, refusal
from gatewise.data.long_form import Columns, LongForm, first_not_finite, sequences_of
from gatewise.data.sequences import Sequences
from gatewise.data.times import TimeColumn, column_of, seconds
from gatewise.files import irregular

_LONG_FORM = Columns()
_SEPARATORS = {";": ";", "\t": "\\t", "|": "|"}
"""Other separators of columns, and how the program `tr` writes them."""


def read_sequences(path: str | Path, columns: Columns = _LONG_FORM, *, numbers: bool = False) -> Sequences:
    """Read labelled sequences from a file; the suffix of its name determines the format.

    A ``.csv`` or ``.parquet`` file has one row per time step. A ``.npz`` file has `x` [N, T, F], with `lengths` [N]
    when sequences are shorter than T; or all sequences concatenated, `x` [sum of lengths, F], with `lengths`; and the
    labels `y` [N].

    Args:
        path: The path of the file.
        columns: The roles of the columns of a table. An empty `label` reads no labels, from an .npz file neither.
        numbers: Whether labels are numbers for regression; otherwise they are names of classes.

    Returns:
        The sequences in the order of the file, on the CPU.

    Raises:
        DataError: The file is missing or empty, or has another format, or cannot be used for training; the message
            names the file, the row, and what to do.
        MissingExtra: The file is Parquet and pyarrow is not installed.
    """
    path = Path(path)
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise DataError(f"{path} must end in one of {', '.join(_READERS)}. Rename the file, or convert it.")
    if reason := irregular(path):
        raise DataError(reason)
    if not path.is_file():
        what = "is a folder, not a file. Name the file in it" if path.is_dir() else "does not exist. Check the path"
        raise DataError(f"the data file {path} {what}.")
    if not path.stat().st_size:
        raise DataError(f"{path} is empty. Give a file with data in it.")
    return read(path, columns, numbers)


def _read_csv(path: Path, columns: Columns, numbers: bool) -> Sequences:
    try:
        with path.open("rb") as raw:
            reason = refusal(path, raw.read(HEAD))
        if reason:
            raise DataError(reason)
        with path.open(encoding="utf-8-sig", newline="") as file:
            return sequences_of(_csv_table(path, csv.reader(file, strict=True), columns, numbers), columns.allow_gaps)
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8. {conversion(path, 'latin1')}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Check its permissions.") from error


def _csv_table(path: Path, reader, columns: Columns, numbers: bool) -> LongForm:  # noqa: ANN001 - csv names no type
    records = _records(path, reader)
    header = next((record for record in records if record), None)
    if header is None:
        raise DataError(f"{path} is empty. Give a file with data in it.")
    if len(header) == 1:
        _check_separator(path, header[0])
    features = columns.features_among(path, header)
    places = [header.index(name) for name in features]
    sequence = header.index(columns.sequence)
    time = header.index(columns.time) if columns.time else None
    label = header.index(columns.label) if columns.label else None
    rows, values, times = array("q"), array("d"), TimeColumn()
    ids: list[str] = []
    names: list[str] = []
    amounts = array("d")
    shared: dict[str, str] = {}  # equal strings share one object, however many rows have them

    def parsed(record: list[str], column: int, parse: Callable[[str], Any] = float) -> Any:
        try:
            return parse(record[column])
        except ValueError:
            shown = repr(record[column]) if record[column].strip() else "empty"
            expected = times.expected if column == time else "a number"
            raise DataError(
                f"{path}, row {reader.line_num}: {header[column]!r} is {shown}, not {expected}. Correct the value, or "
                "leave the sequence out."
            ) from None

    for record in records:
        if not record:
            continue
        if len(record) != len(header):
            raise DataError(
                f"{path}, row {reader.line_num}: there are {len(record)} fields, the header has {len(header)}. Give "
                "every row the same features."
            )
        if not record[sequence].strip():
            raise DataError(f"{path}, row {reader.line_num}: {header[sequence]!r} is empty. Fill in its sequence.")
        rows.append(reader.line_num)
        ids.append(shared.setdefault(record[sequence], record[sequence]))
        if time is not None:
            parsed(record, time, times.append)
        for column in places:
            values.append(parsed(record, column))
        if label is not None:
            if not record[label].strip():
                raise DataError(f"{path}, row {reader.line_num}: there is no label. Fill it in.")
            if numbers:
                amounts.append(parsed(record, label))
            else:
                names.append(shared.setdefault(record[label], record[label]))
    labels = np.array(amounts) if numbers else np.array(names, dtype=object)
    return LongForm(
        name=str(path),
        features=tuple(features),
        rows=np.array(rows, dtype=np.int64),
        ids=np.array(ids, dtype=object),
        times=None if time is None else times.values(),
        values=np.array(values).reshape(len(rows), len(features)),
        labels=None if label is None else labels,
    )


def _records(path: Path, reader) -> Iterator[list[str]]:  # noqa: ANN001 - csv names no type
    """Yield the records of a CSV file, and name the row in the reader's errors."""
    begun = 1
    try:
        for record in reader:
            yield record
            begun = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}, row {begun}: it cannot be read as CSV: {error}. Look for a quotation mark that is not closed."
        ) from error


def _check_separator(path: Path, line: str) -> None:
    """Check that the only column of a header is not several with another separator."""
    found = max(_SEPARATORS, key=line.count)
    if not line.count(found):
        return
    # In the countries where spreadsheets write semicolons, they write commas in numbers.
    program = f"sed 's/,/./g; s/{found}/,/g' {path}" if found == ";" else f"tr '{_SEPARATORS[found]}' , < {path}"
    raise DataError(
        f"{path} must have its columns separated by commas, got {line!r}, which has {line.count(found)} "
        f"{found!r}. Convert it first, for example: {program} > {path.stem}-commas{path.suffix}"
    )


def _read_parquet(path: Path, columns: Columns, numbers: bool) -> Sequences:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise MissingExtra.for_package("pyarrow", "reading Parquet", "parquet") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            table = file.read()
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).rstrip(".")
        raise DataError(f"{path} cannot be read as Parquet: {reason}. Check the file.") from error
    features = columns.features_among(path, table.column_names)

    def refuse(column: str, row: int, what: str, advice: str) -> DataError:
        return DataError(f"{path}, row {row + 1}: {column!r} is {what}. {advice}")

    def whole(column: str) -> np.ndarray:
        values = table[column]
        if values.null_count:
            row = int(np.argmax(values.is_null().to_numpy()))
            raise refuse(column, row, "empty", "Fill it in, or leave the sequence out.")
        try:
            return values.to_numpy()
        except pyarrow.ArrowException as error:
            raise DataError(f"{path}: {column!r} cannot be read: {error}. Convert the column.") from error

    def floats(column: str) -> np.ndarray:
        values = whole(column)
        if values.dtype.kind == "M":
            return seconds(values)
        if values.dtype.kind not in "biuf":
            raise DataError(f"{path}: {column!r} holds {table[column].type}, not numbers. Convert the column.")
        return values.astype(np.float64)

    def times(column: str) -> np.ndarray:
        values, advice = whole(column), "Correct the value, or leave the sequence out."

        def bad(row: int, expected: str) -> DataError:
            return refuse(column, row, f"{str(values[row])!r}, not {expected}", advice)

        return column_of(values, bad)

    def names(column: str) -> np.ndarray:
        values = whole(column)
        missing = _missing(values)
        if missing is not None:
            raise refuse(column, missing, "not a number", "Fill it in, or leave the sequence out.")
        return _names(values)

    if not table.num_rows:
        raise DataError(f"{path} has no rows of data. Give a file with one row per time step.")
    labels = None
    if columns.label:
        labels = floats(columns.label) if numbers else names(columns.label)
    return sequences_of(
        LongForm(
            name=str(path),
            features=tuple(features),
            rows=np.arange(1, table.num_rows + 1),
            ids=names(columns.sequence),
            times=times(columns.time) if columns.time else None,
            values=np.stack([floats(column) for column in features], axis=1),
            labels=labels,
        ),
        columns.allow_gaps,
    )


def _missing(values: np.ndarray) -> int | None:
    """Return the index of the first value that is not a finite number, or None."""
    if values.dtype.kind != "f" or np.isfinite(values).all():
        return None
    return int(np.isfinite(values).argmin())


def _names(values: np.ndarray) -> np.ndarray:
    """Return identifiers and labels as text; integral floating-point numbers are written without a decimal point."""
    if values.dtype.kind == "f" and np.array_equal(values, np.trunc(values)):
        return np.array([str(int(value)) for value in values], dtype=object)
    return np.array([str(value) for value in values], dtype=object)


def _read_npz(path: Path, columns: Columns, numbers: bool) -> Sequences:
    try:
        with path.open("rb") as file:
            archived = zipfile.is_zipfile(file)
        arrays = {}
        if archived:
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in ("x", "lengths", "y") if name in archive}
    except (OSError, *DAMAGED_ARCHIVE) as error:
        objects = "Objects are not read: give sequences of unequal length one after the other, with `lengths`."
        advice = objects if "Object arrays" in str(error) else "Take another copy."
        raise DataError(f"{path} cannot be read as .npz: {error}. {advice}") from error
    if not archived:  # NumPy's error for other files would advise to load them as pickles
        raise DataError(f"{path} is damaged, or was not written by numpy.savez. Take another copy.")
    for name in ("x", "y") if columns.label else ("x",):
        if name not in arrays:
            raise DataError(f"{path} has no array {name!r}. Save it by numpy.savez(path, x=..., lengths=..., y=...).")
    for name, member in arrays.items():
        if not isinstance(member, np.ndarray):  # NumPy returns other members of an archive as bytes
            raise DataError(f"{path}: `{name}` must be an array, got another file. Save it by numpy.savez.")
    x, lengths = arrays["x"], arrays.get("lengths")
    if x.dtype.kind not in "biuf" or x.ndim not in (2, 3) or (x.ndim == 2 and lengths is None):
        raise DataError(
            f"{path}: `x` must be numbers [N, T, F], or [steps, F] with `lengths`, got {x.dtype} {list(x.shape)}. "
            "Give every step the same features."
        )
    count = len(x) if x.ndim == 3 or lengths is None else len(lengths)
    longest = x.shape[1] if x.ndim == 3 else len(x)
    lengths = np.full(count, longest) if lengths is None else lengths
    if not count or not x.size:
        raise DataError(f"{path} has no sequences: `x` is {list(x.shape)}. Give a file with data in it.")
    if lengths.shape != (count,) or lengths.dtype.kind not in "iu" or lengths.min() < 1 or lengths.max() > longest:
        got = f"{lengths.dtype} {list(lengths.shape)}"
        if lengths.size and lengths.dtype.kind in "iuf":
            got += f" from {lengths.min()} to {lengths.max()}"
        raise DataError(
            f"{path}: `lengths` must be {count} whole numbers from 1 to {longest}, got {got}. Correct them."
        )
    if x.ndim == 3:
        x = x[np.arange(longest) < lengths[:, None]]
    elif lengths.sum() != len(x):
        raise DataError(f"{path}: `lengths` sum to {lengths.sum()}, `x` has {len(x)} steps. Make them agree.")
    labels = _npz_labels(path, arrays["y"], count, numbers) if columns.label else None
    with np.errstate(over="ignore"):  # values beyond the range of float32 become infinite and are rejected
        values = x.astype(np.float32)
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        step, feature = bad[0]
        ends = lengths.cumsum()
        number = int(np.searchsorted(ends, step, side="right"))
        step -= int(ends[number] - lengths[number])
        raise DataError(
            f"{path}, sequence {number}, step {step}: feature {feature} is {x[tuple(bad[0])]:g}, not a finite number "
            "of float32. Correct the value, or leave the sequence out."
        )
    return Sequences(
        name=str(path),
        features=tuple(str(feature) for feature in range(values.shape[1])),
        values=torch.from_numpy(values),
        lengths=torch.from_numpy(lengths.astype(np.int64)),
        labels=labels,
        ids=np.array([str(number) for number in range(count)], dtype=object),
    )


def _npz_labels(path: Path, y: np.ndarray, count: int, numbers: bool) -> np.ndarray:
    if y.shape != (count,):
        raise DataError(f"{path}: `y` must hold one label per sequence, [{count}], got {list(y.shape)}. Correct it.")
    if numbers and y.dtype.kind not in "biuf":
        raise DataError(f"{path}: `y` must hold numbers, got {y.dtype}. Train a classification instead.")
    number = first_not_finite(y) if numbers else _missing(y)
    if number is not None:
        raise DataError(f"{path}, sequence {number}: the label is {y[number]}. Fill it in, or leave the sequence out.")
    return y.astype(np.float64) if numbers else _names(y)


_READERS: dict[str, Callable[[Path, Columns, bool], Sequences]] = {
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".npz": _read_npz,
}
