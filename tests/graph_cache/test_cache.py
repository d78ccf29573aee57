"""Reading a cache, and batches of it against the truth in NumPy."""

import os
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.graph_cache.reference import (
    TEXT,
    DoNotFit,
    array_of,
    collate,
    counts_of,
    same,
    texts,
)
from tests.graph_cache.worlds import World, molecules, widened, worlds
from trainfast import _core
from trainfast import graph_cache as gc
from trainfast.graph_cache.schema import Count, Field, Schema

COUNT = settings(max_examples=150, suppress_health_check=list(HealthCheck))


@pytest.fixture
def world():
    return molecules(23)


@pytest.fixture
def cache(world, tmp_path):
    return gc.open(world.write(tmp_path / "cache"))


def assert_same_graph(schema, got, want):
    assert list(got) == [key for key in schema.keys if key in want]
    for key, field in zip(schema.keys, schema.fields):
        if key not in want:
            continue
        if field.dtype in TEXT or field.scalar:
            assert type(got[key]) is type(want[key])
            assert got[key] == want[key]
        else:
            assert same(got[key], want[key]), key


# ---- Graph by graph ----------------------------------------------------------------


def test_cache_gives_graphs_as_written(cache, world):
    assert len(cache) == 23
    for number, graph in enumerate(world.graphs):
        assert_same_graph(world.schema, cache[number], graph)


def test_iteration_gives_all_graphs_in_order(cache, world):
    got = list(cache)
    assert len(got) == 23
    for mine, graph in zip(got, world.graphs):
        assert_same_graph(world.schema, mine, graph)


def test_negative_index_counts_from_end(cache, world):
    assert_same_graph(world.schema, cache[-1], world.graphs[22])
    assert_same_graph(world.schema, cache[-23], world.graphs[0])


@pytest.mark.parametrize("index", [23, -24, 2**40])
def test_index_outside_is_error(cache, index):
    with pytest.raises(IndexError, match=rf"index must be in -23 \.\. 22, got {index}"):
        cache[index]


def test_numpy_integer_is_index(cache, world):
    assert_same_graph(world.schema, cache[np.int32(5)], world.graphs[5])
    assert_same_graph(world.schema, cache[np.array(5)], world.graphs[5])


@pytest.mark.parametrize(
    ("index", "want"),
    [
        (slice(3, 9, 2), [3, 5, 7]),
        (slice(None, None, -10), [22, 12, 2]),
        (slice(5, 5), []),
        ([1, -1, 1], [1, 22, 1]),
        (np.array([4, 0], np.uint8), [4, 0]),
        (np.arange(23) % 7 == 0, [0, 7, 14, 21]),
        ([], []),
    ],
)
def test_slices_arrays_and_masks_are_subsets(cache, world, index, want):
    subset = cache[index]
    assert isinstance(subset, gc.Subset)
    assert subset.indices.tolist() == want
    assert [float(g["y"][0]) for g in subset] == want
    assert subset.sizes.nodes.tolist() == [len(world.graphs[i]["x"]) for i in want]


def test_subset_of_subset_is_of_the_cache(cache):
    subset = cache[::2][[1, -1, 3]]
    assert subset.indices.tolist() == [2, 22, 6]
    assert subset[1:].indices.tolist() == [22, 6]
    assert subset.cache is cache
    assert float(subset[-1]["y"][0]) == 6
    with pytest.raises(IndexError, match=r"index must be in -3 \.\. 2, got 3"):
        subset[3]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (np.ones(4, bool), "mask must have 23 elements, got 4"),
        (np.ones(4), "indices must be integers, got float64"),
        (np.ones((2, 2), int), r"index must be an integer.* got shape \(2, 2\)"),
        ([0, 23], r"index must be in -23 \.\. 22, got 23"),
        ("x", "index must be an integer, .*got 'x'"),
        (1.0, r"index must be an integer, .*got 1\.0"),
        (np.array([2**64 - 1], np.uint64), "got 18446744073709551615"),
    ],
)
def test_wrong_selection_is_error(cache, index, message):
    with pytest.raises(IndexError, match=message):
        cache[index]


def test_get_many_gives_list_of_graphs(cache):
    assert [float(g["y"][0]) for g in cache.get_many([3, 0, 3, -1])] == [3, 0, 3, 22]
    assert cache.get_many(np.array([], int)) == []


