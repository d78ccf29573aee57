"""A cache of graphs that are made from positions: near points are joined by edges."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat, overload

import numpy as np

from trainfast.graph_cache.build import BuildReport, build
from trainfast.graph_cache.keys import Key
from trainfast.numpy.neighbours import Feature, radius_graph

__all__ = ["build_from_points"]

Array = np.ndarray[Any, Any]
Graph = dict[str, Array]

_DISTANCE: tuple[Feature] = ("distance",)
_CHUNK_NODES = 1 << 15  # nodes whose edges are made in one call


def build_from_points(
    path: str | os.PathLike[str],
    points: Any,
    *,
    r: SupportsFloat,
    ptr: Any = None,
    frame: Any = None,
    track: Any = None,
    mask: Any = None,
    max_num_neighbors: int | None = None,
    node_fields: Mapping[str, Any] | None = None,
    graph_fields: Mapping[str, Any] | None = None,
    transform_id: Key | None = None,
    workers: int = 0,
    progress: bool = True,
    rebuild: bool | None = None,
) -> BuildReport:
    """Makes the cache at `path` hold a graph for each set of points.

    Each graph has `pos` [nodes, dimensions], `edge_index` [2, edges] (row 0 the
    neighbour, row 1 the centre) and `edge_attr` [edges, 1], the distance. Spatial edges
    join points within `r`. With `frame` they join points of one frame only, and
    `edge_type` [edges] tells them (0) from temporal edges (1), which join the points of
    one track in a frame and the next one, both ways. The spatial edges come first.

    A killed build resumes as `build` does: graphs that are in the cache are not made
    again.

    Args:
        path: the cache's directory, as for `build`.
        points: [graphs, nodes, dimensions], or [points, dimensions] with `ptr`.
        r: the largest distance of a spatial edge; infinity joins all.
        ptr: [graphs + 1]: graph g has the rows ptr[g] to ptr[g + 1] - 1 of `points`.
        frame: the number of each point's frame, an integer: [nodes] if it is the same
            for all graphs, otherwise of the shape of `points` without dimensions.
        track: the number of what each point is a position of, shaped as `frame`; with
            `frame` only.
        mask: which points there are, shaped as `frame`, bool. The others become no
            nodes, and may be NaN.
        max_num_neighbors: at most so many spatial edges to each point, those from the
            nearest ones.
        node_fields: by name more values of nodes, shaped as `points` up to its last
            dimension.
        graph_fields: by name more values of graphs, of shape [graphs, ...].
        transform_id: names what the points are, as for `build`; change it when they
            change, and all graphs are made again.
        workers: processes that make graphs.
        progress: shows a bar.
        rebuild: True makes all graphs again.

    Returns:
        What was made and reused, as from `build`.

    Raises:
        ValueError: shapes that do not fit, or r < 0.
        BuildError: a point is not finite, or a track is twice in a frame. What was made
            before is kept.
        The other errors of `build`.
    """
    if not float(r) >= 0:
        raise ValueError(f"r must be >= 0, got {r}")
    graphs = _Graphs(
        _ragged(points, ptr, frame, track, mask, node_fields or {}),
        {name: np.asarray(value) for name, value in (graph_fields or {}).items()},
        float(r),
        max_num_neighbors,
    )
    for name, value in graphs.graph_fields.items():
        if value.ndim < 1 or len(value) != len(graphs):
            rule = f"graph_fields[{name!r}] must have a row for each of {len(graphs)}"
            raise ValueError(f"{rule} graphs, got shape {value.shape}")
    return build(
        path,
        graphs,
        transform_id=transform_id,
        workers=workers,
        progress=progress,
        rebuild=rebuild,
    )


@dataclass
class _Points:
    """All points, one after another. An array that is the same for all graphs, of
    equally many nodes, is there once."""

    ptr: Array  # [graphs + 1]
    pos: Array
    frame: Array | None
    track: Array | None
    fields: dict[str, Array]  # of nodes
    mask: Array | None

    def part(self, first: int, end: int) -> "_Points":
        """The points of these graphs that there are."""
        begin, stop = self.ptr[first], self.ptr[end]
        ptr = self.ptr[first : end + 1] - begin
        rows: slice | Array = slice(begin, stop)

        def take(array: Array) -> Array:
            if len(array) == len(self.pos):
                return array[rows]
            numbers = np.arange(begin, stop) if isinstance(rows, slice) else rows
            return array[numbers % len(array)]

        if self.mask is not None:
            kept = take(self.mask)
            rows = begin + np.flatnonzero(kept)
            ptr = np.concatenate(([0], kept.cumsum()))[ptr]
        return _Points(
            ptr,
            take(self.pos),
            None if self.frame is None else take(self.frame),
            None if self.track is None else take(self.track),
            {name: take(array) for name, array in self.fields.items()},
            None,
        )


def _ragged(
    points: Any, ptr: Any, frame: Any, track: Any, mask: Any, fields: Mapping[str, Any]
) -> _Points:
    pos = np.asarray(points)
    if pos.ndim != (3 if ptr is None else 2):
        rule = "points must have shape [graphs, nodes, dimensions], or with ptr "
        raise ValueError(f"{rule}[points, dimensions], got {pos.shape}")
    if ptr is None:
        begins = np.arange(len(pos) + 1, dtype=np.int64) * pos.shape[1]
    else:
        begins = np.asarray(ptr, np.int64)
        if begins.ndim != 1 or not len(begins) or begins[0] != 0:
            raise ValueError(f"ptr must be a vector that begins with 0, got {ptr!r}")
        if (np.diff(begins) < 0).any() or begins[-1] != len(pos):
            rule = f"ptr must not decrease, and end with the {len(pos)} points"
            raise ValueError(f"{rule}, got {begins[-1]}")
    if track is not None and frame is None:
        raise ValueError("track must be given with frame")

    def flat(name: str, value: Any) -> Array:
        array = np.asarray(value)
        if array.ndim == 1 and array.shape == pos.shape[1:-1]:
            return array  # the same for all graphs
        if array.shape[: pos.ndim - 1] != pos.shape[:-1]:
            rule = f"{name} must have shape {list(pos.shape[:-1])}"
            raise ValueError(f"{rule}, got {list(array.shape)}")
        return array.reshape(-1, *array.shape[pos.ndim - 1 :])

    def number(name: str, value: Any, kinds: str) -> Array | None:
        array = None if value is None else flat(name, value)
        if array is not None and (array.ndim != 1 or array.dtype.kind not in kinds):
            what = "bool" if kinds == "b" else "an integer"
            raise ValueError(f"{name} must be {what} for each point, got {array.dtype}")
        return array

    return _Points(
        begins,
        pos.reshape(-1, pos.shape[-1]),
        number("frame", frame, "iu"),
        number("track", track, "iu"),
        {name: flat(f"node_fields[{name!r}]", value) for name, value in fields.items()},
        number("mask", mask, "b"),
    )


@dataclass
class _Graphs(Sequence[Graph]):
    """The graphs, made many at a time when one of them is asked for."""

    points: _Points
    graph_fields: dict[str, Array]
    r: float
    most: int | None
    first: int = 0  # of the chunk that is held
    chunk: tuple[Graph, ...] = ()

    def __len__(self) -> int:
        return len(self.points.ptr) - 1

    @overload
    def __getitem__(self, index: int) -> Graph: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Graph]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        if not self.first <= index < self.first + len(self.chunk):
            self.chunk = ()  # its memory is free for the next one
            end = np.searchsorted(
                self.points.ptr, self.points.ptr[index] + _CHUNK_NODES
            )
            end = min(max(int(end) - 1, index + 1), len(self))
            self.first, self.chunk = index, self._make(index, end)
        return self.chunk[index - self.first]

    def _make(self, first: int, end: int) -> tuple[Graph, ...]:
        points = self.points.part(first, end)
        try:
            edges = _edges(points, self.r, self.most)
        except ValueError as error:
            graphs = f"graphs {first} to {end - 1}"
            raise ValueError(f"{error} of the points of {graphs}") from None
        nodes = {"pos": points.pos, **points.fields}
        made = []
        for i in range(end - first):
            a, b = points.ptr[i], points.ptr[i + 1]
            graph = {name: array[a:b] for name, array in nodes.items()}
            graph.update(_joined([part.of(i, a) for part in edges]))
            for name, value in self.graph_fields.items():
                graph[name] = value[first + i]
            made.append(graph)
        return tuple(made)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "first": 0, "chunk": ()}  # for workers


@dataclass
class _Edges:
    """Edges of one kind of several graphs, one graph after another."""

    ptr: Array  # [graphs + 1]
    index: Array  # [2, edges]
    distance: Array

    def of(self, i: int, node: int) -> tuple[Array, Array]:
        """Index and distance of graph i, whose first node is `node`."""
        e = slice(self.ptr[i], self.ptr[i + 1])
        return self.index[:, e] - node, self.distance[e]


def _joined(kinds: Sequence[tuple[Array, Array]]) -> Graph:
    """A graph's edges of one kind, or spatial ones and then temporal ones."""
    if len(kinds) == 1:
        index, distance = kinds[0]
        return {"edge_index": index, "edge_attr": distance[:, None]}
    (index, distance), (late_index, late_distance) = kinds
    kind = np.zeros(len(distance) + len(late_distance), np.uint8)
    kind[len(distance) :] = 1
    return {
        "edge_index": np.concatenate((index, late_index), axis=1),
        "edge_attr": np.concatenate((distance, late_distance))[:, None],
        "edge_type": kind,
    }


