"""PPO with a recurrent policy on CartPole: a collector, rollouts with resets inside, GAE and the clipped loss."""

import tempfile
from pathlib import Path

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, InitTracker, TransformedEnv
from torchrl.modules import MLP, LSTMModule, ProbabilisticActor, set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import gatewise
from clients.trial import Trial


def network() -> tuple[LSTMModule, TensorDictModule, TensorDictModule]:
    lstm = LSTMModule(4, 24, in_key="observation", out_key="features")
    policy = TensorDictModule(MLP(24, 2, num_cells=[16]), in_keys=["features"], out_keys=["logits"])
    value = TensorDictModule(MLP(24, 1, num_cells=[16]), in_keys=["features"], out_keys=["state_value"])
    return lstm, policy, value


with Trial("torchrl", "gatewise.accelerate(actor)") as trial, tempfile.TemporaryDirectory() as folder:
    lstm, policy, value = network()
    actor = ProbabilisticActor(
        TensorDictSequential(lstm, policy),
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=torch.distributions.OneHotCategorical,
        return_log_prob=True,
    )
    critic = TensorDictSequential(lstm, value)
    if trial.gatewise:
        gatewise.accelerate(actor)
    environment = TransformedEnv(GymEnv("CartPole-v1"), InitTracker())
    environment.append_transform(lstm.make_tensordict_primer())
    environment.set_seed(0)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, shifted=True)
    loss = ClipPPOLoss(actor, critic)
    optimizer = torch.optim.Adam(loss.parameters(), 3e-3)
    for batch in Collector(environment, actor, frames_per_batch=128, total_frames=512):
        trial.compare("resets in a batch", batch["is_init"].sum())
        for _ in range(3):
            with set_recurrent_mode(True):
                with torch.no_grad():
                    advantage(batch)
                losses = loss(batch)
            total = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
            optimizer.zero_grad()
            total.backward()
            nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
            optimizer.step()
            trial.compare("losses", total)
    file = Path(folder) / "loss.pt"
    torch.save(loss.state_dict(), file)
    with set_recurrent_mode(True), torch.no_grad():
        before = actor(batch.clone())["logits"]
        nn.init.zeros_(lstm.lstm.weight_hh_l0)
        loss.load_state_dict(torch.load(file))
        trial.saved("state_dict, load_state_dict", before, actor(batch.clone())["logits"], actor)
