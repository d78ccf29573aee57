"""Writes the seeds that fuzzing begins with: small caches that have all there is.

    python -m tests.graph_cache.corpus.make

They are committed, so that files of this version stay readable; run it only to add one.
"""

from pathlib import Path

import numpy as np

from tests.graph_cache.reference import counts_of
from tests.graph_cache.worlds import World, molecules
from trainfast import _core
from trainfast.graph_cache.schema import Count, Field, Schema

HERE = Path(__file__).parent


def make(name, *worlds, order=None):
    path = HERE / name
    if path.exists():
        return
    for world in worlds:
        world.write(path)
    if order is not None:
        _core.graph_build_begin(str(path))
        _core.graph_build_end(str(path), np.array(order, np.uint64))
    (path / "lock").unlink(missing_ok=True)


def world(counts, fields, *graphs):
    schema = Schema(counts, fields)
    return World(schema, list(graphs), [counts_of(schema, graph) for graph in graphs])


def typed():
    counts = (Count("nodes", "a"), Count("nodes", "b"), Count("edges", "a|to|b", 0, 1))
    fields = (
        Field("x", 0, "float64", (-1,), 0),
        Field("x", 1, "uint16", (2, -2), 1),
        Field("edge_index", 2, "int32", (2, -3), 1, (0, 1)),
    )
    return world(
        counts,
        fields,
        *(
            {
                ("a", "x"): np.arange(n, dtype=float),
                ("b", "x"): np.full((2, 3), n, np.uint16),
                (("a", "to", "b"), "edge_index"): np.full((2, n), n - 1, np.int32),
            }
            for n in (1, 2)
        ),
    )


def ragged():
    counts = (Count("size"), Count("size"), Count("size"), Count("increment"))
    fields = (
        Field("text", None, "string", (-1,), 0),
        Field("raw", None, "bytes", (-2,), 0, (), True),
        Field("values", None, "int64", (-3, 2), 0),
        Field("own", None, "int64", (3,), 0, (3,)),
        Field("flag", None, "bool", (), None, (), False, True),
        Field("half", None, "bfloat16", (2,), None, (), True),
    )
    schema = Schema(counts, fields)
    graphs = [
        {
            "text": "Käse" * n,
            "raw": b"\x00\xff" * n,
            "values": np.arange(2 * n).reshape(n, 2) - 70000,
            "own": np.arange(3) + n,
            "flag": n == 1,
        }
        for n in range(3)
    ]
    return World(schema, graphs, [counts_of(schema, g, {3: 7}) for g in graphs])


if __name__ == "__main__":
    make("molecules", molecules(3))
    make("ordered", molecules(3), molecules(2, seed=1), order=[4, 0, 2])
    make("typed", typed())
    make("ragged", ragged())
    make("empty", molecules(0))
