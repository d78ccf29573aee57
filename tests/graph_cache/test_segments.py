"""Several segments as one cache, the order of a build, and what damage leaves."""

import os
import shutil
import signal

import numpy as np
import pytest

import trainfast.graph_cache as gc
from tests.graph_cache.cache_files import (
    layout_of,
    put,
    read_cache,
    seal_manifest,
    seal_segment,
    write_cache,
)
from trainfast import _core
from trainfast.graph_cache.schema import Count, Field, Schema

NODES = Count("nodes")


def schema_of(columns, positions, t, sizes=0):
    """x [nodes, columns], pos [positions, 2], t [t]; dims as in a file."""
    fields = (
        Field("x", 0, "float32", (-1, columns), 0),
        Field("pos", 0, "float32", (positions, 2), 0),
        Field("t", None, "int64", (t,), 0),
    )
    return Schema((NODES, *(Count("size") for _ in range(sizes))), fields)


def graph_of(number, nodes=3, columns=4, positions=3):
    x = np.arange(nodes * columns, dtype=np.float32).reshape(nodes, columns)
    pos = np.full((positions, 2), number, np.float32)
    return {"x": x + number, "pos": pos, "t": np.arange(columns) * number}


def write(path, schema, graphs, *, commit=0):
    """One segment; with `commit` a commit after each so many graphs."""
    writer = _core.GraphWriter(str(path), schema.encode(), schema.keys)
    for number, graph in enumerate(graphs, 1):
        assert writer.append(graph) is None
        if commit and number % commit == 0:
            writer.commit()
    writer.close()


def numbers(path, **options):
    return [int(graph["pos"][0, 0]) for graph in gc.open(str(path), **options)]


def segments(path):
    """The files, as their first graphs are numbered."""
    return sorted(path.glob("segment-*"), key=lambda file: first_number(file))


def first_number(file):
    data = file.read_bytes()
    at, _, head = layout_of(data).records[0]
    return np.frombuffer(data, np.float32, 1, at + head)[0]  # x[0, 0]


def flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 0x55
    file.write_bytes(data)


# ---- Schemas that differ in sizes ----------------------------------------------------


@pytest.fixture
def mixed(tmp_path):
    """Three segments: t and x fixed to 4, to 6, and with sizes of their own."""
    path = tmp_path / "cache"
    graphs = [graph_of(1), graph_of(2, 5, 4, 5)]
    write(path, schema_of(4, -1, 4), graphs)
    graphs.append(graph_of(3, 2, 6, 2))
    write(path, schema_of(6, -1, 6), graphs[2:])
    graphs += [graph_of(4, 2, 4, 7), graph_of(5, 3, 4, 1)]
    write(path, schema_of(4, -2, -3, 2), graphs[3:])
    return path, graphs


def test_segments_of_other_sizes_are_one_cache(mixed):
    path, graphs = mixed
    cache = gc.open(str(path), "always")
    assert [count.role for count in cache.schema.counts] == ["nodes", *["size"] * 3]
    for got, want in zip(cache, graphs, strict=True):
        assert got.keys() == want.keys()
        for key, value in want.items():
            np.testing.assert_array_equal(got[key], value)
    core = _core.GraphCache(str(path))
    counts = {tuple(core.counts(k).tolist()) for k in range(4)}
    assert counts == {(3, 5, 2, 2, 3), (4, 4, 6, 4, 4), (3, 5, 2, 7, 1)}


def test_batch_joins_segments_of_other_sizes(mixed):
    path, graphs = mixed
    selection = _core.GraphSelection(_core.GraphCache(str(path)), [1, 2])
    batch = _core.graph_collate(selection, np.arange(5))
    for got, key in zip(batch.fields, ("pos", "t"), strict=True):
        np.testing.assert_array_equal(got, np.concatenate([g[key] for g in graphs]))


