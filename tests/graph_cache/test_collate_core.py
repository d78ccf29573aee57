"""Collating (csrc/graph_cache/plan.c, collate.c, batch.c, prefetch.c): with sanitizers,
and against NumPy for fields of every kind."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.graph_cache.core_calls import (
    EDGES,
    INTEGERS,
    NODES,
    SIZE,
    cached,
    collate,
    random_bits,
    same,
    write,
)
from trainfast import _core
from trainfast.graph_cache.schema import Count, Field, Schema

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which(os.environ.get("CC", "cc").split()[0])
FLAGS = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE"]
SANITIZERS = {
    "none": [],
    "memory": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "threads": ["-fsanitize=thread", "-fno-sanitize-recover=all"],
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.slow if flags else ())
        for name, flags in SANITIZERS.items()
    ],
)
def harness(request, tmp_path_factory):
    if not COMPILER:
        pytest.skip("needs a C compiler")
    target = tmp_path_factory.mktemp("collate") / "harness"
    sources = [ROOT / "tests/graph_cache/collate_harness.c"]
    sources += sorted((ROOT / "csrc/graph_cache").glob("*.c"))
    names = ("status", "scratch", "cpuid", "parallel", "openmp", "cpus")
    sources += [ROOT / f"csrc/{name}.c" for name in names]
    arguments = [*map(str, sources), f"-I{ROOT / 'csrc'}", "-o", str(target)]
    command = [COMPILER, *FLAGS, *SANITIZERS[request.param], *arguments]
    command += ["-pthread", "-ldl", "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


RUNS = [(0, 1, 0), (1, 2, 0), (1, 0, 1), (3, 1, 0), (3, 2, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("threads", "verify", "pread"), RUNS)
def test_threads_collate_what_one_does(harness, tmp_path, threads, verify, pread):
    command = [str(harness), str(tmp_path / "c"), *map(str, (threads, verify, pread))]
    options = {"capture_output": True, "text": True, "timeout": 240}
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "4"}, **options)
    assert (done.returncode, done.stdout) == (0, "passed\n"), done.stderr


# ---- Against NumPy -----------------------------------------------------------------

A, B = Count("nodes", "a"), Count("nodes", "b")
AB = Count("edges", "a|to|b", source=0, target=1)
INCREMENT = Count("increment")
COUNTS = (A, B, AB, SIZE, INCREMENT)


def union(schema, graphs, counts):
    """The disjoint union, as the format says it: one array a field."""
    sums = np.cumsum([[0] * len(schema.counts), *counts], 0)
    found = []
    for field in schema.fields:
        parts = []
        for g, graph in enumerate(graphs):
            part = np.array(graph[schema.key_of(field)])
            add = [np.array(sums[g][k]).astype(part.dtype) for k in field.add]
            if len(add) == 1:
                part = part + add[0]
            elif add:
                part = np.stack([part[0] + add[0], part[1] + add[1]])
            parts.append(part)
        if field.cat_dim is None:
            found.append(np.stack(parts))
        else:
            found.append(np.concatenate(parts, field.cat_dim))
    return found, sums


def any_graph(rng, schema, counts):
    graph = {}
    for field in schema.fields:
        shape = [counts[-1 - dim] if dim < 0 else dim for dim in field.dims]
        key = schema.key_of(field)
        if not field.add:
            graph[key] = random_bits(rng, field.dtype, shape)
            continue
        rows = []
        for k in field.add:
            limit = 9 if schema.counts[k].role == "increment" else counts[k]
            rest = shape[1:] if len(field.add) == 2 else shape
            rows.append(rng.integers(0, max(limit, 1), rest))
        value = rows[0] if len(rows) == 1 else np.stack(rows)
        graph[key] = value.astype(field.dtype)
    return graph


FIELDS = [
    Field("plain", 0, "float32", (-1, 3), 0),
    Field("last", 0, "float16", (2, 3, -1), 2),
    Field("middle", 1, "int16", (2, -2, 5), 1),
    Field("stacked", None, "float64", (3, 2), None),
    Field("scalar", None, "int64", (), None),
    Field("fixed", None, "complex128", (2, 2), 1),
    Field("ragged", None, "uint8", (-4,), 0),
    Field("rows", 2, "int64", (2, -3), 1, add=(0, 1)),
    Field("row_of_rows", 2, "int32", (2, 3, -3), 2, add=(0, 1)),
    Field("rows_on_top", None, "int64", (2, 3), 0, add=(4, 0)),
    Field("rows_stacked", None, "int64", (2, 3), None, add=(4, 4)),
    Field("index", 0, "uint64", (-1,), 0, add=(4,)),
    Field("index_stacked", None, "int64", (), None, add=(4,)),
    Field("bool", 1, "bool", (-2,), 0),
    Field("bfloat", 1, "bfloat16", (-2, 1), 0),
]


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
@pytest.mark.parametrize("options", [{}, {"verify": 2}, {"pread": True}], ids=str)
def test_field_is_put_together_as_numpy_does(tmp_path, rng, field, options):
    schema = Schema(COUNTS, (field,))
    counts = [rng.integers(1, (7, 5, 40, 6, 300)).tolist() for _ in range(12)]
    counts[3] = [1, 1, 0, 0, 0]
    graphs = [any_graph(rng, schema, count) for count in counts]
    path = tmp_path / "c"
    writer = _core.GraphWriter(str(path), schema.encode(), schema.keys, durable=False)
    for graph, count in zip(graphs, counts, strict=True):
        assert writer.append(graph, None, count) is None
    writer.close()
    cache = _core.GraphCache(str(path), **options)
    large = [5, 3, *rng.integers(0, 12, 8000)]  # of which threads make shares
    for order in [list(range(12)), [5], [3], [7, 7, 3, 0], rng.permutation(12), large]:
        batch = collate(cache, order, batch_of=[0, 2])
        chosen = [counts[i] for i in order]
        want, sums = union(schema, [graphs[i] for i in order], chosen)
        assert same(batch.fields[0], want[0])
        for k, ptr in enumerate(batch.ptrs):
            assert ptr.tolist() == sums[:, k].tolist()
        for k, vector in zip([0, 2], batch.batches, strict=True):
            members = np.repeat(range(len(order)), [count[k] for count in chosen])
            assert vector.tolist() == members.tolist()


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_padding_is_one_graph_with_the_rest_and_empty_ones(tmp_path, rng, field):
    """The first padding graph: zeros and first indices, ones that are stacked too."""
    schema = Schema(COUNTS, (field,))
    counts = [[3, 2, 4, 5, 7], [1, 2, 0, 1, 2]]
    graphs = [any_graph(rng, schema, count) for count in counts]
    path = tmp_path / "c"
    writer = _core.GraphWriter(str(path), schema.encode(), schema.keys, durable=False)
    for graph, count in zip(graphs, counts, strict=True):
        assert writer.append(graph, None, count) is None
    writer.close()
    totals = [9, 6, 11, 20, -1]
    batch = collate(
        _core.GraphCache(str(path)), [0, 1], batch_of=[0], n_slots=5, totals=totals
    )
    plain, sums = union(schema, graphs, counts)
    whole, plain = batch.fields[0], plain[0]
    axis = field.cat_dim or 0
    n = plain.shape[axis]
    assert same(np.take(whole, range(n), axis), plain)
    rest = np.take(whole, range(n, whole.shape[axis]), axis)
    first = [np.array(sums[-1][k]).astype(whole.dtype) for k in field.add]
    if len(first) == 2:
        row = 0 if field.cat_dim else 1
        rest = np.moveaxis(rest.reshape(-1, 2, 3) if row else rest, row, 0)
        assert (rest[0] == first[0]).all()
        assert (rest[1] == first[1]).all()
    else:
        assert (rest == (first[0] if first else 0)).all()
    assert rest.size > 0
    want = [totals[k] if totals[k] >= 0 else 9 for k in range(5)]
    assert batch.totals == tuple(want)
    for k, ptr in enumerate(batch.ptrs):
        assert ptr.tolist() == [*sums[:, k], want[k], want[k], want[k]]
    assert batch.batches[0].tolist() == [0, 0, 0, 1] + [2] * 5


@pytest.mark.parametrize("dtype", INTEGERS)
def test_narrowed_indices_are_widened_and_offset(tmp_path, dtype):
    """Each way of storing: the values decide it, the batch's dtype does not change."""
    schema = Schema((NODES,), (Field("i", 0, dtype, (-1,), 0, add=(0,)),))
    info = np.iinfo(dtype)
    sizes = [n for n in (3, 200, 300, 70_000) if n + 20_000 < info.max or n == 3]
    graphs = [{"i": np.arange(n).astype(dtype)[::-1].copy()} for n in sizes]
    cache = cached(tmp_path / "c", schema, graphs)
    batch = collate(cache, range(len(sizes)))
    starts = np.cumsum([0, *sizes])
    want = [
        graph["i"] + np.array(at).astype(dtype) for graph, at in zip(graphs, starts)
    ]
    assert same(batch.fields[0], np.concatenate(want))


