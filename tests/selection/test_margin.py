"""On a CPU, another kernel replaces PyTorch's own where it is predicted to be faster by more than predictions err."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import random

import numpy as np
import pytest

from gatewise.benchmarks import shapes
from gatewise.cells import GRU, LSTM, RNN
from gatewise.contract.device import Device
from gatewise.contract.ranking import slug
from gatewise.selection import correction, kernel_named, margin, points, predicted
from gatewise.selection.estimate import estimated
from gatewise.selection.points import Point, Record

CPU = Device.named("cpu").replace(name="An invented CPU")
RECORD = Record("tune", CPU, "gatewise tune", "0123456789", datetime.date.today().isoformat(), "2.11.0")
SHARE = 4.0
"""How many times what is estimated `aten` takes."""


def forget():
    for cache in (points.points, correction._fitted, margin._standard_error, predicted):
        cache.cache_clear()


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Write the measured calls of an invented CPU, on which `eager` takes a multiple of the time of `aten`."""
    monkeypatch.setenv("GATEWISE_CACHE", str(tmp_path))

    def write(multiple, noise, count=60, kernels=("aten", "eager"), cells=(LSTM,)):
        chance, found = random.Random(0), []
        problems = (problem for problem in shapes.designed(CPU) if type(problem.cell) in cells)
        for problem in itertools.islice(problems, count):
            of_aten = kernel_named("aten").work(problem, CPU)
            usual = SHARE * estimated(of_aten, problem, CPU)
            for kernel in kernels:
                seconds = usual * (multiple if kernel == "eager" else 1.0) * math.exp(chance.gauss(0.0, noise))
                found.append(Point(kernel, problem, kernel_named(kernel).work(problem, CPU), seconds, None, RECORD))
        path = points.user_folder() / f"{slug(CPU.name)}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(points.lines(found)))
        forget()

    forget()
    yield write
    forget()


def fresh(count, cell=LSTM):
    """Return problems that were not measured, which both kernels accept."""
    drawn = (each.replace(cell=cell(), lean=False) for each in shapes.drawn(5, CPU))
    return list(itertools.islice(drawn, count))


def choices(cell=LSTM):
    return [predicted(problem, CPU).chosen for problem in fresh(60, cell)]


def test_noise_seldom_chooses_a_slower_kernel(measured):
    measured(multiple=1.2, noise=0.4)
    times = [[predicted(problem, CPU).verdict(name).seconds for name in ("aten", "eager")] for problem in fresh(60)]
    alone = sum(eager < aten for aten, eager in times)  # by predicted times alone
    assert alone > 15
    # Of errors of a normal distribution, one in six is larger than the standard error, and in the wrong direction. The
    # number of 60 is at most three of its own standard errors larger; the fit depends on the machine's arithmetic.
    assert choices().count("eager") <= len(times) / 6 + 3 * math.sqrt(len(times) * 5 / 36)


def test_a_kernel_that_is_faster_by_more_than_the_noise_is_chosen(measured):
    measured(multiple=0.4, noise=0.1)
    assert choices().count("eager") > 50


def test_the_margin_grows_with_the_noise_of_the_measured_calls(measured):
    errors = []
    for noise in (0.05, 0.2, 0.8):
        measured(multiple=1.0, noise=noise)
        errors.append(margin.margin("aten", "eager", fresh(1)[0].replace(needs_grad=True), CPU))
    assert errors == sorted(errors)
    assert errors[2] > math.sqrt(2) * 0.8  # of two measurements


def test_the_report_gives_the_reason(measured):
    measured(multiple=1.0, noise=0.4)
    decisions = [predicted(problem, CPU) for problem in fresh(60)]
    faster = [each for each in decisions if each.verdict("eager").seconds < each.verdict("aten").seconds]
    close = next(each for each in faster if each.chosen == "aten")
    assert close.reason == "PyTorch's own: eager is predicted to be faster by less than the error of predictions"
    assert "PyTorch's own" in str(close)


@pytest.mark.parametrize("cell", [GRU, RNN])
def test_calls_of_one_cell_say_nothing_of_another(measured, cell):
    problem = fresh(1, cell)[0]
    before = [verdict.seconds for verdict in predicted(problem, CPU).verdicts]
    measured(multiple=0.1, noise=0.1)
    assert [verdict.seconds for verdict in predicted(problem, CPU).verdicts] == before
    assert set(choices(cell)) == {"aten"}
    measured(multiple=0.1, noise=0.1, cells=(GRU,))
    assert (choices(cell).count("eager") > 50) == (cell is GRU)


@pytest.mark.parametrize("kernel", ["aten", "eager"])
def test_the_estimate_of_one_kernel_is_not_compared_with_measured_times_of_another(measured, kernel):
    measured(multiple=0.1, noise=0.1, kernels=(kernel,))
    assert margin.margin("aten", "eager", fresh(1)[0], CPU) == math.inf
    assert set(choices()) == {"aten"}


def test_grus_are_measured_on_a_cpu_only():
    for device, cells in ((CPU, {LSTM, GRU}), (Device.named("h200"), {LSTM})):
        assert {type(problem.cell) for problem in itertools.islice(shapes.designed(device), 30)} == cells


def test_an_error_is_that_of_a_prediction_from_the_other_calls(measured):
    measured(multiple=1.0, noise=0.3, count=40)
    fit = correction.fit("aten", True, CPU.name, cell=LSTM())
    calls = correction.measured_calls("aten", True, CPU.name, LSTM())
    values = [math.log(each.graph / estimated(each.work, each.problem, CPU)) for each in calls]
    without = dataclasses.replace(fit.busy, places=fit.busy.places[1:])
    others = type(fit.busy).through(without.places, np.array(values[1:]), fit.busy.settings)
    others = dataclasses.replace(others, middle=fit.busy.middle, least=-math.inf, most=math.inf)
    matrix = others.covariance(others.places) + fit.busy.settings.noise**2 * np.eye(len(values) - 1)
    weights = np.linalg.solve(matrix, np.array(values[1:]) - fit.busy.middle)
    mean = dataclasses.replace(others, weights=weights).means(fit.busy.places[:1])[0]
    assert fit.busy.errors()[0] == pytest.approx(values[0] - mean, rel=1e-6)
