"""What happens to a cache that something else has happened to.

Damage to any byte, truncation, files replaced, removed or not a cache at all, other
processes: an error or the right data, never wrong data and never a crash. The fuzzing
of damage behind right checksums is in test_fuzz.py.
"""

import contextlib
import gc as garbage
import multiprocessing
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.graph_cache.cache_files import (
    BLOCK,
    aligned,
    folder_in_memory,
    layout_of,
    put,
    read_cache,
    seal_manifest,
    seal_segment,
    write_cache,
)
from tests.graph_cache.reference import counts_of, same
from tests.graph_cache.worlds import World, molecules
from trainfast import _core
from trainfast import graph_cache as gc
from trainfast.graph_cache.schema import Count, Field, Schema

ERRORS = (ValueError, OSError)
MASKS = (0x01, 0xFF)
# The minor version of the manifest: readers take any, and no checksum covers it.
MINOR = {("manifest", 10), ("manifest", 11)}


def small_world():
    """A little of everything, in as few bytes as can be."""
    schema = Schema(
        (Count("nodes"), Count("edges", "", 0, 0), Count("size")),
        (
            Field("x", 0, "float32", (-1, 2), 0),
            Field("edge_index", 1, "int64", (2, -2), 1, (0,)),
            Field("flag", None, "bool", (), None, (), False, True),
            Field("name", None, "string", (-3,), 0),
        ),
    )
    graphs = [
        {
            "x": np.array([[1, 2], [3, np.nan]], np.float32),
            "edge_index": np.array([[0, 1, 1], [1, 0, 1]]),
            "flag": True,
            "name": "ä",
        },
        {
            "x": np.zeros((0, 2), np.float32),
            "edge_index": np.zeros((2, 0), int),
            "flag": False,
            "name": "",
        },
        {
            "x": np.full((1, 2), -0.0, np.float32),
            "edge_index": np.zeros((2, 2), int),
            "flag": True,
            "name": "zz",
        },
    ]
    return World(schema, graphs, [counts_of(schema, graph) for graph in graphs])


def snapshot(cache):
    """All that a cache says, as bytes that can be compared."""
    said = [repr(cache.schema), len(cache)]
    for graph in cache:
        for key, value in graph.items():
            array = np.asarray(value) if not isinstance(value, str) else value
            said.append((key, getattr(array, "tobytes", lambda v=value: v)()))
    said += [part.tolist() for part in (cache.sizes.nodes, cache.sizes.edges)]
    batch = next(iter(gc.Loader(cache, max(len(cache), 1), threads=0)), {})
    for key, value in batch.items():
        said.append((key, value if isinstance(value, list) else value.tobytes()))
    return said


def outcome(path, want, **options):
    """ "error" or "right"; fails where the data is anything else."""
    try:
        cache = gc.open(path, **options)
        got = snapshot(cache)
    except ERRORS:
        return "error"
    assert got == want, "wrong data was given without an error"
    return "right"


@pytest.fixture
def in_memory():
    with folder_in_memory() as folder:
        yield Path(folder)


@pytest.fixture
def small(in_memory):
    path = small_world().write(in_memory / "small")
    return path, snapshot(gc.open(path))


def unread(path):
    """Bytes of a sealed segment that nothing but verify() reads: commit frames and the
    zeros behind them."""
    segment = next(path.glob("segment-*"))
    return {
        (segment.name, at)
        for begin in layout_of(segment.read_bytes()).commits
        for at in range(begin, aligned(begin + 32, BLOCK))
    }


def places(data, every=False):
    """Offsets to damage: all, or without most of the long gaps of zeros."""
    for at in range(len(data)):
        if every or at % 61 == 0 or any(data[max(at - 16, 0) : at + 16]):
            yield at


@contextlib.contextmanager
def flipped(file, at, mask):
    """The file with one byte changed, in place."""
    with open(file, "r+b", buffering=0) as out:
        (byte,) = os.pread(out.fileno(), 1, at)
        os.pwrite(out.fileno(), bytes([byte ^ mask]), at)
        try:
            yield
        finally:
            os.pwrite(out.fileno(), bytes([byte]), at)


