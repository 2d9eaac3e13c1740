"""Deep Q-learning with a recurrent network on a CartPole without velocities, from a buffer of stacked steps."""

import tempfile
from pathlib import Path

import gymnasium
import numpy as np
import torch

import gatewise
from clients.trial import Trial

trial = Trial("tianshou", "torch.nn.LSTM = gatewise.LSTM")
if trial.gatewise:
    torch.nn.LSTM = gatewise.LSTM

from tianshou.algorithm import DQN
from tianshou.algorithm.algorithm_base import policy_within_training_step
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Batch, Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.utils.net.common import Recurrent


class Positions(gymnasium.ObservationWrapper):
    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[[0, 2]]


def learner(environments: DummyVectorEnv) -> DQN:
    net = Recurrent(layer_num=2, state_shape=2, action_shape=2, hidden_layer_size=16)
    policy = DiscreteQLearningPolicy(model=net, action_space=environments.action_space[0], eps_training=0.2)
    optimizer = AdamOptimizerFactory(lr=1e-3)
    return DQN(policy=policy, optim=optimizer, gamma=0.95, n_step_return_horizon=3, target_update_freq=8)


with trial, tempfile.TemporaryDirectory() as folder:
    environments = DummyVectorEnv([Positions for _ in range(3)])
    environments.seed(0)
    environments.action_space[0].seed(0)
    algorithm = learner(environments)
    buffer = VectorReplayBuffer(600, buffer_num=3, stack_num=4, ignore_obs_next=True)
    collector = Collector(algorithm, environments, buffer, exploration_noise=True)
    collector.reset(gym_reset_kwargs={"seed": 0})
    for _ in range(6):
        steps = collector.collect(n_step=60)
        trial.compare("episodes", steps.n_collected_episodes)
        with policy_within_training_step(algorithm.policy):
            for _ in range(4):
                trial.compare("losses", algorithm.update(buffer, 32).loss)
    file = Path(folder) / "algorithm.pt"
    torch.save(algorithm.state_dict(), file)
    loaded = learner(environments)
    loaded.load_state_dict(torch.load(file))
    seen = torch.randn(5, 2)
    answers = []
    for each in (algorithm, loaded):
        found = each.policy.eval()(Batch(obs=seen, info={}))
        answers.append(each.policy(Batch(obs=-seen, info={}), found.state).logits.detach())  # from step to step
    trial.compare("values", answers[0])
    trial.saved("state_dict, load_state_dict", *answers, loaded)