def test_writer_with_schema_of_something_else_is_refused(mixed):
    path, _ = mixed
    fields = (Field("x", 0, "float64", (-1, 4), 0),)
    before = sorted(file.name for file in path.iterdir())
    with pytest.raises(ValueError, match="schema must agree in all but sizes"):
        _core.GraphWriter(str(path), Schema((NODES,), fields).encode(), ["x"])
    assert sorted(file.name for file in path.iterdir()) == before


# ---- Order ---------------------------------------------------------------------------


def test_order_of_build_counts_graphs_as_they_are_shown(tmp_path):
    path = tmp_path / "cache"
    write(path, schema_of(4, -1, 4), [graph_of(n) for n in range(5)])
    for order, shown in (([4, 0, 2], [4, 0, 2]), ([2, 0, 1], [2, 4, 0])):
        _core.graph_build_begin(str(path))
        assert numbers(path, partial=True)
        _core.graph_build_end(str(path), np.array(order, np.uint64))
        assert numbers(path) == shown
    write(path, schema_of(4, -1, 4), [graph_of(9)])
    assert numbers(path) == [2, 4, 0, 9]


def test_build_deletes_segments_without_graphs(tmp_path):
    path = tmp_path / "cache"
    for n in range(3):
        write(path, schema_of(4, -1, 4), [graph_of(n), graph_of(10 + n)])
    _core.graph_build_begin(str(path))
    _core.graph_build_end(str(path), np.array([5, 0], np.uint64))
    assert numbers(path) == [12, 0]
    assert len(list(path.glob("segment-*"))) == 2
    _core.graph_build_begin(str(path))
    _core.graph_build_end(str(path), np.array([], np.uint64))
    assert len(gc.open(str(path))) == 0 and not list(path.glob("segment-*"))


@pytest.mark.parametrize("order", [[0, 0], [3], [2**62], [0, 1, 2, 0]])
def test_wrong_order_is_refused_and_changes_nothing(tmp_path, order):
    path = tmp_path / "cache"
    write(path, schema_of(4, -1, 4), [graph_of(n) for n in range(3)])
    _core.graph_build_begin(str(path))
    with pytest.raises(ValueError, match="order must have"):
        _core.graph_build_end(str(path), np.array(order, np.uint64))
    assert numbers(path, partial=True) == [0, 1, 2]


# ---- Verify --------------------------------------------------------------------------


@pytest.mark.parametrize("pread", [False, True])
def test_threads_of_verify_report_in_order(tmp_path, pread):
    path = tmp_path / "cache"
    write(path, schema_of(4, -1, 4), [graph_of(n) for n in range(4000)], commit=500)
    (file,) = segments(path)
    data = bytearray(file.read_bytes())
    layout = layout_of(data)
    damaged = [0, 7, 1024, 1999, 2000, 3999]
    for n in damaged:
        at, size, _ = layout.records[n]
        data[at + size - 30] ^= 1
    data[layout.commits[3] + 100] ^= 1
    file.write_bytes(data)
    found = _core.GraphCache(str(path), pread=pread).verify(0, 4000, False)
    assert [i for i, _ in found] == [*damaged, -1]
    assert all(f"graph {i} in " in message for i, message in found[:-1])
    assert "must have a commit frame of 2000 records" in found[-1][1]


# ---- Repair --------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path):
    """Graphs 0 .. 5 and 10 .. 13 in two segments, a commit after each two."""
    path = tmp_path / "cache"
    write(path, schema_of(4, -1, 4), [graph_of(n) for n in range(6)], commit=2)
    write(path, schema_of(4, -1, 4), [graph_of(10 + n) for n in range(4)], commit=2)
    return path


def repaired(path):
    """(report, the numbers of what it kept, its lines)."""
    target, lines = path.with_name("repaired"), []
    report = _core.graph_repair(str(path), str(target), lines.append)
    assert gc.open(str(target)).verify().ok
    return report, numbers(target), "\n".join(lines)