# ---- Damage ------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"mode": "pread"}], ids=["mmap", "pread"])
def test_no_flipped_byte_gives_wrong_data(small, options, record_property):
    path, want = small
    counts = {"error": 0, "right": 0}
    right = set()
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for at in places(data, every=not options):
            for mask in MASKS:
                with flipped(file, at, mask):
                    told = outcome(path, want, **options)
                counts[told] += 1
                if told == "right":
                    right.add((file.name, at))
    assert outcome(path, want) == "right"
    for name, number in counts.items():
        record_property(f"flipped bytes: {name}", number)
    print(f"\nflipped bytes, {len(MASKS)} masks each: {counts}")
    assert counts["error"] > 1000
    assert right <= MINOR | unread(path)


def test_every_flipped_byte_is_found_by_verify(small):
    path, _ = small
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for at in places(data):
            with flipped(file, at, 0x10):
                try:
                    report = gc.open(path, "never").verify()
                except ERRORS:
                    continue
            assert not report.ok or (file.name, at) in MINOR, (file.name, at)


def test_verify_never_still_cannot_crash(small):
    path, _ = small
    segment = next(path.glob("segment-*"))
    data = segment.read_bytes()
    for at in places(data):
        for mask in MASKS:
            ends = (*ERRORS, MemoryError)
            with flipped(segment, at, mask), contextlib.suppress(*ends):
                snapshot(gc.open(path, "never"))


def test_truncation_at_every_length_is_error(small):
    path, want = small
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        if not data:
            continue  # the lock
        for size in reversed(range(len(data))):
            os.truncate(file, size)
            assert outcome(path, want) == "error", (file.name, size)
        for more in (b"\0", b"\0" * 64, data):
            file.write_bytes(data + more)
            assert outcome(path, want) == "error", (file.name, len(more))
        file.write_bytes(data)
    assert outcome(path, want) == "right"


def test_missing_file_is_error(small):
    path, want = small
    for file in sorted(path.iterdir()):
        if file.name == "lock":
            continue
        data = file.read_bytes()
        file.unlink()
        assert outcome(path, want) == "error", file.name
        file.write_bytes(data)
    (path / "lock").unlink()
    assert outcome(path, want) == "right"  # readers do not need it


def test_no_flipped_byte_of_unclosed_segment_is_adopted_as_wrong_data(in_memory):
    """What a killed writer left: recovery takes a beginning of it, and says so."""
    tmp_path = in_memory
    world = small_world()
    writer = _core.GraphWriter(
        str(tmp_path / "open"), world.schema.encode(), world.schema.keys
    )
    for graph, counts in zip(world.graphs, world.counts):
        writer.append(graph, None, counts)
        writer.commit()
    left = tmp_path / "left"
    shutil.copytree(tmp_path / "open", left)
    del writer
    name = next(left.glob("open-*")).name
    data = (left / name).read_bytes()
    begins = [snapshot_of(tmp_path, world, n) for n in range(len(world.graphs) + 1)]
    kept = [0] * (len(world.graphs) + 1)
    for at in places(data):
        target = tmp_path / "flipped"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(left, target)
        damaged = bytearray(data)
        damaged[at] ^= 0x04
        (target / name).write_bytes(damaged)
        with pytest.raises(ERRORS):
            gc.open(target)  # never silently shorter
        try:
            graphs, _ = _core.graph_adopt(str(target))
            cache = gc.open(target)
        except ERRORS:
            continue
        assert len(cache) == graphs
        assert [graph for graph in map(repr, cache)] == begins[graphs]
        kept[graphs] += 1
    assert sum(kept) > 0


def snapshot_of(tmp_path, world, n):
    path = world.write(tmp_path / f"first-{n}", range(n))
    return [repr(graph) for graph in gc.open(path)]


# ---- What a file says behind right checksums ---------------------------------------


def changed(tmp_path, change):
    """A small cache with one change of its segment, all checksums right."""
    manifest, segments = read_cache(small_world().write(tmp_path / "before"))
    ((uuid, data),) = segments.items()
    layout = layout_of(data)
    change(data, layout)
    seal_segment(data, layout)
    seal_manifest(manifest, {uuid: data})
    return write_cache(tmp_path / "after", manifest, {uuid: data})


def test_unchanged_cache_with_new_checksums_opens(tmp_path):
    path = changed(tmp_path, lambda data, layout: None)
    assert len(gc.open(path)) == 3
    assert gc.open(path).verify().ok


