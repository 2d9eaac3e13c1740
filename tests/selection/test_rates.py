"""Measured calls as data: what is packaged, how it is read and written, and how estimates are corrected by it."""

import ast
import dataclasses
import itertools
import math
from pathlib import Path

import pytest
import torch

import gatewise
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.contract.ranking import slug
from gatewise.kernels.cuda.deep_products import widens
from gatewise.selection import correction, cost, estimate, explain, kernel_named, points
from tests.pairwise import one_in

MEASURED = ("h200", "h100")
GPUS = ("h200", "a100", "l4", "b200")


@pytest.mark.parametrize("name", one_in(2, MEASURED))
def test_every_measured_call_has_its_record(name):
    found = points.points(Device.named(name).name)
    assert len(found) > 1500
    assert {point.kernel for point in found} == set(gatewise.kernel_names())
    for point in found:
        assert point.record.device.name == Device.named(name).name
        assert point.record.commit
        assert point.record.date
        assert 0 < point.graph < 1
    assert points.read(points.lines(found)) == found


@pytest.mark.skipif(not widens(), reason="PyTorch 2.6 has no product of float16 with a float32 result")
@pytest.mark.parametrize("name", MEASURED)
def test_the_work_in_the_data_is_what_kernels_state_today(name):
    # Corrections are fitted to it: after a change of a statement `python benchmarks/restate.py` writes it anew.
    device = Device.named(name)
    found = points.points(device.name)
    for point in found[:: len(found) // 60]:
        stated = points.Point(
            point.kernel,
            point.problem,
            kernel_named(point.kernel).work(point.problem, device),
            point.graph,
            point.eager,
            point.record,
        )
        assert points.point_line(stated) == points.point_line(point)


@pytest.mark.parametrize("name", one_in(2, MEASURED))
def test_predictions_follow_measured_calls(name):
    device = Device.named(name)
    ratios = [
        cost.seconds(point.kernel, point.work, point.problem, device) / point.graph
        for point in points.points(device.name)[::3]
    ]
    assert sum(0.75 <= ratio <= 1.25 for ratio in ratios) >= 0.95 * len(ratios)


def test_without_measured_calls_a_prediction_is_the_roofline_with_the_errors_of_estimates_on_an_h200():
    device = Device.named("a100").replace(launch_seconds=1e-6, exchange_seconds=2e-6, memory_bandwidth=1e12)
    problem = Problem(10, 4, 8, 8, dtype=torch.bfloat16, captured=True)
    work = kernel_named("eager").work(problem, device)
    arithmetic = work.matmul_flops / device.matmul_rate(torch.bfloat16)
    traffic = work.bytes_moved / 1e12 + work.cached_bytes / device.cache_bandwidth
    expected = work.launches * 1e-6 + max(arithmetic, traffic)
    assert estimate.estimated(work, problem, device) == pytest.approx(expected, rel=1e-6)
    on_h200 = correction.factors("eager", work, problem, Device.named("h200"))
    assert on_h200.busy != 1.0 != on_h200.issue
    assert cost.seconds("eager", work, problem, device) == pytest.approx(expected * on_h200.busy, rel=1e-6)
    launched = cost.seconds("eager", work, problem.replace(captured=False), device)
    assert launched == pytest.approx(estimate.issue(work, device) * on_h200.issue, rel=1e-6)
    assert correction.factors("eager", work, problem, Device.probe("cpu")) == correction.Factors()


@pytest.mark.parametrize("kernel", ["persistent", "cudnn", "stepwise"])
def test_times_differ_as_the_hardware_does(kernel):
    times = []
    for name in GPUS:
        layer = torch.nn.LSTM(512, 512, device="meta", dtype=torch.bfloat16)
        decision = explain(layer, (100, 64, 512), device=name, captured=True)
        verdict = decision.verdict(kernel)
        assert verdict.known == (name in MEASURED)
        text = str(decision)
        assert ("estimated, not measured on this GPU" in text) == (name not in MEASURED)
        times.append(verdict.seconds)
    for one, other in itertools.combinations(times, 2):
        assert abs(math.log(one / other)) > 0.01


@pytest.mark.parametrize("quantity", ["memory_bandwidth", "launch_seconds", "exchange_seconds", "cache_bandwidth"])
def test_every_speed_counts(quantity):
    device = Device.named("a100")
    problem = Problem(100, 64, 512, 512, dtype=torch.bfloat16, captured=True, needs_grad=True)
    faster = 2.0 if "bandwidth" in quantity else 0.5
    changed = device.replace(**{quantity: faster * getattr(device, quantity)})
    times = [
        sum(
            cost.seconds(name, kernel_named(name).work(problem, each), problem, each)
            for name in ("persistent", "cudnn", "stepwise")
        )
        for each in (device, changed)
    ]
    assert times[1] < times[0]


def test_a_precision_that_was_not_measured_is_estimated():
    decision = explain(torch.nn.LSTM(512, 512, device="meta"), (100, 64, 512), device="h200", dtype=torch.float64)
    assert decision.evidence == "estimated, not measured on this GPU"


def test_a_line_that_is_damaged_is_left_out(tmp_path):
    every = points.points(Device.named("h200").name)
    found = tuple([point for point in every if point.record == every[-1].record][:2])
    lines = points.lines(found)
    damaged = [*lines[:2], lines[2][:30], '{"kernel": "cudnn"}', "[]", "", *lines[3:]]
    assert points.read(damaged) == found[1:]


def test_far_from_all_measured_calls_a_correction_stays_in_their_range():
    device = Device.named("h200")
    misses = [
        point.graph / estimate.estimated(point.work, point.problem, device)
        for point in points.points(device.name)
        if point.kernel == "cudnn" and point.problem.needs_grad
    ]
    problem = Problem(60000, 4000, 3, 5, num_layers=40, dtype=torch.bfloat16, needs_grad=True, captured=True)
    factor = correction.factors("cudnn", kernel_named("cudnn").work(problem, device), problem, device).busy
    assert 0.7 * min(misses) < factor < 1.4 * max(misses)


def test_kernels_hold_no_seconds():
    # Neither numbers that small, nor the speeds that make seconds of work.
    package = Path(gatewise.__file__).parent / "kernels"
    found = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            small = isinstance(node, ast.Constant) and isinstance(node.value, float) and 0 < abs(node.value) < 1e-4
            speed = isinstance(node, ast.Attribute) and node.attr.endswith("_seconds")
            if small or speed:
                found.append(f"{path.relative_to(package)}:{node.lineno}")
    assert not found


def test_calls_of_a_version_that_states_other_work_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("GATEWISE_CACHE", str(tmp_path))
    name = Device.named("h200").name
    points.points.cache_clear()
    packaged = points.points(name)
    path = points.user_folder() / f"{slug(name)}.jsonl"
    path.parent.mkdir(parents=True)
    try:
        for change, expected in ((0, packaged[:40]), (1, packaged)):
            work = dataclasses.replace(packaged[0].work, launches=packaged[0].work.launches + change)
            own = [dataclasses.replace(packaged[0], work=work), *packaged[1:40]]
            path.write_text("\n".join(points.lines(own)))
            points.points.cache_clear()
            assert points.points(name) == expected
            assert len(points.users_own(name)) == 40
    finally:
        points.points.cache_clear()
