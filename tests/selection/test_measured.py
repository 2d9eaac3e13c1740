"""The choice in a CUDA graph, held to what the kernels that may be the fastest took on an H200.

The calls are those of the record "grid" in gatewise/selection/rates/nvidia-h200.jsonl, which the predictions are fitted
to: the shapes of `gatewise bench lstm`, and around those where cuDNN's persistent algorithms are the fastest. Some
kernels accept a call since the record was made, and are in others.
"""

from collections import defaultdict

import pytest

from gatewise.contract.device import Device
from gatewise.selection import kernel_named, points, predicted

H200 = Device.named("h200")
MEASURED = defaultdict(dict)
for point in points.points(H200.name):
    MEASURED[point.problem][point.kernel] = point.graph * 1e6
GRID = [point.problem for point in points.points(H200.name) if point.record.name.partition(",")[0] == "grid"]
CELLS = [(problem, MEASURED[problem]) for problem in dict.fromkeys(GRID)]


def test_the_whole_grid_is_there():
    assert len(CELLS) == 250


@pytest.mark.parametrize(("problem", "measured"), [cell for cell in CELLS if len(cell[1]) > 1], ids=str)
def test_the_choice_is_within_five_percent_of_the_fastest(problem, measured):
    decision = predicted(problem, H200)
    chosen = min(measured, key=lambda kernel: decision.verdict(kernel).seconds)
    within = 1.05 if problem.time > 1 else 1.1  # a microsecond is ten percent of some single steps
    assert measured[chosen] <= within * min(measured.values())


def by_warpgroups(problem):
    """Whether `persistent` multiplies by warpgroups: such calls were not measured since it does."""
    return "by warpgroups" in kernel_named("persistent").algorithm(problem, H200)


def test_what_is_chosen_was_measured():
    compared = [cell for cell in CELLS if len(cell[1]) > 1 and not by_warpgroups(cell[0])]
    assert len(compared) > 200
    known = {(point.kernel, point.problem) for point in points.points(H200.name)}
    unknown = [str(problem) for problem, _ in compared if (predicted(problem, H200).chosen, problem) not in known]
    assert len(unknown) <= 0.01 * len(compared), unknown


def ratio(problem, kernel, microseconds):
    return predicted(problem, H200).verdict(kernel).seconds * 1e6 / microseconds


def test_what_is_chosen_takes_what_was_predicted_within_a_quarter():
    ratios = [
        (ratio(problem, chosen, measured[chosen]), chosen, str(problem))
        for problem, measured in CELLS
        if (chosen := predicted(problem, H200).chosen) in measured
    ]
    assert len(ratios) > 200
    far = [found for found in ratios if not 0.75 <= found[0] <= 1.25]
    assert len(far) <= 0.01 * len(ratios), far


def test_no_kernel_takes_less_than_half_or_more_than_twice_of_what_was_predicted():
    ratios = [
        (ratio(problem, kernel, microseconds), kernel, str(problem))
        for problem, measured in CELLS
        for kernel, microseconds in measured.items()
    ]
    far = [found for found in ratios if not 0.5 <= found[0] <= 2.0]
    assert not far
