"""Graphs of neighbours: edges from positions, as a dataset builds them.

    python -m benchmarks.bench_neighbours                   every case
    python -m benchmarks.bench_neighbours --case 64x230 --seconds 5
    python -m benchmarks.bench_neighbours --json auto       into benchmarks/results/

The rival is scipy's cKDTree as a user would use it: a tree for each graph, its pairs in
both directions, one concatenation to int64 [2, edges], unsorted; in one thread, and
with the graphs shared among threads. trainfast's edges are sorted. The bound is a copy
of as many bytes as the edges take. Before it is timed, each contender must find the
edges that trainfast finds. In its turn a contender builds several batches of small
graphs, all different, as a loop over a dataset does; a lone call between other work
takes longer, and `--batches 1` measures it.
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
    batches: int = 1  # that a turn builds
    box: tuple[float, ...] = FIELD
    aim: float | None = None

    def shrunk(self) -> Problem:
        """Return the problem with sizes that only show that everything runs."""
        few = replace(self, graphs=min(self.graphs, 3), points=min(self.points, 500))
        few = replace(few, batches=min(self.batches, 2))
        return few if few.points == self.points else replace(few, r=0.2)


def problems() -> list[Problem]:
    """Return the cases, in the order of the table."""
    million, box = 10**6, (1.0, 1.0, 1.0)
    r = (30 / million * 3 / (4 * pi)) ** (1 / 3)  # of a ball with 30 points
    cloud = "1,000,000 points in 3-D, 30 neighbours"
    return [
        Problem("64x230", "64 graphs of 230 points", 64, 230, 30.0, 4, aim=4.0),
        Problem("64x23", "64 graphs of 23 points", 64, 23, 30.0, 32, aim=8.0),
        Problem("1x23", "one graph of 23 points", 1, 23, 30.0, 64),
        Problem("cloud", cloud, 1, million, r, box=box, aim=3.0),
    ]


class Setup:
    """A problem's positions, and the edges that every contender must find."""

    def __init__(self, problem: Problem, threads: int) -> None:
        from trainfast.numpy import radius_graph

        self.problem, self.threads = problem, threads
        rng = np.random.default_rng(0)
        shape = (problem.batches, problem.graphs, problem.points, len(problem.box))
        self.positions = (rng.random(shape) * problem.box).astype(np.float32)
        self.flat = self.positions.reshape(problem.batches, -1, shape[3])
        self.ptr = np.arange(problem.graphs + 1) * problem.points
        self.find = partial(radius_graph, r=problem.r, ptr=self.ptr)
        self.edges = [self.find(points) for points in self.flat]
        centres = [np.bincount(edges[1], minlength=1) for edges in self.edges]
        self.most = max(int(counts.max(initial=0)) for counts in centres)
        self._numbers = [numbered(edges) for edges in self.edges]

    def contender(
        self,
        name: str,
        find: Callable[[Any], Any],
        batches: Sequence | None = None,
        role: str = "rival",
        note: str = "",
    ) -> Contender:
        """One that finds the edges of each batch: by default of [graphs, points, dim].

        Raises RuntimeError unless these are the edges that trainfast finds, in any
        order.
        """
        batches = self.positions if batches is None else batches
        for batch, expected in zip(batches, self._numbers, strict=True):
            edges = np.asarray(find(batch))
            if edges.dtype != np.int64 or edges.shape != (2, len(expected)):
                raise RuntimeError(
                    f"{name} must find int64 {(2, len(expected))}, got {edges.dtype} "
                    f"{edges.shape}"
                )
            if not np.array_equal(numbered(edges), expected):
                raise RuntimeError(f"{name} must find the edges that trainfast finds")

        def run() -> None:
            for batch in batches:
                find(batch)

        return Contender(name, run, role, note=note, calls=len(batches))

    @property
    def case(self) -> Case:
        """The case for the harness; it must move what it writes, and the positions."""
        nbytes = self.edges[0].nbytes + self.flat[0].nbytes
        return Case(self.problem.name, self.problem.title, "float32", nbytes=nbytes)


def numbered(edges: Any) -> Any:
    """Return a number for each edge, sorted."""
    return np.sort(edges[1] << 32 | edges[0])


# ---- Contenders ----------------------------------------------------------------------


def make_ours(setup: Setup) -> Contender:
    return setup.contender("trainfast", setup.find, setup.flat, "ours", "sorted")


def make_tensors(setup: Setup) -> Contender:
    from trainfast.torch import radius_graph

    find = partial(radius_graph, r=setup.problem.r, ptr=torch.from_numpy(setup.ptr))
    batches = [torch.from_numpy(points) for points in setup.flat]
    return setup.contender("trainfast, tensors", find, batches, "ours", "sorted")