@pytest.mark.parametrize("verify", ["once", "always"])
def test_edge_beyond_nodes_is_error(tmp_path, verify):
    def change(data, layout):
        at, _, head = layout.records[0]
        payload = at + head
        stored = data[at + 32 + 12 : at + 32 + 16]
        assert stored[1] == 2, "edge_index is stored as bytes"
        data[payload + 16] = 2  # behind x: two nodes, so 0 and 1 are all there is

    path = changed(tmp_path, change)
    cache = gc.open(path, verify)
    with pytest.raises(ERRORS, match="edge_index"):
        cache[0]
    with pytest.raises(ERRORS, match="edge_index"):
        next(iter(gc.Loader(cache, 3)))
    assert [graph for graph, _ in cache.verify().damaged] == [0]
    assert cache[2]["name"] == "zz"


def test_count_beyond_record_is_error(tmp_path):
    def change(data, layout):
        at, _, _ = layout.records[0]
        put(data, at + 32, "I", 2**31)

    path = changed(tmp_path, change)
    with pytest.raises(ERRORS):
        gc.open(path)[0]
    with pytest.raises(ERRORS):
        list(gc.Loader(gc.open(path), 3))


def test_text_that_is_no_utf8_is_error(tmp_path):
    def change(data, layout):
        at, _, head = layout.records[0]
        place = bytes(data).index("ä".encode(), at + head)
        data[place] = 0xFF

    cache = gc.open(changed(tmp_path, change))
    with pytest.raises(ERRORS):
        cache[0]
    assert [graph for graph, _ in cache.verify().damaged] == [0]


# ---- Files that change under a reader ----------------------------------------------


@pytest.fixture
def many(tmp_path):
    world = molecules(40)
    return world, world.write(tmp_path / "many")


def assert_reads_all(cache, world):
    for graph, want in zip(cache, world.graphs):
        assert all(same(graph[key], value) for key, value in want.items())
    loader = gc.Loader(cache, 8)
    assert sum(len(batch["y"]) for batch in loader) == len(world.graphs)


@pytest.mark.parametrize("mode", ["mmap", "pread"])
def test_removed_cache_is_read_on(many, mode):
    world, path = many
    cache = gc.open(path, mode=mode)
    shutil.rmtree(path)
    assert_reads_all(cache, world)


@pytest.mark.parametrize("mode", ["mmap", "pread"])
def test_replaced_segment_is_read_on_and_not_opened_again(many, tmp_path, mode):
    world, path = many
    cache = gc.open(path, mode=mode)
    other = molecules(40, seed=1).write(tmp_path / "other")
    mine, theirs = (next(p.glob("segment-*")) for p in (path, other))
    os.replace(theirs, mine)
    assert_reads_all(cache, world)
    with pytest.raises(ERRORS):
        gc.open(path)


def test_shrunk_file_is_error_with_pread(many):
    world, path = many
    cache = gc.open(path, mode="pread")
    segment = next(path.glob("segment-*"))
    os.truncate(segment, 2000)
    read = 0
    with pytest.raises(ERRORS):
        for graph, want in zip(cache, world.graphs):
            assert same(graph["x"], want["x"])
            read += 1
    with pytest.raises(ERRORS):
        list(gc.Loader(cache, 8))


def test_reader_has_its_snapshot_while_a_build_goes_on(many):
    world, path = many
    before = gc.open(path)
    _core.graph_build_begin(str(path))
    with pytest.raises(ERRORS, match="build"):
        gc.open(path)
    assert len(gc.open(path, partial=True)) == 40
    writer = _core.GraphWriter(str(path), world.schema.encode(), world.schema.keys)
    writer.append(world.graphs[0])
    writer.commit()
    assert_reads_all(before, world)
    with pytest.raises(ERRORS):
        gc.open(path)
    assert len(gc.open(path, partial=True)) == 40
    writer.close()
    order = np.array([40, 0, 1], np.uint64)
    _core.graph_build_end(str(path), order)
    after = gc.open(path)
    assert [float(graph["y"][0]) for graph in after] == [0, 0, 1]
    assert after.fingerprint != before.fingerprint
    assert_reads_all(before, world)


def test_writer_that_lives_keeps_cache_from_opening(many):
    world, path = many
    writer = _core.GraphWriter(str(path), world.schema.encode(), world.schema.keys)
    writer.append(world.graphs[0])
    writer.commit()
    with pytest.raises(ERRORS):
        gc.open(path)
    assert len(gc.open(path, partial=True)) == 40
    writer.close()
    assert len(gc.open(path)) == 41


