"""What trajectories.py trains: a graph network that predicts several futures of each
track, of which one should be right, and how likely each of them is."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from play_batches import FUTURE, PAST, RADIUS
from play_simulation import SECONDS
from torch import Tensor, nn

Batch = Mapping[str, Tensor]
SPREAD = 0.5  # metres


class Round(nn.Module):
    """Each node gets the mean of the messages along its edges."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.neighbour = nn.Linear(width, width, bias=False)
        self.centre = nn.Linear(width, width, bias=False)
        self.own = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(
        self, x: Tensor, edges: Tensor, index: Tensor, degree: Tensor
    ) -> Tensor:
        neighbour, centre = index
        messages = self.neighbour(x).index_select(0, neighbour)
        messages = messages + self.centre(x).index_select(0, centre) + edges
        # Summed in float32: a node has dozens of neighbours.
        sums = x.new_zeros(len(x), messages.shape[1], dtype=torch.float32)
        sums = sums.index_add(0, centre, F.relu(messages).float())
        both = torch.cat([x, sums / degree], 1)
        return x + F.relu(self.norm(self.own(both)))


class PlayNet(nn.Module):
    """From a batch of graphs to `modes` futures of each track, and their scores.

    Returns metres from the last known position, [tracks, modes, FUTURE, 2], and the
    logits of the modes, [tracks, modes]; tracks are those of all graphs.
    """

    def __init__(self, width: int, rounds: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.team, self.frame = nn.Embedding(3, width), nn.Embedding(PAST, width)
        self.velocity, self.edge = nn.Linear(2, width), nn.Linear(4, width)
        self.rounds = nn.ModuleList(Round(width) for _ in range(rounds))
        self.head = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU())
        self.futures = nn.Linear(2 * width, modes * FUTURE * 2)
        self.scores = nn.Linear(2 * width, modes)

    def forward(self, graphs: Batch) -> tuple[Tensor, Tensor]:
        index, pos, velocity = (graphs[k] for k in ("edge_index", "pos", "velocity"))
        relative = pos.index_select(0, index[0]) - pos.index_select(0, index[1])
        edges = torch.cat([relative, graphs["edge_attr"]], 1) / RADIUS
        edges = torch.cat([edges, graphs["edge_type"][:, None].to(edges.dtype)], 1)
        edges = self.edge(edges)
        degree = torch.bincount(index[1], minlength=len(pos)).clamp(min=1)[:, None]
        x = self.team(graphs["team"]) + self.frame(graphs["frame"])
        x = F.relu(x + self.velocity(velocity / 5))
        for round in self.rounds:
            x = round(x, edges, index, degree)
        last = graphs["frame"] == PAST - 1
        x = self.head(x[last])
        turns = self.futures(x).float().view(-1, self.modes, FUTURE, 2)
        speeds = velocity[last][:, None, None] + 3 * turns  # metres a second
        return SECONDS * speeds.cumsum(2), self.scores(x).float()


def straight_on(velocity: Tensor) -> Tensor:
    """Where a track is if it keeps its velocity, [tracks, FUTURE, 2]."""
    seconds = SECONDS * torch.arange(1, FUTURE + 1, device=velocity.device)
    return velocity[:, None] * seconds[:, None]


def loss_of(futures: Tensor, scores: Tensor, truth: Tensor) -> Tensor:
    """How unlikely the truth is where each mode is right to SPREAD, in metres, and the
    error of each track's best mode, so that the modes differ."""
    errors = (futures - truth[:, None]).norm(dim=-1).mean(-1)  # [tracks, modes]
    likely = torch.logsumexp(scores.log_softmax(1) - errors / SPREAD, 1)
    return 0.15 * errors.amin(1).mean() - SPREAD * likely.mean()
