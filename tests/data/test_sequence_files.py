"""Files of sequences: their formats, and errors for those that cannot be used for training."""

from __future__ import annotations

import io
import re
import subprocess
import zipfile

import numpy as np
import pytest
import torch

from gatewise.contract import errors
from gatewise.contract.errors import DataError
from gatewise.data import Columns, read_sequences
from gatewise.data.sequence_examples import digits, noiseless, synthetic

GOOD = """\
sequence,time,x,y,label
b,2,3,-3,up
a,0,1,-1,down
b,1,2,-2,up
a,1,1.5,-1.5,down
b,3,4,-4,up
"""


@pytest.fixture
def read(tmp_path):
    """Read a text as a file."""

    def reading(text, name="steps.csv", columns=None, **options):
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return read_sequences(path, columns or Columns(), **options)

    return reading


def refusal(call):
    with pytest.raises(DataError) as error:
        call()
    return str(error.value)


def same(one, other):
    assert one.features == other.features
    assert torch.equal(one.values, other.values)
    assert torch.equal(one.lengths, other.lengths)
    assert (one.labels == other.labels).all()
    assert (one.ids == other.ids).all()


def test_rows_are_put_together_and_ordered_by_time(read):
    table = read(GOOD)
    assert table.features == ("x", "y")
    assert table.lengths.tolist() == [3, 2]
    assert table.ids.tolist() == ["b", "a"]
    assert table.labels.tolist() == ["up", "down"]
    assert table.values[:, 0].tolist() == [2, 3, 4, 1, 1.5]
    assert torch.equal(table.values[:, 1], -table.values[:, 0])