def test_sizes_come_from_index(cache, world):
    nodes = [len(g["x"]) for g in world.graphs]
    edges = [g["edge_index"].shape[1] for g in world.graphs]
    sizes = cache.sizes
    assert sizes.nodes.tolist() == nodes
    assert sizes.edges.tolist() == edges
    assert sizes.total_nodes().tolist() == nodes
    assert (sizes.bytes % 16 == 0).all()
    assert 0 < sizes.bytes.sum() < cache._core.file_bytes
    with pytest.raises(ValueError, match="read-only"):
        sizes.nodes[0] = 5


def test_sizes_of_typed_graphs_come_by_type(tmp_path):
    counts = (
        Count("nodes", "a"),
        Count("nodes", "b"),
        Count("edges", "a|to|b", 0, 1),
    )
    fields = (Field("x", 0, "float32", (-1,), 0), Field("x", 1, "float32", (-2,), 0))
    writer = _core.GraphWriter(
        str(tmp_path / "c"), Schema(counts, fields).encode(), [("a", "x"), ("b", "x")]
    )
    for n in range(3):
        graph = {("a", "x"): np.zeros(n, "f4"), ("b", "x"): np.zeros(5, "f4")}
        writer.append(graph, None, [-1, -1, 7])
    writer.close()
    cache = gc.open(tmp_path / "c")
    assert {k: v.tolist() for k, v in cache.sizes.nodes.items()} == {
        "a": [0, 1, 2],
        "b": [5, 5, 5],
    }
    assert list(cache.sizes.edges) == [("a", "to", "b")]
    assert cache.sizes.total_nodes().tolist() == [5, 6, 7]
    assert cache.sizes.total_edges().tolist() == [7, 7, 7]
    assert cache[1:].sizes.total_nodes().tolist() == [6, 7]


def test_arrays_are_read_only_views(cache):
    graph = cache[4]
    with pytest.raises(ValueError, match="read-only"):
        graph["x"][0, 0] = 1


def test_arrays_outlive_cache(world, tmp_path):
    cache = gc.open(world.write(tmp_path / "cache"))
    graph = cache[4]
    del cache
    assert_same_graph(world.schema, graph, world.graphs[4])


def mappings_of(cache):
    """How many mappings of its files the process has."""
    return Path("/proc/self/maps").read_text().count(str(cache.path))


def test_leaving_the_context_closes_the_files(world, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with gc.open(world.write(tmp_path / "cache"), mode="mmap") as cache:
        assert not cache.closed
        assert cache[3]["y"] == 3
        assert mappings_of(cache)
    assert cache.closed
    assert mappings_of(cache) == 0
    assert len(os.listdir("/proc/self/fd")) == before
    cache.close()
    assert cache.closed


def test_exception_closes_the_cache_and_passes(cache):
    with pytest.raises(KeyError), cache:
        raise KeyError
    assert cache.closed


CLOSED_USES = {
    "graph": lambda cache: cache[0],
    "subset": lambda cache: cache[2:][0],
    "all graphs": list,
    "sizes": lambda cache: cache.sizes,
    "fingerprint": lambda cache: cache.fingerprint,
    "verify": lambda cache: cache.verify(),
    "pickle": pickle.dumps,
    "with": lambda cache: cache.__enter__(),
    "loader": lambda cache: list(gc.Loader(cache, 4)),
}


@pytest.mark.parametrize("use", CLOSED_USES)
def test_use_of_closed_cache_is_error(cache, use):
    cache.close()
    with pytest.raises(ValueError, match=r"cache at .* is closed; open it again"):
        CLOSED_USES[use](cache)


def test_closing_ends_no_iteration_and_frees_no_array(cache, world):
    graph = cache[5]
    loader = gc.Loader(cache, 4)
    list(loader)
    iteration = iter(loader)
    first = next(iteration)
    cache.close()
    assert_same_graph(world.schema, graph, world.graphs[5])
    assert [len(batch["y"]) for batch in [first, *iteration]] == 5 * [4] + [3]
    with pytest.raises(ValueError, match="is closed"):
        next(iter(loader))


@pytest.mark.parametrize("verify", ["never", "once", "always"])
@pytest.mark.parametrize("mode", ["mmap", "pread"])
def test_modes_and_policies_give_the_same(world, tmp_path, verify, mode):
    cache = gc.open(world.write(tmp_path / "cache"), verify, mode=mode)
    for _ in range(2):
        for number, graph in enumerate(world.graphs):
            assert_same_graph(world.schema, cache[number], graph)


def test_schema_and_facts_are_told(cache, world):
    assert cache.schema == world.schema
    assert len(cache.fingerprint) == 32
    path = str(cache.path)
    assert repr(cache).startswith(f"Cache(path={path!r}, graphs=23, fields=4, bytes=")
    assert repr(cache[:2]) == f"Subset(graphs=2, path={path!r})"


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"verify": "often"}, "verify must be one of .*, got 'often'"),
        ({"verify": True}, "verify must be one of .*, got True"),
        ({"mode": "mapped"}, "mode must be one of .*, got 'mapped'"),
    ],
)
def test_wrong_option_is_error(world, tmp_path, keywords, message):
    path = world.write(tmp_path / "cache")
    with pytest.raises(ValueError, match=message):
        gc.open(path, **keywords)


