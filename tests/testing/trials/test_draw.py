"""Settings are drawn from every option, reproducibly."""

import dataclasses
import functools
import random

import pytest
import torch

from gatewise.cells import SHIPPED, cell_named
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.contract.pytorch import LAYERS
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.sizes import half_operands
from gatewise.testing.trials import Setting, draw, sizes
from gatewise.testing.trials.draw import families

KERNELS = ["persistent", "cudnn", "stepwise", "aten", "eager"]
DTYPES = ["bfloat16", "float16", "float32", "float64"]


def drawn(count, seed=0, device="cuda"):
    generator = random.Random(seed)
    return [draw(generator, device, KERNELS, DTYPES, sizes(seed, device)) for _ in range(count)]


@functools.cache
def many():
    return drawn(4000)


def some(count, device):
    """Return the first settings of `many`, or as many for a CPU."""
    return many()[:count] if device == "cuda" else drawn(count, device=device)


def test_the_same_seed_gives_the_same_settings():
    assert drawn(50) == drawn(50)
    assert drawn(50) != drawn(50, seed=1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_option_differs_from_its_default_in_some_setting(device):
    fields = [field for field in dataclasses.fields(Setting) if field.name not in ("device", "allow_tf32")]
    found = some(600, device)
    assert [own.name for own in fields if all(getattr(one, own.name) == own.default for one in found)] == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sizes_have_every_residue_of_16(device):
    for each in sizes(3, device):
        assert {size % 16 for size in each} == set(range(16))
    assert {one.time % 16 for one in some(800, device)} == set(range(16))


def test_sizes_reach_their_limits():
    found = many()
    assert max(one.time for one in found) > 1000
    assert max(one.batch for one in found) > 300
    assert max(one.hidden_size for one in found) > 1000


@pytest.mark.parametrize("mode", ["eager", "explicit", "inference", "no_grad", "graph", "compile", "ddp", "stream"])
def test_every_mode_is_drawn_with_every_kernel(mode):
    assert {one.kernel for one in many() if one.mode == mode} >= {"auto", "persistent", "eager"}


def test_every_cell_is_drawn_with_every_kernel_that_accepts_it():
    found = {(one.cell, one.kernel) for one in many()}
    wanted = {(cell.name, kernel) for cell in SHIPPED for kernel in ("auto", "stepwise", "eager")}
    wanted |= {(cell.name, "persistent") for cell in SHIPPED}
    wanted |= {(layer.cell.name, kernel) for layer in LAYERS for kernel in ("cudnn", "aten")}
    assert wanted <= found


def test_resets_and_given_states_are_drawn_for_every_cell():
    found = many()
    for cell in SHIPPED:
        own = [one for one in found if one.cell == cell.name]
        assert {one.states for one in own} == {"none", "given", "learned"}, cell
        assert any(one.resets for one in own), cell


def test_a_setting_is_written_as_python_reads_it():
    for one in drawn(50):
        assert eval(str(one), {"Setting": Setting}) == one


def test_reversed_layers_have_one_direction_and_are_drawn_for_every_cell():
    found = [one for one in many() if one.reverse]
    assert {one.cell for one in found} == {cell.name for cell in SHIPPED}
    assert not any(one.bidirectional or one.packed or one.resets for one in found)
    assert {bool(one.lengths) for one in found} == {False, True}


@pytest.mark.parametrize("rate", ["weight_dropout", "recurrent_dropout", "candidate_dropout", "zoneout"])
def test_rates_are_drawn_with_every_kernel_that_accepts_them(rate):
    assert {one.kernel for one in many() if getattr(one, rate)} >= {"auto", "persistent", "stepwise", "eager"}


def test_cells_without_candidate_have_no_dropout_of_it():
    found = {one.cell for one in many() if one.candidate_dropout}
    assert {"lstm", "gru", "slstm"} <= found
    assert not {"rnn_tanh", "rnn_relu"} & found


def test_the_input_has_a_nan_in_some_settings_with_zoneout():
    assert {one.poison for one in many() if one.zoneout} == {"nowhere", "padding", "x"}


def test_settings_of_a_family_differ_in_what_no_kernel_is_compiled_for():
    (first, *_) = own = families(3, "cuda", KERNELS)
    assert own == families(3, "cuda", KERNELS) != families(4, "cuda", KERNELS)
    generator = random.Random(0)
    found = [draw(generator, "cuda", KERNELS, DTYPES, sizes(3, "cuda"), first) for _ in range(40)]
    shared = ("hidden_size", "batch", "bidirectional", "dtype", "kernel", "cell", "zoneout")
    assert all(getattr(one, name) == getattr(first, name) for one in found for name in shared)
    assert len({(one.time, one.input_size, one.seed) for one in found}) == len(found)
    assert len({one.mode for one in found}) > 3


def test_families_have_every_residue_of_16_and_every_cell():
    own = families(3, "cuda", KERNELS)
    assert {one.hidden_size % 16 for one in own} == {one.batch % 16 for one in own} == set(range(16))
    assert {one.cell for one in own} == {cell.name for cell in SHIPPED}
    assert not families(3, "cpu", KERNELS)


def test_cells_that_normalize_have_two_units_or_more():
    found = [one for one in many() if one.cell in ("layer_norm_lstm", "layer_norm_gru")]
    assert min(one.hidden_size for one in found) == 2
    assert min(one.hidden_size for one in many()) == 1


@functools.cache
def many_from_families():
    generator, own = random.Random(0), families(3, "cuda", KERNELS)
    return [draw(generator, "cuda", KERNELS, DTYPES, sizes(3, "cuda"), generator.choice(own)) for _ in range(3000)]


@pytest.mark.parametrize("found", [many, many_from_families])
def test_three_settings_of_ten_have_as_many_features_as_units(found):
    equal = sum(one.input_size == one.hidden_size for one in found()) / len(found())
    assert 0.25 < equal < 0.45  # with small sizes also by chance


def problem_of(setting):
    """Return the problem of a setting of an LSTM, GRU or RNN in float32, without masks."""
    sizes = setting.time, setting.batch, setting.input_size, setting.hidden_size
    options = {name: getattr(setting, name) for name in ("num_layers", "bidirectional", "proj_size", "allow_tf32")}
    cell = cell_named(setting.cell)
    return Problem(*sizes, **options, dtype=torch.float32, needs_grad=setting.training, cell=cell)


@pytest.fixture
def h200(monkeypatch):
    """Return an H200, with a version of PyTorch that has products of float16 factors with float32 results."""
    monkeypatch.setattr(half_operands, "widens", lambda: True)
    half_operands.uses_halves.cache_clear()
    yield Device.named("h200")
    half_operands.uses_halves.cache_clear()


def test_one_setting_of_twenty_has_float16_factors_in_the_persistent_kernel(h200):
    found = [one for one in many_from_families() if one.large_tf32]
    assert len(found) > 0.04 * len(many_from_families())
    halved, refused = [], []
    for one in found:
        problem = problem_of(one)
        halved += [one] if [*half_operands.layers(problem, h200)] else []
        refused += [one] if any(own.check(problem, h200) for own in persistent.criteria()) else []
    assert len(halved) > 0.9 * len(found)
    assert not refused
    for each in (
        [one for one in halved if one.bidirectional],
        [one for one in halved if one.proj_size],
        [one for one in halved if one.recurrent_dropout],
        [one for one in halved if one.resets],
        [one for one in halved if one.ragged],
        [one for one in halved if one.input_size != one.hidden_size],
    ):
        assert each
    assert {one.cell for one in halved} == {layer.cell.name for layer in LAYERS}
