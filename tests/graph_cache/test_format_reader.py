"""A reader made from the document alone reads what trainfast writes, and no more."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from tests.graph_cache.cache_files import (
    folder_in_memory,
    put,
    read_cache,
    seal_manifest,
    write_cache,
)
from tests.graph_cache.format_reader import Damaged, graphs_of, read_sealed, recover
from tests.graph_cache.worlds import worlds
from tests.graph_samples import assert_same, graph, quiet
from trainfast import _core
from trainfast.graph_cache import Writer
from trainfast.graph_cache import open as open_cache
from trainfast.graph_cache.infer import infer
from trainfast.graph_cache.keys import key_maker


def as_stored(value):
    """The bits of what NumPy alone does not know, as bfloat16."""
    dtype = getattr(value, "dtype", None)
    unknown = dtype is not None and dtype.isbuiltin != 1
    return value.view(f"u{dtype.itemsize}") if unknown else value


@settings(max_examples=60, deadline=None)
@given(world=worlds())
def test_graphs_of_any_schema_are_read(world):
    with folder_in_memory() as folder:
        found = graphs_of(world.write(f"{folder}/cache"))
    wanted = [{k: as_stored(v) for k, v in graph.items()} for graph in world.graphs]
    assert_same([graph for _, graph in found], wanted)


def test_segments_orders_and_commits_are_read(tmp_path):
    path = tmp_path / "cache"

    def make(n):
        return graph(n % 7) | {"at": np.full(n // 300, n)}

    quiet(path, range(600), make, key=int)
    quiet(path, range(650, 2, -1), make, key=int)
    assert len(list(path.glob("segment-*"))) > 1
    found, key = graphs_of(path), key_maker(int, None)
    assert_same([one for _, one in found], [make(n) for n in range(650, 2, -1)])
    assert [one for one, _ in found] == [key(0, n) for n in range(650, 2, -1)]


def test_segment_that_is_deleted_but_not_forgotten_is_not_missed(tmp_path):
    for numbers in (range(3), range(3, 5)):
        with Writer(tmp_path / "cache") as writer:
            for n in numbers:
                writer.append(graph(n))
    manifest, segments = read_cache(tmp_path / "cache")
    put(manifest, 32, "Q", 2)
    put(manifest, 60, "I", 1)
    manifest += np.array([4, 3]).tobytes()
    seal_manifest(manifest, segments)
    del segments[bytes(manifest[64:80]).hex()]
    path = write_cache(tmp_path / "later", manifest, segments)
    assert_same([one for _, one in graphs_of(path)], [graph(4), graph(3)])
    assert [len(one["x"]) for one in open_cache(path)] == [4, 3]


def test_every_byte_is_accounted_for(tmp_path):
    with Writer(tmp_path / "cache") as writer:
        for n in range(2):
            writer.append(graph(n) | {"name": "ä" * n})
            writer.commit()
    (file,) = (tmp_path / "cache").glob("segment-*")
    data = bytearray(file.read_bytes())
    for at in range(len(data)):
        if at % 61 == 0 or any(data[max(at - 16, 0) : at + 16]):  # few long zeros
            data[at] ^= 4
            with pytest.raises(Damaged):
                read_sealed(bytes(data))
            data[at] ^= 4
    assert len(read_sealed(bytes(data))) == 2


def test_cut_file_that_no_writer_closed_gives_what_adopting_keeps(tmp_path):
    graphs = [graph(n) for n in range(5)]
    schema = infer(graphs)
    writer = _core.GraphWriter(str(tmp_path / "cache"), schema.encode(), schema.keys)
    for n, one in enumerate(graphs):
        writer.append(one)
        if n % 2:
            writer.commit()
    (file,) = (tmp_path / "cache").glob("open-*")
    data, manifest = file.read_bytes(), (file.parent / "manifest").read_bytes()
    writer.abandon()
    kept = set()
    with folder_in_memory() as folder:
        for cut in (*range(4096, len(data), 176), len(data)):
            path = Path(folder) / str(cut)
            path.mkdir()
            (path / "manifest").write_bytes(manifest)
            (path / file.name).write_bytes(data[:cut])
            recovered = [record.graph for record in recover(data[:cut])]
            assert _core.graph_adopt(str(path))[0] == len(recovered)
            assert_same(recovered, graphs[: len(recovered)])
            assert_same([one for _, one in graphs_of(path)], recovered)
            kept.add(len(recovered))
    assert kept == {0, 2, 4}
