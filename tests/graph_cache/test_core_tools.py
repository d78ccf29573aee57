"""The core's functions on whole caches from Python: adopting, builds, repair."""

import errno
import fcntl
import os
import signal
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.graph_cache.core_calls import (
    PLAIN,
    one_field,
    plain_graph,
    random_bits,
    same,
    write,
)
from trainfast import _core
from trainfast.graph_cache.schema import Field

SCHEMA = one_field("int64")


def number_graph(i):
    return {"x": np.array([i])}


def numbers_in(path, **options):
    cache = _core.GraphCache(str(path), **options)
    return [int(cache.get(i)[0][0]) for i in range(len(cache))]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "c"


# ---- Adopting ----------------------------------------------------------------------


def die_while_writing(path, committed, lost):
    """A process that is killed with so many graphs committed, and others not."""
    child = os.fork()
    if child == 0:
        writer = _core.GraphWriter(str(path), SCHEMA.encode(), SCHEMA.keys)
        for i in range(committed):
            writer.append(number_graph(i))
        if committed:
            writer.commit()
        for i in range(lost):
            writer.append(number_graph(1000 + i))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_adopt_keeps_what_was_committed(path):
    die_while_writing(path, 7, 3)
    with pytest.raises(OSError, match="what was committed is safe"):
        _core.GraphCache(str(path))
    kept, lost = _core.graph_adopt(str(path))
    assert kept == 7 and lost <= 3
    assert numbers_in(path) == list(range(7))
    assert _core.graph_adopt(str(path)) == (0, 0)


def test_open_segment_that_cannot_be_looked_at_is_not_left_out(path):
    """As one of another user, which this one may not read."""
    write(path, SCHEMA, [number_graph(0)])
    die_while_writing(path, 7, 0)
    (left,) = path.glob("open-*")
    left.unlink()
    left.symlink_to(left.name)  # a loop: every open() fails
    with pytest.raises(OSError, match="must be a complete cache"):
        _core.GraphCache(str(path))


def test_reader_at_the_lock_is_not_taken_for_a_writer(path):
    """Who opens the cache shares a dead writer's lock for a moment."""
    die_while_writing(path, 7, 0)
    (left,) = path.glob("open-*")
    with open(left) as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        unlock = threading.Timer(0.1, fcntl.flock, (reader, fcntl.LOCK_UN))
        unlock.start()
        assert _core.graph_adopt(str(path)) == (7, 0)
        unlock.join()


def committed_writer(path):
    writer = _core.GraphWriter(str(path), SCHEMA.encode(), SCHEMA.keys)
    writer.append(number_graph(0))
    writer.commit()
    return writer


def test_abandoned_writer_is_adopted_while_a_child_has_its_file(path):
    writer = committed_writer(path)
    read, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read, 1)
        os._exit(0)
    writer.abandon()
    kept = _core.graph_adopt(str(path))
    os.close(write_end)
    os.waitpid(child, 0)
    assert kept == (1, 0)


def test_child_that_drops_a_writer_leaves_the_parent_its_lock(path):
    writer = committed_writer(path)
    child = os.fork()
    if child == 0:
        writer.abandon()
        os._exit(0)
    os.waitpid(child, 0)
    assert _core.graph_adopt(str(path)) == (0, 0)
    writer.append(number_graph(1))
    writer.close()
    assert numbers_in(path) == [0, 1]


def test_first_error_of_adopting_is_raised(path):
    """With its own number, whatever the files after it say."""
    die_while_writing(path, 2, 0)
    die_while_writing(path, 3, 0)
    first, second = sorted(path.glob("open-*"))
    first.unlink()
    first.mkdir()
    with pytest.raises(OSError) as caught:
        _core.graph_adopt(str(path))
    assert caught.value.errno == errno.EISDIR
    assert not second.exists()  # it is held up by nothing


def test_adopt_takes_a_path_and_nothing_else(path):
    write(path, SCHEMA, [number_graph(0)])
    assert _core.graph_adopt(Path(path)) == (0, 0)
    with pytest.raises(TypeError):
        _core.graph_adopt(3)
    with pytest.raises(ValueError, match="null"):
        _core.graph_adopt("a\0b")


# ---- Builds ------------------------------------------------------------------------


def test_build_is_closed_until_it_ends(path):
    _core.graph_build_begin(str(path))
    write(path, SCHEMA, [number_graph(i) for i in range(5)])
    with pytest.raises((OSError, ValueError)):
        _core.GraphCache(str(path))
    assert numbers_in(path, partial=True) == list(range(5))
    _core.graph_build_end(str(path), None)
    assert numbers_in(path) == list(range(5))


def test_build_anew_drops_all_and_goes_on(path):
    write(path, SCHEMA, [number_graph(i) for i in range(3)])
    _core.graph_build_anew(str(path))
    assert _core.graph_is_building(str(path)) and not [*path.glob("segment-*")]
    write(path, one_field("float64"), [{"x": np.array([7.5])}])
    _core.graph_build_end(str(path), None)
    (found,) = _core.GraphCache(str(path)).get(0)
    assert found == [7.5]
    with pytest.raises(FileNotFoundError):
        _core.graph_build_anew(str(path / "nowhere"))


