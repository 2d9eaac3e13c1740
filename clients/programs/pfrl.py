"""PPO and double deep Q-learning on packed sequences of episodes, with states that are carried from step to step."""

import tempfile
from pathlib import Path

import numpy as np
import pfrl
import torch
from pfrl.agents import PPO, DoubleDQN
from pfrl.nn import RecurrentBranched, RecurrentSequential
from pfrl.utils.recurrent import pack_and_forward
from torch import nn

import gatewise
from clients.trial import Trial


class Remember:
    """Say at the end whether the first number was positive; episodes have different lengths."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def reset(self) -> np.ndarray:
        self.first, self.left = self.random.choice([-1.0, 1.0]), int(self.random.integers(2, 7))
        return np.array([self.first, 1.0], np.float32)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, dict]:
        self.left -= 1
        reward = float((action == 1) == (self.first > 0)) if self.left == 0 else 0.0
        return np.array([self.random.normal(), 0.0], np.float32), reward, self.left == 0, {}


def policy() -> nn.Module:
    head = pfrl.policies.SoftmaxCategoricalHead()
    branches = RecurrentBranched(
        RecurrentSequential(nn.GRU(12, 8), nn.Linear(8, 2), head), RecurrentSequential(nn.LSTM(12, 8), nn.Linear(8, 1))
    )
    return RecurrentSequential(nn.Linear(2, 12), nn.Tanh(), nn.LSTM(12, 12, num_layers=2), branches)


def values() -> nn.Module:
    value = pfrl.q_functions.DiscreteActionValueHead()
    return RecurrentSequential(nn.Linear(2, 12), nn.RNN(12, 12), nn.LSTM(12, 12), nn.Linear(12, 2), value)


def ppo(model: nn.Module) -> PPO:
    options = {"recurrent": True, "max_recurrent_sequence_len": 5, "update_interval": 48, "minibatch_size": 16}
    return PPO(model, torch.optim.Adam(model.parameters(), 3e-3), epochs=3, **options)


def dqn(model: nn.Module) -> DoubleDQN:
    explorer = pfrl.explorers.ConstantEpsilonGreedy(0.3, lambda: np.random.randint(2))
    buffer = pfrl.replay_buffers.EpisodicReplayBuffer(1000)
    options = {"recurrent": True, "episodic_update_len": 4, "minibatch_size": 8, "target_update_interval": 20}
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    return DoubleDQN(model, optimizer, buffer, 0.95, explorer, replay_start_size=40, **options)


with Trial("pfrl", "gatewise.accelerate(model)") as trial, tempfile.TemporaryDirectory() as folder:
    for make, network in ((ppo, policy), (dqn, values)):
        model = network()
        if trial.gatewise:
            gatewise.accelerate(model)
        agent = make(model)
        worlds = [Remember(seed) for seed in range(3)]
        seen = [world.reset() for world in worlds]
        for _ in range(60):
            steps = [world.step(action) for world, action in zip(worlds, agent.batch_act(seen), strict=True)]
            seen, rewards, ended, _ = map(list, zip(*steps, strict=True))
            agent.batch_observe(seen, rewards, ended, [False] * 3)
            trial.compare("rewards", rewards)
            seen = [world.reset() if end else each for world, each, end in zip(worlds, seen, ended, strict=True)]
        trial.compare("statistics", [value for _, value in agent.get_statistics()])
        trial.compare("weights", torch.cat([weight.flatten() for weight in model.parameters()]))
        place = str(Path(folder) / make.__name__)
        agent.save(place)
        loaded = make(network())
        loaded.load(place)
        sequences = [torch.randn(length, 2) for length in (5, 3, 1)]
        with torch.no_grad():
            outputs = [pack_and_forward(each.model, sequences, None)[0] for each in (agent, loaded)]
        answers = [each[1] if isinstance(each, tuple) else each.q_values for each in outputs]
        trial.saved("save, load", *answers, loaded.model)
