"""Where values lie, in the arrays that are appended and in those that are read."""

import numpy as np
import pytest

from tests.graph_cache.core_calls import NODES, NUMPY, SIZE, same
from trainfast import _core
from trainfast.graph_cache.schema import Field, Schema


def test_views_that_repeat_beyond_all_memory_are_refused(tmp_path):
    """Four times 2^62 bytes, which no size_t counts."""
    many = np.broadcast_to(np.float32(1), (2**30, 2**30))
    names = "abcd"
    schema = Schema(
        (NODES, SIZE), tuple(Field(n, 0, "float32", (-1, -2), 0) for n in names)
    )
    writer = _core.GraphWriter(str(tmp_path / "c"), schema.encode(), schema.keys)
    with pytest.raises(ValueError, match="a must have at most 549755813888 bytes"):
        writer.append(dict.fromkeys(names, many))
    assert writer.append(dict.fromkeys(names, many[:2, :2])) is None
    writer.close()
    assert same(_core.GraphCache(str(tmp_path / "c")).get(0)[3], many[:2, :2])


@pytest.mark.parametrize("pread", [False, True])
def test_whatever_is_stored_as_its_dtype_is_a_view(tmp_path, pread):
    """Behind fields of odd sizes too: each lies where its elements are aligned."""
    dtypes = ("uint8", "float16", "bool", "float32", "int8", "complex128", "uint8")
    schema = Schema(
        (NODES,), tuple(Field(f"f{i}", 0, d, (-1,), 0) for i, d in enumerate(dtypes))
    )
    path = str(tmp_path / "c")
    writer = _core.GraphWriter(path, schema.encode(), schema.keys, durable=False)
    graphs = [
        {f"f{i}": np.ones(n, NUMPY[d]) for i, d in enumerate(dtypes)} for n in (3, 7)
    ]
    for graph in graphs:
        writer.append(graph)
    writer.close()
    cache = _core.GraphCache(path, pread=pread)
    for number, graph in enumerate(graphs):
        for got, want in zip(cache.get(number), graph.values(), strict=True):
            assert same(got, want)
            assert got.base is not None and got.flags.aligned
            assert not got.flags.owndata and not got.flags.writeable
