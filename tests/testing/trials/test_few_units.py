"""Layer normalization over one, two or three units, which multiplies errors up to 1 / sqrt(eps), is judged fairly."""

import itertools
import random

import pytest
import torch

from gatewise.cells import LayerNormGRU, LayerNormLSTM
from gatewise.kernels.eager import eager
from gatewise.testing.trials import Setting, Wrong, trial
from tests.pairwise import each_value, pairwise

CELLS = {cell.name: cell for cell in (LayerNormLSTM(), LayerNormGRU())}
SEEDS = [range(3), pytest.param(range(3, 300), marks=pytest.mark.exhaustive)]
FORMATS = ["float32", "float64"]


def drawn(seed, units, dtype, **options):
    generator = random.Random(seed)
    layers = generator.choice([1, 1, 2])
    return Setting(
        time=generator.randint(1, 6),
        batch=generator.randint(1, 5),
        input_size=generator.randint(1, 5),
        hidden_size=units,
        num_layers=layers,
        bidirectional=generator.random() < 0.3,
        kernel="eager",
        states=generator.choice(["none", "learned"]),
        above=generator.choice(["y", "h", "h c", "y h c"]) if options.get("cell") != "layer_norm_gru" else "y h",
        calls=1,
        seed=seed,
        dtype=dtype,
        **options,
    )


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize(("cell", "units", "dtype"), each_value([*itertools.product(CELLS, [1, 2, 3], FORMATS)]))
def test_the_kernel_is_within_its_budgets(cell, units, dtype, seeds):
    for seed in seeds:
        trial(drawn(seed, units, dtype, cell=cell))


def share_wrong(settings):
    found = 0
    for setting in settings:
        try:
            trial(setting)
        except Wrong:
            found += 1
    return found / len(settings)


@pytest.mark.parametrize(("cell", "units", "dtype"), each_value(pairwise([*CELLS], [1, 2, 3], FORMATS), most=1))
def test_another_epsilon_is_wrong(monkeypatch, passes_alone, cell, units, dtype):
    forward, backward = type(eager).forward, type(eager).backward
    other = type(CELLS[cell])(eps=1e-6)
    monkeypatch.setattr(
        type(eager), "forward", lambda self, problem, *given: forward(self, problem.replace(cell=other), *given)
    )
    monkeypatch.setattr(
        type(eager), "backward", lambda self, problem, *given: backward(self, problem.replace(cell=other), *given)
    )
    assert share_wrong([drawn(seed, units, dtype, cell=cell) for seed in range(2)]) > 0.8


@pytest.mark.parametrize(("cell", "units", "dtype"), each_value(pairwise([*CELLS], [1, 2, 3], FORMATS), most=1))
def test_the_variance_of_a_sample_is_wrong(monkeypatch, passes_alone, cell, units, dtype):
    """Dividing by n - 1 rather than by n is the same as multiplying the gains by sqrt((n - 1) / n)."""
    forward = type(eager).forward
    names = list(CELLS[cell].parameters)
    together = (4 if cell == "layer_norm_lstm" else 3) * units

    def wrong(self, problem, inputs):
        weights, each = list(inputs.weights), problem.weights_per_direction
        for start in range(each - len(names), len(weights), each):
            for place, name in enumerate(names, start):
                if name.startswith("gain") and name != "gain_c":
                    weights[place] = weights[place] * ((together - 1) / together) ** 0.5
        return forward(self, problem, inputs._replace(weights=tuple(weights)))

    monkeypatch.setattr(type(eager), "forward", wrong)
    assert share_wrong([drawn(seed, units, dtype, cell=cell) for seed in range(2)]) > 0.8


def test_gradients_of_a_value_and_of_its_mean_are_added_first():
    """With one unit they cancel; otherwise they would round the other gradient of the value to their own size."""
    from gatewise.cells import standardized

    value = torch.tensor([[0.3]], dtype=torch.float64, requires_grad=True)
    above = torch.tensor([[0.7]], dtype=torch.float64)
    tiny = 1.1e-14
    (found,) = torch.autograd.grad(tiny * value + standardized(value), value, above)
    assert found.item() == tiny * above.item()
