"""PyG's `radius_graph`, `knn_graph`, `radius` and `knn`, with PyG's signatures, for a
PyG without pyg-lib and torch-cluster.

Beyond PyG's promises: edges are sorted by centre and then by neighbour, the cap keeps
the nearest, and `knn_graph` finds exactly k neighbours where a graph has them.
"""

from typing import Any

import torch_geometric.typing
from torch import Tensor
from torch_geometric.nn import pool

from trainfast.numpy import neighbours
from trainfast.stats import count_call, count_fallback

__all__ = ["knn", "knn_graph", "radius", "radius_graph"]

# PyG's own; under trainfast.patch("pyg") its names are bound to the ones below.
_theirs = {name: getattr(pool, name) for name in __all__}


def radius_graph(
    x: Tensor,
    r: float,
    batch: Tensor | None = None,
    loop: bool = False,
    max_num_neighbors: int = 32,
    flow: neighbours.Flow = "source_to_target",
    num_workers: int = 1,
    batch_size: int | None = None,
) -> Tensor:
    """Edges between all points of a graph that are nearer to each other than `r`.

    Args:
        x: positions, [points, dimensions] or [points].
        r: the radius.
        batch: the graph of each point, sorted; None: one graph.
        loop: also an edge from each point to itself.
        max_num_neighbors: at most as many neighbours of each point, the nearest.
        flow: "source_to_target": row 0 is the neighbour and row 1 the centre;
            "target_to_source": the other way round.
        num_workers: ignored; torch.set_num_threads() says how many threads run.
        batch_size: the number of graphs; None: those up to the last point's.

    Returns:
        int64 [2, edges], sorted by centre, then by neighbour.

    Raises:
        ValueError: a coordinate is NaN or infinite, r is NaN or negative, or batch is
            not sorted.
    """
    theirs = _for_gpu("radius_graph", x)
    if theirs is not None:
        return theirs(
            x, r, batch, loop, max_num_neighbors, flow, num_workers, batch_size
        )
    edges: Tensor = neighbours.radius_graph(
        _positions(x),
        r=float(r),
        batch=batch,
        batch_size=batch_size,
        loop=loop,
        max_num_neighbors=max_num_neighbors,
        flow=flow,
        boundary="<",
    )
    return edges


def knn_graph(
    x: Tensor,
    k: int,
    batch: Tensor | None = None,
    loop: bool = False,
    flow: neighbours.Flow = "source_to_target",
    cosine: bool = False,
    num_workers: int = 1,
    batch_size: int | None = None,
) -> Tensor:
    """Edges from each point's `k` nearest points of its graph to the point.

    Args:
        x: positions, [points, dimensions] or [points].
        k: the number of neighbours; a graph with fewer points has fewer.
        batch: the graph of each point, sorted; None: one graph.
        loop: a point is its own nearest neighbour.
        flow: "source_to_target": row 0 is the neighbour and row 1 the centre;
            "target_to_source": the other way round.
        cosine: by 1 - cos of the angle between positions, not by distance.
        num_workers: ignored; torch.set_num_threads() says how many threads run.
        batch_size: the number of graphs; None: those up to the last point's.

    Returns:
        int64 [2, edges], sorted by centre, then by neighbour.

    Raises:
        ValueError: a coordinate is NaN or infinite, or batch is not sorted.
    """
    theirs = _for_gpu("knn_graph", x)
    if theirs is not None:
        return theirs(x, k, batch, loop, flow, cosine, num_workers, batch_size)
    edges: Tensor = neighbours.knn_graph(
        _positions(x),
        k=k,
        batch=batch,
        batch_size=batch_size,
        loop=loop,
        flow=flow,
        cosine=cosine,
    )
    return edges


