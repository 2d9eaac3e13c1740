"""The launches of the persistent kernel as loops of plain torch on the CPU, through the addresses they are given."""

import contextlib
import ctypes
import math
import types

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gatewise import testing
from gatewise.contract.problem import Layout
from gatewise.kernels.cuda import driver, graphs
from gatewise.kernels.persistent import dry_run, launches, replay
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.sizes.padding import hidden_of
from gatewise.kernels.sums import SUMS
from tests.kernels.cell_code import carries_hidden, code_of
from tests.kernels.copies import copy_on_cpu

_TOGETHER = 2


def at(address, *shape):
    """Return the float64 values that begin at an address."""
    values = (ctypes.c_double * math.prod(shape)).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(values)).view(*shape)


class _Token:
    """Rows of a tensor with a value for each token, by step and batch row."""

    def __init__(self, address, tokens, width, row_width):
        self._address, self._tokens, self._width, self._row_width = address, tokens, width, row_width

    def __getitem__(self, place):
        step, row = place
        token = step * self._tokens.step + row * self._tokens.row
        return at(self._address + 8 * token * self._row_width, self._width)


def resized(matrix, rows, columns, groups=1, *, scratch=None, into=None):
    if into is None and matrix.shape == (groups * rows, columns):
        return matrix.contiguous()
    parts = matrix.reshape(groups, -1, matrix.shape[1])
    target = (scratch or matrix).new_empty(groups * rows, columns) if into is None else into
    target.zero_()
    rows, columns = min(rows, parts.shape[1]), min(columns, parts.shape[2])
    target.view(groups, -1, target.shape[1])[:, :rows, :columns] = parts[:, :rows, :columns]
    return target


def _begins(resets, direction, step, end):
    """Return whether a step of a row of the whole sequence begins an episode in the order of a direction."""
    if resets is None or (direction and step + 1 == end):
        return False
    return bool(resets[step + direction])


def write_operands(wanted, into, tokens, lengths, resets=None):
    if into[0].is_meta:
        return
    total = wanted[0].source.shape[0]
    for own, target in zip(wanted, into, strict=True):
        tokens.unflat(target).zero_()
        placed = tokens.unflat(target)[..., : own.source.shape[2]]
        for row in range(tokens.batch):
            end = _end(total, lengths, row, 0)
            for step in range(own.start, min(own.start + tokens.time, end)):
                there = step + own.shift
                value = own.source[there, row] if 0 <= there < end else own.first[row]
                begins = own.shift and _begins(_row(resets, row), int(own.shift > 0), step, end)
                placed[step - own.start, row] = 0 if begins else value


def _row(resets, row):
    return None if resets is None else resets[:, row]


def fill_unwritten(buffer):
    buffer.view(torch.uint8).fill_(0xFF)  # a NaN
    return buffer


def launch(problem, batch, directions, ragged, device):
    hidden = hidden_of(problem.hidden_size)
    sizes = {"hidden": hidden, "row_width": hidden + 8}
    tiling = types.SimpleNamespace(together=_TOGETHER, blocks=1, distributed=False, **sizes)
    return types.SimpleNamespace(problem=problem, tiling=tiling, interleaved=False)


def _end(time, lengths, row, start):
    return time if lengths is None else min(max(int(lengths[row]) - start, 0), time)


def activate(problem, weights, gates, dgates, tokens):
    if gates.is_meta:
        return
    if dgates is not None:
        dgates[:, :tokens].fill_(math.nan)
    hidden = hidden_of(problem.hidden_size)
    for direction, share in enumerate(gates):
        bias = torch.zeros(SUMS, hidden, dtype=torch.float64)
        bias[:, : problem.hidden_size] = _biases(problem.cell, weights, direction, problem.hidden_size)
        four = share[:tokens].view(tokens, SUMS, hidden)
        for own in four:
            own.copy_(code_of(problem.cell).stepped(own + bias, torch.zeros(hidden, dtype=torch.float64))[0])


def _steps(direction, time):
    return range(time) if direction == 0 else range(time - 1, -1, -1)


def _biases(cell, weights, direction, size):
    if weights.bias_ih[direction] is None:
        return torch.zeros(SUMS, size, dtype=torch.float64)
    both = [at(own[direction], len(cell.gates) * size) for own in (weights.bias_ih, weights.bias_hh)]
    return _of_input(cell, both[0].view(-1, size)) + _recurrent(cell, both[1].view(-1, size))


def _of_input(cell, gates):
    """Return the rows of gates as those of sums; zeros for sums that have no part from the input."""
    sums = gates.new_zeros(SUMS, *gates.shape[1:])
    sums[: len(cell.gates)] = gates
    return sums