@pytest.mark.parametrize("kind", [list, np.array])
def test_build_ends_with_an_order(path, kind):
    _core.graph_build_begin(str(path))
    for first in (0, 3):
        write(path, SCHEMA, [number_graph(first + i) for i in range(3)])
    records = numbers_in(path, partial=True)
    wanted = [4, 0, 5]
    _core.graph_build_end(str(path), kind([records.index(i) for i in wanted]))
    assert numbers_in(path) == wanted


@pytest.mark.parametrize(
    ("order", "message"),
    [([0, -1], r"order\[1\] must be >= 0, got -1"), ([0, 9], "9"), ([0, 0], "")],
)
def test_wrong_order_is_refused(path, order, message):
    _core.graph_build_begin(str(path))
    write(path, SCHEMA, [number_graph(i) for i in range(3)])
    with pytest.raises(ValueError, match=message or None):
        _core.graph_build_end(str(path), order)
    _core.graph_build_end(str(path), None)
    assert numbers_in(path) == [0, 1, 2]


@pytest.mark.parametrize("records", [2**61, 2**62 + 1, 2**63, 10**9])
def test_manifest_of_more_records_than_files_hold_is_refused(path, records):
    """Eight bytes for each of 2^61 records would be no bytes at all."""
    write(path, SCHEMA, [number_graph(0)])
    data = bytearray((path / "manifest").read_bytes())
    struct.pack_into("<Q", data, 32, records)  # graphs
    struct.pack_into("<Q", data, 64 + 16, records)  # of the segment
    struct.pack_into("<I", data, 12, _core.crc32c(bytes(data[16:])))
    (path / "manifest").write_bytes(data)
    for attempt in (
        lambda: _core.graph_build_end(str(path), None),
        lambda: _core.graph_build_end(str(path), [0]),
        lambda: _core.GraphCache(str(path)),
    ):
        with pytest.raises(OSError, match="possible sizes of segments"):
            attempt()


@pytest.mark.parametrize("name", ["manifest", "segment"])
def test_pipe_with_a_name_of_ours_does_not_hold_us_up(path, name):
    write(path, SCHEMA, [number_graph(0)])
    (file,) = path.glob(f"{name}*")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(OSError, match=r"must have .* bytes, got 0"):
        _core.GraphCache(str(path))


# ---- Repair ------------------------------------------------------------------------


def damaged_cache(path):
    """Nine graphs, of which number 4 is broken."""
    write(path, SCHEMA, [{"x": np.full(40, i)} for i in range(9)])
    (segment,) = path.glob("segment-*")
    data = bytearray(segment.read_bytes())
    data[data.find(b"\4" * 40)] ^= 1
    segment.write_bytes(data)


def test_repair_keeps_all_but_the_damaged(path, tmp_path):
    damaged_cache(path)
    lines = []
    report = _core.graph_repair(str(path), str(tmp_path / "new"), lines.append)
    assert (report["kept"], report["damaged"]) == (8, 1)
    assert set(report) == {"kept", "damaged", "uncommitted", "bytes_skipped"}
    assert lines and all(isinstance(line, str) for line in lines)
    assert numbers_in(tmp_path / "new") == [0, 1, 2, 3, 5, 6, 7, 8]


def test_target_of_repair_opens_only_in_the_end(path, tmp_path):
    damaged_cache(path)
    new, building = str(tmp_path / "new"), []

    def line(text):
        building.append(_core.graph_is_building(new))

    _core.graph_repair(str(path), new, line)
    assert building == [True]
    assert not _core.graph_is_building(new)


def test_graphs_of_a_lost_segment_count_as_damaged(path, tmp_path):
    write(path, SCHEMA, [number_graph(i) for i in range(3)])
    (segment,) = path.glob("segment-*")
    segment.write_bytes(b"?" + segment.read_bytes()[1:])  # of the header
    report = _core.graph_repair(str(path), str(tmp_path / "new"), lambda line: None)
    assert (report["kept"], report["damaged"]) == (0, 3)


def test_repair_takes_the_schema_that_all_records_fit(path, tmp_path):
    """Heads of both schemas have the same size, so their checksums fit both."""
    score = Field("score", None, "int64", (), None, optional=True)
    wide = replace(SCHEMA, fields=(*SCHEMA.fields, score))
    write(path, SCHEMA, [number_graph(i) for i in range(3)])
    (first,) = path.glob("segment-*")
    graphs = [number_graph(i) | {"score": np.array(i + 1)} for i in range(3, 6)]
    for two in (graphs[:2], graphs[2:]):
        write(path, wide, two)
    broken = next(file for file in path.glob("segment-*") if file != first)
    broken.write_bytes(b"?" + broken.read_bytes()[1:])
    report = _core.graph_repair(str(path), str(tmp_path / "new"), lambda line: None)
    assert (report["kept"], report["damaged"]) == (6, 0)
    cache = _core.GraphCache(str(tmp_path / "new"))
    graphs = [cache.get(i) for i in range(6)]
    found = sorted((int(x[0]), None if s is None else int(s)) for x, s in graphs)
    assert found == [(i, i + 1 if i > 2 else None) for i in range(6)]


