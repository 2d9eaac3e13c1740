"""Fits of measured calls are stored for other processes, and made anew for other calls and other sources."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.selection import correction, cost, kernel_named, points, stored_fits

DEVICE = Device.named("h200")
PROBLEM = Problem(35, 20, 650, 650, num_layers=2, dtype=torch.bfloat16, needs_grad=False)
KERNEL = "aten"  # of its inference few calls were measured, so that a fit takes little time


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder; the folder of fits in it."""
    monkeypatch.setenv("GATEWISE_CACHE", str(tmp_path / "cache"))
    points.points.cache_clear()
    as_in_a_new_process()
    yield tmp_path / "cache" / "corrections"
    points.points.cache_clear()
    as_in_a_new_process()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder for the fit that is made once, and for its predictions."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def first(folder, kept):
    """The predictions of a process that made a fit, which is in the folder and in none of this process's caches."""
    if (kept / "fits").exists():
        shutil.copytree(kept / "fits", folder)
    else:
        (kept / "predictions").write_text(json.dumps(predictions()))
        shutil.copytree(folder, kept / "fits")
        as_in_a_new_process()
    return json.loads((kept / "predictions").read_text())


def as_in_a_new_process():
    correction._fitted.cache_clear()
    stored_fits._digest.cache_clear()


def predictions():
    problems = [PROBLEM, PROBLEM.replace(captured=True), PROBLEM.replace(dtype=torch.float32)]
    work = kernel_named(KERNEL).work
    found = [cost.seconds(KERNEL, work(problem, DEVICE), problem, DEVICE) for problem in problems]
    return [*found, *(cost.is_measured(KERNEL, problem, DEVICE) for problem in problems)]


def never(*given):
    raise AssertionError("a fit is made")


def test_another_process_reads_it_and_predicts_the_same(folder, first, monkeypatch):
    (file,) = folder.iterdir()
    assert file.name.startswith("nvidia-h200-aten-inference-")
    as_in_a_new_process()
    monkeypatch.setattr(correction, "fit", never)
    assert predictions() == first


DAMAGES = {
    "empty": lambda whole: b"",
    "another file": lambda whole: b"no archive",
    "cut": lambda whole: whole[: len(whole) // 2],
    "overwritten": lambda whole: whole[:5000] + bytes(2000) + whole[7000:],
}


@pytest.mark.parametrize(
    "damage",
    ["overwritten", *[pytest.param(name, marks=pytest.mark.exhaustive) for name in DAMAGES if name != "overwritten"]],
)
def test_a_damaged_file_is_replaced(folder, first, damage):
    (file,) = folder.iterdir()
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    as_in_a_new_process()
    assert predictions() == first
    assert stored_fits.read(f"nvidia-h200-{KERNEL}-inference", correction.settings_of(KERNEL)) is not None


def test_other_measured_calls_have_a_fit_of_their_own(folder, first, tmp_path, monkeypatch):
    other = tmp_path / "rates"
    shutil.copytree(Path(str(points.packaged_folder())), other, ignore=shutil.ignore_patterns("rankings"))
    path = other / "nvidia-h200.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if "graph_us" in line:
            line["graph_us"] *= 2
    path.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(points, "packaged_folder", lambda: other)
    points.points.cache_clear()
    points.of_the_same_architecture.cache_clear()
    as_in_a_new_process()
    assert predictions()[1] > 1.5 * first[1]
    assert len([*folder.iterdir()]) == 2
    points.of_the_same_architecture.cache_clear()


@pytest.mark.usefixtures("first")
def test_other_sources_have_a_fit_of_their_own(folder, tmp_path, monkeypatch):
    before = {each.name for each in folder.iterdir()}
    (tmp_path / "gatewise" / "extra").mkdir(parents=True)
    (tmp_path / "gatewise" / "extra" / "features.py").write_text("another description of a call")
    for name in stored_fits._SOURCES:
        (tmp_path / "gatewise" / name).symlink_to(Path(stored_fits.__file__).parents[1] / name)
    monkeypatch.setattr(stored_fits.resources, "files", lambda package: tmp_path / package)
    monkeypatch.setattr(points, "packaged_folder", lambda: Path(points.__file__).parent / "rates")
    monkeypatch.setattr(stored_fits, "_SOURCES", (*stored_fits._SOURCES, "extra"))
    as_in_a_new_process()
    predictions()
    assert len({each.name for each in folder.iterdir()} - before) == 1


def test_calls_of_the_user_are_fitted_in_every_process(folder):
    own = points.user_folder() / "nvidia-h200.jsonl"
    own.parent.mkdir(parents=True)
    own.write_text("\n".join(points.lines(points.points(DEVICE.name)[:400])))
    points.points.cache_clear()
    as_in_a_new_process()
    predictions()
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_to_changes_nothing(folder):
    folder.parent.mkdir(parents=True)
    folder.write_text("a file in place of the folder")
    found = predictions()
    folder.unlink()
    as_in_a_new_process()
    assert predictions() == found
