"""PPO on sixteen carts with poles at once."""

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

ENVS, STEPS, UPDATES = 16, 128, 40
GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2


class CartPoles:
    def __init__(self, n, seed=0):
        self.rng = np.random.default_rng(seed)
        self.state = self.rng.uniform(-0.05, 0.05, (n, 4))
        self.age = np.zeros(n, int)

    def step(self, action):
        x, v, angle, w = self.state.T
        force = np.where(action == 1, 10.0, -10.0)
        cos, sin = np.cos(angle), np.sin(angle)
        temp = (force + 0.05 * w * w * sin) / 1.1
        turn = (9.8 * sin - cos * temp) / (0.5 * (4 / 3 - 0.1 * cos * cos / 1.1))
        push = temp - 0.05 * turn * cos / 1.1
        self.state += 0.02 * np.stack([v, push, w, turn], axis=1)
        self.age += 1
        done = (abs(self.state[:, 0]) > 2.4) | (abs(self.state[:, 2]) > 0.2095)
        done |= self.age >= 500
        self.state[done] = self.rng.uniform(-0.05, 0.05, (done.sum(), 4))
        self.age[done] = 0
        return np.ones(len(done), np.float32), done


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(
            nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )
        self.actor = nn.Sequential(
            nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
        )

    def forward(self, x):
        return Categorical(logits=self.actor(x)), self.critic(x).squeeze(-1)


def advantages_of(rewards, values, dones, last):
    """Generalised advantage estimation."""
    advantages = torch.zeros(STEPS, ENVS)
    for e in range(ENVS):
        following, gae = last[e], 0.0
        for t in reversed(range(STEPS)):
            alive = 1.0 - dones[t, e]
            delta = rewards[t, e] + GAMMA * following * alive - values[t, e]
            gae = delta + GAMMA * LAMBDA * alive * gae
            advantages[t, e] = gae
            following = values[t, e]
    return advantages


torch.manual_seed(0)
env, agent = CartPoles(ENVS), Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
for update in range(UPDATES):
    columns = [torch.zeros(STEPS, ENVS) for _ in range(5)]
    actions, logprobs, rewards, dones, values = columns
    states = torch.zeros(STEPS, ENVS, 4)
    with torch.no_grad():
        for t in range(STEPS):
            states[t] = torch.from_numpy(env.state).float()
            policy, values[t] = agent(states[t])
            actions[t] = policy.sample()
            logprobs[t] = policy.log_prob(actions[t])
            reward, done = env.step(actions[t].numpy())
            rewards[t], dones[t] = (
                torch.from_numpy(reward),
                torch.from_numpy(done).float(),
            )
        last = agent(torch.from_numpy(env.state).float())[1]
        advantages = advantages_of(rewards, values, dones, last)
    returns = (advantages + values).flatten()
    advantages = advantages.flatten()
    for _ in range(4):
        for rows in torch.randperm(ENVS * STEPS).view(4, -1):
            policy, value = agent(states.view(-1, 4)[rows])
            ratio = (
                policy.log_prob(actions.flatten()[rows]) - logprobs.flatten()[rows]
            ).exp()
            a = advantages[rows]
            a = (a - a.mean()) / (a.std() + 1e-8)
            loss = -torch.min(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a).mean()
            loss = loss + 0.5 * (value - returns[rows]).square().mean()
            loss = loss - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    if (update + 1) % 10 == 0:
        print(f"update {update + 1}: mean value {values.mean().item():.2f}")
