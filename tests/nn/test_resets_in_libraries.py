"""Resets as libraries of reinforcement learning compute them: their loops over PyTorch's layers, stated anew here.

| library | marks | how states are reset |
|---|---|---|
| TorchRL, `LSTMModule`, `GRUModule` | `is_init`, bool [B, T, 1] | episodes are cut out and padded to a batch |
| Stable-Baselines3 contrib, recurrent policies | `episode_starts`, floats [B * T] | product with 1 - start, [T, B] |
| DreamerV3, `RSSM.observe` | `is_first`, bool [B, T] | selection, also of the previous action |
"""

import pytest
import torch
from torch import nn

import gatewise
from gatewise.cells import GRU, LSTM, RNN

T, B, F, H, L = 7, 4, 3, 5, 2

STARTS = torch.zeros(T, B, dtype=torch.bool)
for step, row in ((2, 0), (5, 0), (0, 1), (4, 1), (6, 1), (0, 2), (1, 2), (2, 2), (6, 2)):
    STARTS[step, row] = True  # the last row is one episode, which began earlier

OURS = {"lstm": gatewise.LSTM, "gru": gatewise.GRU, "rnn": gatewise.RNN}
THEIRS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
CELLS = {"lstm": LSTM(), "gru": GRU(), "rnn": RNN("tanh")}


def layers(kind, **options):
    """Return a layer of gatewise and the same layer of PyTorch, with equal weights."""
    torch.manual_seed(0)
    ours, theirs = (made[kind](F, H, dtype=torch.float64, **options) for made in (OURS, THEIRS))
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def states_of(kind, *shape):
    return [drawn(*shape, H) for _ in range(2 if kind == "lstm" else 1)]


def given(states):
    return tuple(states) if len(states) > 1 else states[0]


def as_list(states):
    return list(states) if isinstance(states, tuple) else [states]


def assert_same(found, expected, leaves, ours, theirs):
    torch.testing.assert_close(found, expected)
    above = [torch.randn_like(each) for each in expected]
    torch.testing.assert_close(
        torch.autograd.grad(found, [*leaves, *ours.parameters()], above),
        torch.autograd.grad(expected, [*leaves, *theirs.parameters()], above),
    )


# TorchRL


def torchrl_trajectories(layer, value, is_init, states):
    """Compute a batch of rollouts as TorchRL's modules do in recurrent mode.

    Args:
        layer: A layer of PyTorch with `batch_first`.
        value: The input [B, T, F].
        is_init: The marks [B, T, 1].
        states: The states before each step [B, T, L, H], of which those before the first step of a trajectory are read.
    """
    marks = is_init.squeeze(-1)
    firsts = marks.clone()
    firsts[:, 0] = True
    lengths = firsts.flatten().nonzero().squeeze(1).diff(append=torch.tensor([marks.numel()])).tolist()
    pieces = nn.utils.rnn.pad_sequence(value.flatten(0, 1).split(lengths), batch_first=True)
    entering = [torch.where(marks[..., None, None], 0.0, state)[firsts].transpose(0, 1) for state in states]
    y, _ = layer(pieces, given([state.contiguous() for state in entering]))
    return torch.cat([piece[:length] for piece, length in zip(y, lengths, strict=True)]).view(*value.shape[:2], -1)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_is_init_in_the_recurrent_mode_of_torchrl(kind):
    ours, theirs = layers(kind, num_layers=L, batch_first=True)
    value, stored, is_init = drawn(B, T, F), states_of(kind, B, T, L), STARTS.t().unsqueeze(-1)
    expected = torchrl_trajectories(theirs, value, is_init, stored)
    first = given([state[:, 0].transpose(0, 1) for state in stored])
    found, _ = ours(value, first, resets=is_init.squeeze(-1))
    assert_same([found], [expected], [value, *stored], ours, theirs)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_is_init_in_the_one_step_mode_of_torchrl(kind):
    """A policy that acts computes one step at a time [B, 1, F], and passes its states [B, L, H] on."""
    ours, theirs = layers(kind, num_layers=L, batch_first=True)
    value, states = drawn(B, T, F), states_of(kind, B, L)
    carried, outputs = states, []
    for step, is_init in zip(value.unbind(1), STARTS, strict=True):
        masked = [torch.where(is_init[:, None, None], 0.0, state).transpose(0, 1).contiguous() for state in carried]
        y, after = theirs(step.unsqueeze(1), given(masked))
        carried = [state.transpose(0, 1) for state in as_list(after)]
        outputs.append(y)
    expected = [torch.cat(outputs, 1), *carried]
    y, after = ours(value, given([state.transpose(0, 1) for state in states]), resets=STARTS.t())
    found = [y, *(state.transpose(0, 1) for state in as_list(after))]
    assert_same(found, expected, [value, *states], ours, theirs)


