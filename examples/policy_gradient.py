"""Policy gradients in large batches, with the reinforcement learning guide's numbers.

A thousand and more poles on carts are balanced at once: the environment is a few tensor
operations on the device that also trains the policy, by PPO. First the batch sizes that
the guide has for its devices take turns, each with plain torch ("before": AdamW and
clip_grad_norm_) and with trainfast ("after": AdamW with max_grad_norm). Then both train
from the same seed, in turns, with the batch for this device, under a SystemMonitor and
with a checkpoint every few iterations.

    python examples/policy_gradient.py              # about a minute on two cores
    python examples/policy_gradient.py --resume     # goes on from the last checkpoints
"""

import argparse
import math
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainfast
from trainfast.report import Table

# The guide's batch sizes: of its configurations for CI and debugging, and by device.
BATCHES = {"ci": 1024, "debug": 8192, "cpu": 32768, "mps": 65536, "cuda": 524288}
HORIZON = 32  # steps of each environment in a batch
PASSES, PARTS = 3, 4  # over each batch, and minibatches in one
DISCOUNT, TRACE = 0.99, 0.95  # gamma, and lambda of generalised advantage estimation
CLIP = 0.2  # of PPO's ratio
MAX_GRAD_NORM = 0.5
LONGEST = 500  # steps of an episode, and so the most reward
MIB = 1 << 20


class CartPoles:
    """Many independent carts with a pole each (Barto, Sutton and Anderson 1983).

    `state` is (environments, 4): position, speed, angle and the angle's speed. The
    reward of every step is 1. An environment starts anew when the pole has fallen, the
    cart has left the track, or the episode is LONGEST steps long.
    """

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.generator = generator
        self.lengths = torch.zeros(count, device=generator.device)
        self.state = self.start()

    def start(self) -> Tensor:
        """Carts that nearly stand still and poles that are nearly upright."""
        shape = len(self.lengths), 4
        random = torch.rand(
            shape, generator=self.generator, device=self.generator.device
        )
        return random * 0.1 - 0.05

    def step(self, push_right: Tensor) -> tuple[Tensor, Tensor]:
        """Pushes each cart; returns which episodes ended, and their lengths or 0."""
        x, speed, angle, turning = self.state.unbind(1)
        force = push_right * 20.0 - 10.0
        sin, cos = angle.sin(), angle.cos()
        push = (force + 0.05 * turning.square() * sin) / 1.1
        spin = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos.square() / 1.1))
        pull = push - 0.05 * spin * cos / 1.1
        moved = (
            *(x + 0.02 * speed, speed + 0.02 * pull),
            *(angle + 0.02 * turning, turning + 0.02 * spin),
        )
        state = torch.stack(moved, 1)
        self.lengths = self.lengths + 1
        fallen = (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > math.radians(12))
        ended = fallen | (self.lengths >= LONGEST)
        lengths = self.lengths * ended
        self.state = torch.where(ended[:, None], self.start(), state)
        self.lengths = self.lengths * ~ended
        return ended, lengths


class Policy(nn.Module):
    """Scores of the two actions, and the value of the state."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        layers = nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        self.body = nn.Sequential(*layers)
        self.scores, self.value = nn.Linear(width, 2), nn.Linear(width, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(state)
        return self.scores(hidden), self.value(hidden).squeeze(-1)


def ppo_loss(policy: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Of states, actions, their log-probabilities then, advantages and returns."""
    states, actions, old, advantages, returns = batch
    scores, values = policy(states)
    log_probs = F.log_softmax(scores, -1)
    ratio = (log_probs.gather(1, actions[:, None]).squeeze(1) - old).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP) * advantages
    gain = torch.minimum(ratio * advantages, clipped).mean()
    entropy = -(log_probs.exp() * log_probs).sum(1).mean()
    return F.smooth_l1_loss(values / 10, returns / 10) - gain - 0.01 * entropy