def radius(
    x: Tensor,
    y: Tensor,
    r: float,
    batch_x: Tensor | None = None,
    batch_y: Tensor | None = None,
    max_num_neighbors: int = 32,
    num_workers: int = 1,
    batch_size: int | None = None,
) -> Tensor:
    """For each point of `y`, the points of `x` that are nearer to it than `r`.

    Args:
        x: positions, [points, dimensions] or [points].
        y: positions of the centres, of as many dimensions.
        r: the radius.
        batch_x: the graph of each point of x, sorted; None: one graph.
        batch_y: the graph of each point of y, sorted; None: one graph.
        max_num_neighbors: at most as many points of x for each of y, the nearest.
        num_workers: ignored; torch.set_num_threads() says how many threads run.
        batch_size: the number of graphs; None: those up to the last point's.

    Returns:
        int64 [2, pairs]: row 0 is the index into y, row 1 the index into x; sorted by
        row 0, then by row 1.

    Raises:
        ValueError: a coordinate is NaN or infinite, r is NaN or negative, or a batch
            vector is not sorted, or one of the two is missing.
    """
    theirs = _for_gpu("radius", x)
    if theirs is not None:
        return theirs(
            x, y, r, batch_x, batch_y, max_num_neighbors, num_workers, batch_size
        )
    edges: Tensor = neighbours.radius(
        _positions(x),
        _positions(y),
        r=float(r),
        **_batches(batch_x, batch_y, batch_size),
        max_num_neighbors=max_num_neighbors,
        boundary="<",
    )
    return edges


def knn(
    x: Tensor,
    y: Tensor,
    k: int,
    batch_x: Tensor | None = None,
    batch_y: Tensor | None = None,
    cosine: bool = False,
    num_workers: int = 1,
    batch_size: int | None = None,
) -> Tensor:
    """For each point of `y`, its `k` nearest points of `x`.

    Args:
        x: positions, [points, dimensions] or [points].
        y: positions of the centres, of as many dimensions.
        k: the number of points of x for each of y; fewer where a graph has fewer.
        batch_x: the graph of each point of x, sorted; None: one graph.
        batch_y: the graph of each point of y, sorted; None: one graph.
        cosine: by 1 - cos of the angle between positions, not by distance.
        num_workers: ignored; torch.set_num_threads() says how many threads run.
        batch_size: the number of graphs; None: those up to the last point's.

    Returns:
        int64 [2, pairs]: row 0 is the index into y, row 1 the index into x; sorted by
        row 0, then by row 1.

    Raises:
        ValueError: a coordinate is NaN or infinite, or a batch vector is not sorted, or
            one of the two is missing.
    """
    theirs = _for_gpu("knn", x)
    if theirs is not None:
        return theirs(x, y, k, batch_x, batch_y, cosine, num_workers, batch_size)
    edges: Tensor = neighbours.knn(
        _positions(x),
        _positions(y),
        k=k,
        **_batches(batch_x, batch_y, batch_size),
        cosine=cosine,
    )
    return edges


def _for_gpu(name: str, x: Tensor) -> Any:
    """PyG's own function for tensors on a GPU, if it has the library that it needs.
    Without it the search is trainfast's."""
    if x.device.type != "cpu" and _has_library():
        count_fallback("pyg", f"{name} on a GPU is left to PyG")
        return _theirs[name]
    count_call("pyg", name)
    return None


def _has_library() -> bool:
    """Whether PyG's own functions can run: since PyG 2.8 with pyg-lib, before with
    torch-cluster."""
    known = torch_geometric.typing
    name = "WITH_KNN" if hasattr(known, "WITH_KNN") else "WITH_TORCH_CLUSTER"
    return bool(getattr(known, name, False))


def _positions(x: Tensor) -> Tensor:
    """Positions as the kernel takes them; integers become float64."""
    x = x.detach() if x.is_floating_point() else x.double()
    return x.view(-1, 1) if x.dim() == 1 else x


def _batches(
    batch_x: Tensor | None, batch_y: Tensor | None, batch_size: int | None
) -> dict[str, Any]:
    """The batch vectors as keywords; one alone is an error, except for one graph."""
    given = [batch for batch in (batch_x, batch_y) if batch is not None]
    if len(given) == 1:
        # Sorted, so that the last one is the largest.
        last = int(given[0][-1]) if len(given[0]) else 0
        graphs = last + 1 if batch_size is None else batch_size
        if graphs > 1:
            missing = "batch_x" if batch_x is None else "batch_y"
            raise ValueError(
                f"{missing} must be given for {graphs} graphs, got None; pass the "
                "graph of each of its points"
            )
    return {"batch_x": batch_x, "batch_y": batch_y, "batch_size": batch_size}