# Stable-Baselines3 contrib


def sb3_sequence(layer, features, states, episode_starts):
    """Compute a batch of sequences as the recurrent policies of Stable-Baselines3 contrib do.

    Args:
        layer: A layer of PyTorch.
        features: The input [B * T, F], one sequence after the other.
        states: The initial states [L, B, H].
        episode_starts: The marks [B * T], floats.

    Returns:
        The output [B * T, H] and the final states.
    """
    count = states[0].shape[1]
    by_step = features.reshape(count, -1, F).swapaxes(0, 1)
    starts = episode_starts.reshape(count, -1).swapaxes(0, 1)
    outputs = []
    for x, start in zip(by_step, starts, strict=True):
        kept = [(1.0 - start).view(1, count, 1) * state for state in states]
        y, after = layer(x.unsqueeze(0), given(kept))
        states = as_list(after)
        outputs.append(y)
    return torch.cat(outputs).transpose(0, 1).flatten(0, 1), states


@pytest.mark.parametrize("kind", ["lstm", "rnn"])
def test_episode_starts_as_in_sb3_contrib(kind):
    ours, theirs = layers(kind, num_layers=L)
    features, states, episode_starts = drawn(B * T, F), states_of(kind, L, B), STARTS.t().flatten().double()
    y, after = sb3_sequence(theirs, features, states, episode_starts)
    x, resets = features.view(B, T, F).transpose(0, 1), episode_starts.bool().view(B, T).t()
    found, finals = ours(x, given(states), resets=resets)
    found = [found.transpose(0, 1).flatten(0, 1), *as_list(finals)]
    assert_same(found, [y, *after], [features, *states], ours, theirs)


@pytest.mark.parametrize("kind", ["lstm", "rnn"])
def test_a_minibatch_of_sb3_contrib_is_one_call_without_padding(kind):
    """Its buffer [T, B] cuts rollouts at the starts of episodes, and pads the pieces to sequences of one length.

    Each piece begins with the states that the policy had at that step while it acted, which are not differentiated.
    """
    ours, theirs = layers(kind, num_layers=L)
    x, states = drawn(T, B, F), [state.detach() for state in states_of(kind, L, B)]
    episode_starts = STARTS.double()
    stored, carried = [], states
    with torch.no_grad():
        for step, start in zip(x, episode_starts, strict=True):
            stored.append(torch.stack(carried))
            _, carried = sb3_sequence(theirs, step, carried, start)
    by_row = torch.stack(stored).movedim(3, 0).flatten(0, 1)  # [B * T, states, L, H]
    cuts = STARTS.t().clone()
    cuts[:, 0] = True
    (places,) = cuts.flatten().nonzero(as_tuple=True)
    lengths = places.diff(append=torch.tensor([B * T])).tolist()

    def padded(tensor):
        return nn.utils.rnn.pad_sequence(tensor.transpose(0, 1).flatten(0, 1).split(lengths), batch_first=True)

    features, marks = padded(x), padded(episode_starts)
    entering = [state.swapaxes(0, 1) for state in by_row[places].unbind(1)]
    y, _ = sb3_sequence(theirs, features.flatten(0, 1), entering, marks.flatten())
    mask = padded(torch.ones(T, B, dtype=torch.bool)).flatten()
    expected = y[mask].view(B, T, H).transpose(0, 1)
    found, _ = ours(x, given(states), resets=STARTS)
    assert_same([found], [expected], [x], ours, theirs)


