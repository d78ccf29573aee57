"""What `trainfast bench` measures: all cases by name, and those that need no torch.

A maker builds the contenders of a case on a device. The makers of the other cases are
in `trainfast.torch.bench`, which is loaded by name because it imports this module.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from trainfast import adapters, graph_cache
from trainfast.bench.turns import Case, Contender
from trainfast.numpy import adamw_step, attention

Arrays = dict[str, np.ndarray[Any, Any]]
_CPU, _BOTH = ("cpu",), ("cpu", "cuda")
# In the order of the report; on which devices a case runs.
CASES = {
    "adamw-large": _BOTH,
    "adamw-small": _BOTH,
    "amp-step": _BOTH,
    "attention-forward": _BOTH,
    "attention-backward": _BOTH,
    "attention-gqa-mask": _BOTH,
    "loader": _CPU,
    "numpy-adamw": _CPU,
    "numpy-attention": _CPU,
    "train-gpt": _BOTH,
    "train-graphs": _BOTH,
}
TRAINING = "train-"  # cases of whole training steps
GRAPHS, BATCH = 256, 16


class Setup(NamedTuple):
    """Where to build contenders. `stack` undoes at the end what building them did."""

    device: str
    stack: ExitStack


class Made(NamedTuple):
    """A case with its contenders, and why other contenders do not run."""

    case: Case
    contenders: Sequence[Contender]
    skipped: Mapping[str, str] = {}


class Unavailable(Exception):
    """The case cannot run here; the message says what it needs."""


def make(name: str, setup: Setup) -> Made:
    """The case of this name with its contenders on a device.

    Raises:
        Unavailable: it needs a package or a device that is not here.
    """
    if name in _NUMPY:
        return _NUMPY[name](setup)
    if find_spec("torch") is None:
        raise Unavailable("needs torch, which is not installed")
    torch_cases = adapters.load("bench")
    torch_cases.require(setup.device)
    made: Made = torch_cases.CASES[name](setup)
    return made


def require_same(results: Mapping[str, Any], rtol: float = 1e-3) -> None:
    """RuntimeError unless all contenders computed the same: one that does not do the
    work must not be timed."""
    (first, expected), *others = results.items()
    for name, result in others:
        apart = float(abs(result - expected).max())
        if not apart <= rtol * float(abs(expected).max()):
            raise RuntimeError(
                f"{name} and {first} must agree, but are {apart:.2g} off"
            )


# ---- Graphs --------------------------------------------------------------------------


def build_graph(seed: int) -> Arrays:
    """8 nearest neighbours of 64 to 96 random points. A node has its coordinates and 8
    eigenvectors of the graph's Laplacian, the usual positional encoding."""
    rng = np.random.default_rng(seed)
    points = rng.random((int(rng.integers(64, 97)), 3), np.float32)
    distances = np.square(points[:, None] - points).sum(-1)
    nearest = np.argpartition(distances, 8, axis=1)[:, :9]
    adjacency = np.zeros_like(distances)
    np.put_along_axis(adjacency, nearest, 1, axis=1)
    np.fill_diagonal(adjacency, 0)
    adjacency = np.maximum(adjacency, adjacency.T)
    laplacian = np.diag(adjacency.sum(1)) - adjacency
    vectors = np.linalg.eigh(laplacian)[1][:, 1:9]
    return {
        "x": np.hstack([points, vectors]).astype(np.float32),
        "edge_index": np.array(adjacency.nonzero()),
        "y": points[:, :1].mean(0),
    }


def build_cache(graphs: Sequence[Arrays], stack: ExitStack) -> graph_cache.Cache:
    """A graph cache that is deleted with the stack."""
    folder = stack.enter_context(TemporaryDirectory(prefix="trainfast-bench-"))
    graph_cache.build(Path(folder, "cache"), graphs, progress=False)
    return stack.enter_context(graph_cache.open(Path(folder, "cache")))


def concatenate(graphs: Sequence[Arrays]) -> Arrays:
    """The batch of these graphs by NumPy: one graph of unconnected parts."""
    sizes = [len(graph["x"]) for graph in graphs]
    starts = np.cumsum([0, *sizes[:-1]])
    moved = [graph["edge_index"] + s for graph, s in zip(graphs, starts, strict=True)]
    return {
        "x": np.concatenate([graph["x"] for graph in graphs]),
        "edge_index": np.concatenate(moved, axis=1),
        "y": np.concatenate([graph["y"] for graph in graphs]),
        "batch": np.repeat(np.arange(len(graphs)), sizes),
    }


