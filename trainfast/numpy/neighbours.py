"""Edges between points that are near each other, for arrays of NumPy and torch.

The squared distance of two points is computed in float64, in the order of dimensions,
and compared with r * r. Edges are sorted by centre, then by neighbour. The same points
therefore give the same edges on every processor and for any number of threads.
"""

import math
from collections.abc import Callable, Collection
from typing import Any, Literal, SupportsFloat, SupportsIndex

import numpy as np

from trainfast import _core
from trainfast.numpy import arrays
from trainfast.stats import count_fallback

__all__ = ["knn", "knn_graph", "radius", "radius_graph"]

Array = Any  # of NumPy or torch
Feature = Literal["distance", "relative_position", "unit_vector"]
Boundary = Literal["<", "<="]
Selection = Literal["nearest", "first"]
Flow = Literal["source_to_target", "target_to_source"]

# On a GPU every pair is compared, on the CPU only those of near cells. From about this
# many pairs on a CPU is faster than a small GPU, by the instructions that a pair takes.
_MOST_PAIRS = 2**30

_FEATURES = ("distance", "relative_position", "unit_vector")
_FLOWS = ("source_to_target", "target_to_source")

# What is said where a gradient would be lost; the two lines give it.
_NO_GRADIENT = (
    "features have no gradient, and pos.requires_grad is set. Call it without features "
    "and compute them in torch:\n"
    "    relative = pos[edge_index[0]] - pos[edge_index[1]]\n"
    "    distance = relative.norm(dim=-1)"
)


def radius_graph(
    pos: Array,
    *,
    r: SupportsFloat,
    batch: Array | None = None,
    ptr: Array | None = None,
    batch_size: int | None = None,
    loop: bool = False,
    max_num_neighbors: int | None = None,
    flow: Flow = "source_to_target",
    boundary: Boundary = "<=",
    selection: Selection = "nearest",
    features: Collection[Feature] = (),
    index_dtype: Any = "int64",
) -> Any:
    """Edges between all points of a graph that are within a distance of each other.

    Args:
        pos: points of shape [n, dimensions], 1 to 8 dimensions, of float64, float32,
            float16 or bfloat16.
        r: the largest distance; infinity makes complete graphs.
        batch: [n] the graph of each point, sorted. None: `ptr`, or all are one graph.
        ptr: [graphs + 1] instead of `batch`: graph g has the points ptr[g] to
            ptr[g + 1] - 1.
        batch_size: number of graphs, where the last ones of `batch` have no points.
        loop: whether each point is its own neighbour.
        max_num_neighbors: at most so many neighbours of each centre, itself not
            counted. None: no bound.
        flow: "source_to_target": row 0 has the neighbours, row 1 the centres;
            "target_to_source": the rows are swapped.
        boundary: "<=": points at the distance r are neighbours; "<": they are not.
        selection: which neighbours are kept if there are too many: the "nearest" (of
            equally near ones those with lower indices), or the "first" ones.
        features: of "distance" [edges], "relative_position" [edges, dimensions] (the
            neighbour's minus the centre's) and "unit_vector" [edges, dimensions] (that
            divided by the distance, zeros for zero), in the dtype of `pos`. They have
            no gradient.
        index_dtype: "int64" or "int32".

    Returns:
        edge_index of shape [2, edges]; with features (edge_index, dict of arrays).

    Raises:
        ValueError: a coordinate is NaN or infinite, `batch` is not sorted, r < 0, or
            `pos` requires a gradient and features are asked for.
    """
    return _edges(
        pos,
        None,
        _ptr("", pos, batch, ptr, batch_size),
        None,
        centres_first=_is_swapped(flow),
        features=features,
        index_dtype=index_dtype,
        r=float(r),
        most=_bound("max_num_neighbors", max_num_neighbors),
        below=_one_of("boundary", boundary, ("<", "<=")) == 0,
        first=_one_of("selection", selection, ("nearest", "first")) == 1,
        loop=bool(loop),
    )


