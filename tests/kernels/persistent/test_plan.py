"""The choice of a tiling is arithmetic: every choice must fit the device it is made for."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.contract.ranking import weights
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.launches.compiled import backward_launch, forward_launch
from gatewise.kernels.persistent.sizes.tiling_choice import (
    candidates,
    clusters,
    fits,
    multiprocessors,
    shared_memory,
    stacked_tiling,
    tiling,
)
from gatewise.selection import points
from tests.pairwise import each_value, exhaustive_unless

DEVICES = [Device.named(name) for name in ("h200", "b200", "a100", "rtx4090", "a10", "l4")]
SIZES = (1, 3, 31, 128, 200, 256, 512, 650, 768, 1024, 1150, 1500, 2048)
BATCHES = (1, 7, 64, 300)
H200 = Device.named("h200")
RANKINGS = Path(points.__file__).parent / "rates/rankings/nvidia-h200.jsonl"


@pytest.mark.parametrize(
    ("value_bytes", "exact"),
    [(2, False), *exhaustive_unless([], [(4, False)]), (4, True)],
    ids=["16-bit", "TF32", "exact"],
)
@pytest.mark.parametrize(
    ("backward", "device"),
    each_value([*itertools.product([False, True], DEVICES)]),
    ids=lambda own: getattr(own, "name", str(own)),
)
def test_every_choice_is_resident_and_covers_the_problem(device, backward, value_bytes, exact):
    # Every third pair of sizes, and others on the next device.
    for hidden, batch in list(itertools.product(SIZES, BATCHES))[DEVICES.index(device) % 3 :: 3]:
        cut = tiling(hidden, batch, 2, device, backward, value_bytes, exact)
        if cut is None:
            continue
        blocks = math.prod(cut.grid)
        if cut.distributed:
            assert cut.together * cut.directions <= clusters(device, cut.blocks) * cut.resident_blocks
            assert blocks <= device.multiprocessors * cut.resident_blocks
        else:
            assert blocks <= multiprocessors(device, cut.split) <= device.multiprocessors
        assert cut.shared_bytes <= shared_memory(device)
        assert cut.blocks % cut.split == 0
        assert cut.blocks * cut.units >= hidden
        assert cut.groups * cut.rows >= batch
        assert cut.spans * cut.warps * 64 >= cut.depth * value_bytes
        assert 1 <= cut.resident <= cut.tiles
        assert fits(cut, device)


@pytest.mark.parametrize("value_bytes", [2, 4])
def test_rows_of_exchanged_states_are_whole_loads_unless_they_are_short(value_bytes):
    for hidden in (8, 120, 200, 264, 512, 650, 1000, 1500):
        cut = tiling(hidden, 20, 1, H200, False, value_bytes)
        assert cut is not None
        if cut.distributed or cut.hidden * value_bytes < 512:
            assert cut.row_width == cut.hidden
        else:
            assert cut.row_width * value_bytes % 64 == 0
            assert 0 <= (cut.row_width - cut.hidden) * value_bytes < 64


@pytest.mark.parametrize(
    ("dtype", "allow_tf32"),
    [(torch.bfloat16, True), (torch.float32, True), (torch.float32, False)],
    ids=["16-bit", "TF32", "exact"],
)
def test_every_launch_pauses_as_long_as_the_rankings_say(dtype, allow_tf32):
    for size, batch in itertools.product([264, 512, 768, 1024, 1100], [1, 8, 20, 64]):
        problem = Problem(50, batch, size, size, dtype=dtype, allow_tf32=allow_tf32, needs_grad=True)
        for make in (forward_launch, backward_launch):
            launch = make(problem, batch, 1, False, H200)
            cut, macros = launch.tiling, dict(launch.source[2])
            if cut.warpgroups:
                assert "PAUSE" not in macros
                continue
            rows = " of a shared depth" if not cut.backward and cut.split > 1 else ""
            rows = " interleaved" if "INTERLEAVED" in macros else rows
            sizes = cut.rows, cut.blocks, math.prod(cut.grid)
            pauses = weights(H200, f"persistent pauses {cut.kind}{rows}")
            fitting = [
                pause
                for limits, pause in pauses.items()
                if all(own <= float(limit) for own, limit in zip(sizes, limits.split(" x "), strict=True))
            ]
            assert macros["PAUSE"] == fitting[0]


def test_the_last_pause_of_a_ranking_is_that_of_all_other_tilings():
    rankings = [json.loads(line) for line in RANKINGS.read_text("utf-8").splitlines()]
    found = [own["weights"] for own in rankings if own["ranking"].startswith("persistent pauses")]
    assert len(found) == 11
    for pauses in found:
        assert [*pauses][-1] == "inf x inf x inf"
        limits = [tuple(map(float, most.split(" x "))) for most in pauses]
        for index, earlier in enumerate(limits):  # or else a later one would never be reached
            later = limits[index + 1 :]
            assert not any(all(a <= b for a, b in zip(own, earlier, strict=True)) for own in later)


@pytest.mark.parametrize(("value_bytes", "exact"), [(2, False), (4, False), (4, True)], ids=["16-bit", "TF32", "exact"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_the_choice_has_the_fewest_clock_cycles_of_all_that_fit(backward, value_bytes, exact):
    """The choice does not make each tiling that it compares."""
    device, number = Device.named("h200"), (value_bytes, exact)
    for hidden, batch in ((200, 20), (264, 3000), (512, 100), (650, 1)):
        found = [cut for beside in (1, 2) for cut in candidates(hidden, batch, beside, device, backward, *number)]
        least = min(found, key=lambda cut: cut.step_clocks(device) * 2 / cut.directions)
        assert tiling(hidden, batch, 2, device, backward, *number) == least
        found = candidates(hidden, batch, 3, device, backward, *number, several=False)
        found = [cut for cut in found if not (cut.warpgroups or cut.distributed) and (backward or cut.split == 1)]
        least = min(found, key=lambda cut: cut.step_clocks(device), default=None)
        chosen = stacked_tiling(hidden, batch, device, backward, *number)
        assert chosen == (least and least.replace(stacked=True))


@pytest.mark.parametrize(
    ("value_bytes", "exact"),
    [(2, False), *exhaustive_unless([], [(4, False), (4, True)])],
    ids=["16-bit", "TF32", "exact"],
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_two_layers_and_what_is_between_them_are_resident(backward, value_bytes, exact):
    device = Device.named("h200")
    for hidden in (1, 31, 128, 256, 512, 650):
        for batch in BATCHES:
            cut = stacked_tiling(hidden, batch, device, backward, value_bytes, exact)
            assert cut.grid == (cut.blocks, cut.together, 3)
            assert math.prod(cut.grid) <= multiprocessors(device, cut.split)
            assert fits(cut, device)
            assert cut.macros(torch.bfloat16, ragged=False)["STACKED"] == 1
    assert stacked_tiling(2048, 20, device, backward, value_bytes, exact) is None


def test_clusters_are_for_devices_that_have_them():
    assert all(cut.split == 1 for cut in candidates(1024, 64, 1, Device.named("a100"), True))
    assert any(cut.split > 1 for cut in candidates(1024, 64, 1, Device.named("h200"), True))


def test_largest_models_of_the_grid_fit_on_an_h200():
    for hidden in (1500, 2048):
        assert tiling(hidden, 20, 1, Device.named("h200"), False) is not None
        assert tiling(hidden, 20, 1, Device.named("h200"), True) is not None


def test_weights_rounded_to_tf32_take_the_room_of_16_bits():
    device = Device.named("h200")
    assert tiling(2000, 20, 1, device, True, 4) is not None
    assert tiling(2000, 20, 1, device, True, 4, exact=True) is None
    rounded, half = (
        next(cut for cut in candidates(512, 64, 1, device, False, value_bytes) if cut.resident == cut.tiles == 4)
        for value_bytes in (4, 2)
    )
    assert (rounded.units, rounded.warps) == (half.units, half.warps)
    assert rounded.weight_registers == half.weight_registers
    assert rounded.spans == 2 * half.spans  # what they are multiplied with comes in 32 bits


def test_weights_rounded_to_tf32_leave_registers_where_loads_can_take_them():
    found = candidates(1024, 64, 1, Device.named("h200"), False, 4)
    cuts = [cut for cut in found if (cut.units, cut.rows, cut.warps, cut.eights) == (16, 32, 8, 1)]
    loads = {cut.resident: cut.chunk * cut.ahead for cut in cuts}
    assert len(loads) > 1
    assert loads[min(loads)] > loads[max(loads)]


def test_weights_beyond_the_chip_have_no_tiling():
    assert tiling(4096, 1, 1, Device.named("h200"), False) is None


def test_no_multiprocessors_no_tiling():
    assert tiling(512, 8, 1, Device.named("h200").replace(multiprocessors=4), False) is None


def test_both_directions_run_beside_each_other_where_there_is_room():
    cut = tiling(256, 64, 2, Device.named("h200"), False)
    assert cut.directions == 2
    alone = tiling(256, 64, 1, Device.named("h200"), False)
    assert cut.step_clocks(Device.named("h200")) < 1.5 * alone.step_clocks(Device.named("h200"))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_one_row_is_multiplied_without_tensor_cores_where_products_are_exact(backward):
    device = Device.named("h200")
    alone = tiling(1024, 1, 1, device, backward, 4, exact=True)
    assert alone.one_row
    assert alone.macros(torch.bfloat16, ragged=False)["ONE_ROW"] == 1
    assert alone.step_clocks(device) < tiling(1024, 2, 1, device, backward, 4, exact=True).step_clocks(device)
    for batch, value_bytes, exact in ((2, 4, True), (1, 4, False), (1, 2, False)):
        assert not tiling(1024, batch, 1, device, backward, value_bytes, exact).one_row


@pytest.mark.parametrize("needs_grad", [False, True], ids=["inference", "training"])
def test_what_is_accepted_has_a_tiling_for_any_batch(needs_grad):
    """One row by itself takes less room where products are exact: what fits for it alone is refused."""
    device = Device.named("h200")
    criteria = [criterion for criterion in persistent.criteria() if criterion.quantity == "hidden_size"]
    accepted = []
    for size in range(1024, 2048, 64):
        for batch in (1, 20):
            problem = Problem(9, batch, 8, size, dtype=torch.float32, needs_grad=needs_grad)
            accepted.append(all(criterion.holds(problem, device) for criterion in criteria))
            if accepted[-1]:
                for backward in {False, needs_grad}:
                    assert tiling(size, batch, 1, device, backward, 4, exact=True) is not None
    assert any(accepted)
    assert not all(accepted)


def test_batch_is_bucketed():
    """Neighbouring batches share their machine code: it depends on the rows of a group, not on the batch."""
    device = Device.named("h200")
    codes = {
        tuple(tiling(512, batch, 1, device, False).macros(torch.bfloat16, ragged=False).items())
        for batch in range(1, 129)
    }
    assert len(codes) <= 12
