"""Graphs for tests of the graph cache: random schemas, and graphs that fit them."""

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from tests.graph_cache.reference import counts_of
from trainfast import _core
from trainfast.graph_cache.schema import Count, Field, Schema

NUMPY = {
    name: np.dtype(name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32"),
        *("int64", "float16", "float32", "float64", "complex64", "complex128"),
    )
}
NUMPY["bfloat16"] = np.dtype(ml_dtypes.bfloat16)
NUMPY["float8_e4m3fn"] = np.dtype(ml_dtypes.float8_e4m3fn)
NUMPY["float8_e5m2"] = np.dtype(ml_dtypes.float8_e5m2)
INDEX_DTYPES = ("int64", "int32", "uint8", "int16")
TEXTS = ("", "a", "graph", "Käse", "日本", "zero\0inside")


@dataclass
class World:
    """A schema and graphs that fit it, with the counts of each."""

    schema: Schema
    graphs: list
    counts: list

    def write(self, path, rows=None):
        """Writes all graphs, or those in `rows`, as one segment."""
        writer = _core.GraphWriter(str(path), self.schema.encode(), self.schema.keys)
        for row in range(len(self.graphs)) if rows is None else rows:
            writer.append(self.graphs[row], None, self.counts[row])
        writer.close()
        return path


def molecules(n, seed=0, nodes=(1, 9), edges=(0, 20), features=3):
    """Homogeneous graphs with x, edge_index, edge_attr and y."""
    rng = np.random.default_rng(seed)
    schema = Schema(
        (Count("nodes"), Count("edges", "", 0, 0)),
        (
            Field("x", 0, "float32", (-1, features), 0),
            Field("edge_index", 1, "int64", (2, -2), 1, (0,)),
            Field("edge_attr", 1, "uint8", (-2, 2), 0),
            Field("y", None, "float32", (1,), 0),
        ),
    )
    graphs = []
    for number in range(n):
        v, e = int(rng.integers(*nodes)), int(rng.integers(*edges))
        graphs.append(
            {
                "x": rng.standard_normal((v, features)).astype(np.float32),
                "edge_index": rng.integers(0, v, (2, e)),
                "edge_attr": rng.integers(0, 255, (e, 2), np.uint8),
                "y": np.array([number], np.float32),
            }
        )
    return World(schema, graphs, [counts_of(schema, graph) for graph in graphs])