def _edges(points: _Points, r: float, most: int | None) -> list[_Edges]:
    """Spatial edges and, with frames, temporal ones."""
    graph = np.repeat(np.arange(len(points.ptr) - 1), np.diff(points.ptr))
    if points.frame is None:
        index, features = radius_graph(
            points.pos,
            r=r,
            ptr=points.ptr,
            max_num_neighbors=most,
            features=_DISTANCE,
        )
        ptr = _count(graph, index, len(points.ptr))
        return [_Edges(ptr, index, features["distance"])]
    index, distance = _in_frames(points, graph, r, most)
    later = _in_tracks(points, graph)
    pos = points.pos.astype(np.float64, copy=False)
    gap = pos[later[0]] - pos[later[1]]
    late_distance = np.sqrt((gap * gap).sum(1)).astype(distance.dtype)
    return [
        _Edges(_count(graph, index, len(points.ptr)), index, distance),
        _Edges(_count(graph, later, len(points.ptr)), later, late_distance),
    ]


def _count(graph: Array, index: Array, n: int) -> Array:
    """Where each graph's edges begin; `index` is sorted by graph."""
    return np.searchsorted(graph[index[1]], np.arange(n))


def _in_frames(
    points: _Points, graph: Array, r: float, most: int | None
) -> tuple[Array, Array]:
    """Spatial edges, and their lengths."""
    frame = points.frame
    assert frame is not None
    moved = (graph[1:] == graph[:-1]) & (frame[1:] < frame[:-1])
    order = np.lexsort((frame, graph)) if moved.any() else None
    if order is not None:
        frame, graph = frame[order], graph[order]
    begins = np.flatnonzero((np.diff(graph) != 0) | (np.diff(frame) != 0)) + 1
    index, features = radius_graph(
        points.pos if order is None else points.pos[order],
        r=r,
        ptr=np.concatenate(([0], begins, [len(graph)])),
        max_num_neighbors=most,
        features=_DISTANCE,
    )
    distance = features["distance"]
    if order is not None:
        index = order[index]
        sort = np.lexsort((index[0], index[1]))
        index, distance = index[:, sort], distance[sort]
    return index, distance


def _in_tracks(points: _Points, graph: Array) -> Array:
    """Temporal edges, both ways, sorted by centre and neighbour."""
    frame, track = points.frame, points.track
    assert frame is not None
    if track is None:
        return np.empty((2, 0), np.int64)
    order = np.lexsort((frame, track, graph))
    a, b = order[:-1], order[1:]
    joined = (graph[a] == graph[b]) & (track[a] == track[b])
    gap = frame[b].astype(np.int64) - frame[a].astype(np.int64)
    if (joined & (gap == 0)).any():
        twice = order[1:][joined & (gap == 0)][0]
        rule = f"track {track[twice]} must be in a frame once, got it twice"
        raise ValueError(f"{rule} in frame {frame[twice]}")
    joined &= gap == 1
    ahead = np.stack((a[joined], b[joined]))
    index = np.concatenate((ahead, ahead[::-1]), axis=1)
    return index[:, np.lexsort((index[0], index[1]))]
