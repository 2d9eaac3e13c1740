"""Scratch memory of a call: what is alive at its peak besides inputs, outputs, gradients and what is kept."""

from __future__ import annotations

import functools

import torch

from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.plan import hidden_of
from gatewise.kernels.persistent.segments import longest

_MOST_LAID_OUT = 1 << 28  # bytes of the gates of all layers


@functools.lru_cache(maxsize=4096)
def is_laid_out(problem: Problem) -> bool:
    """Whether a call takes all its memory before its first launch, so that it can be replayed.

    In large calls the device has more to do than the CPU, and scratch memory is better given back early.
    """
    if problem.traced or problem.proj_size or (problem.lean and problem.needs_grad):
        return False
    gates = 4 * problem.num_layers * problem.time * problem.batch * _width(problem)
    return gates * problem.element_bytes <= _MOST_LAID_OUT


def keeps_matrices(problem: Problem) -> bool:
    """Whether input weights that were rounded up for the forward pass are kept for the backward pass.

    In 16 bits only: in float32 they would take a step's memory beyond what it is to be.
    """
    if not problem.needs_grad or problem.lean or problem.proj_size:
        return False
    return _is_odd(problem) and problem.element_bytes == 2


def workspace_bytes(problem: Problem) -> int:
    """Return the bytes of scratch memory at the peak of a call."""
    if is_laid_out(problem):
        return (
            _laid_out_backward(problem) if problem.needs_grad else _laid_out_forward(problem)
        ) * problem.element_bytes
    if not problem.needs_grad:
        return _inference(problem) * problem.element_bytes
    return (_lean(problem) if problem.lean else _training(problem)) * problem.element_bytes


def _laid_out_forward(problem: Problem) -> int:
    # As `whole.forward` takes it: the output of one layer below, then what each layer takes in turn.
    tokens, width, odd = problem.time * problem.batch, _width(problem), _is_odd(problem)
    # In float32 the initial state is copied without NaNs that rounding would change.
    state = problem.batch * width * (odd + (problem.dtype == torch.float32))
    below = tokens * problem.output_size * (problem.num_layers > 1)
    layers = [
        4 * tokens * width
        + tokens * features * (problem.dropout > 0)
        + _widened(tokens, features)
        + max(_matrix(problem, features), tokens * width * odd + state)
        for features in _inputs(problem)
    ]
    return below + max(layers) + _masks(problem)


def _laid_out_backward(problem: Problem) -> int:
    # As `whole.backward` takes it: gradients between two layers, then what each layer takes in turn.
    tokens, width, odd = problem.time * problem.batch, _width(problem), _is_odd(problem)
    hidden, size = hidden_of(problem.hidden_size), problem.hidden_size
    between = tokens * problem.output_size * min(2, problem.num_layers - 1)
    history = tokens * size + odd * hidden * (tokens + 4 * hidden)
    layers = [
        4 * tokens * width
        + tokens * features * ((problem.dropout > 0) + _is_ragged(problem))
        + _widened(tokens, features)
        + max(_matrix(problem, features), history)
        for features in _inputs(problem)
    ]
    return between + max(layers) + _masks(problem)


def _masks(problem: Problem) -> int:
    # A byte a value.
    values = (problem.num_layers - 1) * problem.time * problem.batch * problem.output_size
    return values // problem.element_bytes * (problem.dropout > 0)


def _inputs(problem: Problem) -> set[int]:
    return {problem.layer_input_size(layer) for layer in range(problem.num_layers)}


def _widened(rows: int, columns: int) -> int:
    return rows * hidden_of(columns) * (columns % 8 > 0)


def _matrix(problem: Problem, features: int) -> int:
    odd = _is_odd(problem) or features % 8 > 0
    return 4 * hidden_of(problem.hidden_size) * hidden_of(features) * odd


def _inference(problem: Problem) -> int:
    tokens, width = problem.time * problem.batch, _width(problem)
    gates = 4 * tokens * width + tokens * _widened_input(problem)
    below = tokens * problem.output_size if problem.num_layers > 1 else 0
    # Fitted weights are gone before the outputs come, whose own memory is counted elsewhere.
    outputs = tokens * width if _is_odd(problem) else 0
    return gates + below + max(outputs, _fitted_matrix(problem) - tokens * problem.output_size) + _dropped(problem)


def _training(problem: Problem) -> int:
    # The peak is in the backward pass, where the gradients of the recurrent weights are made.
    tokens, width = problem.time * problem.batch, _width(problem)
    dgates = 4 * tokens * width
    history = tokens * problem.output_size + (tokens * hidden_of(problem.hidden_size) if _is_odd(problem) else 0)
    inputs = tokens * (_largest_input(problem) if _is_ragged(problem) else _widened_input(problem))
    return dgates + history + inputs + _from_above(problem, tokens) + _fitted_matrix(problem) + _dropped(problem)


def _lean(problem: Problem) -> int:
    # One segment's share of what a whole sequence takes otherwise; fitted weights and their gradients for all of them.
    tokens, width = longest(problem.time) * problem.batch, _width(problem)
    gates = 2 * 4 * tokens * width
    ragged, odd, hidden = _is_ragged(problem), _is_odd(problem), hidden_of(problem.hidden_size)
    history = tokens * (hidden * odd + (problem.hidden_size if ragged and problem.bidirectional else 0))
    inputs = tokens * (_largest_input(problem) if ragged else _widened_input(problem))
    matrices = problem.num_directions * 4 * hidden * (hidden_of(_largest_input(problem)) + hidden) if odd else 0
    scratch = gates + history + inputs + 2 * matrices
    return scratch + _from_above(problem, problem.time * problem.batch) + _dropped(problem)


def _from_above(problem: Problem, tokens: int) -> int:
    # The gradient of a layer's output, and a copy without what was rounded up.
    if problem.num_layers == 1:
        return 0
    whole = problem.time * problem.batch * hidden_of(problem.output_size)
    return whole + (tokens * problem.output_size if problem.output_size % 8 else 0)


def _dropped(problem: Problem) -> int:
    # Masks, and the outputs of a layer times one of them.
    outputs = problem.time * problem.batch * problem.output_size
    return _masks(problem) + 2 * outputs * (problem.dropout > 0)


def _width(problem: Problem) -> int:
    return problem.num_directions * hidden_of(problem.hidden_size)


def _largest_input(problem: Problem) -> int:
    return max(_inputs(problem))


def _widened_input(problem: Problem) -> int:
    return max((hidden_of(size) for size in _inputs(problem) if size % 8), default=0)


def _fitted_matrix(problem: Problem) -> int:
    hidden, features = hidden_of(problem.hidden_size), hidden_of(_largest_input(problem))
    return 4 * hidden * max(hidden, features) if _is_odd(problem) or _widened_input(problem) else 0


def _is_odd(problem: Problem) -> bool:
    return problem.hidden_size % 8 > 0


def _is_ragged(problem: Problem) -> bool:
    return problem.layout is not Layout.DENSE