def test_indices_that_their_dtype_cannot_hold_are_refused(tmp_path):
    schema = Schema((NODES,), (Field("i", 0, "uint8", (-1,), 0, add=(0,)),))
    graphs = [{"i": np.arange(100, dtype=np.uint8)}] * 3
    cache = cached(tmp_path / "c", schema, graphs)
    assert collate(cache, [0, 1]).fields[0].max() == 199
    with pytest.raises(
        ValueError, match=r"field i must be wide enough .* 299, got uint8"
    ):
        collate(cache, [0, 1, 2])


def test_sizes_that_differ_where_they_must_not_are_refused(tmp_path):
    schema = Schema((NODES, SIZE), (Field("m", 0, "float32", (-1, -2), 0),))
    graphs = [{"m": np.zeros((3, size), np.float32)} for size in (4, 4, 5)]
    cache = cached(tmp_path / "c", schema, graphs)
    assert collate(cache, [0, 1]).fields[0].shape == (6, 4)
    with pytest.raises(ValueError, match=r"field m .* dimension 1 .* got 4 and 5"):
        collate(cache, [0, 2])


def test_optional_field_is_in_all_graphs_of_a_batch_or_in_none(tmp_path):
    fields = (
        Field("x", 0, "float32", (-1,), 0),
        Field("extra", 0, "float32", (-1, 64), 0, optional=True),
    )
    schema = Schema((NODES,), fields)
    full = {"x": np.ones(4, np.float32), "extra": np.ones((4, 64), np.float32)}
    cache = cached(tmp_path / "c", schema, [full, {"x": full["x"]}])
    assert collate(cache, [0, 0]).fields[1].shape == (8, 64)
    assert collate(cache, [1, 1]).fields[1] is None
    for order in [[0, 1], [1, 0], [1, 1, 0]]:
        with pytest.raises(ValueError, match="must all have field extra"):
            collate(cache, order)
    selection = _core.GraphSelection(cache, [0])
    assert _core.graph_collate(selection, [0, 1]).fields[0].shape == (8,)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("verify", [1, 2])