def tree_of() -> Any:
    """scipy's tree. Raises UnavailableError."""
    if not find_spec("scipy"):
        raise UnavailableError("scipy is not installed")
    from scipy.spatial import cKDTree

    return cKDTree


def pairs_of(make_tree: Any, r: float, positions: Any, graphs: Iterable[int]) -> list:
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
    find = partial(pairs_of, tree_of(), setup.problem.r)
    graphs = range(setup.problem.graphs)
    return setup.contender("scipy pairs", lambda batch: joined(find(batch, graphs)))


def make_threads(setup: Setup) -> Contender:
    """The graphs shared among threads."""
    n = setup.problem.graphs
    if n == 1:
        raise UnavailableError("there is one graph")
    find = partial(pairs_of, tree_of(), setup.problem.r)
    pool = ThreadPoolExecutor(setup.threads)
    shares = [range(i, n, setup.threads) for i in range(setup.threads)]

    def run(batch: Any) -> Any:
        parts = pool.map(partial(find, batch), shares)
        return joined([part for share in parts for part in share])

    return setup.contender(f"scipy pairs, {setup.threads} threads", run)


def make_query(setup: Setup) -> Contender:
    """The k nearest within r, where k is the largest number of neighbours."""
    if setup.problem.graphs > 1:
        raise UnavailableError("query() is for one large graph")
    make_tree, r, k = tree_of(), setup.problem.r, setup.most + 1
    bound = np.nextafter(r, 1e9)

    def run(points: Any) -> Any:
        tree = make_tree(points)
        _, found = tree.query(
            points, k, distance_upper_bound=bound, workers=setup.threads
        )
        centers, places = np.nonzero(found < len(points))  # no more within r
        edges = np.stack([found[centers, places], centers])
        return edges[:, edges[0] != edges[1]]

    note = f"query(k={k}, workers={setup.threads}), {k} given"
    return setup.contender("scipy query", run, setup.flat, note=note)


def make_scikit(setup: Setup) -> Contender:
    if not find_spec("sklearn"):
        raise UnavailableError("scikit-learn is not installed")
    from sklearn.neighbors import radius_neighbors_graph

    def run(batch: Any) -> Any:
        parts = []
        for i, points in enumerate(batch):
            matrix = radius_neighbors_graph(points, setup.problem.r).tocoo()
            parts.append(np.stack([matrix.col, matrix.row]) + i * len(points))
        return joined(parts)

    return setup.contender("scikit-learn", run)


def make_pyg(setup: Setup) -> Contender:
    if not find_spec("pyg_lib") and not find_spec("torch_cluster"):
        raise UnavailableError("neither pyg-lib nor torch-cluster is installed")
    from torch_geometric.nn import radius_graph

    most, r = setup.most + 1, setup.problem.r
    graph_of = torch.arange(setup.problem.graphs).repeat_interleave(
        setup.problem.points
    )
    batches = [torch.from_numpy(points) for points in setup.flat]
    return setup.contender(
        "PyG",
        lambda points: radius_graph(points, r, graph_of, max_num_neighbors=most),
        batches,
    )


def make_bound(setup: Setup) -> Contender:
    source, target = setup.edges[0], np.zeros_like(setup.edges[0])
    calls = setup.problem.batches

    def run() -> None:
        for _ in range(calls):
            np.copyto(target, source)

    note = "a copy of the edges' bytes into memory that is there"
    return Contender("copy", run, "bound", nbytes=source.nbytes, note=note, calls=calls)


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
            contenders.append(CONTENDERS[name](setup))
        except UnavailableError as error:
            skipped[name] = str(error)
    budget = command.make_budget(args)
    if problem.points > 10**5:  # seconds a call
        budget = Budget(args.seconds, warmup=1, min_rounds=5)
    case = harness.run_case(setup.case, contenders, budget, harness.cpu_clock, skipped)
    case["edges"] = setup.edges[0].shape[1]
    case["batches"] = problem.batches
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
    parser.add_argument(
        "--batches", type=int, help="that a contender builds in its turn"
    )
    args = command.parse(parser, argv)
    if args.batches is not None and args.batches < 1:
        parser.error(f"--batches must be at least 1, got {args.batches}")
    return args


def run(args: argparse.Namespace) -> dict:
    """Run the chosen cases and return the report."""
    chosen = []
    for problem in problems():
        if args.case and problem.name not in args.case:
            continue
        if args.smoke:
            problem = problem.shrunk()
        if args.batches is not None:
            problem = replace(problem, batches=args.batches)
        chosen.append(partial(run_problem, args, problem))
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
