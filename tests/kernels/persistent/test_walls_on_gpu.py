"""Weights, inputs and states between walls of NaN: nothing beyond them is read, in any tiling."""

import pytest
import torch

from gatewise.contract.device import Device
from gatewise.kernels.persistent.sizes import tiling_choice
from gatewise.testing.trials import Setting, trial

NUMBERS = ("bfloat16", "float16", "float32", "exact")
# The units of a block divide some of them, but not the sizes that they are rounded up to; nothing divides the others.
SIZES = (3, 20, 31, 36, 60, 100, 156, 220, 300, 333, 420, 540, 580, 651, 660, 820, 1060, 1100, 1300, 1499, 1500)


def test_the_sizes_have_blocks_whose_units_are_not_all_the_layers():
    device = Device.named("h200")
    cuts = [(size, tiling_choice.tiling(size, 20, 1, device, False)) for size in SIZES if size > 500]
    assert sum(cut is not None and size % cut.units == 0 and size % 8 > 0 for size, cut in cuts) >= 2


def sizes_that_fit(number, device):
    number_of_bytes, exact = 4 if number in ("float32", "exact") else 2, number == "exact"

    def fits(size, backward):
        return tiling_choice.tiling(size, 20, 1, device, backward, number_of_bytes, exact) is not None

    return [size for size in SIZES if fits(size, False) and fits(size, True)]


def test_weights_of_nearly_all_sizes_fit_on_a_chip():
    assert [sizes_that_fit(number, Device.named("h200")) for number in NUMBERS[:3]] == [list(SIZES)] * 3
    assert set(SIZES) - set(sizes_that_fit("exact", Device.named("h200"))) == {1499, 1500}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_nothing_beyond_a_tensor_is_read(number):
    dtype = "float32" if number == "exact" else number
    for hidden in sizes_that_fit(number, Device.probe(torch.device("cuda"))):
        trial(
            Setting(
                time=3,
                batch=20,
                input_size=7,
                hidden_size=hidden,
                dtype=dtype,
                allow_tf32=number == "float32",
                device="cuda",
                kernel="persistent",
                states="given",
                weights="walls",
                above="y h c",
                calls=1,
                seed=hidden,
            )
        )
    torch.cuda.synchronize()