def test_shared_batch_fails_as_that_of_one_thread(tmp_path, verify):
    """Its error is that of the first graph that has one; the next batch is whole."""
    fields = (
        Field("x", 0, "float32", (-1,), 0),
        Field("extra", 0, "float32", (-1,), 0, optional=True),
    )
    path, n = tmp_path / "c", 200
    graphs = [{"x": np.full(4000, i, np.float32)} for i in range(n)]
    graphs.append(graphs[0] | {"extra": graphs[0]["x"]})
    write(path, Schema((NODES,), fields), graphs)
    (segment,) = path.glob("segment-*")
    data = bytearray(segment.read_bytes())
    for i in 90, 150:
        data[data.find(graphs[i]["x"].tobytes())] ^= 1
    segment.write_bytes(data)
    cache = _core.GraphCache(str(path), verify=verify)
    order = [i for i in range(n) if i not in (90, 150)]
    for place in 1, 60, 140, 198:
        with pytest.raises(ValueError, match="must all have field extra"):
            collate(cache, [*order[:place], n, *order[place:]])
    for i, other in (90, 150), (150, 90):
        with pytest.raises(OSError, match=f"graph {i} in .* must be whole"):
            collate(cache, [*order[:50], i, *order[50:], n, other])
    batch = collate(cache, order)
    want = np.concatenate([graphs[i]["x"] for i in order])
    np.testing.assert_array_equal(batch.fields[0], want)


@pytest.mark.parametrize(
    ("n_slots", "totals", "message"),
    [
        (1, [9, 9], "number of graphs must be at least the batch's, 2, got 1"),
        (3, [5, 9], "at least 6 nodes, got 5"),
        (3, [9, 3], "at least 4 edges, got 3"),
        (2, [7, 4], "without a padding graph 6 nodes, got 7"),
        (3, [6, 9], "must have a node for the indices of its field edge_index"),
    ],
)
def test_padding_that_does_not_fit_is_refused(tmp_path, n_slots, totals, message):
    schema = Schema(
        (NODES, EDGES), (Field("edge_index", 1, "int64", (2, -2), 1, add=(0,)),)
    )
    path = str(tmp_path / "c")
    writer = _core.GraphWriter(path, schema.encode(), schema.keys, durable=False)
    for _ in range(2):
        graph = {"edge_index": np.zeros((2, 2), np.int64)}
        assert writer.append(graph, None, [3, 2]) is None
    writer.close()
    cache = _core.GraphCache(path)
    with pytest.raises(ValueError, match=message):
        collate(cache, [0, 1], n_slots=n_slots, totals=totals)
    assert collate(cache, [0, 1], n_slots=2, totals=[6, 4]).n_slots == 2
    padded = collate(cache, [0, 1], n_slots=3, totals=[7, 9]).fields[0]
    assert (padded[:, 4:] == 6).all()