# DreamerV3


class DreamerGRU(gatewise.Cell):
    """The GRU of DreamerV3 without its norm and with a dense matrix in the place of blocks.

    The reset gate multiplies the whole sum of the candidate, and one is subtracted from the sum of the update gate.
    """

    gates = ("reset", "candidate", "update")

    def step(self, gate, state):
        candidate = torch.tanh(torch.sigmoid(gate.reset) * gate.candidate)
        update = torch.sigmoid(gate.update - 1)
        return update * candidate + (1 - update) * state.h, {}


def dreamer_step(layer, deter, x):
    """Compute the recurrent core of DreamerV3 on the concatenated state and input."""
    weight = torch.cat([layer.weight_hh_l0, layer.weight_ih_l0], 1)
    sums = torch.cat([deter, x], -1) @ weight.t() + layer.bias_ih_l0 + layer.bias_hh_l0
    reset, candidate, update = sums.split(H, -1)
    update = torch.sigmoid(update - 1)
    return update * torch.tanh(torch.sigmoid(reset) * candidate) + (1 - update) * deter


def dreamer_observe(layer, carry, tokens, action, is_first):
    """Scan over axis 1 of [B, T, ...], with the carry and the previous action masked where an episode is new."""
    outputs = []
    for step in range(tokens.shape[1]):
        keep = ~is_first[:, step, None]
        deter = torch.where(keep, carry, torch.zeros_like(carry))
        previous = torch.where(keep, action[:, step], torch.zeros_like(action[:, step]))
        carry = dreamer_step(layer, deter, torch.cat([tokens[:, step], previous], -1))
        outputs.append(carry)
    return torch.stack(outputs, 1), carry


def test_is_first_as_in_dreamer():
    torch.manual_seed(0)
    layer = gatewise.Recurrent(DreamerGRU(), F + 2, H, batch_first=True, dtype=torch.float64)
    tokens, action, carry, is_first = drawn(B, T, F), drawn(B, T, 2), drawn(B, H), STARTS.t()
    expected = dreamer_observe(layer, carry, tokens, action, is_first)
    x = torch.cat([tokens, action.masked_fill(is_first.unsqueeze(-1), 0)], -1)
    y, h = layer(x, carry.unsqueeze(0), resets=is_first)
    assert_same([y, h[0]], list(expected), [tokens, action, carry], layer, layer)


def test_the_carry_of_dreamer_goes_from_one_chunk_of_a_replay_buffer_to_the_next():
    torch.manual_seed(0)
    layer = gatewise.Recurrent(DreamerGRU(), F + 2, H, batch_first=True, dtype=torch.float64)
    tokens, action, is_first = drawn(B, T, F), drawn(B, T, 2), STARTS.t()
    expected, _ = dreamer_observe(layer, tokens.new_zeros(B, H), tokens, action, is_first)
    x = torch.cat([tokens, action.masked_fill(is_first.unsqueeze(-1), 0)], -1)
    found, carry = [], None
    for chunk, marks in zip(x.split(3, 1), is_first.split(3, 1), strict=True):
        y, carry = layer(chunk, carry, resets=marks)
        found.append(y)
    assert_same([torch.cat(found, 1)], [expected], [tokens, action], layer, layer)


# A policy that acts, and its rollout in training


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_acting_step_by_step_gives_the_states_and_gradients_of_the_rollout(kind):
    ours, _ = layers(kind)
    cell = gatewise.RecurrentCell(CELLS[kind], F, H, dtype=torch.float64)
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in ours.state_dict().items()})
    x, states = drawn(T, B, F), states_of(kind, B)
    carried, outputs = given(states), []
    for observation, starts in zip(x, STARTS, strict=True):
        carried = cell(observation, carried, starts)
        outputs.append(as_list(carried)[0])
    y, finals = ours(x, given([state.unsqueeze(0) for state in states]), resets=STARTS)
    found = [torch.stack(outputs), *as_list(carried)]
    assert_same(found, [y, *(state[0] for state in as_list(finals))], [x, *states], cell, ours)