def _recurrent(cell, gates):
    sums = gates.new_zeros(SUMS, *gates.shape[1:])
    sums[list(cell.recurrent_sums)] = gates
    return sums


def forward_pass(
    launch,
    weights,
    tokens,
    *,
    gates,
    y,
    y_width,
    unpadded,
    cells,
    h0,
    c0,
    h_n,
    c_n,
    lengths,
    order=None,
    starts=(0, 0),
    keep_gates,
    between=None,
    resets=None,
    masks=None,
):
    if h0.is_meta:
        return
    assert masks is None
    if between is not None:
        pair = {"gates": gates, "y": y, "unpadded": unpadded, "cells": cells}
        states = {"h0": h0, "c0": c0, "h_n": h_n, "c_n": c_n}
        _forward_pass_of_pair(launch, weights, tokens, pair, y_width, states, lengths, keep_gates, between, resets)
        return
    assert (resets is not None) == launch.problem.resets
    size, directions, batch = launch.problem.hidden_size, weights.directions, tokens.batch
    hidden, cell, code = hidden_of(size), launch.problem.cell, code_of(launch.problem.cell)
    for direction in range(directions):
        sums = _Token(gates[direction], tokens, 4 * hidden, 4 * hidden)
        outputs = _Token(y[direction], tokens, hidden, y_width)
        w_hh = at(weights.recurrent[direction], len(cell.gates) * size, size)
        bias = _biases(cell, weights, direction, size)
        for row in range(batch):
            h, c = h0.view(directions, batch, hidden)[direction, row, :size], c0[direction, row]
            end = _end(tokens.time, lengths, row, starts[direction])
            for step in range(end, tokens.time):
                outputs[step, row].zero_()
                if unpadded[0] is not None:
                    _Token(unpadded[direction], tokens, size, directions * size)[step, row].zero_()
            begins = _of_episodes(launch.problem, resets, lengths, row, direction, starts)
            for step in _steps(direction, end):
                if begins(step):
                    h, c = torch.zeros_like(h), torch.zeros_like(c)
                four = sums[step, row].view(4, hidden)
                given = _of_input(cell, four[: len(cell.gates), :size])
                activated, c, h = code.stepped(given + _recurrent(cell, (w_hh @ h).view(-1, size)) + bias, c)
                outputs[step, row].zero_()[:size] = h
                if unpadded[0] is not None:
                    _Token(unpadded[direction], tokens, size, directions * size)[step, row].copy_(h)
                if keep_gates:
                    four.zero_()[:, :size] = activated
                if cells[direction] is not None:
                    _Token(cells[direction], tokens, hidden, hidden)[step, row].zero_()[:size] = c
            h_n[direction, row], c_n[direction, row] = h, c


def backward_pass(
    launch,
    weights,
    tokens,
    *,
    gates,
    cells,
    dy,
    dgates,
    exchange=(None, None),
    c0,
    dh_n,
    dc_n,
    dh0,
    dc0,
    bias,
    biases=(),
    done=None,
    earlier=None,
    lengths,
    order=None,
    starts=(0, 0),
    between=None,
    resets=None,
    masks=None,
):
    if c0.is_meta:
        return
    assert masks is None
    if between is not None:
        pair = {"gates": gates, "cells": cells, "dgates": dgates}
        states = {"c0": c0, "dh_n": dh_n, "dc_n": dc_n, "dh0": dh0, "dc0": dc0}
        of_biases = bias, biases, done
        _backward_pass_of_pair(launch, weights, tokens, pair, states, dy, of_biases, lengths, between, resets)
        return
    assert (resets is not None) == launch.problem.resets
    size, directions = launch.problem.hidden_size, weights.directions
    hidden, cell, code = hidden_of(size), launch.problem.cell, code_of(launch.problem.cell)
    bias.zero_()
    if biases:
        assert done.shape == (directions, launch.tiling.blocks)
    for direction in range(directions):
        found = _Token(dgates[direction], tokens, 4 * hidden, 4 * hidden)
        kept = _Token(cells[direction], tokens, hidden, hidden)
        activated = _Token(gates[direction], tokens, 4 * hidden, 4 * hidden)
        w_hh = at(weights.recurrent[direction], len(cell.gates) * size, size)
        for row in range(tokens.batch):
            end = _end(tokens.time, lengths, row, starts[direction])
            steps = _steps(direction, end)
            begins = _of_episodes(launch.problem, resets, lengths, row, direction, starts)
            for step in range(end, tokens.time):
                found[step, row].zero_()
            given = dh_n, None if carries_hidden(cell) else dc_n
            dh, dc = (torch.zeros_like(c0[0, 0]) if last is None else last[direction, row] for last in given)
            for index in reversed(range(end)):
                step = steps[index]
                # The gradients may take the gates' place.
                own = activated[step, row].view(4, hidden)[:, :size].clone()
                before = kept[steps[index - 1], row][:size] if index else c0[direction, row]
                if begins(step):
                    before = torch.zeros_like(before)
                if dy[0] is not None:
                    dh = dh + _Token(dy[direction], tokens, size, directions * size)[step, row]
                each, dc = code.adjoint(own, kept[step, row][:size], before, dh, dc)
                four = found[step, row].zero_().view(4, hidden)
                four[:, :size] = each
                bias[row % _TOGETHER, direction] += four.flatten()
                dh = w_hh.t() @ four[list(cell.recurrent_sums), :size].flatten()
                if begins(step):
                    dh, dc = torch.zeros_like(dh), torch.zeros_like(dc)
            dh0[direction, row] = dh + dc if carries_hidden(cell) else dh
            if not carries_hidden(cell):
                dc0[direction, row] = dc
        if biases:
            for own, sums in zip(biases[direction], (range(len(cell.gates)), cell.recurrent_sums), strict=True):
                left = bias[:, direction].sum(0)
                if earlier is not None and len(earlier):
                    assert earlier.data_ptr() + earlier.nbytes == bias.data_ptr()
                    left += earlier[:, :, direction].sum((0, 1))
                own.copy_(left.view(4, hidden)[list(sums), :size].flatten())


