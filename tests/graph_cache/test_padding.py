"""Static shapes: padded batches, and which of several shapes is taken."""

import numpy as np
import pytest

from tests.graph_cache.loading import N
from tests.graph_cache.reference import collate, same
from tests.graph_cache.worlds import molecules
from trainfast import _core
from trainfast import graph_cache as gc
from trainfast.graph_cache.schema import Count, Field


@pytest.fixture(scope="module")
def world():
    return molecules(N)


@pytest.fixture(scope="module")
def cache(world, tmp_path_factory):
    return gc.open(world.write(tmp_path_factory.mktemp("loader") / "cache"))


# ---- Padding -----------------------------------------------------------------------


def test_padded_batches_have_one_shape(cache, world):
    loader = gc.Loader(cache, 8, pad_to=(10, 90, 200))
    shapes = {tuple(batch[k].shape for k in sorted(batch)) for batch in loader}
    assert len(shapes) == 1
    for batch in loader:
        real = int(batch["graph_mask"].sum())
        graphs = batch["y"][:real].astype(int).tolist()
        counts = [world.counts[i] for i in graphs]
        want = collate(
            world.schema,
            [world.graphs[i] for i in graphs],
            counts,
            n_slots=10,
            totals=[90, 200],
        )
        for key, truth in zip(world.schema.keys, want.fields):
            assert same(batch[key], truth), key
        assert same(batch["batch"], want.batches[0])
        assert batch["ptr"].tolist() == want.ptrs[0].tolist()
        assert batch["edge_index"].max() < 90


@pytest.mark.parametrize(
    "keywords",
    [
        {"batch_size": 8, "shuffle": True},
        {"max_nodes": 40, "max_edges": 80},
        {"max_nodes": 5, "oversize": "alone"},
        {"batch_size": 4, "sampler": [0] * 9},
    ],
)
def test_pad_to_max_has_room_for_any_batch(cache, keywords):
    loader = gc.Loader(cache, pad_to="max", **keywords)
    for _ in range(3):
        shapes = {tuple(batch[k].shape for k in sorted(batch)) for batch in loader}
        assert len(shapes) == 1
    for name in ("max_nodes", "max_edges"):
        budget = keywords.get(name)
        if budget and "oversize" not in keywords:
            place = ("max_nodes", "max_edges").index(name)
            assert loader._buckets[0].totals[place] <= budget + 1


def test_smallest_bucket_that_fits_is_taken(cache, world):
    buckets = [(9, 90, 400), {"graphs": 9, "nodes": 40, "edges": 60}, (9, 50, 90)]
    loader = gc.Loader(cache, 8, shuffle=True, pad_to=buckets)
    seen = set()
    for number in range(4):
        loader.set_epoch(number)
        for batch in loader:
            real = int(batch["graph_mask"].sum())
            graphs = batch["y"][:real].astype(int)
            nodes, edges = (sum(world.counts[i][k] for i in graphs) for k in (0, 1))
            fits = [
                (v, e)
                for v, e in ((40, 60), (50, 90), (90, 400))
                if nodes < v and edges <= e
            ]
            assert batch["x"].shape[0] == fits[0][0]
            assert batch["edge_index"].shape[1] == fits[0][1]
            seen.add(fits[0])
    assert len(seen) > 1


def test_batch_that_fits_no_bucket_is_error(cache):
    loader = gc.Loader(cache, 8, pad_to=[(9, 12, 400), (9, 14, 400)])
    with pytest.raises(
        ValueError, match=r"pad_to must have room .* one for padding in"
    ):
        list(loader)


@pytest.mark.parametrize(
    ("pad_to", "message"),
    [
        ([], "pad_to must be"),
        ((1, 2), "pad_to must be"),
        ("big", "pad_to must be"),
        ((1, 90, 90), r"pad_to\['graphs'\] must be at least 2"),
        ((9, 90, None), r"pad_to\['edges'\] must be an integer"),
        ((9, 90.5, 90), r"pad_to\['nodes'\] must be an integer"),
        ({"graphs": 9, "nodes": 90}, r"pad_to\['edges'\] must be an integer"),
        ({"graphs": 9, "nodes": {"a": 90}, "edges": 9}, "must have the types"),
        ({"graphs": 9, "nodes": 90, "edges": 9, "x": 7}, "one ragged dimension"),
        ({"graphs": 9, "nodes": 90, "edges": 9, "z": 7}, "sizes of the cache"),
    ],
)
def test_wrong_padding_is_error(cache, pad_to, message):
    with pytest.raises(ValueError, match=message):
        gc.Loader(cache, 8, pad_to=pad_to)


@pytest.fixture
def typed(tmp_path):
    """Heterogeneous graphs with ragged values, text and an index of each graph."""
    schema = gc.Schema(
        (
            Count("nodes", "a"),
            Count("nodes", "b"),
            Count("edges", "a|to|b", 0, 1),
            Count("size"),
            Count("size"),
        ),
        (
            Field("x", 0, "float32", (-1,), 0),
            Field("x", 1, "float32", (-2,), 0),
            Field("edge_index", 2, "int64", (2, -3), 1, (0, 1)),
            Field("values", None, "int64", (-4,), 0),
            Field("name", None, "string", (-5,), 0),
            Field("root", None, "int64", (), None, (1,)),
        ),
    )
    keys = schema.keys
    writer = _core.GraphWriter(str(tmp_path / "c"), schema.encode(), keys)
    for n in range(1, 8):
        ends = np.array([[n - 1] * n, [n] * n])
        values = (np.ones(n, "f4"), np.ones(n + 1, "f4"), ends, np.arange(n % 3))
        writer.append(dict(zip(keys, (*values, "z" * n, np.array(n)))))
    writer.close()
    return gc.open(tmp_path / "c")


NODES = {"a": 30, "b": 40}
EDGES = {("a", "to", "b"): 50}


def test_typed_graphs_are_padded_by_type(typed):
    pad_to = {"graphs": 5, "nodes": NODES, "edges": EDGES, "values": 9}
    for batch in gc.Loader(typed, 3, pad_to=pad_to):
        real = int(batch["graph_mask"].sum())
        assert batch["a", "x"].shape == (30,) and batch["b", "x"].shape == (40,)
        index = batch[("a", "to", "b"), "edge_index"]
        assert index.shape == (2, 50)
        first = batch["a", "ptr"][real], batch["b", "ptr"][real]
        edges = int(typed.sizes.edges["a", "to", "b"][:3].sum())
        if real == 3 and batch["root"][0] == 1:
            assert (index[:, edges:] == np.array(first)[:, None]).all()
        assert batch["values"].shape == (9,)
        assert batch["name"][real:] == [""] * (5 - real)
        assert batch["root"].shape == (5,)
        assert (batch["root"][real:] == first[1]).all()


def test_sizes_that_are_not_named_have_room(typed):
    pad_to = {"graphs": 4, "nodes": NODES, "edges": EDGES}
    shapes = {batch["values"].shape for batch in gc.Loader(typed, 3, pad_to=pad_to)}
    assert shapes == {(5,)}  # 2 + 2 + 1, the largest three


@pytest.mark.parametrize(
    ("pad_to", "message"),
    [
        ((4, 30, 50), r"pad_to\['nodes'\] must be a dict with a size for each"),
        ({"graphs": 4, "nodes": {"a": 1}, "edges": EDGES}, "must have the types"),
    ],
)
def test_typed_padding_must_name_all_types(typed, pad_to, message):
    with pytest.raises(ValueError, match=message):
        gc.Loader(typed, 3, pad_to=pad_to)