def test_exception_in_line_comes_through(path, tmp_path):
    damaged_cache(path)

    def line(text):
        raise KeyError(text)

    with pytest.raises(KeyError):
        _core.graph_repair(str(path), str(tmp_path / "new"), line)


@pytest.mark.parametrize("close", [False, True])
def test_repair_into_itself_is_refused(path, close):
    if close:
        damaged_cache(path)
    else:
        die_while_writing(path, 3, 0)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(ValueError, match="target must be a new cache"):
        _core.graph_repair(str(path), str(path), print)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_repair_wants_two_paths(path, tmp_path):
    with pytest.raises(TypeError):
        _core.graph_repair(str(path), 3, print)
    with pytest.raises(FileNotFoundError):
        _core.graph_repair(str(path), str(tmp_path / "new"), print)


# ---- Interrupts --------------------------------------------------------------------


class Interrupted:
    """A graph whose number of keys nobody can wait for."""

    def __init__(self, graph):
        self.graph = graph

    def __getitem__(self, key):
        return self.graph[key]

    def __len__(self):
        raise KeyboardInterrupt


def test_interrupt_while_a_graph_is_read_comes_through(path, rng):
    writer = _core.GraphWriter(str(path), PLAIN.encode(), PLAIN.keys)
    with pytest.raises(KeyboardInterrupt):
        writer.append(Interrupted(plain_graph(rng)))


def test_interrupted_import_of_ml_dtypes_is_tried_again(path, rng):
    graph = {"x": random_bits(rng, "bfloat16", (3,))}
    write(path, one_field("bfloat16"), [graph])
    code = """
import sys
from trainfast import _core

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "ml_dtypes":
            sys.meta_path.remove(self)
            raise KeyboardInterrupt

cache = _core.GraphCache(sys.argv[1])
assert "ml_dtypes" not in sys.modules
sys.meta_path.insert(0, Interrupt())
try:
    cache.get(0)
except KeyboardInterrupt:
    print("interrupted", cache.get(0)[0].dtype)
"""
    words = [sys.executable, "-c", code, str(path)]
    assert subprocess.check_output(words, text=True) == "interrupted bfloat16\n"


# ---- Errors of the system ----------------------------------------------------------


def test_os_error_has_number_class_and_path(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere") as caught:
        _core.GraphCache(str(tmp_path / "nowhere"))
    assert caught.value.errno == errno.ENOENT
    (tmp_path / "file").write_text("a")
    with pytest.raises(NotADirectoryError, match="file"):
        _core.GraphWriter(str(tmp_path / "file"), PLAIN.encode(), PLAIN.keys)


def test_full_disk_is_an_os_error_with_its_number(tmp_path, rng):
    path = Path("/dev/full")
    if not path.exists():
        pytest.skip("needs /dev/full")
    writer = _core.GraphWriter(str(tmp_path / "c"), PLAIN.encode(), PLAIN.keys)
    graph = plain_graph(rng)
    writer.append(graph)
    (segment,) = (tmp_path / "c").glob("open-*")
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    (file,) = [n for n in numbers if points_at(n, segment)]
    full = os.open(path, os.O_WRONLY)
    os.dup2(full, file)
    os.close(full)
    with pytest.raises(OSError, match="No space left") as caught:
        writer.commit()
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises((OSError, ValueError)):
        writer.append(graph)
    with pytest.raises((OSError, ValueError)):
        writer.close()


def points_at(number, path):
    try:
        return os.path.samefile(f"/proc/self/fd/{number}", path)
    except OSError:
        return False


def test_name_that_is_no_utf8_is_taken(tmp_path, rng):
    path = os.fsencode(tmp_path) + b"/\xff\xfe"
    graph = plain_graph(rng)
    writer = _core.GraphWriter(path, PLAIN.encode(), PLAIN.keys, durable=False)
    writer.append(graph)
    writer.close()
    assert same(_core.GraphCache(path).get(0)[0], graph["x"])
    with pytest.raises(FileNotFoundError):
        _core.GraphCache(path + b"x")


def test_crc32c_has_known_value_and_goes_on():
    assert _core.crc32c(b"123456789") == 0xE3069283
    assert _core.crc32c(b"") == 0
    whole = bytes(range(256)) * 5
    assert _core.crc32c(whole[100:], _core.crc32c(whole[:100])) == _core.crc32c(whole)
    assert _core.crc32c(np.arange(4)) == _core.crc32c(np.arange(4).tobytes())