def _of_episodes(problem, resets, lengths, row, direction, starts):
    """Return the function that says whether a step of a launch begins an episode of a row."""
    end, start = _end(problem.time, lengths, row, 0), starts[direction]
    return lambda step: _begins(_row(resets, row), direction, start + step, end)


def _layer_of(weights, index):
    kinds = {name: getattr(weights, name)[index : index + 1] for name in ("recurrent", "bias_ih", "bias_hh")}
    return types.SimpleNamespace(directions=1, **kinds)


def _states_of(index, **states):
    return {name: None if state is None else state[index : index + 1] for name, state in states.items()}


def _surviving(between, values, step, row):
    return values if between.mask is None else values * between.mask[step, row] * between.scale


def _forward_pass_of_pair(launch, weights, tokens, pair, y_width, states, lengths, keep_gates, between, resets):
    size, hidden = launch.problem.hidden_size, hidden_of(launch.problem.hidden_size)
    states = states | {"h0": states["h0"].view(2, -1, hidden)}
    for index in range(2):
        if index:
            below = _Token(pair["y"][0], tokens, hidden, y_width)
            sums = _Token(pair["gates"][1], tokens, 4 * hidden, 4 * hidden)
            assert (between.mask is None) == (between.passed is None)
            for row in range(tokens.batch):
                for step in range(_end(tokens.time, lengths, row, 0)):
                    assert sums[step, row].isnan().all()
                    read = _surviving(between, below[step, row][:size], step, row)
                    sums[step, row].zero_().view(4, hidden)[:, :size] = _of_input(
                        launch.problem.cell, (between.w_ih @ read).view(-1, size)
                    )
        forward_pass(
            launch,
            _layer_of(weights, index),
            tokens,
            **{name: own[index:] for name, own in pair.items()},
            y_width=y_width,
            **_states_of(index, **states),
            lengths=lengths,
            keep_gates=keep_gates,
            resets=resets,
        )


def _backward_pass_of_pair(launch, weights, tokens, pair, states, dy, of_biases, lengths, between, resets):
    size, hidden = launch.problem.hidden_size, hidden_of(launch.problem.hidden_size)
    bias, biases, done = of_biases
    given = torch.zeros(tokens.time * tokens.batch, size, dtype=torch.float64)  # as wide as the kernel's own is not
    for index in (1, 0):
        if index == 0:
            above = _Token(given.data_ptr(), tokens, size, size)
            found = _Token(pair["dgates"][1], tokens, 4 * hidden, 4 * hidden)
            assert between.passed.isnan().all()
            for row in range(tokens.batch):
                for step in range(tokens.time):
                    four = found[step, row].view(4, hidden)[: len(launch.problem.cell.gates), :size]
                    above[step, row].copy_(_surviving(between, between.w_ih.t() @ four.flatten(), step, row))
        backward_pass(
            launch,
            _layer_of(weights, index),
            tokens,
            dy=dy[index:] if index else (given.data_ptr(),),
            **{name: own[index:] for name, own in pair.items()},
            **_states_of(index, **states),
            bias=bias[:, index : index + 1],
            biases=biases[index : index + 1],
            done=done[index : index + 1],
            lengths=lengths,
            resets=resets,
        )