def knn_graph(
    pos: Array,
    *,
    k: SupportsIndex,
    batch: Array | None = None,
    ptr: Array | None = None,
    batch_size: int | None = None,
    loop: bool = False,
    flow: Flow = "source_to_target",
    cosine: bool = False,
    features: Collection[Feature] = (),
    index_dtype: Any = "int64",
) -> Any:
    """Edges from the k nearest points of the same graph to each point.

    Args:
        pos: points, as for `radius_graph`.
        k: number of neighbours; fewer where a graph has fewer points. Of equally near
            points those with lower indices are taken.
        batch: as for `radius_graph`.
        ptr: as for `radius_graph`.
        batch_size: as for `radius_graph`.
        loop: whether a point itself counts as its neighbour.
        flow: as for `radius_graph`.
        cosine: order by the angle between points, not by their distance.
        features: as for `radius_graph`; not with `cosine`.
        index_dtype: "int64" or "int32".

    Returns:
        edge_index of shape [2, edges]; with features (edge_index, dict of arrays).

    Raises:
        ValueError: as `radius_graph`, or k < 0.
    """
    begins = _ptr("", pos, batch, ptr, batch_size)
    return _edges(
        pos,
        pos if loop else None,  # as centres of their own, points are found like others
        begins,
        begins if loop else None,
        centres_first=_is_swapped(flow),
        features=_not_with_cosine(features, cosine),
        index_dtype=index_dtype,
        r=math.inf,
        most=_bound("k", k),
        unit=bool(cosine),
    )


def radius(
    x: Array,
    y: Array,
    *,
    r: SupportsFloat,
    batch_x: Array | None = None,
    batch_y: Array | None = None,
    ptr_x: Array | None = None,
    ptr_y: Array | None = None,
    batch_size: int | None = None,
    max_num_neighbors: int | None = None,
    boundary: Boundary = "<=",
    selection: Selection = "nearest",
    features: Collection[Feature] = (),
    index_dtype: Any = "int64",
) -> Any:
    """For each point of y the points of x, of the same graph, that are within r of it.

    Args:
        x: points of shape [n, dimensions], as for `radius_graph`.
        y: the centres, of shape [m, dimensions] and x's dtype.
        r: the largest distance.
        batch_x: [n] the graph of each point of x, sorted.
        batch_y: [m] the graph of each centre, sorted. Given with `batch_x`, or neither.
        ptr_x: [graphs + 1] instead of `batch_x`, as for `radius_graph`.
        ptr_y: [graphs + 1] instead of `batch_y`.
        batch_size: number of graphs; None: as many as the larger batch has.
        max_num_neighbors: at most so many points for each centre. None: no bound.
        boundary: as for `radius_graph`.
        selection: as for `radius_graph`.
        features: as for `radius_graph`; positions are relative to the centre.
        index_dtype: "int64" or "int32".

    Returns:
        [2, pairs]: row 0 the indices into y, row 1 the indices into x; with features
        (pairs, dict of arrays).

    Raises:
        ValueError: as `radius_graph`.
    """
    ptr = _both(x, y, batch_x, batch_y, ptr_x, ptr_y, batch_size)
    return _edges(
        x,
        y,
        *ptr,
        centres_first=True,
        features=features,
        index_dtype=index_dtype,
        r=float(r),
        most=_bound("max_num_neighbors", max_num_neighbors),
        below=_one_of("boundary", boundary, ("<", "<=")) == 0,
        first=_one_of("selection", selection, ("nearest", "first")) == 1,
    )