@st.composite
def worlds(draw, max_graphs=5):
    """Random worlds; any of their graphs can be put in one batch."""
    counts = list(draw(st.sampled_from(TYPES)))
    fields = []
    for place, count in enumerate(list(counts)):
        for number in range(draw(st.integers(0, 2))):
            fields.append(_counted(draw, place, f"f{place}_{number}"))
        if count.role == "edges" and draw(st.booleans()):
            fields.append(_edge_index(draw, place, count))
    nodes = [place for place, count in enumerate(counts) if count.role == "nodes"]
    for number in range(draw(st.integers(0, 4))):
        fields.append(_of_graph(draw, counts, nodes, f"g{number}"))
    if draw(st.booleans()):  # last, as counts are sorted by role
        counts.append(Count("increment"))
        dims = (2, draw(st.integers(0, 2)))
        fields.append(Field("own", None, "int64", dims, 1, (len(counts) - 1,)))
    schema = Schema(tuple(counts), tuple(draw(st.permutations(fields))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lacks = {key: draw(st.booleans()) for key in schema.keys}
    made = [_graph(schema, rng, lacks) for _ in range(draw(st.integers(0, max_graphs)))]
    return World(schema, [g for g, _ in made], [c for _, c in made])


TYPES = (
    (Count("nodes"), Count("edges", "", 0, 0)),
    (Count("nodes"),),
    (
        Count("nodes", "a"),
        Count("nodes", "b"),
        Count("edges", "a|to|b", 0, 1),
        Count("edges", "b|in|b", 1, 1),
    ),
    (),
)


def _counted(draw, place, name):
    """A field of nodes or edges, counted along any of its dimensions."""
    dims = draw(st.lists(st.integers(0, 3), max_size=2))
    cat_dim = draw(st.integers(0, len(dims)))
    dims.insert(cat_dim, -1 - place)
    dtype = draw(st.sampled_from(sorted(NUMPY)))
    optional = draw(st.booleans())
    return Field(name, place, dtype, tuple(dims), cat_dim, (), optional)


def _edge_index(draw, place, count):
    dtype = draw(st.sampled_from(INDEX_DTYPES))
    one = count.source == count.target and draw(st.booleans())
    add = (count.source,) if one else (count.source, count.target)
    return Field("edge_index", place, dtype, (2, -1 - place), 1, add)


def _of_graph(draw, counts, nodes, name):
    """A field of the whole graph, of one of the kinds there are."""
    kind = draw(
        st.sampled_from(("fixed", "stacked", "ragged", "text", "scalar", "add"))
    )
    dtype = draw(st.sampled_from(sorted(NUMPY)))
    optional = draw(st.booleans())
    dims = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
    if kind == "stacked":
        return Field(name, None, dtype, dims, None, (), optional)
    if kind == "ragged" or kind == "text":
        place = len(counts)
        counts.append(Count("size"))
        if kind == "text":
            dtype = draw(st.sampled_from(("string", "bytes")))
            return Field(name, None, dtype, (-1 - place,), 0, (), optional)
        return Field(name, None, dtype, (-1 - place, *dims[1:]), 0, (), optional)
    if kind == "scalar":
        dtype = draw(st.sampled_from(("bool", "int64", "float64")))
        return Field(name, None, dtype, (), None, (), optional, True)
    if kind == "add" and nodes:
        place = draw(st.sampled_from(nodes))
        dtype = draw(st.sampled_from(INDEX_DTYPES))
        stack = draw(st.booleans())
        shape = () if stack else (draw(st.integers(0, 3)),)
        return Field(name, None, dtype, shape, None if stack else 0, (place,), optional)
    return Field(name, None, dtype, dims, draw(st.integers(0, len(dims) - 1)), ())


def _graph(schema, rng, lacks):
    """A graph, and its counts."""
    indexed = {place for field in schema.fields for place in field.add}
    counts = []
    for place, count in enumerate(schema.counts):
        number = int(rng.choice([0, 1, 2, 3, 7, 8, 20]))
        if count.role == "nodes" and place in indexed:
            number += 1
        counts.append(number)
    graph = {}
    for key, field in zip(schema.keys, schema.fields):
        if field.optional and lacks[key]:
            for dim in field.dims:
                if dim < 0 and schema.counts[-1 - dim].role == "size":
                    counts[-1 - dim] = 0
            continue
        shape = tuple(dim if dim >= 0 else counts[-1 - dim] for dim in field.dims)
        value = _value(field, shape, rng, [counts[place] for place in field.add])
        if field.dtype in ("string", "bytes"):
            size = len(value.encode() if field.dtype == "string" else value)
            counts[-1 - field.dims[0]] = size
        graph[key] = value
    return graph, counts


def _value(field, shape, rng, limits):
    if field.dtype == "string":
        return str(rng.choice(TEXTS))
    if field.dtype == "bytes":
        return rng.bytes(shape[0])
    if field.scalar:
        low, high = -(2 ** int(rng.integers(1, 60))), 2 ** int(rng.integers(1, 60))
        number = int(rng.integers(low, high))
        return {"bool": number > 0, "int64": number, "float64": number / 7}[field.dtype]
    if limits and field.name != "own":
        rows = [rng.integers(0, limit, shape[len(limits) > 1 :]) for limit in limits]
        values = np.stack(rows) if len(rows) > 1 else rows[0]
        return np.asarray(values).astype(NUMPY[field.dtype])
    dtype = NUMPY[field.dtype]
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        bits = int(rng.integers(1, 64))
        high = min(info.max, 2**bits - 1)
        low = max(info.min, -(2**bits)) if rng.integers(2) else max(info.min, 0)
        return rng.integers(low, high, shape, dtype, endpoint=True)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    raw = rng.bytes(int(np.prod(shape)) * dtype.itemsize)
    return np.frombuffer(raw, dtype).reshape(shape)  # NaNs and all


def widened(world, key, dim):
    """The same graphs under a schema where a fixed size of a field is a count."""
    old = world.schema
    place = next(
        (i for i, c in enumerate(old.counts) if c.role == "increment"), len(old.counts)
    )
    counts = (*old.counts[:place], Count("size"), *old.counts[place:])
    fields = []
    for name, field in zip(old.keys, old.fields):
        dims = [d if -1 - d < place else d - 1 for d in field.dims]
        if name == key:
            dims[dim] = -1 - place
        add = tuple(i + (i >= place) for i in field.add)
        fields.append(replace(field, dims=tuple(dims), add=add))
    rows = []
    for graph, row in zip(world.graphs, world.counts):
        size = np.shape(graph[key])[dim] if key in graph else 0
        rows.append([*row[:place], size, *row[place:]])
    return World(Schema(counts, tuple(fields)), world.graphs, rows)
