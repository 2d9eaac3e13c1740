"""Random numbers that a training step draws on the CPU.

A replay runs no Python code, so that such a number, a coin for example, would be that of the capture in every replay.
Generators of a GPU are not among those here: replays draw new numbers from them.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from gatewise.nn.step_variables import variables


class _Generator(NamedTuple):
    """A random number generator on the CPU.

    Attributes:
        where: Where it draws, in words.
        state: A function that returns its state.
        restore: A function that sets its state.
    """

    where: str
    state: Callable[[], Any]
    restore: Callable[[Any], object]


_GLOBAL = (
    _Generator("in Python", random.getstate, random.setstate),
    _Generator("from PyTorch's generator of the CPU", torch.get_rng_state, torch.set_rng_state),
)


def _of_numpy_is_used() -> bool:
    # NumPy loads the module when its name is first used.
    return "numpy.random" in sys.modules


@contextlib.contextmanager
def without_random_numbers(step: Callable[..., Any], modules: Sequence[nn.Module]) -> Iterator[None]:
    """Raise an error if the block draws random numbers on the CPU, which a graph would contain; draw them anew then.

    Args:
        step: The step that runs in the block, whose variables may hold generators.
        modules: All modules, whose attributes may.
    """
    held = [_held(place.name, place.value()) for place in variables(step, modules)]
    generators = [*_GLOBAL, *filter(None, held)]
    if _of_numpy_is_used():
        numpys = _Generator("from NumPy's generator", lambda: np.random.get_state(legacy=False), np.random.set_state)
        generators.append(numpys)
    before = [each.state() for each in generators]
    try:
        yield
        for each, state in zip(generators, before, strict=True):
            if not _equal(each.state(), state):
                advice = "draw them outside, and pass them as arguments"
                raise RuntimeError(f"the step draws random numbers {each.where}, which replays would not do; {advice}")
    except BaseException:
        for each, state in zip(generators, before, strict=True):
            each.restore(state)
        raise


def _held(name: str, value: Any) -> _Generator | None:
    where = f"from `{name}`"
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # which has no state
        return _Generator(where, value.getstate, value.setstate)
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return _Generator(where, value.get_state, value.set_state)
    if not _of_numpy_is_used():
        return None
    if isinstance(value, np.random.RandomState):
        return _Generator(where, lambda: value.get_state(legacy=False), value.set_state)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return _Generator(where, lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None


def _equal(state: Any, other: Any) -> bool:
    parts, others = pytree.tree_leaves(state), pytree.tree_leaves(other)
    return len(parts) == len(others) and all(map(np.array_equal, parts, others))