def knn(
    x: Array,
    y: Array,
    *,
    k: SupportsIndex,
    batch_x: Array | None = None,
    batch_y: Array | None = None,
    ptr_x: Array | None = None,
    ptr_y: Array | None = None,
    batch_size: int | None = None,
    cosine: bool = False,
    features: Collection[Feature] = (),
    index_dtype: Any = "int64",
) -> Any:
    """For each point of y the k nearest points of x of the same graph.

    Args:
        x: points, as for `radius`.
        y: the centres, as for `radius`.
        k: number of points for each centre; fewer where a graph has fewer.
        batch_x: as for `radius`.
        batch_y: as for `radius`.
        ptr_x: as for `radius`.
        ptr_y: as for `radius`.
        batch_size: as for `radius`.
        cosine: order by the angle between points, not by their distance.
        features: as for `radius`; not with `cosine`.
        index_dtype: "int64" or "int32".

    Returns:
        [2, pairs]: row 0 the indices into y, row 1 the indices into x; with features
        (pairs, dict of arrays).

    Raises:
        ValueError: as `radius_graph`, or k < 0.
    """
    ptr = _both(x, y, batch_x, batch_y, ptr_x, ptr_y, batch_size)
    return _edges(
        x,
        y,
        *ptr,
        centres_first=True,
        features=_not_with_cosine(features, cosine),
        index_dtype=index_dtype,
        r=math.inf,
        most=_bound("k", k),
        unit=bool(cosine),
    )


# ---- Arguments ----------------------------------------------------------------------


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> int:
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")
    return choices.index(value)


def _is_swapped(flow: Any) -> bool:
    return _one_of("flow", flow, _FLOWS) == 1


def _bound(name: str, value: SupportsIndex | None) -> int:
    """The largest number of neighbours for the core, whose -1 means no bound."""
    if value is None:
        return -1
    if not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value.__index__() < 0:
        raise ValueError(f"{name} must be at least 0, got {value}")
    return min(value.__index__(), 2**31)


def _not_with_cosine(features: Collection[Feature], cosine: bool) -> Any:
    if cosine and features:
        raise ValueError("features must be empty with cosine=True")
    return features


def _numpy(name: str, array: Array) -> Any:
    """A batch or ptr as a NumPy array of int64."""
    if hasattr(array, "detach"):  # torch's
        array = array.detach().cpu().numpy()
    array = np.asarray(array)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        rule = f"{name} must be a vector of integers"
        raise ValueError(f"{rule}, got {array.dtype} of shape {array.shape}")
    return np.ascontiguousarray(array, np.int64)


def _ptr(
    side: str, points: Array, batch: Array | None, ptr: Array | None, size: int | None
) -> Any:
    """Where the graphs of `points` begin. `side`: the end of the arguments' names."""
    points_n = len(points)
    if ptr is not None:
        if batch is not None:
            raise ValueError(f"batch{side} and ptr{side} must not be given together")
        begins = _numpy(f"ptr{side}", ptr)
        if size is not None and len(begins) != size + 1:
            rule = f"ptr{side} must have batch_size + 1 = {size + 1} elements"
            raise ValueError(f"{rule}, got {len(begins)}")
        return begins
    if batch is None:
        graphs = 1 if size is None else size
        if graphs < 1:
            raise ValueError(f"batch_size must be at least 1, got {size}")
        begins = np.full(graphs + 1, points_n, np.int64)
        begins[0] = 0
        return begins
    graph = _numpy(f"batch{side}", batch)
    if len(graph) != points_n:
        rule = f"batch{side} must have an element for each of {points_n} points"
        raise ValueError(f"{rule}, got {len(graph)}")
    if len(graph) and (graph[0] < 0 or (graph[1:] < graph[:-1]).any()):
        raise ValueError(f"batch{side} must be sorted and not negative")
    found = int(graph[-1]) + 1 if len(graph) else 0
    graphs = max(found, 1) if size is None else size
    if graphs < found:
        raise ValueError(f"batch_size must be at least {found}, got {size}")
    return np.concatenate(([0], np.bincount(graph, minlength=graphs).cumsum()))


