"""The choice of a tiling is arithmetic: every choice must fit the device it is made for."""

import math

import pytest

from gatewise.contract.device import Device
from gatewise.kernels.persistent.plan import candidates, fits, multiprocessors, shared_memory, tiling

DEVICES = [Device.named(name) for name in ("h200", "b200", "a100", "rtx4090", "a10", "l4")]
SIZES = (1, 3, 31, 128, 200, 256, 512, 650, 768, 1024, 1150, 1500, 2048)
BATCHES = (1, 7, 64, 300)


@pytest.mark.parametrize("value_bytes", [2, 4], ids=["16-bit", "float32"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_every_choice_is_resident_and_covers_the_problem(device, backward, value_bytes):
    for hidden in SIZES:
        for batch in BATCHES:
            cut = tiling(hidden, batch, 2, device, backward, value_bytes)
            if cut is None:
                continue
            blocks = math.prod(cut.grid)
            assert blocks <= multiprocessors(device, cut.split) <= device.multiprocessors
            assert cut.shared_bytes <= shared_memory(device)
            assert cut.blocks % cut.split == 0
            assert cut.blocks * cut.units >= hidden
            assert cut.groups * cut.rows >= batch
            assert cut.spans * cut.warps * 64 >= cut.depth * value_bytes
            assert 1 <= cut.resident <= cut.tiles
            assert fits(cut, device)


def test_clusters_are_for_devices_that_have_them():
    assert all(cut.split == 1 for cut in candidates(1024, 64, 1, Device.named("a100"), True))
    assert any(cut.split > 1 for cut in candidates(1024, 64, 1, Device.named("h200"), True))


def test_largest_models_of_the_grid_fit_on_an_h200():
    for hidden in (1500, 2048):
        assert tiling(hidden, 20, 1, Device.named("h200"), False) is not None
        assert tiling(hidden, 20, 1, Device.named("h200"), True) is not None


def test_weights_beyond_the_chip_have_no_tiling():
    assert tiling(4096, 1, 1, Device.named("h200"), False) is None


def test_no_multiprocessors_no_tiling():
    assert tiling(512, 8, 1, Device.named("h200").replace(multiprocessors=4), False) is None


def test_both_directions_run_beside_each_other_where_there_is_room():
    cut = tiling(256, 64, 2, Device.named("h200"), False)
    assert cut.directions == 2
    alone = tiling(256, 64, 1, Device.named("h200"), False)
    assert cut.step_seconds() < 1.5 * alone.step_seconds()


def test_batch_is_bucketed():
    """Neighbouring batches share their machine code: it depends on the rows of a group, not on the batch."""
    device = Device.named("h200")
    codes = {
        tuple(tiling(512, batch, 1, device, False).macros(float16=False, ragged=False).items())
        for batch in range(1, 129)
    }
    assert len(codes) <= 12
