"""GraphsTuples from the loader, against jraph itself where it is installed."""

import sys

import numpy as np
import pytest
from graph_worlds import World, molecules
from reference_graph import counts_of, same

from trainfast import graph_cache as gc
from trainfast.graph_cache.jraph import graphs_tuple
from trainfast.graph_cache.schema import Count, Field, Schema

N = 31


@pytest.fixture
def world():
    return molecules(N)


@pytest.fixture
def cache(world, tmp_path):
    return gc.open(world.write(tmp_path / "cache"))


def as_jraph(jraph, graph):
    """What a user of jraph would write for one graph."""
    nodes, edges = len(graph["x"]), graph["edge_index"].shape[1]
    return jraph.GraphsTuple(
        nodes=graph["x"],
        edges=graph["edge_attr"],
        senders=graph["edge_index"][0],
        receivers=graph["edge_index"][1],
        globals=graph["y"],
        n_node=np.array([nodes], np.int32),
        n_edge=np.array([edges], np.int32),
    )


def assert_same_tuple(got, want):
    assert type(got) is type(want)
    assert got._fields == want._fields
    for name in want._fields:
        mine, theirs = getattr(got, name), np.asarray(getattr(want, name))
        assert same(mine, theirs), name


def test_batches_are_those_of_jraph(cache, world):
    jraph = pytest.importorskip("jraph")
    loader = gc.Loader(cache, 5, output="jraph")
    for number, batch in enumerate(loader):
        graphs = world.graphs[5 * number : 5 * number + 5]
        assert_same_tuple(batch, jraph.batch_np([as_jraph(jraph, g) for g in graphs]))


@pytest.mark.parametrize("pad_to", [(6, 50, 100), (9, 47, 201)])
def test_padded_batches_are_those_of_jraph(cache, world, pad_to):
    jraph = pytest.importorskip("jraph")
    graphs, nodes, edges = pad_to
    loader = gc.Loader(cache, 5, output="jraph", pad_to=pad_to)
    for number, batch in enumerate(loader):
        some = world.graphs[5 * number : 5 * number + 5]
        whole = jraph.batch_np([as_jraph(jraph, g) for g in some])
        assert_same_tuple(batch, jraph.pad_with_graphs(whole, nodes, edges, graphs))
        mask = np.asarray(jraph.get_graph_padding_mask(batch))
        assert mask.tolist() == [slot < len(some) for slot in range(graphs)]
        assert_same_tuple(jraph.unpad_with_graphs(batch), whole)


def test_padding_without_room_is_error_as_in_jraph(cache):
    nodes = int(cache.sizes.nodes[:5].sum())
    edges = int(cache.sizes.edges[:5].sum())
    some = cache[:5]
    for pad_to in ((5, nodes + 1, edges), (6, nodes, edges), (6, nodes + 1, edges - 1)):
        with pytest.raises(ValueError, match="pad_to must have room"):
            list(gc.Loader(some, 5, output="jraph", pad_to=pad_to))
    (batch,) = gc.Loader(some, 5, output="jraph", pad_to=(6, nodes + 1, edges))
    assert batch.n_node[5] == 1 and batch.n_edge[5] == 0


def test_several_fields_become_dicts(tmp_path):
    schema = Schema(
        (Count("nodes"), Count("edges", "", 0, 0)),
        (
            Field("x", 0, "float32", (-1, 2), 0),
            Field("z", 0, "uint8", (-1,), 0),
            Field("senders", 1, "int32", (-2,), 0, (0,)),
            Field("receivers", 1, "int32", (-2,), 0, (0,)),
        ),
    )
    graph = {
        "x": np.ones((3, 2), np.float32),
        "z": np.arange(3, dtype=np.uint8),
        "senders": np.array([0, 2], np.int32),
        "receivers": np.array([1, 0], np.int32),
    }
    world = World(schema, [graph] * 2, [counts_of(schema, graph)] * 2)
    cache = gc.open(world.write(tmp_path / "c"))
    (batch,) = gc.Loader(cache, 2, output="jraph")
    assert list(batch.nodes) == ["x", "z"]
    assert batch.edges is None and batch.globals is None
    assert batch.senders.tolist() == [0, 2, 3, 5]
    assert batch.receivers.tolist() == [1, 0, 4, 3]
    assert batch.senders.dtype == np.int32
    assert batch.n_node.tolist() == [3, 3] and batch.n_edge.tolist() == [2, 2]


def test_without_jraph_there_is_a_tuple_of_the_same_kind(monkeypatch, cache):
    monkeypatch.setitem(sys.modules, "jraph", None)
    (batch,) = gc.Loader(cache[:3], 3, output="jraph")
    fields = ("nodes", "edges", "receivers", "senders", "globals", "n_node", "n_edge")
    assert type(batch)._fields == fields
    assert batch.n_node.tolist() == cache.sizes.nodes[:3].tolist()


def test_our_tuple_has_the_fields_of_theirs():
    jraph = pytest.importorskip("jraph")
    from trainfast.graph_cache.jraph import _GraphsTuple

    assert graphs_tuple() is jraph.GraphsTuple
    assert _GraphsTuple._fields == jraph.GraphsTuple._fields


def test_batches_go_through_jit(cache):
    jax = pytest.importorskip("jax")

    traces = []

    @jax.jit
    def total(graph):
        traces.append(1)
        return graph.nodes.sum()

    loader = gc.Loader(cache, 5, output="jraph", pad_to="max")
    sums = [float(total(batch)) for batch in loader]
    assert len(sums) == 7 and len(traces) == 1


def plain_cache(tmp_path, counts, fields, graph):
    schema = Schema(counts, fields)
    world = World(schema, [graph], [counts_of(schema, graph)])
    return gc.open(world.write(tmp_path / "c"))


EDGES = (Count("nodes"), Count("edges", "", 0, 0))
INDEX = Field("edge_index", 1, "int64", (2, -2), 1, (0,))
NODES = Field("x", 0, "float32", (-1,), 0)
GRAPH = {"edge_index": np.zeros((2, 1), int), "x": np.zeros(1, np.float32)}


@pytest.mark.parametrize(
    ("counts", "fields", "graph", "message"),
    [
        (
            (Count("nodes", "a"), Count("edges", "a|to|a", 0, 0)),
            (NODES,),
            {("a", "x"): np.zeros(1, np.float32)},
            "output must be 'dict' or 'pyg' for graphs with types",
        ),
        ((Count("nodes"),), (NODES,), GRAPH, "must have nodes and edges"),
        (EDGES, (NODES,), GRAPH, "must have 'edge_index', or 'senders'"),
        (
            (*EDGES, Count("size")),
            (INDEX, NODES, Field("name", None, "string", (-3,), 0)),
            {**GRAPH, "name": "a"},
            r"'name' must have one entry .*exclude=\['name'\]",
        ),
        (
            EDGES,
            (INDEX, NODES, Field("y", None, "int64", (3,), 0)),
            {**GRAPH, "y": np.zeros(3, int)},
            "'y' must have one entry",
        ),
    ],
)
def test_what_has_no_place_in_a_tuple_is_error(
    tmp_path, counts, fields, graph, message
):
    keys = Schema(counts, fields).keys
    cache = plain_cache(tmp_path, counts, fields, {k: graph[k] for k in keys})
    with pytest.raises(ValueError, match=message):
        gc.Loader(cache, 1, output="jraph")
