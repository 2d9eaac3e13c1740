"""Options that cells refuse when they are made."""

import itertools
import math
import re

import numpy as np
import pytest
import torch

from gatewise.cells import RNN, LayerNormGRU, LayerNormLSTM, cell_named
from tests.pairwise import each_value

WRONG_NUMBERS = ["1", None, math.nan, math.inf, True, torch.tensor(1.0), 1j]


@pytest.mark.parametrize(
    ("value", "cell"),
    each_value([*itertools.product([*WRONG_NUMBERS, 0, -1e-5], [LayerNormLSTM, LayerNormGRU])]),
    ids=repr,
)
def test_eps_is_a_positive_number(cell, value):
    if cell is LayerNormGRU and value is None:
        return  # the default
    with pytest.raises(ValueError, match=re.escape(f"`eps` must be a positive number, got {value!r}.")):
        cell(eps=value)


@pytest.mark.parametrize("value", WRONG_NUMBERS, ids=repr)
@pytest.mark.parametrize(
    ("cell", "option"), [(LayerNormLSTM, "forget_bias"), (LayerNormLSTM, "gain_offset"), (LayerNormGRU, "update_bias")]
)
def test_what_is_added_is_a_number(cell, option, value):
    if cell is LayerNormGRU and value is None:
        return
    with pytest.raises(ValueError, match=re.escape(f"`{option}` must be a finite number, got {value!r}.")):
        cell(**{option: value})


@pytest.mark.parametrize("value", ["1", math.nan, math.inf, True, 0, -1.0], ids=repr)
def test_clip_is_a_positive_number_or_none(value):
    with pytest.raises(ValueError, match=re.escape(f"`clip` must be a positive number or None, got {value!r}.")):
        LayerNormLSTM(clip=value)


@pytest.mark.parametrize("value", ["yes", 1, None], ids=repr)
@pytest.mark.parametrize(
    ("cell", "option"),
    [(LayerNormLSTM, "hidden"), (LayerNormLSTM, "shift"), (LayerNormLSTM, "bias"), (LayerNormGRU, "centered")],
)
def test_flags_are_true_or_false(cell, option, value):
    with pytest.raises(ValueError, match=f"`{option}` must be True or False, got {value!r}"):
        cell(**{option: value})


@pytest.mark.parametrize("value", ["other", None, ["tanh"], {}], ids=repr)
@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda value: LayerNormLSTM(gates=value), "gates"),
        (lambda value: LayerNormLSTM(cell=value), "cell"),
        (lambda value: LayerNormLSTM.of(value), "form"),
        (lambda value: LayerNormGRU(gates=value), "gates"),
        (lambda value: RNN(value), "nonlinearity"),
    ],
)
def test_words_are_known(make, option, value):
    with pytest.raises(ValueError, match=re.escape(f"`{option}` must be ")) as raised:
        make(value)
    assert str(raised.value).endswith(f", got {value!r}.")


def test_numbers_of_numpy_are_numbers():
    cell = LayerNormLSTM(eps=np.float64(1e-3), clip=np.float32(2), forget_bias=np.int64(1))
    assert cell == LayerNormLSTM(eps=1e-3, clip=2.0, forget_bias=1.0) == cell_named(cell.name)