def test_the_same_rows_in_any_format_are_the_same(read, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [line.split(",") for line in GOOD.split()[1:]]
    columns = list(zip(*rows, strict=True))
    table = {
        "sequence": list(columns[0]),
        "time": [int(time) for time in columns[1]],
        "x": [float(x) for x in columns[2]],
        "y": [float(y) for y in columns[3]],
        "label": list(columns[4]),
    }
    parquet.write_table(pyarrow.table(table), tmp_path / "steps.parquet")
    expected = read(GOOD)
    same(read_sequences(tmp_path / "steps.parquet"), expected)

    x = np.zeros((2, 3, 2))
    x[0], x[1, :2] = expected.values[:3], expected.values[3:]
    x[1, 2] = np.nan  # behind the end
    y, lengths = expected.labels.astype(str), np.array([3, 2])
    np.savez(tmp_path / "padded.npz", x=x, lengths=lengths, y=y)
    np.savez(tmp_path / "flat.npz", x=expected.values.numpy(), lengths=lengths, y=y)
    padded, flat = (read_sequences(tmp_path / f"{name}.npz") for name in ("padded", "flat"))
    same(padded, flat)
    assert torch.equal(padded.values, expected.values)
    assert padded.labels.tolist() == ["up", "down"]


def test_npz_without_lengths_has_equal_ones(tmp_path):
    np.savez(tmp_path / "steps.npz", x=np.arange(24.0).reshape(3, 4, 2), y=np.array([7.0, 8.0, 7.0]))
    steps = read_sequences(tmp_path / "steps.npz")
    assert steps.lengths.tolist() == [4, 4, 4]
    assert steps.labels.tolist() == ["7", "8", "7"]
    numbers = read_sequences(tmp_path / "steps.npz", numbers=True).labels
    assert numbers.dtype == np.float64
    assert numbers.tolist() == [7.0, 8.0, 7.0]


def test_columns_can_have_other_names_and_be_left_out(read):
    text = "who,t,x,y,kind\na,1,5,6,p\nb,1,7,8,q\n"
    columns = Columns(sequence="who", time="t", label="kind", features=("y",))
    table = read(text, columns=columns)
    assert table.features == ("y",)
    assert table.values.tolist() == [[6], [8]]
    unlabelled = read(text, columns=Columns(sequence="who", time="t", label="", features=("x", "y")))
    assert unlabelled.labels is None


def test_without_a_time_rows_are_in_order(read):
    columns = Columns(time="")
    table = read("sequence,x,label\na,3,p\nb,9,q\na,1,p\n", columns=columns)
    assert table.values[:, 0].tolist() == [3, 1, 9]


def test_dates_are_times(read):
    text = "sequence,time,x,label\na,2026-01-02T00:00,2,p\na,2026-01-01,1,p\na,2026-01-03 00:00:00,3,p\n"
    assert read(text).values[:, 0].tolist() == [1, 2, 3]
    assert "goes from time" in refusal(lambda: read(text.replace("01-03", "01-04")))


def table_of(times):
    """A table of one sequence, whose feature counts the times."""
    rows = "".join(f"a,{time},{place},p\n" for place, time in enumerate(times))
    return f"sequence,time,x,label\n{rows}"


@pytest.mark.parametrize("distance", [1, 50, 100, 200])  # microseconds
def test_fast_recordings_have_no_gaps(read, distance):
    """As seconds since 1970, neighbouring times would be rounded to different distances, or to none."""
    start = np.datetime64("2024-03-01T12:00:00.000000")
    dates = [start + distance * place for place in (2, 0, 1, 3)]
    assert read(table_of(dates)).values[:, 0].tolist() == [1, 2, 0, 3]
    nanoseconds = [1_700_000_000_000_000_000 + distance * place for place in (2, 0, 1, 3)]
    assert read(table_of(nanoseconds)).values[:, 0].tolist() == [1, 2, 0, 3]
    numbers = [1.7e9 + distance / 1e6 * place for place in (2, 0, 1, 3)]
    if distance > 1:  # four times the distance of neighbouring numbers
        assert read(table_of(numbers)).values[:, 0].tolist() == [1, 2, 0, 3]
    gap = refusal(lambda: read(table_of([*dates, start + 5 * distance])))
    assert f"goes from time {start + 3 * distance} to {start + 5 * distance}, where steps of " in gap
    assert "has the time 2024-03-01T12:00:00.000000 twice" in refusal(lambda: read(table_of([*dates, start])))


def test_gaps_between_dates_are_told_in_days(read):
    months = table_of(["2024-01-01", "2024-02-01", "2024-03-01"])
    told = refusal(lambda: read(months))
    assert (
        "from time 2024-01-01T00:00:00.000000 to 2024-02-01T00:00:00.000000, where steps of 30 days are usual" in told
    )


def test_a_large_time_of_another_sequence_hides_no_gap(read):
    table = table_of(["0.0", "1.0", "2.0", "3.0", "400.0"])
    told = refusal(lambda: read(table + "b,1700000000000000000,1,q\n"))
    assert "the sequence 'a' goes from time 3 to 400, where steps of 1 are usual" in told
    days = refusal(lambda: read(table_of(["2024-01-01", "2024-01-02", "2024-01-03", "2024-01-05"])))
    assert "where steps of 1 day are usual" in days


def test_a_column_of_times_has_one_kind(read):
    assert read(table_of(["2", "1.0", "0"])).values[:, 0].tolist() == [2, 1, 0]
    mixed = refusal(lambda: read(table_of(["2024-01-01", "17"])))
    assert "row 3: 'time' is '17', not an ISO date, as the times before are." in mixed
    assert "row 2: 'time' is 'soon', not a number or an ISO date such as 2024-01-31." in refusal(
        lambda: read(table_of(["soon"]))
    )
    assert "the time is inf, not a finite number" in refusal(lambda: read(table_of(["1" + "0" * 400])))
    assert read(table_of([2**63 - 1, -(2**63)])).values[:, 0].tolist() == [1, 0]
    finer = refusal(lambda: read(table_of(["2024-01-01T00:00:00.0000001", "2024-01-02"])))
    assert "row 2: 'time' is '2024-01-01T00:00:00.0000001', not" in finer
    zeros = table_of(["2024-01-01T00:00:01.000000000", "2024-01-01T00:00:00.000000000"])
    assert read(zeros).values[:, 0].tolist() == [1, 0]


def test_the_label_is_no_feature(read):
    told = refusal(lambda: read(GOOD, columns=Columns(features=("label", "x"))))
    assert "`features` names the column 'label' of " in told
    assert "which is the `label_column`. Leave it out." in told


def test_a_byte_order_mark_blank_lines_and_quotes_are_no_trouble(read):
    text = "\ufeff" + GOOD.replace("\n", "\r\n").replace("b,2", '\r\n"b",2')
    same(read(text), read(GOOD))


def test_features_that_are_named_wrongly_are_refused(read):
    nameless = refusal(lambda: read(GOOD, columns=Columns(features=("x", ""))))
    assert "has no column ''; its columns are 'sequence', " in nameless
    assert nameless.endswith("or name it by `features`.")
    twice = refusal(lambda: read(GOOD, columns=Columns(features=("x", "y", "x"))))
    assert re.fullmatch(r"`features` names the column 'x' of .*steps\.csv twice\. Name it once\.", twice)


# Errors in a CSV file, and the messages about them.
BAD = {
    "empty": ("", "steps.csv is empty. Give a file with data in it."),
    "blank": ("\n\n", "steps.csv is empty."),
    "only a header": (GOOD.partition("\n")[0] + "\n", "steps.csv has no rows of data."),
    "a short row": (GOOD.replace("a,0,1,-1,down", "a,0,1,down"), "row 3: there are 4 fields, the header has 5."),
    "a long row": (GOOD.replace("a,0,1,-1", "a,0,1,-1,2"), "row 3: there are 6 fields, the header has 5."),
    "a word for a number": (GOOD.replace("b,1,2,-2", "b,1,two,-2"), "row 4: 'x' is 'two', not a number."),
    "an empty feature": (GOOD.replace("b,1,2,-2", "b,1,,-2"), "row 4: 'x' is empty, not a number."),
    "a NaN": (GOOD.replace("b,1,2,-2", "b,1,2,nan"), "row 4: the feature 'y' is nan, not a finite number of float32."),
    "an infinity": (
        GOOD.replace("b,1,2,-2", "b,1,1e60,-2"),
        "'x' is 1e+60, not a finite number of float32.",
    ),
    "a time that is none": (
        GOOD.replace("b,1", "b,soon"),
        "row 4: 'time' is 'soon', not a number, as the times before are.",
    ),
    "a NaN for a time": (GOOD.replace("b,1", "b,nan"), "row 4: the time is missing. Fill it in."),
    "an infinite time": (GOOD.replace("b,1", "b,inf"), "row 4: the time is inf, not a finite number."),
    "a gap": (
        GOOD.replace("b,3", "b,4"),
        "row 6: the sequence 'b' goes from time 2 to 4, where steps of 1 are usual. Fill the gap in, or",
    ),
    "a time twice": (GOOD.replace("b,1", "b,2"), "row 4: the sequence 'b' has the time 2 twice."),
    "two labels": (
        GOOD.replace("-1.5,down", "-1.5,up"),
        "row 5: the sequence 'a' has the label 'up' here and 'down' in row 3.",
    ),
    "no label": (GOOD.replace("-1.5,down", "-1.5,"), "row 5: there is no label. Fill it in."),
    "no sequence": (GOOD.replace("b,1", ",1"), "row 4: 'sequence' is empty. Fill in its sequence."),
    "no such column": (GOOD.replace("label", "kind"), "has no column 'label'; its columns are 'sequence', 'time', 'x'"),
    "a column twice": (GOOD.replace("x,y", "x,x"), "has two columns named 'x'. Rename one"),
    "no features": ("sequence,time,label\na,1,p\n", "has no columns beside sequence, time, label."),
    "not UTF-8": (GOOD.replace("up", "\xfc").encode("latin1"), "is not UTF-8. Convert it first"),
    "UTF-16": (GOOD.encode("utf-16"), "is not UTF-8, but UTF-16. Convert it first, for example: iconv -f utf-16 -t"),
    "zeros": (GOOD.encode() + bytes(999), "must be text in UTF-8, got a file that holds 999 NUL characters"),
    "UTF-16 without a mark": (GOOD.encode("utf-16le"), "iconv -f utf-16le -t utf-8"),
    "a quote without end": (GOOD.replace("b,3", '"b,3'), "row 6: it cannot be read as CSV: unexpected end of data."),
    "a field without end": (GOOD.replace("b,1", f"{'b' * 200_000},1"), "row 4: it cannot be read as CSV: field larger"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_table_is_refused_by_file_row_and_advice(read, case):
    text, message = BAD[case]
    said = refusal(lambda: read(text))
    assert "steps.csv" in said
    assert message in said
    assert said.endswith((".", "> steps-utf8.csv", "> steps-text.csv"))
    assert read(GOOD).lengths.tolist() == [3, 2]  # the next call works


@pytest.mark.parametrize(
    ("separator", "command"),
    [(";", "sed 's/,/./g; s/;/,/g' {}"), ("\t", "tr '\\t' , < {}"), ("|", "tr '|' , < {}")],
)
def test_another_separator_is_named_and_the_command_makes_a_table_that_can_be_read(read, tmp_path, separator, command):
    text = GOOD.replace(",", separator)
    if separator == ";":
        text = text.replace(".", ",")
    said = refusal(lambda: read(text))
    assert "must have its columns separated by commas, got 'sequence" in said
    command = f"{command.format(tmp_path / 'steps.csv')} > steps-commas.csv"
    assert said.endswith(f"for example: {command}")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert (tmp_path / "steps-commas.csv").read_text() == GOOD


def test_gaps_can_be_allowed(read):
    text = GOOD.replace("b,3", "b,40")
    assert read(text, columns=Columns(allow_gaps=True)).values[:, 0].tolist() == [2, 3, 4, 1, 1.5]


def test_labels_of_a_regression_are_numbers(read):
    text = GOOD.replace("up", "1.5").replace("down", "-2")
    assert read(text, numbers=True).labels.tolist() == [1.5, -2.0]
    assert "row 2: 'label' is 'up', not a number" in refusal(lambda: read(GOOD, numbers=True))
    infinite = GOOD.replace("up", "inf").replace("down", "-2")
    limits = "the label is not a finite number of float32, but"
    assert f"row 2: {limits} inf" in refusal(lambda: read(infinite, numbers=True))
    large = GOOD.replace("up", "1.5").replace("down", "-1e39")
    assert f"row 3: {limits} -1e+39" in refusal(lambda: read(large, numbers=True))


def test_bad_parquet_is_refused(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    path = tmp_path / "steps.parquet"
    good = {"sequence": [1, 1, 2], "time": [0, 1, 0], "x": [1.0, 2.0, 3.0], "label": ["p", "p", "q"]}
    parquet.write_table(pyarrow.table(good), path)
    assert read_sequences(path).ids.tolist() == ["1", "2"]
    for changes, message in (
        ({"x": [1.0, None, 3.0]}, "row 2: 'x' is empty. Fill it in"),
        ({"x": [1.0, 2.0, float("nan")]}, "row 3: the feature 'x' is nan, not a finite number"),
        ({"label": ["p", None, "q"]}, "row 2: 'label' is empty"),
        ({"label": [1.0, 1.0, float("nan")]}, "row 3: 'label' is not a number"),
        ({"x": ["1", "2", "3"]}, "'x' holds string, not numbers"),
        ({"x": [[1.0], [2.0, 3.0], [4.0]]}, "'x' holds list<element: double>, not numbers"),
        ({"time": [0, 0, 0]}, "row 2: the sequence '1' has the time 0 twice"),
    ):
        parquet.write_table(pyarrow.table(good | changes), path)
        assert message in refusal(lambda: read_sequences(path))
    parquet.write_table(pyarrow.table(good).slice(0, 0), path)
    assert "has no rows of data" in refusal(lambda: read_sequences(path))
    path.write_bytes(path.read_bytes()[:-10])
    assert "cannot be read as Parquet" in refusal(lambda: read_sequences(path))


def test_large_numbers_are_names_of_their_own(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    ids = [1e19, 1e19, 2e19, 3e20]  # beyond the integers of 64 bits
    table = {"sequence": ids, "time": [0, 1, 5, 6], "x": [1.0, 2.0, 3.0, 4.0], "label": [-1e25, -1e25, 7.0, 8.0]}
    parquet.write_table(pyarrow.table(table), tmp_path / "steps.parquet")
    steps = read_sequences(tmp_path / "steps.parquet")
    assert steps.lengths.tolist() == [2, 1, 1]
    assert [int(name) for name in steps.ids] == [int(1e19), int(2e19), int(3e20)]
    assert [float(name) for name in steps.labels] == [-1e25, 7.0, 8.0]


def test_dates_in_parquet_are_times(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    times = np.array(["2026-01-01", "2026-01-03", "2026-01-02"], dtype="datetime64[us]")
    table = {"sequence": ["a"] * 3, "time": times, "x": [1, 3, 2], "label": [True, True, True]}
    parquet.write_table(pyarrow.table(table), tmp_path / "steps.parquet")
    steps = read_sequences(tmp_path / "steps.parquet")
    assert steps.values[:, 0].tolist() == [1, 2, 3]
    assert steps.labels.tolist() == ["True"]


@pytest.mark.parametrize(
    "times",
    [
        np.datetime64("2262-04-08") + np.arange(8),  # beyond what nanoseconds can be
        np.datetime64("2024-01-01T00:00:00.000000001") + np.arange(8),
        1_700_000_000_000_000_000 + np.arange(8),
        np.array([str(place) for place in range(8)], dtype=object),
        np.array([f"2024-01-0{place + 1}" for place in range(8)], dtype=object),
        np.arange(8, dtype=np.uint64) + (1 << 62),
        (1000 + np.arange(8) / 100).astype(np.float32),
        (np.arange(8) / 10).astype(np.float16),
    ],
    ids=["days", "nanoseconds", "whole", "text", "dates as text", "unsigned", "float32", "float16"],
)
def test_times_in_parquet_order_the_rows(tmp_path, times):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    places = [3, 1, 2, 0, 7, 5, 6, 4]
    table = {"sequence": ["a"] * 8, "time": times[places], "x": [float(place) for place in places], "label": ["p"] * 8}
    parquet.write_table(pyarrow.table(table), tmp_path / "steps.parquet")
    assert read_sequences(tmp_path / "steps.parquet").values[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    as_feature = {**table, "y": table["time"], "time": table["x"]}
    if times.dtype.kind == "M":
        parquet.write_table(pyarrow.table(as_feature), tmp_path / "steps.parquet")
        found = read_sequences(tmp_path / "steps.parquet").values[:, 1]
        assert torch.allclose(found, torch.from_numpy((times - np.datetime64(0, "s")) / np.timedelta64(1, "s")).float())


def test_bad_npz_is_refused(tmp_path):
    path = tmp_path / "steps.npz"
    x, y = np.ones((2, 3, 2)), np.array([0, 1])
    missing = x.copy()
    missing[1, 2, 0] = np.nan
    objects = np.empty(2, dtype=object)
    objects[:] = [np.ones((2, 2)), np.ones((3, 1))]
    for arrays, message in (
        ({"x": x}, "has no array 'y'"),
        ({"x": objects, "y": y}, "one after the other, with `lengths`"),
        ({"x": x[0], "y": y}, "`x` must be numbers [N, T, F], or [steps, F] with `lengths`"),
        ({"x": x.astype(str), "y": y}, "`x` must be numbers"),
        ({"x": x[:0], "y": y[:0]}, "has no sequences: `x` is [0, 3, 2]"),
        ({"x": x, "y": y, "lengths": np.array([3, 4])}, "whole numbers from 1 to 3, got int64 [2] from 3 to 4"),
        ({"x": x, "y": y, "lengths": np.array([0, 3])}, "`lengths` must be 2 whole numbers from 1 to 3"),
        ({"x": x, "y": y, "lengths": np.array([3])}, "must be 2 whole numbers from 1 to 3, got int64 [1] from 3 to 3"),
        ({"x": x, "y": y, "lengths": np.array(["3", "3"])}, "must be 2 whole numbers from 1 to 3, got <U1 [2]."),
        ({"x": x[0], "y": y, "lengths": np.array([1, 1])}, "`lengths` sum to 2, `x` has 3 steps"),
        ({"x": x, "y": np.array([0, 1, 2])}, "`y` must hold one label per sequence, [2], got [3]"),
        ({"x": missing, "y": y}, "sequence 1, step 2: feature 0 is nan, not a finite number"),
    ):
        np.savez(path, **arrays)
        said = refusal(lambda: read_sequences(path))
        assert "steps.npz" in said
        assert message in said
    np.savez(path, x=missing, y=y, lengths=np.array([3, 2]))
    assert len(read_sequences(path)) == 2
    np.savez(path, x=x, y=np.array([0.5, np.nan]))
    for numbers in (True, False):
        assert "sequence 1: the label is nan" in refusal(lambda: read_sequences(path, numbers=numbers))  # noqa: B023
    np.savez(path, x=x, y=np.array([0.5, 1e39]))
    assert "sequence 1: the label is 1e+39" in refusal(lambda: read_sequences(path, numbers=True))
    np.savez(path, x=missing.reshape(6, 2), y=y, lengths=np.array([3, 3], dtype=np.uint64))
    assert "sequence 1, step 2: feature 0 is nan" in refusal(lambda: read_sequences(path))
    np.savez(path, x=x, y=np.array(["a", "b"]))
    assert "`y` must hold numbers, got <U1" in refusal(lambda: read_sequences(path, numbers=True))


def test_a_damaged_npz_is_refused(tmp_path):
    path = tmp_path / "steps.npz"
    np.savez(path, x=np.ones((2, 3, 2)), y=np.array([0, 1]))
    good = path.read_bytes()
    np.save(tmp_path / "steps.npy", np.ones(3))
    with zipfile.ZipFile(io.BytesIO(good)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for content in (b"PK\x03\x04 cut off", b"x,y\n1,2\n", (tmp_path / "steps.npy").read_bytes()):
        path.write_bytes(content)
        said = refusal(lambda: read_sequences(path))
        assert said.endswith("steps.npz is damaged, or was not written by numpy.savez. Take another copy.")
    for content in (
        _encrypted(good),
        _zipped(members | {"x.npy": members["x.npy"].replace(b"}", b" ")}),
    ):
        path.write_bytes(content)
        said = refusal(lambda: read_sequences(path))
        assert "steps.npz cannot be read as .npz: " in said
        assert said.endswith("Take another copy.")
    path.write_bytes(_zipped(members | {"y.npy": b"no array"}))
    assert "steps.npz: `y` must be an array, got another file." in refusal(lambda: read_sequences(path))


def _zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def _encrypted(content):
    """Set the flag of encryption in every header of a zip archive."""
    content = bytearray(content)
    for signature, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = content.find(signature)
        while at >= 0:
            content[at + place] |= 1
            at = content.find(signature, at + 1)
    return bytes(content)


def test_missing_files_folders_and_other_formats_are_refused(tmp_path):
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "steps.xlsx").write_text("x")
    assert "does not exist. Check the path" in refusal(lambda: read_sequences(tmp_path / "absent.csv"))
    assert "is a folder, not a file" in refusal(lambda: read_sequences(tmp_path / "folder.csv"))
    assert "must end in one of .csv, .parquet, .npz" in refusal(lambda: read_sequences(tmp_path / "steps.xlsx"))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "steps.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(errors.MissingExtra, match=r"pip install 'gatewise\[parquet\]'"):
        read_sequences(tmp_path / "steps.parquet")


def test_the_digits_are_read_row_by_row():
    datasets = pytest.importorskip("sklearn.datasets")
    data, original = digits(), datasets.load_digits()
    assert (len(data), data.features) == (1797, tuple(map(str, range(8))))
    assert torch.equal(data.values.view(1797, 8, 8), torch.tensor(original.images, dtype=torch.float32))
    assert data.labels.astype(int).tolist() == original.target.tolist()


def test_the_synthetic_task_is_the_templates():
    data = synthetic()
    assert (len(data), data.lengths.unique().tolist(), len(data.features)) == (10_000, [10], 2)
    x = data.values.double().numpy().reshape(-1, 10, 2)
    assert -1 <= x.min() < -0.999
    assert 0.999 < x.max() <= 1
    one = sum(0.1 * a * a * np.sin(t) + 0.4 * b**3 / (abs(a) + 1) for t, (a, b) in enumerate(x[0])) / 10
    assert noiseless(x)[0] == pytest.approx(one)
    right = ((noiseless(x) > 0) == (data.labels == "1")).mean()
    assert right == pytest.approx(0.91, abs=0.01)  # what the noise leaves
    clear = synthetic(noise=0.0)
    assert ((noiseless(clear.values.double().numpy().reshape(-1, 10, 2)) > 0) == (clear.labels == "1")).mean() > 0.9999
    assert synthetic(seed=1).values.ne(data.values).any()