class Learner:
    """A policy, its optimizer and its environments; plain torch, or trainfast."""

    def __init__(self, way: str, batch: int, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.way, self.batch, self.device = way, batch, args.device
        self.generator = torch.Generator(args.device).manual_seed(args.seed)
        self.environments = CartPoles(max(1, batch // HORIZON), self.generator)
        self.policy = Policy().to(args.device)
        if way == "after":
            self.optimizer = trainfast.AdamW(
                self.policy.parameters(), lr=args.lr, max_grad_norm=MAX_GRAD_NORM
            )
        else:
            self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=args.lr)
        self.seconds: list[float] = []
        self.rewards: list[float] = []  # the mean reward of the episodes that ended

    def update(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        if self.way == "before":
            nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()

    @torch.no_grad()
    def collect(self) -> tuple[Tensor, ...]:
        """HORIZON steps of every environment; what ppo_loss needs, one row a step."""
        environments, steps, lengths = self.environments, [], []
        for _ in range(HORIZON):
            state = environments.state
            scores, value = self.policy(state)
            log_probs = F.log_softmax(scores, -1)
            chance = torch.rand(
                value.shape, generator=self.generator, device=self.device
            )
            action = (chance < log_probs[:, 1].exp()).long()
            old = log_probs.gather(1, action[:, None]).squeeze(1)
            ended, length = environments.step(action)
            lengths.append(length)
            steps.append((state, action, old, value, ended))
        states, actions, old, values, ended = map(torch.stack, zip(*steps))
        lengths = torch.stack(lengths)
        self.rewards.append((lengths.sum() / ended.sum().clamp(min=1)).item())
        last = self.policy(environments.state)[1]
        advantages = advantages_of(values, ended.float(), last)
        returns = advantages + values
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        rows = (states, actions, old, advantages, returns)
        return tuple(row.flatten(0, 1) for row in rows)

    def iterate(self) -> None:
        began = time.perf_counter()
        rows = self.collect()
        for _ in range(PASSES):
            count = len(rows[0])
            order = torch.randperm(count, generator=self.generator, device=self.device)
            for part in order.chunk(PARTS):
                loss = ppo_loss(self.policy, tuple(row[part] for row in rows))
                self.update(loss)
        loss.item()  # waits for a GPU
        self.seconds.append(time.perf_counter() - began)

    def state_dict(self) -> dict:
        """All that the training goes on from, for checkpoints."""
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "carts": (self.environments.state, self.environments.lengths),
            "generator": self.generator.get_state(),
            "rewards": self.rewards,
        }

    def load_state_dict(self, state: dict) -> None:
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        carts = (tensor.to(self.device) for tensor in state["carts"])
        self.environments.state, self.environments.lengths = carts
        self.generator.set_state(state["generator"].cpu())
        self.rewards = state["rewards"]

    def steps_a_second(self) -> float:
        """The median over the iterations, without the first, which warms up."""
        seconds = statistics.median(self.seconds[1:] or self.seconds)
        return self.environments.state.shape[0] * HORIZON / seconds


def advantages_of(values: Tensor, ended: Tensor, last: Tensor) -> Tensor:
    """Generalised advantage estimation (Schulman et al. 2016); a step's reward is 1."""
    advantages, sum_ahead, ahead = torch.empty_like(values), 0.0, last
    for t in reversed(range(len(values))):
        goes_on = 1 - ended[t]
        surprise = 1 + DISCOUNT * ahead * goes_on - values[t]
        sum_ahead = surprise + DISCOUNT * TRACE * goes_on * sum_ahead
        advantages[t], ahead = sum_ahead, values[t]
    return advantages


# ---- The tables ----------------------------------------------------------------------


def used_memory(monitor: trainfast.SystemMonitor, device: torch.device) -> int:
    """Most bytes of torch's allocator on a GPU, otherwise of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved()
    return int(monitor.get_stats()["process.memory"].max)


def estimated_memory(batch: int, device: torch.device) -> int:
    """The same for an update, from an estimate that computes nothing; on the CPU it
    begins with what the process takes already."""
    n = max(1, batch // PARTS)
    rows = torch.randn(n, 4), torch.zeros(n, dtype=torch.long), *torch.randn(3, n)
    estimate = trainfast.estimate_memory(
        Policy(), rows, step=ppo_loss, optimizer="trainfast", device=device.type
    )
    return estimate.reserved if device.type == "cuda" else estimate.total


def batch_table(args: argparse.Namespace) -> Table:
    """The guide's batch sizes, up to that for this device."""
    rows = []
    for name, batch in BATCHES.items():
        if batch > args.batch:
            continue
        memory = estimated_memory(batch, args.device)
        learners = [Learner(way, batch, args) for way in ("before", "after")]
        with trainfast.SystemMonitor(sampling_interval_sec=0.2) as monitor:
            for _ in range(args.rounds):
                for learner in learners:
                    learner.iterate()
        before, after = (learner.steps_a_second() for learner in learners)
        print(f"batch {batch}: {before:,.0f} and {after:,.0f} steps/s", flush=True)
        speeds = round(before), round(after), f"{after / before:.2f}"
        used = used_memory(monitor, args.device)
        rows.append((name, batch, *speeds, round(memory / MIB), round(used / MIB)))
    speeds = "before steps/s", "after steps/s", "times"
    columns = "guide's", "batch", *speeds, "estimated MiB", "used MiB"
    return Table(f"Batch by device, on {args.device.type}", columns, rows)


def train(args: argparse.Namespace) -> list[Learner]:
    """Both ways from the same seed, in turns, with checkpoints."""
    learners = [Learner(way, args.batch, args) for way in ("before", "after")]
    checkpoints = trainfast.CheckpointEvery(
        args.save_every, args.out, **{learner.way: learner for learner in learners}
    )
    done = checkpoints.resume().get("epoch", 0) if args.resume else 0
    if done:
        print(f"goes on after iteration {done}", flush=True)
    for iteration in range(done + 1, args.iterations + 1):
        for learner in learners:
            learner.iterate()
        checkpoints(iteration)
        if iteration % args.save_every == 0 or iteration == args.iterations:
            rewards = (f"{x.way} {x.rewards[-1]:.0f}" for x in learners)
            print(f"iteration {iteration}: reward {', '.join(rewards)}", flush=True)
    return learners


def training_table(learners: list[Learner]) -> Table:
    rows = [
        (
            *(learner.way, learner.batch, len(learner.rewards)),
            round(learner.steps_a_second()) if learner.seconds else None,
            *(round(learner.rewards[0], 1), round(learner.rewards[-1], 1)),
        )
        for learner in learners
    ]
    columns = "", "batch", "iterations", "steps/s", "first reward", "last reward"
    return Table(f"Training (most reward: {LONGEST})", columns, rows)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=40, help="of each training")
    parser.add_argument("--rounds", type=int, default=9, help="of each batch size")
    parser.add_argument("--batch", type=int, help="steps; default: the guide's")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch; small tensors gain from none"
    )
    parser.add_argument("--out", type=Path, default=Path("build/policy_gradient"))
    parser.add_argument("--save-every", type=int, default=10, help="iterations")
    parser.add_argument("--resume", action="store_true", help="with the same arguments")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.batch = args.batch or BATCHES[args.device]
    args.device = torch.device(args.device)
    return args


def main(arguments: list[str] | None = None) -> tuple[Table, list[Learner]]:
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    batches = batch_table(args)
    monitor = trainfast.SystemMonitor(sampling_interval_sec=1.0).start()
    learners = train(args)
    stats = monitor.stop().get_stats()
    print(f"\n{batches}\n\n{training_table(learners)}\n\nMonitor: {stats}")
    return batches, learners


if __name__ == "__main__":
    main()
