"""Batches as jraph's GraphsTuple, for JAX.

With a Loader's `pad_to` they are what `jraph.pad_with_graphs` gives: one graph with all
nodes and edges that are missing (its edges join its first node), then empty ones, and
`jraph.get_graph_padding_mask` and its like work on them.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from trainfast._core import GraphBatch
from trainfast.graph_cache.batch import Assemble, BatchPlan


class _GraphsTuple(NamedTuple):
    """The fields of jraph's GraphsTuple, for where jraph is not installed."""

    nodes: Any
    edges: Any
    receivers: Any
    senders: Any
    globals: Any
    n_node: Any
    n_edge: Any


def graphs_tuple() -> Any:
    """jraph's GraphsTuple, or an equal one of ours where jraph is not installed."""
    try:
        return import_module("jraph").GraphsTuple
    except ImportError:
        return _GraphsTuple


def jraph_assembler(plan: BatchPlan) -> Assemble:
    """Makes a GraphBatch a GraphsTuple of NumPy arrays.

    nodes, edges, globals: the array where there is one such field, a dict by name where
    there are several, None where there is none; [nodes, ...], [edges, ...] and
    [graphs, ...]. senders, receivers: the rows of "edge_index", or the fields of these
    names, int [edges], in the dtype they were given in. n_node, n_edge: int32 [graphs].

    Raises ValueError for graphs with types, and for fields that have no place in a
    GraphsTuple (strings, those along another dimension than the first): leave them out
    with `exclude`.
    """
    schema = plan.schema
    if set(schema.nodes) - {""} or set(schema.edges) - {""}:
        raise ValueError("output must be 'dict' or 'pyg' for graphs with types")
    if not schema.nodes or not schema.edges:
        rule = "must have nodes and edges, by names such as x and edge_index"
        raise ValueError(f"graphs for a GraphsTuple {rule}, got {list(schema.keys)}")
    nodes, edges = schema.nodes[""], schema.edges[""]
    ends = _ends(plan)
    parts: dict[int | None, list[int]] = {nodes: [], edges: [], None: []}
    for place, number in enumerate(plan.fields):
        if place not in ends.used:
            parts[_part(plan, number, nodes, edges)].append(place)
    pick = {part: _picker(plan, places) for part, places in parts.items()}
    make = graphs_tuple()

    def assemble(batch: GraphBatch) -> Any:
        arrays = batch.fields
        ptrs = batch.ptrs
        senders, receivers = ends.split(arrays)
        return make(
            nodes=pick[nodes](arrays),
            edges=pick[edges](arrays),
            receivers=receivers,
            senders=senders,
            globals=pick[None](arrays),
            n_node=_sizes(ptrs[nodes]),
            n_edge=_sizes(ptrs[edges]),
        )

    return assemble


def _sizes(ptr: np.ndarray) -> np.ndarray:
    """What lies between the sums, int32 [graphs]."""
    return np.subtract(ptr[1:], ptr[:-1], dtype=np.int32, casting="unsafe")


class _Ends(NamedTuple):
    """Where an edge's two ends are: places in the plan's fields, and how to split."""

    used: tuple[int, ...]
    split: Callable[[Sequence[Any]], tuple[Any, Any]]


def _ends(plan: BatchPlan) -> _Ends:
    places = {key: place for place, key in enumerate(plan.keys)}
    if "edge_index" in places:
        place = places["edge_index"]
        return _Ends((place,), lambda arrays: (arrays[place][0], arrays[place][1]))
    if "senders" in places and "receivers" in places:
        first, second = places["senders"], places["receivers"]
        return _Ends((first, second), lambda arrays: (arrays[first], arrays[second]))
    rule = "must have 'edge_index', or 'senders' and 'receivers'"
    raise ValueError(f"fields {rule}, got {list(plan.keys)}")


def _part(plan: BatchPlan, number: int, nodes: int, edges: int) -> int | None:
    """Whether a field goes with the nodes, the edges or, None, the globals."""
    field = plan.schema.fields[number]
    fits = field.dtype not in ("string", "bytes")
    if field.type in (nodes, edges):
        fits = fits and field.cat_dim == 0 and field.dims[0] == -1 - field.type
    else:
        fits = fits and (field.cat_dim is None or field.dims[:1] == (1,))
        fits = fits and field.cat_dim in (0, None)
    if not fits:
        name = field.name
        rule = "must have one entry a node, edge or graph in a GraphsTuple"
        raise ValueError(f"field {name!r} {rule}: leave it out (exclude=[{name!r}])")
    return field.type


def _picker(plan: BatchPlan, places: list[int]) -> Callable[[Sequence[Any]], Any]:
    if not places:
        return lambda arrays: None
    if len(places) == 1:
        only = places[0]
        return lambda arrays: arrays[only]
    named = [(str(plan.keys[place]), place) for place in places]
    return lambda arrays: {name: arrays[place] for name, place in named}