def test_pickled_cache_is_opened_again(cache, world):
    again = pickle.loads(pickle.dumps(cache))
    assert again.fingerprint == cache.fingerprint
    assert_same_graph(world.schema, again[3], world.graphs[3])
    subset = pickle.loads(pickle.dumps(cache[[5, 2]]))
    assert subset.indices.tolist() == [5, 2]
    assert float(subset[0]["y"][0]) == 5


def test_pickled_cache_keeps_its_options(world, tmp_path):
    path = world.write(tmp_path / "cache")
    cache = gc.open(path, "always", mode="pread", partial=True)
    again = pickle.loads(pickle.dumps(cache))
    assert again._options == cache._options
    assert again._options["verify"] == "always"


def test_pickled_cache_that_changed_is_error(cache, world):
    data = pickle.dumps(cache)
    world.write(cache.path)  # one more segment
    with pytest.raises(ValueError, match=r"must be the one that was pickled.*changed"):
        pickle.loads(data)


def test_verify_report_tells_damage(world, tmp_path):
    path = world.write(tmp_path / "cache")
    report = gc.open(path).verify()
    assert report and report.ok and report.damaged == []
    assert "all intact" in str(report)
    segment = next(path.glob("segment-*"))
    x = world.graphs[7]["x"]
    data = bytearray(segment.read_bytes())
    at = data.index(x.tobytes())
    data[at] ^= 1
    segment.write_bytes(data)
    report = gc.open(path, "never").verify()
    assert not report
    assert [graph for graph, _ in report.damaged] == [7]
    assert report.to_dict()["damaged"][0]["graph"] == 7
    assert "7" in str(report)


def test_verify_values_finds_what_is_not_finite(tmp_path):
    world = molecules(4)
    world.graphs[2]["x"][0, 0] = np.nan
    cache = gc.open(world.write(tmp_path / "cache"))
    assert cache.verify().ok
    assert [graph for graph, _ in cache.verify(values=True).damaged] == [2]
    assert np.isnan(cache[2]["x"][0, 0])


def test_cache_without_graphs_opens(tmp_path):
    molecules(0).write(tmp_path / "cache")
    cache = gc.open(tmp_path / "cache")
    assert len(cache) == 0 and list(cache) == []
    assert cache.sizes.nodes.tolist() == []
    assert cache.verify().ok
    assert cache[:].indices.tolist() == []


# ---- Against the truth -------------------------------------------------------------


@given(world=worlds())
@COUNT
def test_any_graphs_come_back_as_written(world):
    with tempfile.TemporaryDirectory() as folder:
        cache = gc.open(world.write(f"{folder}/cache"), "always")
        assert len(cache) == len(world.graphs)
        for number, graph in enumerate(world.graphs):
            assert_same_graph(world.schema, cache[number], graph)
        assert cache.verify().ok


@given(world=worlds(), data=st.data())
@COUNT
def test_any_batch_is_as_the_truth_says(world, data):
    with tempfile.TemporaryDirectory() as folder:
        cache = gc.open(world.write(f"{folder}/cache"))
        if not world.graphs:
            return
        rows = data.draw(
            st.lists(st.sampled_from(range(len(world.graphs))), min_size=1)
        )
        pad = data.draw(st.none() | st.tuples(st.integers(0, 2), st.integers(0, 5)))
        counts = [world.counts[row] for row in rows]
        slots, totals = 0, None
        if pad is not None:
            slots = len(rows) + pad[0]
            totals = [int(sum(column)) + pad[1] for column in zip(*counts)]
        check_batch(cache, world, rows, counts, slots, totals)