# ---- What is no cache --------------------------------------------------------------


def test_path_of_nothing_is_error(tmp_path):
    with pytest.raises(OSError, match="nothing"):
        gc.open(tmp_path / "nothing")


def test_path_of_file_is_error(tmp_path):
    (tmp_path / "file").write_bytes(b"graph")
    with pytest.raises(ERRORS, match="file"):
        gc.open(tmp_path / "file")


def test_directory_of_something_else_is_error(tmp_path):
    with pytest.raises(ERRORS, match=str(tmp_path)):
        gc.open(tmp_path)
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(ERRORS, match=str(tmp_path)):
        gc.open(tmp_path)
    schema = small_world().schema
    with pytest.raises(ERRORS):
        _core.GraphWriter(str(tmp_path), schema.encode(), schema.keys)
    assert [file.name for file in tmp_path.iterdir()] == ["photo.jpg"]


def test_manifest_of_something_else_is_error(tmp_path):
    for content in (b"", b"hello", b"{}" * 100, b"\0" * 64):
        (tmp_path / "manifest").write_bytes(content)
        with pytest.raises(ERRORS, match="manifest"):
            gc.open(tmp_path)


def test_other_files_in_a_cache_are_left_alone(many):
    world, path = many
    (path / "notes.txt").write_text("mine")
    assert_reads_all(gc.open(path), world)
    assert (path / "notes.txt").read_text() == "mine"


# ---- Other processes, other rights -------------------------------------------------


def _read_in_child(cache, world, queue):
    try:
        assert_reads_all(cache, world)
        queue.put("read")
    except BaseException as error:
        queue.put(repr(error))


@pytest.mark.parametrize(
    "method", [pytest.param("fork", marks=pytest.mark.forks), "spawn"]
)
@pytest.mark.parametrize("mode", ["mmap", "pread"])
def test_open_cache_is_read_in_other_process(many, method, mode):
    world, path = many
    cache = gc.open(path, mode=mode)
    assert_reads_all(cache, world)
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_read_in_child, args=(cache, world, queue))
    child.start()
    assert queue.get(timeout=240) == "read"
    child.join()
    assert child.exitcode == 0
    assert_reads_all(cache, world)


@pytest.mark.forks
def test_child_does_not_end_the_parents_cache(many):
    world, path = many
    cache = gc.open(path)
    child = os.fork()
    if child == 0:
        try:
            del cache
            garbage.collect()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert_reads_all(cache, world)


@contextlib.contextmanager
def read_only(write):
    """The path of a cache that nobody may write to, after `write(path)`."""
    folder = Path(tempfile.mkdtemp())
    path = folder / "cache"
    write(path)
    for file in path.iterdir():
        file.chmod(0o444)
    for each in (path, folder):
        each.chmod(0o555)
    try:
        yield path
    finally:
        for each in (folder, path):
            each.chmod(0o755)
        shutil.rmtree(folder)


def code_without_rights(function, *args):
    """The exit code of a child that runs it as nobody: rights do not hold root back."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.getuid() == 0:
                os.setuid(65534)
            function(*args)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_read_only_directory_is_read():
    def child():
        assert not os.access(path, os.W_OK)
        assert_reads_all(gc.open(path), world)

    world = molecules(10)
    with read_only(world.write) as path:
        assert code_without_rights(child) == 0


def test_build_of_a_read_only_cache_makes_nothing_if_nothing_is_missing():
    def make(path, n=10):
        return gc.build(path, world.graphs[:n], progress=False)

    def child():
        report = make(path)
        assert (report.made, report.reused, report.graphs) == (0, 10, 10)
        with pytest.raises(PermissionError):
            make(path, 9)
        assert_reads_all(gc.open(path), world)

    world = molecules(10)
    with read_only(make) as path:
        assert code_without_rights(child) == 0


# ---- Values ------------------------------------------------------------------------


def test_not_a_number_is_kept_bit_for_bit(tmp_path):
    bits = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x80000000], np.uint32)
    schema = Schema((Count("nodes"),), (Field("x", 0, "float32", (-1,), 0),))
    graph = {"x": bits.view(np.float32)}
    world = World(schema, [graph], [[4]])
    cache = gc.open(world.write(tmp_path / "c"))
    assert same(cache[0]["x"].view(np.uint32), bits)
    assert same(next(iter(gc.Loader(cache, 1)))["x"].view(np.uint32), bits)