ALL = [0, 1, 2, 3, 4, 5, 10, 11, 12, 13]


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "without-trailer"])
def test_repair_loses_only_the_damaged_record(two, sealed):
    file = segments(two)[0]
    at, _, head = layout_of(file.read_bytes()).records[2]
    flip(file, at + head)
    if not sealed:
        flip(file, file.stat().st_size - 1)
    report, kept, _ = repaired(two)
    assert kept == [n for n in ALL if n != 2]
    assert report["damaged"] == 1 and report["kept"] == 9
    assert report["bytes_skipped"] > 0


def test_repair_goes_on_behind_a_broken_header_of_a_record(two):
    file = segments(two)[0]
    flip(file, layout_of(file.read_bytes()).records[2][0] + 12)
    flip(file, file.stat().st_size - 1)
    report, kept, _ = repaired(two)
    assert kept == [n for n in ALL if n != 2]
    assert report["damaged"] == 1


def test_repair_keeps_order_when_records_are_lost(two):
    order = np.array([9, 3, 0, 2, 7], np.uint64)
    _core.graph_build_begin(str(two))
    _core.graph_build_end(str(two), order)
    assert numbers(two) == [13, 3, 0, 2, 11]
    file = segments(two)[0]
    flip(file, layout_of(file.read_bytes()).records[2][0])
    flip(file, file.stat().st_size - 1)
    report, kept, _ = repaired(two)
    assert kept == [13, 3, 0, 11]
    assert (report["kept"], report["damaged"]) == (4, 1)


def test_repair_reads_a_segment_that_has_lost_its_header(two):
    flip(segments(two)[0], 3)
    report, kept, _ = repaired(two)
    assert sorted(kept) == ALL and report["damaged"] == 0


@pytest.mark.parametrize("loss", ["missing", "damaged"])
def test_repair_needs_no_manifest(two, loss):
    if loss == "missing":
        (two / "manifest").unlink()
    else:
        flip(two / "manifest", 20)
    report, kept, lines = repaired(two)
    assert sorted(kept) == ALL and report["kept"] == 10
    assert "order of the graphs is lost" in lines


def test_repair_counts_graphs_of_a_missing_segment(two):
    segments(two)[1].unlink()
    report, kept, lines = repaired(two)
    assert kept == ALL[:6] and report["damaged"] == 4
    assert "4 graphs is missing" in lines


def test_repair_of_what_is_no_cache_is_an_error_and_makes_nothing(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="neither a manifest nor segments"):
        _core.graph_repair(
            str(tmp_path / "other"), str(tmp_path / "target"), lambda line: None
        )
    assert not (tmp_path / "target").exists()


def test_repair_target_must_be_new(two, tmp_path):
    shutil.copytree(two, tmp_path / "target")
    with pytest.raises(ValueError, match="target must be a new cache"):
        _core.graph_repair(str(two), str(tmp_path / "target"), lambda line: None)
    assert numbers(tmp_path / "target") == ALL


