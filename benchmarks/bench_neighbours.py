"""Graphs of neighbours: edges from positions, as a dataset builds them.

    python -m benchmarks.bench_neighbours                   every case
    python -m benchmarks.bench_neighbours --case 64x230 --seconds 5
    python -m benchmarks.bench_neighbours --json auto       into benchmarks/results/

The rival is scipy's cKDTree as a user would use it: a tree for each graph, its pairs in
both directions, one concatenation to int64 [2, edges], unsorted; in one thread, and
with the graphs shared among threads. trainfast's edges are sorted. The bound is a copy
of as many bytes as the edges take. Before it is timed, each contender must find the
edges that trainfast finds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from math import pi
from typing import Any

import numpy as np
import torch

from benchmarks import command, harness
from benchmarks.harness import Budget, Case, Contender

FIELD = (105.0, 68.0)  # a football pitch in metres, where 230 points have 68 neighbours
INDEX_BYTES = 2 * 8  # of an edge


class UnavailableError(Exception):
    """Why a contender cannot run here."""


@dataclass(frozen=True)
class Problem:
    """Graphs of equally many points, uniform in a box.

    aim: the factor by which trainfast is to be ahead of scipy's best; None: no aim.
    """

    name: str
    title: str
    graphs: int
    points: int
    r: float
    box: tuple[float, ...] = FIELD
    aim: float | None = None

    def shrunk(self) -> Problem:
        """Return the problem with sizes that only show that everything runs."""
        few = replace(self, graphs=min(self.graphs, 3), points=min(self.points, 500))
        return few if few.points == self.points else replace(few, r=0.2)


def problems() -> list[Problem]:
    """Return the cases, in the order of the table."""
    million, box = 10**6, (1.0, 1.0, 1.0)
    r = (30 / million * 3 / (4 * pi)) ** (1 / 3)  # of a ball with 30 points
    cloud = "1,000,000 points in 3-D, 30 neighbours"
    return [
        Problem("64x230", "64 graphs of 230 points", 64, 230, 30.0, aim=4.0),
        Problem("64x23", "64 graphs of 23 points", 64, 23, 30.0, aim=8.0),
        Problem("1x23", "one graph of 23 points", 1, 23, 30.0),
        Problem("cloud", cloud, 1, million, r, box, aim=3.0),
    ]


class Setup:
    """A problem's positions, and the edges that every contender must find."""

    def __init__(self, problem: Problem, threads: int) -> None:
        from trainfast.numpy import radius_graph

        self.problem, self.threads = problem, threads
        rng = np.random.default_rng(0)
        shape = (problem.graphs, problem.points, len(problem.box))
        self.positions = (rng.random(shape) * problem.box).astype(np.float32)
        self.flat = self.positions.reshape(-1, shape[2])
        self.ptr = np.arange(problem.graphs + 1) * problem.points
        self.ours = partial(radius_graph, self.flat, r=problem.r, ptr=self.ptr)
        self.edges = self.ours()
        self.most = int(np.bincount(self.edges[1], minlength=1).max(initial=0))
        self._numbers = numbered(self.edges)

    @property
    def case(self) -> Case:
        """The case for the harness; it must move what it writes, and the positions."""
        nbytes = self.edges.nbytes + self.flat.nbytes
        return Case(self.problem.name, self.problem.title, "float32", nbytes=nbytes)

    def check(self, name: str, edges: Any) -> None:
        """Raise RuntimeError unless these are the edges, in any order."""
        edges = np.asarray(edges)
        if edges.dtype != np.int64 or edges.shape != self.edges.shape:
            raise RuntimeError(
                f"{name} must find int64 {self.edges.shape}, got {edges.dtype} "
                f"{edges.shape}"
            )
        if not np.array_equal(numbered(edges), self._numbers):
            raise RuntimeError(f"{name} must find the edges that trainfast finds")


def numbered(edges: Any) -> Any:
    """Return a number for each edge, sorted."""
    return np.sort(edges[1] << 32 | edges[0])


# ---- Contenders ----------------------------------------------------------------------


def make_ours(setup: Setup) -> Contender:
    return Contender("trainfast", setup.ours, "ours", note="sorted")


def make_tensors(setup: Setup) -> Contender:
    from trainfast.torch import radius_graph

    flat, ptr = torch.from_numpy(setup.flat), torch.from_numpy(setup.ptr)
    run = partial(radius_graph, flat, r=setup.problem.r, ptr=ptr)
    return Contender("trainfast, tensors", run, "ours", note="sorted")


def tree_of() -> Any:
    """scipy's tree. Raises UnavailableError."""
    if not find_spec("scipy"):
        raise UnavailableError("scipy is not installed")
    from scipy.spatial import cKDTree

    return cKDTree


def pairs_of(make_tree: Any, positions: Any, r: float, graphs: Iterable[int]) -> list:
    """Return the edges of these graphs, each pair once in either direction."""
    found = []
    for graph in graphs:
        points = positions[graph]
        pairs = make_tree(points).query_pairs(r, output_type="ndarray").T
        pairs = pairs + graph * len(points)
        found += [pairs, pairs[::-1]]
    return found


def joined(parts: list) -> Any:
    return np.concatenate(parts, axis=1, dtype=np.int64)


def make_pairs(setup: Setup) -> Contender:
    """One thread."""
    r, positions = setup.problem.r, setup.positions
    find = partial(pairs_of, tree_of(), positions, r)
    return Contender("scipy pairs", lambda: joined(find(range(len(positions)))))


