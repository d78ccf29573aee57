"""Small caches for tests of the core: schemas, graphs, writing and reading."""

import ml_dtypes
import numpy as np

from trainfast import _core
from trainfast.graph_cache.schema import DTYPES, Count, Field, Schema

NODES = Count("nodes")
EDGES = Count("edges", source=0, target=0)
SIZE = Count("size")

NUMPY = {
    name: np.dtype(getattr(np, name, None) or getattr(ml_dtypes, name))
    for name in DTYPES[1:-2]
    if name != "bool"
} | {"bool": np.dtype(bool)}
INTEGERS = [name for name in NUMPY if "int" in name]

PLAIN = Schema(
    (NODES, EDGES),
    (
        Field("x", 0, "float32", (-1, 3), 0),
        Field("edge_index", 1, "int64", (2, -2), 1, add=(0,)),
        Field("y", None, "float64", (1,), 0),
    ),
)


def plain_graph(rng, nodes=5, edges=8):
    """A graph of PLAIN."""
    return {
        "x": rng.standard_normal((nodes, 3)).astype(np.float32),
        "edge_index": rng.integers(0, nodes, (2, edges)),
        "y": rng.standard_normal(1),
    }


def one_field(dtype, dims=(-1,), **options):
    """A schema of nodes and one field "x" of them."""
    return Schema(
        (NODES,), (Field("x", 0, dtype, dims, 0 if dims else None, **options),)
    )


def random_bits(rng, dtype, shape):
    """An array of every kind of value, NaN and infinity too."""
    dtype = NUMPY[dtype]
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    bits = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return bits.view(dtype).reshape(shape)


def same(a, b):
    """Whether two arrays have one dtype, one shape and the same bits."""
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def write(path, schema, graphs, *, keys=None, counts=None):
    """A sealed cache of these graphs."""
    writer = _core.GraphWriter(str(path), schema.encode(), schema.keys, durable=False)
    for i, graph in enumerate(graphs):
        extra = {} if counts is None else {"counts": counts[i]}
        assert writer.append(graph, None if keys is None else keys[i], **extra) is None
    writer.close()
    return writer


def cached(path, schema, graphs, **options):
    """The same, opened."""
    write(path, schema, graphs)
    return _core.GraphCache(str(path), **options)


def collate(cache, indices, **options):
    """A batch of all fields."""
    fields = range(len(Schema.decode(cache.schema).fields))
    selection = _core.GraphSelection(cache, fields, **options)
    return _core.graph_collate(selection, indices)