def _both(
    x: Array,
    y: Array,
    batch_x: Array | None,
    batch_y: Array | None,
    ptr_x: Array | None,
    ptr_y: Array | None,
    size: int | None,
) -> tuple[Any, Any]:
    """The two arrays of `_ptr`, of the same length."""
    begins = [
        _ptr("_x", x, batch_x, ptr_x, size),
        _ptr("_y", y, batch_y, ptr_y, size),
    ]
    longest = max(map(len, begins))
    if len(begins[0]) != len(begins[1]) and ptr_x is not None and ptr_y is not None:
        rule = "ptr_x and ptr_y must have as many elements"
        raise ValueError(f"{rule}, got {len(begins[0])} and {len(begins[1])}")
    x_begins, y_begins = (
        np.pad(part, (0, longest - len(part)), mode="edge") for part in begins
    )
    return x_begins, y_begins


# ---- The call -----------------------------------------------------------------------


def _edges(
    points: Array,
    centres: Array | None,
    ptr: Array,
    centres_ptr: Array | None,
    *,
    centres_first: bool,
    features: Collection[Feature],
    index_dtype: Any,
    **options: Any,
) -> Any:
    for feature in features:
        _one_of("features", feature, _FEATURES)
    index = str(getattr(index_dtype, "__name__", index_dtype)).rpartition(".")[2]
    _one_of("index_dtype", index, ("int64", "int32"))
    given = [points]
    given += [] if centres is None else [arrays.beside(points, centres)]
    if features and any(getattr(array, "requires_grad", False) for array in given):
        raise ValueError(_NO_GRADIENT)

    def search(given: list[Array], **where: Any) -> dict[str, Array]:
        made: dict[str, Array] = {}

        def make(edges: int) -> tuple[Array | None, ...]:
            if edges >= 2**31 and index == "int32":
                raise ValueError(f"index_dtype must be int64 for {edges} edges")
            rows = made["edge_index"] = arrays.empty(given[0], (2, edges), index)
            for name in features:
                shape = (edges,) if name == "distance" else (edges, points.shape[1])
                made[name] = arrays.empty(given[0], shape)
            centre, neighbour = rows if centres_first else (rows[1], rows[0])
            return (neighbour, centre, *(made.get(name) for name in _FEATURES))

        _core.neighbours(
            given[0],
            None if centres is None else given[1],
            ptr,
            centres_ptr,
            make,
            short_indices=index == "int32",
            scratch=lambda n: arrays.empty(given[0], (n,), "float32"),
            **where,
            **options,
        )
        return made

    if _kind_of_device(points) == "cpu":
        result = search(given, stream=arrays.current_stream(points))
    else:
        pairs = np.diff(ptr).astype(float) @ np.diff(
            ptr if centres_ptr is None else centres_ptr
        )
        result = _search_on_gpu(search, given, pairs)
    edge_index = result.pop("edge_index")
    return (edge_index, result) if features else edge_index


def _kind_of_device(array: Array) -> str:
    """A tensor's; other arrays are taken as they are."""
    return str(getattr(getattr(array, "device", None), "type", "cpu"))


def _search_on_gpu(
    search: Callable[..., dict[str, Array]], given: list[Array], pairs: float
) -> dict[str, Array]:
    """A search for tensors that are not on the CPU: it runs where they are, or on the
    CPU, which `stats()` counts."""
    device = given[0].device
    reason = f"points on {device.type}"
    if device.type == "cuda" and pairs > _MOST_PAIRS:
        reason = "graphs so large that a GPU, which compares all pairs, is slower"
    elif device.type == "cuda":
        stream = arrays.current_stream(given[0])
        try:
            return search([array.detach() for array in given], stream=stream)
        except NotImplementedError as error:
            reason = str(error)
    made = search([array.detach().cpu() for array in given])
    count_fallback("neighbours", f"searched on the CPU: {reason}")
    return {name: array.to(device) for name, array in made.items()}