def check_batch(cache, world, rows, counts, slots, totals):
    schema = world.schema
    numbers = range(len(schema.fields))
    selection = _core.GraphSelection(
        cache._core,
        list(numbers),
        list(range(len(schema.counts))),
        n_slots=slots,
        totals=totals,
    )
    graphs = [world.graphs[row] for row in rows]
    try:
        want = collate(schema, graphs, counts, n_slots=slots, totals=totals)
    except DoNotFit:
        with pytest.raises(ValueError, match="must"):
            _core.graph_collate(selection, np.array(rows))
        return
    batch = _core.graph_collate(selection, np.array(rows))
    assert (batch.n_graphs, batch.n_slots) == (len(rows), slots or len(rows))
    for got, truth in ((batch.ptrs, want.ptrs), (batch.batches, want.batches)):
        assert len(got) == len(truth)
        for a, b in zip(got, truth):
            assert same(a, b.astype(np.int64))
    for field, got, truth in zip(schema.fields, batch.fields, want.fields):
        if truth is None:
            assert got is None
        else:
            assert same(got, truth), field
            assert got.ctypes.data % 64 == 0 or got.size == 0


def test_graph_without_optional_field_does_not_fit_to_one_with(tmp_path):
    schema = Schema((Count("nodes"),), (Field("x", 0, "int64", (-1,), 0, (), True),))
    writer = _core.GraphWriter(str(tmp_path / "c"), schema.encode(), ["x"])
    writer.append({"x": np.arange(3)})
    writer.append({}, None, [2])
    writer.close()
    cache = gc.open(tmp_path / "c")
    assert [sorted(graph) for graph in cache] == [["x"], []]
    selection = _core.GraphSelection(cache._core, [0])
    assert _core.graph_collate(selection, [1, 1]).fields == [None]
    assert _core.graph_collate(selection, [0]).fields[0].tolist() == [0, 1, 2]
    for rows in ([0, 1], [1, 0]):
        with pytest.raises(ValueError, match="must all have field x or all lack it"):
            _core.graph_collate(selection, rows)