def _loader(setup: Setup) -> Made:
    graphs = [build_graph(seed) for seed in range(GRAPHS)]
    cache = build_cache(graphs, setup.stack)
    loader = graph_cache.Loader(cache, BATCH, shuffle=True, seed=0)
    rng = np.random.default_rng(0)

    def by_numpy() -> Iterator[Arrays]:
        for chosen in rng.permutation(GRAPHS).reshape(-1, BATCH):
            yield concatenate([graphs[i] for i in chosen])

    def contender(
        name: str, epoch: Callable[[], Any], role: str = "rival"
    ) -> Contender:
        def drain() -> None:
            count = sum(1 for _ in epoch())
            if count != GRAPHS // BATCH:
                raise RuntimeError(f"{name} must make {GRAPHS // BATCH} batches")

        return Contender(name, drain, role, calls=GRAPHS // BATCH)

    contenders = [contender("trainfast", lambda: loader, "ours")]
    skipped = {}
    if find_spec("torch") and find_spec("torch_geometric"):
        rival = adapters.load("bench").pyg_loader(graphs, BATCH)
        contenders.append(contender("PyG DataLoader", lambda: rival))
    else:
        skipped["PyG DataLoader"] = "needs torch and torch_geometric"
    contenders.append(contender("NumPy", by_numpy))
    nbytes = sum(array.nbytes for graph in graphs for array in graph.values())
    title = f"a batch of {BATCH} graphs, from a loader that is drained"
    case = Case("loader", title, "float32", nbytes=2 * nbytes * BATCH // GRAPHS)
    return Made(case, contenders, skipped)


# ---- Without torch -------------------------------------------------------------------


def _numpy_adamw(_setup: Setup) -> Made:
    n, lr = 1_000_000, 1e-3

    def arrays() -> list[np.ndarray[Any, Any]]:
        rng = np.random.default_rng(0)
        made = [rng.standard_normal(n, np.float32) for _ in range(2)]
        return [*made, np.zeros(n, np.float32), np.zeros(n, np.float32)]

    ours, rival, steps = arrays(), arrays(), {"ours": 0, "rival": 0}

    def trainfast() -> None:
        steps["ours"] += 1
        p, g, m, v = ours
        adamw_step([p], [g], [m], [v], step=steps["ours"], lr=lr, weight_decay=0.01)

    def by_numpy() -> None:
        steps["rival"] += 1
        p, g, m, v = rival
        m += 0.1 * (g - m)
        v += 0.001 * (g * g - v)
        size = lr / (1 - 0.9 ** steps["rival"])
        p *= 1 - lr * 0.01
        p -= size * m / (np.sqrt(v / (1 - 0.999 ** steps["rival"])) + 1e-8)

    trainfast()
    by_numpy()
    require_same({"NumPy": rival[0], "trainfast": ours[0]})
    case = Case("numpy-adamw", "AdamW, 1 x 1,000,000", "float32", nbytes=28 * n)
    return Made(case, _two(trainfast, by_numpy))


def _numpy_attention(_setup: Setup) -> Made:
    heads, n, dim = 8, 512, 64
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, heads, n, dim), np.float32) for _ in range(3))
    hidden = np.triu(np.full((n, n), -np.inf, np.float32), 1)

    def by_numpy() -> Any:
        scores = q @ k.swapaxes(-1, -2) * np.float32(dim**-0.5) + hidden
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights @ v / weights.sum(-1, keepdims=True)

    trainfast = partial(attention, q, k, v, is_causal=True)
    require_same({"NumPy": by_numpy(), "trainfast": trainfast()})
    flops = 2 * heads * n * n * dim  # half of the scores are hidden
    title = f"causal attention, {heads} heads, {n} x {dim}"
    case = Case("numpy-attention", title, "float32", flops=flops)
    return Made(case, _two(trainfast, by_numpy))


def _two(
    trainfast: Callable[[], object], by_numpy: Callable[[], object]
) -> list[Contender]:
    return [Contender("trainfast", trainfast, "ours"), Contender("NumPy", by_numpy)]


_NUMPY: dict[str, Callable[[Setup], Made]] = {
    "loader": _loader,
    "numpy-adamw": _numpy_adamw,
    "numpy-attention": _numpy_attention,
}