# ---- Large files ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["mmap", "pread"])
def test_graphs_beyond_4_gib_of_a_file_are_read(tmp_path, mode):
    bytes_of_nodes = Field("x", 0, "uint8", (-1,), 0)
    graphs = [{"x": np.zeros(16, np.uint8)}, {"x": np.arange(3, dtype=np.uint8)}]
    write(tmp_path / "small", Schema((NODES,), (bytes_of_nodes,)), graphs)
    manifest, segments = read_cache(tmp_path / "small")
    ((uuid, data),) = segments.items()
    layout, more = (
        layout_of(data),
        2**32 - 4096,
    )  # so many zeros more in the first graph
    (first, units, head), (second, _, _) = layout.records
    index, trailer = layout.index[0], layout.size - 64
    put(data, first + 12, "I", (units + more) // 16)
    put(data, first + 32, "I", 16 + more)
    put(data, index + 8, "Q", second + more)
    put(data, index + 64, "I", (units + more) // 16)
    put(data, index + 128, "I", 16 + more)
    put(data, trailer + 8, "Q", index + more)
    put(data, trailer + 32, "Q", layout.commits[0] + more)
    seal_segment(data, layout)
    put(manifest, 64 + 24, "Q", layout.size + more)
    seal_manifest(manifest, segments)
    path = write_cache(tmp_path / "large", manifest, {})
    with open(path / f"segment-{uuid}", "wb") as file:  # has a hole
        file.write(data[: first + head])
        file.seek(more, os.SEEK_CUR)
        file.write(data[first + head :])
    cache = gc.open(path, mode=mode)
    assert cache.sizes.nodes.tolist() == [16 + more, 3]
    np.testing.assert_array_equal(cache[1]["x"], [0, 1, 2])
    (batch,) = gc.Loader(cache, 2, sampler=[1, 1])
    np.testing.assert_array_equal(batch["x"], [0, 1, 2, 0, 1, 2])


# ---- Writers that are gone -----------------------------------------------------------


@pytest.fixture
def left(tmp_path):
    """A cache whose writer has gone after three commits of two, and one graph more."""
    path = tmp_path / "cache"
    schema = schema_of(4, -1, 4)
    writer = _core.GraphWriter(str(path), schema.encode(), schema.keys)
    for n in range(6):
        writer.append(graph_of(n))
        if n % 2:
            writer.commit()
    writer.append(graph_of(6))
    writer.abandon()
    return path


def test_unclosed_cache_says_what_is_safe(left):
    with pytest.raises(OSError, match="without closing it: 0 graphs are sealed"):
        gc.open(str(left))
    assert len(gc.open(str(left), partial=True)) == 0
    assert _core.graph_adopt(str(left)) == (6, 0)
    assert numbers(left) == [0, 1, 2, 3, 4, 5]


def test_forked_child_does_not_keep_what_its_parent_has_abandoned(tmp_path):
    path, schema = str(tmp_path / "cache"), schema_of(4, -1, 4)
    writer = _core.GraphWriter(path, schema.encode(), schema.keys)
    writer.append(graph_of(7))
    writer.commit()
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        assert _core.graph_adopt(path) == (0, 0)  # its writer lives
        writer.abandon()
        assert _core.graph_adopt(path) == (1, 0)
        assert numbers(path) == [7]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_unclosed_file_of_another_name_is_kept(left):
    (file,) = left.glob("open-*")
    last = "1" if file.name[-1] == "0" else "0"
    other = file.rename(file.with_name(file.name[:-1] + last))
    with pytest.raises(OSError, match="must have the name of its own uuid"):
        _core.graph_adopt(str(left))
    other.rename(file)
    assert _core.graph_adopt(str(left)) == (6, 0)


def test_damage_of_what_was_promised_is_not_cut_off(left):
    (file,) = left.glob("open-*")
    data = file.read_bytes()
    flip(file, data.index(b"TFGR", data.index(b"TFGC")) + 40)  # of the second group
    with pytest.raises(OSError, match="must be as it was committed, but is damaged"):
        _core.graph_adopt(str(left))
    assert file.exists()
    report, kept, _ = repaired(left)
    assert kept == [0, 1, 3, 4, 5] and report["damaged"] == 1


@pytest.mark.parametrize("behind", [0, 9, 60], ids=["magic", "number", "zeros"])
def test_commit_that_a_later_one_names_is_not_cut_off(left, behind):
    (file,) = left.glob("open-*")
    data = file.read_bytes()
    last = data.rindex(b"TFGC")  # nothing is behind it: the writer was killed there
    file.write_bytes(data[: last // 4096 * 4096 + 4096])
    flip(file, data.rindex(b"TFGC", 0, last) + behind)
    with pytest.raises(OSError, match="must be as it was committed, but is damaged"):
        _core.graph_adopt(str(left))
    _, kept, _ = repaired(left)
    assert kept == [0, 1, 2, 3, 4, 5]


def test_torn_last_group_is_cut_off(left):
    (file,) = left.glob("open-*")
    data = file.read_bytes()
    flip(file, data.rindex(b"TFGR") + 40)
    kept, lost = _core.graph_adopt(str(left))
    assert kept == 4 and lost >= 1
    assert numbers(left) == [0, 1, 2, 3]