@given(world=worlds(), data=st.data())
@settings(COUNT, max_examples=60)
def test_any_dict_batch_has_what_its_keys_say(world, data):
    with tempfile.TemporaryDirectory() as folder:
        cache = gc.open(world.write(f"{folder}/cache"))
        size = data.draw(st.integers(1, 4))
        padded = data.draw(st.booleans())
        follow = data.draw(
            st.lists(st.sampled_from([f.name for f in world.schema.fields]))
            if world.schema.fields
            else st.just([])
        )
        loader = gc.Loader(
            cache,
            size,
            pad_to="max" if padded else None,
            follow_batch=follow,
            threads=0,
        )
        batches = list(loader)
        assert len(batches) == -(-len(world.graphs) // size) == len(loader)
        for number, batch in enumerate(batches):
            rows = range(number * size, min(number * size + size, len(world.graphs)))
            check_dict(world, batch, rows, loader if padded else None, set(follow))


def check_dict(world, batch, rows, loader, follow):
    schema = world.schema
    slots, totals = 0, None
    if loader is not None:
        slots, totals = loader._buckets[0].slots, loader._buckets[0].totals
    counts = [world.counts[row] for row in rows]
    graphs = [world.graphs[row] for row in rows]
    want = collate(schema, graphs, counts, n_slots=slots, totals=totals)
    rest = dict(batch)
    for key, field, truth in zip(schema.keys, schema.fields, want.fields):
        if truth is None:
            assert key not in rest
            continue
        got = rest.pop(key)
        if field.dtype in TEXT:
            ptr = want.ptrs[-1 - field.dims[0]]
            assert got == texts(field, truth, ptr, len(rows))
            assert got[: len(rows)] == [graph[key] for graph in graphs]
        else:
            assert same(got, truth)
        if field.name in follow:
            check_follow(schema, rest, key, field, want)
    for kind, place in schema.nodes.items():
        names = [(kind, name) if kind else name for name in ("batch", "ptr")]
        assert same(rest.pop(names[0]), want.batches[place])
        assert same(rest.pop(names[1]), want.ptrs[place])
    if loader is not None:
        mask = rest.pop("graph_mask")
        assert mask.tolist() == [slot < len(rows) for slot in range(slots)]
    assert not rest


def check_follow(schema, rest, key, field, want):
    names = [
        (*key[:-1], key[-1] + end) if isinstance(key, tuple) else key + end
        for end in ("_batch", "_ptr")
    ]
    size = 1 if field.cat_dim is None else field.dims[field.cat_dim]
    if field.dtype in TEXT or size >= 0:
        size = 1 if field.dtype in TEXT else size
        ptr = np.arange(len(want.ptrs[0]) if want.ptrs else 0) * size
    else:
        ptr = want.ptrs[-1 - size]
    got = rest.pop(names[1])
    if len(ptr):
        assert same(got, ptr)
    sizes = np.diff(got)
    assert same(rest.pop(names[0]), np.repeat(np.arange(len(sizes)), sizes))


def test_reference_array_of_text_is_its_utf8():
    field = Field("s", None, "string", (-1,), 0)
    assert array_of(field, "ä").tolist() == [0xC3, 0xA4]


@given(world=worlds(), data=st.data())
@COUNT
def test_batch_over_segments_with_other_schemas_is_as_the_truth_says(world, data):
    """A size that is fixed in one segment and counted in another is counted in all."""
    fixed = [
        (key, dim)
        for key, field in zip(world.schema.keys, world.schema.fields)
        for dim, size in enumerate(field.dims)
        if size >= 0 and not (len(field.add) == 2 and dim == 0)
    ]
    if not fixed or not world.graphs:
        return
    second = widened(world, *data.draw(st.sampled_from(fixed)))
    rows = data.draw(
        st.lists(st.integers(0, 2 * len(world.graphs) - 1), min_size=1, max_size=6)
    )
    with tempfile.TemporaryDirectory() as folder:
        for part in data.draw(st.permutations([world, second])):
            part.write(f"{folder}/cache")
        cache = gc.open(f"{folder}/cache")
        assert cache.schema.keys == second.schema.keys
        assert [c.role for c in cache.schema.counts] == [
            c.role for c in second.schema.counts
        ]
        counts = [cache.counts(place) for place in range(len(cache.schema.counts))]
        both = World(
            cache.schema,
            world.graphs * 2,
            np.array(counts, int).T.reshape(len(cache), -1).tolist(),
        )
        for graph, row in zip(both.graphs, both.counts):
            given = dict(enumerate(row))
            assert counts_of(both.schema, graph, given) == row
        assert cache._core.segments == 2
        assert cache.verify().ok
        for graph, want in zip(cache, both.graphs):
            assert_same_graph(both.schema, graph, want)
        check_batch(cache, both, rows, [both.counts[row] for row in rows], 0, None)


def test_graph_much_larger_than_those_before_fits(tmp_path):
    small = molecules(20)
    large = molecules(1, nodes=(5000, 5001), edges=(60000, 60001))
    world = World(
        small.schema,
        [*small.graphs[:10], *large.graphs, *small.graphs[10:]],
        [*small.counts[:10], *large.counts, *small.counts[10:]],
    )
    cache = gc.open(world.write(tmp_path / "c"))
    for number, batch in enumerate(gc.Loader(cache, 3)):
        rows = range(3 * number, min(3 * number + 3, 21))
        want = collate(
            world.schema,
            [world.graphs[row] for row in rows],
            [world.counts[row] for row in rows],
        )
        for key, truth in zip(world.schema.keys, want.fields):
            assert same(batch[key], truth)


def test_any_number_of_empty_rows_is_no_work(tmp_path):
    shape = (2**23, 2**24, 0)  # a loop over the rows would not end
    schema = Schema((), (Field("x", None, "uint8", shape, 2),))
    graph = {"x": np.zeros(shape, np.uint8)}
    cache = gc.open(World(schema, [graph] * 3, [[]] * 3).write(tmp_path / "c"))
    assert cache[0]["x"].shape == shape
    assert cache.verify().ok
    assert [b["x"].shape for b in gc.Loader(cache, 2)] == [shape, shape]
    padded = gc.Loader(cache, 2, pad_to={"graphs": 4, "nodes": 0, "edges": 0})
    assert [b["x"].shape for b in padded] == [shape, shape]
