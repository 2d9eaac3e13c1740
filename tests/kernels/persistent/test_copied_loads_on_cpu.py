"""Products whose operands arrive as copies in shared memory: the sources, run on the CPU, agree with float64."""

import functools

import pytest
import torch

from gatewise import testing
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.launches import compiled
from gatewise.kernels.persistent.sizes import copied_loads, exactness, tilings
from tests.kernels.persistent.sources_on_cpu import launch_on_cpu

H200 = Device.named("h200")
DEVICE = H200.replace(multiprocessors=16)
PROBLEM = Problem(4, 37, 5, 128, dtype=torch.bfloat16, needs_grad=True)
NUMBERS = {
    "bfloat16": ({}, 5e-2),
    "float16": ({"dtype": torch.float16}, 1e-2),
    "TF32": ({"dtype": torch.float32, "allow_tf32": True}, 5e-3),
}
PLACES = {
    "own memory": lambda found: found.spare == found.polls,
    "memory of sums": lambda found: found.spare == 0,
    "both, used again": lambda found: 0 < found.spare < found.polls,
}


@pytest.fixture
def sources(monkeypatch):
    for limit in ("_UNROUNDED_HIDDEN", "_SMALL_HIDDEN"):  # so that small layers round, too
        monkeypatch.setattr(exactness, limit, 0)
    return launch_on_cpu(monkeypatch, DEVICE)


@pytest.fixture
def placed(monkeypatch, cut_where):
    """Have both passes copy to some kind of memory, of a block with so many bytes for copies."""

    def at(place):
        def limited(room, cut, device):
            monkeypatch.setattr(copied_loads, "shared_memory", lambda device: cut.shared_bytes + room)
            return copied_loads.copied_loads_of(cut, device)

        def chosen(cut, device):
            item_bytes = 512 * cut.warps
            of_rooms = (limited(room, cut, device) for room in (64 * item_bytes, 4 * item_bytes, 2 * item_bytes, 0))
            return next((found for found in of_rooms if found is not None and PLACES[place](found)), None)

        cut_where(lambda cut: chosen(cut, DEVICE) is not None)
        monkeypatch.setattr(compiled, "copied_loads_of", chosen)

    return at


def check(sources, problem, tolerance, **given):
    inputs = testing.make_inputs(problem, lengths=given.pop("lengths", None))._replace(**given)
    gradients = testing.make_gradients(problem, inputs)
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    for name, value in testing.named(problem, *testing.oracle(problem, inputs, gradients)).items():
        assert testing.relative_error(found[name], value) < tolerance, name
    of_passes = [dict(macros) for name, macros in sources.compiled if name in ("forward.cu", "backward.cu")]
    assert len(of_passes) == 2
    assert all(macros["COPIED"] for macros in of_passes)
    return found, of_passes


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("place", PLACES)
def test_every_place(sources, placed, place, numbers):
    placed(place)
    changes, tolerance = NUMBERS[numbers]
    check(sources, PROBLEM.replace(**changes), tolerance)


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("own memory", {"bidirectional": True, "layout": Layout.DEVICE_LENGTHS}),
        ("memory of sums", {"hidden_size": 109, "layout": Layout.DEVICE_LENGTHS, "time": 9}),
        ("both, used again", {"hidden_size": 109, "resets": True, "batch": 70}),
    ],
    ids=str,
)
def test_odd_sizes_and_rows_that_end(sources, placed, place, options):
    placed(place)
    check(sources, PROBLEM.replace(**options), 5e-2)


@pytest.mark.parametrize("place", PLACES)
def test_groups_of_rows_in_turn(monkeypatch, placed, place):
    """No copy that the last step of a group begins, for a step that it does not have, arrives in the next group."""
    few = DEVICE.replace(multiprocessors=8)
    sources = launch_on_cpu(monkeypatch, few)
    placed(place)
    problem = PROBLEM.replace(time=3, batch=150, hidden_size=64)
    _, of_passes = check(sources, problem, 5e-2)
    for macros in of_passes:
        blocks = -(-64 // (macros["UNITS"] * macros.get("SPLIT", 1)))
        assert few.multiprocessors // blocks * macros["ROWS"] < 150


@pytest.mark.parametrize("numbers", NUMBERS)
def test_the_same_bits_as_with_loads_to_registers(monkeypatch, sources, placed, numbers):
    placed("both, used again")
    problem = PROBLEM.replace(**NUMBERS[numbers][0])
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs)
    copied = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    monkeypatch.setattr(compiled, "copied_loads_of", lambda cut, device: None)
    compiled.launch_of.cache_clear()
    loaded = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    of_passes = [dict(macros) for _, macros in sources.compiled if "SPANS" in dict(macros)]
    assert {"COPIED" in macros for macros in of_passes} == {True, False}
    assert all(torch.equal(copied[name], value) for name, value in loaded.items())


@pytest.mark.parametrize("place", PLACES)
def test_values_that_are_missing_are_polled(sources, placed, place):
    """A block that is slower than others stores its values long after others have begun to copy them."""
    placed(place)
    found, _ = check(sources, PROBLEM, 5e-2)
    sources.slow = 1
    late, _ = check(sources, PROBLEM, 5e-2)
    assert all(torch.equal(late[name], value) for name, value in found.items())


def test_a_row_that_needs_another_scale(sources, placed):
    """The product is repeated, with new copies where it stored sums."""
    placed("memory of sums")
    problem = PROBLEM.replace(dtype=torch.float32, allow_tf32=True)
    inputs = testing.make_inputs(problem)
    h0 = inputs.h0.clone()
    h0[:, ::3] *= 1e-12
    check(sources, problem, 5e-3, h0=h0)


@functools.cache
def every_tiling():
    sizes = [(size, batch) for size in (96, 512, 650, 1024, 1150, 1500) for batch in (8, 20, 64, 256)]
    asked = [(*size, 1, H200, backward, value) for size in sizes for backward in (False, True) for value in (2, 4)]
    return [cut for one in asked for cut in tilings.candidates(*one)]


def test_more_is_in_flight_than_in_registers():
    found = [(cut, copied_loads.copied_loads_of(cut, H200)) for cut in every_tiling()]
    assert sum(own is None for _, own in found) > 100
    for cut, own in found:
        if own is not None:
            assert own.polls * own.chunk > cut.ahead * cut.chunk
            assert cut.shared_bytes + own.spare_bytes <= tilings.shared_memory(H200)


def test_sums_overwrite_no_copies_in_use():
    """What copied_loads.cuh asserts, for all tilings."""
    places = set()
    for cut in every_tiling():
        own = copied_loads.copied_loads_of(cut, H200)
        if own is None:
            continue
        item_bytes, eights = own.chunk * 512, cut.rows // 8
        of_eight, sum_bytes = -(-cut.spans // own.chunk), 32 * (16 * cut.tiles + 4)
        assert own.polls <= eights * of_eight <= own.polls + own.spare
        for item in range(own.spare, own.polls):
            begin = eights * sum_bytes - (own.polls - item) * item_bytes
            stored = item // of_eight  # groups of eight rows whose sums are stored before the item has been multiplied
            assert begin >= stored * sum_bytes
        places |= {name for name, holds in PLACES.items() if holds(own)}
    assert places == set(PLACES)


def test_no_copies_where_registers_have_room():
    assert copied_loads.copied_loads_of(tilings.tiling(256, 16, 1, H200, False), H200) is None
    assert copied_loads.copied_loads_of(tilings.tiling(1024, 64, 1, H200, False), H200) is not None
    assert copied_loads.copied_loads_of(tilings.tiling(512, 64, 1, H200, True, 4, True), H200) is None