def make_threads(setup: Setup) -> Contender:
    """The graphs shared among threads."""
    n = setup.problem.graphs
    if n == 1:
        raise UnavailableError("there is one graph")
    find = partial(pairs_of, tree_of(), setup.positions, setup.problem.r)
    pool = ThreadPoolExecutor(setup.threads)
    shares = [range(i, n, setup.threads) for i in range(setup.threads)]

    def run() -> Any:
        return joined([part for parts in pool.map(find, shares) for part in parts])

    return Contender(f"scipy pairs, {setup.threads} threads", run)


def make_query(setup: Setup) -> Contender:
    """The k nearest within r, where k is the largest number of neighbours."""
    if setup.problem.graphs > 1:
        raise UnavailableError("query() is for one large graph")
    make_tree, r, k = tree_of(), setup.problem.r, setup.most + 1
    points, n = setup.flat, len(setup.flat)

    def run() -> Any:
        tree = make_tree(points)
        _, found = tree.query(
            points, k, distance_upper_bound=np.nextafter(r, 1e9), workers=setup.threads
        )
        centers, places = np.nonzero(found < n)  # n: no more within r
        edges = np.stack([found[centers, places], centers])
        return edges[:, edges[0] != edges[1]]

    note = f"query(k={k}, workers={setup.threads}), {k} given"
    return Contender("scipy query", run, note=note)


def make_scikit(setup: Setup) -> Contender:
    if not find_spec("sklearn"):
        raise UnavailableError("scikit-learn is not installed")
    from sklearn.neighbors import radius_neighbors_graph

    def run() -> Any:
        parts = []
        for i, points in enumerate(setup.positions):
            matrix = radius_neighbors_graph(points, setup.problem.r).tocoo()
            parts.append(np.stack([matrix.col, matrix.row]) + i * len(points))
        return joined(parts)

    return Contender("scikit-learn", run)


def make_pyg(setup: Setup) -> Contender:
    if not find_spec("pyg_lib") and not find_spec("torch_cluster"):
        raise UnavailableError("neither pyg-lib nor torch-cluster is installed")
    from torch_geometric.nn import radius_graph

    flat, most = torch.from_numpy(setup.flat), setup.most + 1
    batch = torch.arange(setup.problem.graphs).repeat_interleave(setup.problem.points)
    r = setup.problem.r
    return Contender(
        "PyG", lambda: radius_graph(flat, r, batch, max_num_neighbors=most)
    )


def make_bound(setup: Setup) -> Contender:
    source, target = setup.edges, np.zeros_like(setup.edges)
    note = "a copy of the edges' bytes into memory that is there"
    run = partial(np.copyto, target, source)
    return Contender("copy", run, "bound", nbytes=source.nbytes, note=note)


CONTENDERS: dict[str, Callable[[Setup], Contender]] = {
    "ours": make_ours,
    "tensors": make_tensors,
    "pairs": make_pairs,
    "threads": make_threads,
    "query": make_query,
    "sklearn": make_scikit,
    "pyg": make_pyg,
    "copy": make_bound,
}


def run_problem(args: argparse.Namespace, problem: Problem) -> dict:
    """Build a case's contenders, check and measure them, return the case's report."""
    setup = Setup(problem, args.threads)
    contenders, skipped = [], {}
    for name in args.contender or CONTENDERS:
        try:
            contender = CONTENDERS[name](setup)
        except UnavailableError as error:
            skipped[name] = str(error)
            continue
        if contender.role != "bound":
            setup.check(contender.name, contender.run())
        contenders.append(contender)
    budget = command.make_budget(args)
    if problem.points > 10**5:  # seconds a call
        budget = Budget(args.seconds, warmup=1, min_rounds=5)
    case = harness.run_case(setup.case, contenders, budget, harness.cpu_clock, skipped)
    case["edges"] = setup.edges.shape[1]
    case["aim"] = problem.aim
    return case


def aims_text(cases: Sequence[dict]) -> str:
    """Return a line for each case: how far ahead of scipy's best, and the aim."""
    lines = []
    for case in cases:
        scipys = [
            line["times_ours"]["median"]
            for line in case["lines"]
            if line["contender"].startswith("scipy") and line["times_ours"]
        ]
        if scipys:
            aim = f"aim {case['aim']:g}" if case["aim"] else "no aim"
            text = f"{case['title']}: {case['edges']:,} edges, scipy's best takes "
            lines.append(f"{text}{min(scipys):.2f} times as long ({aim})")
    return "\n".join(lines)


# ---- Command line --------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    cases = [problem.name for problem in problems()]
    parser = command.make_parser("bench_neighbours", __doc__, cases, list(CONTENDERS))
    return command.parse(parser, argv)


def run(args: argparse.Namespace) -> dict:
    """Run the chosen cases and return the report."""
    chosen = [
        partial(run_problem, args, problem.shrunk() if args.smoke else problem)
        for problem in problems()
        if not args.case or problem.name in args.case
    ]
    conditions = "positions in float32, indices in int64"
    backend = command.backend_in_use("cpu")
    return command.run(
        "neighbours", "Graphs of neighbours", args, conditions, backend, chosen
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the process's exit status."""
    args = parse(argv)
    report = run(args)
    print(aims_text(report["cases"]))
    command.write(args, report, "neighbours")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
