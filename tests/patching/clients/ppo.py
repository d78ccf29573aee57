"""PPO in one file on a cart and a pole, as CleanRL writes it."""

import random

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions.categorical import Categorical


class CartPoles:
    def __init__(self, count, seed):
        self.random = np.random.default_rng(seed)
        self.state = self.random.uniform(-0.05, 0.05, (count, 4))

    def step(self, action):
        _, v, angle, spin = self.state.T
        force = np.where(action == 1, 10.0, -10.0)
        sin, cos = np.sin(angle), np.cos(angle)
        push = (force + 0.05 * spin**2 * sin) / 1.1
        turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        speed = push - 0.05 * turn * cos / 1.1
        self.state += 0.02 * np.stack([v, speed, spin, turn], 1)
        done = (abs(self.state[:, 0]) > 2.4) | (abs(self.state[:, 2]) > 0.21)
        fresh = self.random.uniform(-0.05, 0.05, self.state.shape)
        self.state = np.where(done[:, None], fresh, self.state)
        return self.state.copy(), np.ones(len(done)), done


def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, 0.0)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(4, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1), std=1.0),
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(4, 64)), nn.Tanh(), layer_init(nn.Linear(64, 2), 0.01)
        )

    def act(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        value = self.critic(x).squeeze(-1)
        return action, probs.log_prob(action), probs.entropy(), value


num_envs, num_steps, num_updates = 8, 32, 4
random.seed(1)
np.random.seed(1)
torch.manual_seed(1)
envs, agent = CartPoles(num_envs, 1), Agent()
optimizer = optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
shape = (num_steps, num_envs)
obs, actions = torch.zeros(*shape, 4), torch.zeros(shape)
logprobs, rewards, dones, values = (torch.zeros(shape) for _ in range(4))
next_obs, next_done = torch.Tensor(envs.state), torch.zeros(num_envs)
losses, returns = [], []
for update in range(num_updates):
    optimizer.param_groups[0]["lr"] = (1.0 - update / num_updates) * 2.5e-4
    for step in range(num_steps):
        obs[step], dones[step] = next_obs, next_done
        with torch.no_grad():
            action, logprobs[step], _, values[step] = agent.act(next_obs)
        actions[step] = action
        state, reward, done = envs.step(action.numpy())
        rewards[step] = torch.tensor(reward)
        next_obs, next_done = torch.Tensor(state), torch.Tensor(done)
    with torch.no_grad():
        following, advantages, last = agent.critic(next_obs).squeeze(-1), [], 0
        for t in reversed(range(num_steps)):
            alive = 1.0 - (next_done if t == num_steps - 1 else dones[t + 1])
            delta = rewards[t] + 0.99 * following * alive - values[t]
            last = delta + 0.99 * 0.95 * alive * last
            advantages.insert(0, last)
            following = values[t]
        advantages = torch.stack(advantages)
    flat = [
        z.flatten(0, 1)
        for z in (obs, actions, logprobs, advantages, advantages + values)
    ]
    indices = np.arange(num_envs * num_steps)
    for _epoch in range(2):
        np.random.shuffle(indices)
        for at in range(0, len(indices), 64):
            x, action, before, advantage, target = (
                z[indices[at : at + 64]] for z in flat
            )
            _, logprob, entropy, value = agent.act(x, action.long())
            ratio = (logprob - before).exp()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            pg_loss = torch.max(
                -advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)
            ).mean()
            v_loss = 0.5 * (value - target).square().mean()
            loss = pg_loss - 0.01 * entropy.mean() + 0.5 * v_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
    returns.append(dones.sum().item())
print(losses[-1], returns)
torch.save(
    {
        "losses": losses,
        "returns": returns,
        "model": agent.state_dict(),
        "optimizer": optimizer.state_dict(),
    },
    "final.pt",
)
