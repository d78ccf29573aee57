"""Where trajectories.py gets its batches from: positions, or a cache.

A graph has a node for each track in each of the first PAST frames. Spatial edges join
what is within RADIUS in the same frame, temporal edges join a track's nodes in a frame
and the next one. What is to be predicted are the FUTURE frames after that.
"""

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import play_simulation
import torch
from play_simulation import SECONDS, TEAM, TRACKS
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import trainfast

PAST, FUTURE = 5, 10  # frames
RADIUS = 30.0  # metres
KEYS = ("pos", "velocity", "team", "frame", "edge_index", "edge_attr", "edge_type", "y")
FRAME = np.repeat(np.arange(PAST), TRACKS)  # of each node
TRACK = np.tile(np.arange(TRACKS), PAST)
Batch = Mapping[str, Tensor]


class Plays:
    """Simulated plays, and the caches of their graphs in the folder `out`."""

    def __init__(self, count: int, batch: int, out: Path, seed: int) -> None:
        tracks = play_simulation.simulate(count, PAST + FUTURE, seed)
        past = tracks[:, :PAST]
        moved = np.diff(past, axis=1) / np.float32(SECONDS)
        velocity = np.concatenate([moved[:, :1], moved], axis=1)
        self.pos = past.reshape(count, PAST * TRACKS, 2)
        self.velocity = velocity.reshape(self.pos.shape)
        future = tracks[:, PAST:] - tracks[:, PAST - 1 : PAST]
        self.y = np.ascontiguousarray(future.swapaxes(1, 2))  # [plays, track, frame, 2]
        self.batch, self.out = batch, out
        self.name = (play_simulation.VERSION, count, seed)
        self.n_train = count * 9 // 10  # the others are for validation
        self.epoch = self.n_train // batch  # batches

    def __len__(self) -> int:
        return len(self.pos)

    def cache(self, cap: int | None) -> Path:
        return self.out / ("cache" if cap is None else f"cache-{cap}")

    def build_cache(self, cap: int | None, fresh: bool) -> str:
        """Makes what is missing in a cache; says what that took."""
        if fresh:
            shutil.rmtree(self.cache(cap), ignore_errors=True)
        report = trainfast.graph_cache.build_from_points(
            self.cache(cap),
            self.pos,
            r=RADIUS,
            frame=FRAME,
            track=TRACK,
            max_num_neighbors=cap,
            node_fields={
                "velocity": self.velocity,
                "team": TEAM[TRACK],
                "frame": FRAME,
            },
            graph_fields={"y": self.y},
            transform_id=self.name,
            progress=sys.stderr.isatty(),
        )
        with trainfast.graph_cache.open(self.cache(cap)) as cache:
            edges = cache.sizes.total_edges().mean()
        which = "all neighbours" if cap is None else f"{cap} neighbours"
        return (
            f"cache of {which}: {report.made:,} graphs built and {report.reused:,} "
            f"found in {report.seconds:.1f} s,\n    {edges:,.0f} edges a graph, "
            f"{report.bytes / 1e6:,.0f} MB"
        )


class Order:
    """A sampler: the plays of an epoch, shuffled; Lightning tells it the epoch."""

    def __init__(self, n: int, count: int, seed: int) -> None:
        self.n, self.count, self.seed, self.epoch = n, count, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng([self.seed, self.epoch])
        return iter(rng.permutation(self.n)[: self.count].tolist())


# ---- Without a cache -----------------------------------------------------------------


class BuiltPlays(Dataset):
    """Graphs built from positions each time that one is asked for."""

    def __init__(self, plays: Plays) -> None:
        self.plays = plays

    def __len__(self) -> int:
        return len(self.plays)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        plays = self.plays
        pos = torch.from_numpy(plays.pos[i])
        edges = [near(pos[t * TRACKS : (t + 1) * TRACKS], t) for t in range(PAST)]
        edges.append(temporal(pos))
        kinds = torch.tensor([0] * PAST + [1])
        return {
            "pos": pos,
            "velocity": torch.from_numpy(plays.velocity[i]),
            "team": torch.from_numpy(TEAM[TRACK]),
            "frame": torch.from_numpy(FRAME),
            "edge_index": torch.cat([index for index, _ in edges], 1),
            "edge_attr": torch.cat([distance for _, distance in edges])[:, None],
            "edge_type": kinds.repeat_interleave(
                torch.tensor([len(distance) for _, distance in edges])
            ),
            "y": torch.from_numpy(plays.y[i]),
        }


def near(pos: Tensor, frame: int) -> tuple[Tensor, Tensor]:
    """Edges inside a frame, and their lengths."""
    distance = torch.cdist(pos, pos)
    within = (distance <= RADIUS).fill_diagonal_(False)
    centre, neighbour = within.nonzero(as_tuple=True)
    index = torch.stack([neighbour, centre]) + frame * TRACKS
    return index, distance[within]


def temporal(pos: Tensor) -> tuple[Tensor, Tensor]:
    """Edges between a track's nodes in neighbouring frames, both ways."""
    later = torch.arange(TRACKS, len(pos))
    index = torch.stack([later - TRACKS, later])
    index = torch.cat([index, index.flip(0)], 1)
    return index, (pos[index[0]] - pos[index[1]]).norm(dim=1)


def collate(graphs: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One graph that is all of them side by side."""
    batch = {
        key: torch.cat(
            [graph[key] for graph in graphs], 1 if key == "edge_index" else 0
        )
        for key in KEYS
    }
    counts = torch.tensor([len(graph["pos"]) for graph in graphs])
    edges = torch.tensor([graph["edge_index"].shape[1] for graph in graphs])
    batch["edge_index"] += (counts.cumsum(0) - counts).repeat_interleave(edges)
    return batch


# ---- Loaders -------------------------------------------------------------------------


def built(plays: Plays, sampler, batch: int, workers: int) -> DataLoader:
    """Batches of graphs that are built when they are needed."""
    return DataLoader(
        BuiltPlays(plays),
        batch,
        sampler=sampler,
        collate_fn=collate,
        num_workers=workers,
    )


def cached(
    plays: Plays, sampler, batch: int, cap: int | None, device: torch.device
) -> trainfast.graph_cache.Loader:
    """Batches from a cache, as tensors on the device."""
    return trainfast.graph_cache.Loader(
        trainfast.graph_cache.open(plays.cache(cap)),
        batch,
        sampler=sampler,
        device=device,
        fields=KEYS,
    )