class _Unwritten(TorchDispatchMode):
    """Does nothing of what is recorded, as a stream that is captured; fails where an operator would make memory."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        schema, given = operator._schema, kwargs or {}
        if not schema.is_mutable:
            views = all(own.alias_info for own in schema.returns)
            assert views, f"{operator} makes memory, or reads it, while work is recorded"
            return operator(*args, **given)
        named = {own.name: value for own, value in zip(schema.arguments, args, strict=False)} | given
        (written,) = [named[own.name] for own in schema.arguments if own.alias_info and own.alias_info.is_write]
        return written


class Recording:
    """What `driver.Graph` does."""

    def __init__(self, issue):
        self._issue = issue

    def launch(self, stream, device):
        self._issue()


class _CaptureStream:
    def of(self, stream):
        return self

    def record(self, issue):
        with _Unwritten(), without_loops():
            issue()
        return Recording(issue)


@contextlib.contextmanager
def without_loops():
    """Launch nothing: what is left is where everything lies, and the products of libraries."""
    nothing = lambda *args, **kwargs: None  # noqa: E731

    def shaped(matrix, rows, columns, groups=1, *, scratch=None, into=None):
        if into is not None:
            return into
        fits = matrix.shape == (groups * rows, columns)
        return matrix.contiguous() if fits else (scratch or matrix).new_empty(groups * rows, columns)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward_pass", "backward_pass", "activate", "write_operands"):
            patch.setattr(launches, name, nothing)
        patch.setattr(launches, "resized", shaped)
        yield


def by_row(tensor):
    """Return a tensor [T, B, ...] that lies row by row."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


class Addresses:
    """Gives every new tensor the memory of the one that was asked for at the same place of an earlier step.

    CPU memory comes back by chance; what comes back here holds NaN, as fresh memory does in these tests.
    """

    def __init__(self, monkeypatch):
        self._held, self._next = [], 0
        self._make = torch.Tensor.new_empty, torch.empty_like
        for index, (where, name) in enumerate(((torch.Tensor, "new_empty"), (torch, "empty_like"))):
            monkeypatch.setattr(where, name, lambda *args, index=index, **options: self._again(index, *args, **options))

    def begin(self):
        self._next = 0

    def forget(self):
        self._held.clear()

    def _again(self, which, like, *shape, **options):
        if self._next == len(self._held):
            self._held.append(self._make[which](like, *shape, **options))
        fill_unwritten(self._held[self._next])
        self._next += 1
        return self._held[self._next - 1]


def assert_agrees(problem, *, rows_first=False, calls=4):
    """Hold calls of one problem, launched at first and then replayed, to float64."""
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs)
    if rows_first:
        inputs, gradients = inputs._replace(x=by_row(inputs.x)), gradients._replace(y=by_row(gradients.y))
    exact = testing.named(problem, *testing.oracle(problem, inputs, gradients))
    with pytest.MonkeyPatch.context() as patch:
        launched, launch = [], Recording.launch
        patch.setattr(Recording, "launch", lambda *given: (launched.append(given), launch(*given)))
        addresses = Addresses(patch)
        for call in range(calls):
            addresses.begin()
            found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
            if call == 0:  # which learns how much scratch memory there must be
                addresses.forget()
            for name, value in found.items():
                # Blocks add up gradients of biases in float32.
                assert testing.relative_error(value, exact[name]) < (1e-6 if "bias" in name else 1e-12), name
    if problem.layout is not Layout.PACKED:  # whose padded tensors are new ones in each call
        assert len(launched) == 2 * max(0, calls - 2)


_SUBSTITUTES = {
    "forward_launch": launch,
    "backward_launch": launch,
    "pair_launch": lambda name, problem, batch, ragged, device: launch(problem, batch, 1, ragged, device),
    "forward_pass": forward_pass,
    "backward_pass": backward_pass,
    "fill_unwritten": fill_unwritten,
    "resized": resized,
    "write_operands": write_operands,
    "longest_first": lambda launch, lengths, scratch: None,
    "activate": activate,
    "raise_if_given_up": lambda index: None,
}


def emulate(monkeypatch):
    """Replace every launch, and recording."""
    for name, substitute in _SUBSTITUTES.items():
        monkeypatch.setattr(launches, name, substitute)
    monkeypatch.setattr(graphs, "capture_streams", lambda index: _CaptureStream())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(driver, "current_stream", lambda device: 0)
    copy_on_cpu(monkeypatch)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    for remembered in (replay._replays, replay.stack_of, dry_run._memory_of):
        remembered.cache_clear()
