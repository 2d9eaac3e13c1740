"""Settings are drawn from every option, reproducibly."""

import dataclasses
import random

import pytest

from gatewise.testing.trials import Setting, draw

KERNELS = ["persistent", "cudnn", "stepwise", "aten", "eager"]
DTYPES = ["bfloat16", "float16", "float32", "float64"]


def drawn(count, seed=0, device="cuda"):
    generator = random.Random(seed)
    return [draw(generator, device, KERNELS, DTYPES) for _ in range(count)]


def test_the_same_seed_gives_the_same_settings():
    assert drawn(50) == drawn(50)
    assert drawn(50) != drawn(50, seed=1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_option_differs_from_its_default_in_some_setting(device):
    fields = [field for field in dataclasses.fields(Setting) if field.name not in ("device", "allow_tf32")]
    found = drawn(600, device=device)
    assert [own.name for own in fields if all(getattr(one, own.name) == own.default for one in found)] == []


def test_sizes_have_every_residue_of_16():
    found = drawn(800)
    for name in ("time", "batch", "input_size", "hidden_size"):
        assert {getattr(one, name) % 16 for one in found} == set(range(16)), name


def test_sizes_reach_their_limits():
    found = drawn(3000)
    assert max(one.time for one in found) > 1000
    assert max(one.batch for one in found) > 400
    assert max(one.hidden_size for one in found) > 1300


@pytest.mark.parametrize("mode", ["eager", "explicit", "inference", "no_grad", "graph", "compile", "ddp", "stream"])
def test_every_mode_is_drawn_with_every_kernel(mode):
    assert {one.kernel for one in drawn(6000) if one.mode == mode} >= {"auto", "persistent", "eager"}


def test_a_setting_is_written_as_python_reads_it():
    for one in drawn(50):
        assert eval(str(one), {"Setting": Setting}) == one