def test_counts_that_nothing_pays_for_take_no_memory(tmp_path):
    """A file of 200 bytes may say that its graph has four thousand million nodes."""
    schema = Schema((NODES,), (Field("y", None, "float32", (1,), 0),))
    path = str(tmp_path / "c")
    writer = _core.GraphWriter(path, schema.encode(), schema.keys, durable=False)
    for nodes in 2**32 - 1, 1000:
        graph = {"y": np.zeros(1, np.float32)}
        assert writer.append(graph, None, [nodes]) is None
    writer.close()
    cache = _core.GraphCache(path)
    with pytest.raises(ValueError, match=r"at most 134217728 nodes .* got 4294967295"):
        collate(cache, [0], batch_of=[0])
    assert len(collate(cache, [1], batch_of=[0]).batches[0]) == 1000
    assert collate(cache, [0]).totals == (2**32 - 1,)


def test_segments_that_fix_different_sizes_are_one_batch(tmp_path, rng):
    """A size that one segment fixes is a count of the cache."""
    for width in (2, 7):
        schema = Schema((NODES,), (Field("v", None, "int32", (width,), 0),))
        path = str(tmp_path / "c")
        writer = _core.GraphWriter(path, schema.encode(), schema.keys, durable=False)
        for i in range(3):
            values = np.arange(width, dtype=np.int32) + 1000 * i
            assert writer.append({"v": values}, None, [1]) is None
        writer.close()
    cache = _core.GraphCache(path)
    order = rng.permutation(6)
    batch = collate(cache, order)
    want = np.concatenate([cache.get(i)[0] for i in order])
    assert same(batch.fields[0], want)
    assert len(want) == 3 * 2 + 3 * 7


def test_warm_arena_is_used_again(tmp_path, rng):
    """For batches of changing sizes, one after another: at most a few arenas ever."""
    schema = Schema((NODES,), (Field("x", 0, "float32", (-1,), 0),))
    graphs = [{"x": np.zeros(n, np.float32)} for n in rng.integers(1, 4000, 40)]
    cache = cached(tmp_path / "c", schema, graphs)
    addresses = set()
    for _ in range(100):
        batch = collate(cache, rng.integers(0, 40, 16))
        addresses.add(batch.arena.ctypes.data)
        del batch
    assert len(addresses) < 12


# ---- Arrays around the sizes in which they are copied --------------------------------


LONG = Schema(
    (NODES, EDGES),
    (
        Field("a", 0, "uint8", (-1,), 0),
        Field("b", 1, "uint8", (-2,), 0),
        Field("c", 0, "uint8", (-1,), 0),
    ),
)
BYTES = (0, 1, 63, 64, 65, 2047, 2048, 2049, 4095, 4096, 4097, 6145, 12289)


@pytest.mark.parametrize(("pread", "verify"), [(False, 0), (False, 2), (True, 1)])
@pytest.mark.parametrize("fields", [[0, 1, 2], [1], [2, 0]])
def test_arrays_of_any_length_are_copied_whole(tmp_path, rng, pread, verify, fields):
    sizes = zip([*BYTES, 3, 100_001], [*rng.permutation(BYTES), 100_001, 0])
    graphs = [
        {key: rng.integers(0, 256, n, np.uint8) for key, n in zip("abc", (n, m, n))}
        for n, m in sizes
    ]
    cache = cached(tmp_path / "c", LONG, graphs, pread=pread, verify=verify)
    order = [*rng.permutation(len(graphs)).tolist(), 0, 0, len(graphs) - 1]
    selection = _core.GraphSelection(cache, fields)
    batch = _core.graph_collate(selection, order)
    for got, i in zip(batch.fields, fields, strict=True):
        want = np.concatenate([graphs[g]["abc"[i]] for g in order])
        np.testing.assert_array_equal(got, want)
