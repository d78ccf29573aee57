"""docs/graph_cache_format.md holds: its reader reads caches, its example is real."""

import re

import numpy as np
import pytest

from tests.graph_cache.format_example import (
    COMMIT,
    DOCUMENT,
    GRAPHS,
    INDEX,
    RECORDS,
    write_example,
)
from tests.graph_samples import assert_same, graph, quiet, read


def between(name):
    return DOCUMENT.read_text().split(f"<!-- begin {name} -->")[1].split("<!--")[0]


@pytest.fixture
def reader():
    """The document's own functions."""
    names = {}
    code = between("reader").strip().removeprefix("```python").removesuffix("```")
    exec(compile(code, str(DOCUMENT), "exec"), names)
    return names


def documented_files():
    """The bytes of the example's dumps, by the names of the files."""
    files = {}
    for name, dump in re.findall(
        r"`(manifest|segment-\w+)`.*?```\n(.*?)```", between("example"), re.DOTALL
    ):
        data = b""
        for line in dump.splitlines():
            if line == "*":
                continue
            offset, _, rest = line.partition("  ")
            data += bytes(int(offset, 16) - len(data))
            data += bytes.fromhex(rest.partition("  ")[0])
        files[name] = data
    return files


def unnamed(data, kind):
    """A file without what differs each time: uuids and the checksums over them."""
    data = bytearray(data)
    blank = {"manifest": [(12, 16), (40, 56), (64, 80)]}.get(kind)
    if blank is None:
        blank = [(24, 40), (60, 64)]
        blank += [(at + 4, at + 8) for at in (*RECORDS, COMMIT)]
        blank += [(COMMIT + 24, COMMIT + 28)]
    for start, end in blank:
        data[start:end] = bytes(end - start)
    return bytes(data)


def test_the_documents_example_is_what_a_writer_writes(tmp_path):
    write_example(tmp_path / "cache")
    documented = {name[:8]: data for name, data in documented_files().items()}
    for file in (tmp_path / "cache").iterdir():
        if file.name != "lock":
            kind = file.name[:8]
            assert unnamed(file.read_bytes(), kind) == unnamed(documented[kind], kind)


def test_the_documents_example_is_a_cache(tmp_path, reader):
    for name, data in documented_files().items():
        (tmp_path / name).write_bytes(data)
    assert_same(read(tmp_path), GRAPHS)
    assert_same(reader["read_cache"](tmp_path), GRAPHS)


def test_the_documents_checksum_is_crc32c(reader):
    assert reader["crc32c"](b"123456789") == 0xE3069283
    assert "0xe3069283" in DOCUMENT.read_text()


def wide():
    """Graphs of all kinds of fields and sizes of integers, with types."""
    for n in (0, 1, 5, 300):
        rng = np.random.default_rng(n)
        yield {
            ("paper", "x"): rng.normal(size=(n, 2)).astype(np.float16),
            ("paper", "large"): rng.integers(0, 2**40, n),
            ("author", "x"): rng.integers(-128, 128, (n + 1, 3)),
            (("author", "writes", "paper"), "edge_index"): rng.integers(
                0, max(n, 1), (2, 3 * n)
            ),
            "flag": n > 1,
            "count": -n,
            "ratio": n / 7,
            "text": "ä" * n,
            "data": bytes(range(n % 256)),
            "mask": rng.random(n) < 0.5,
            "z": rng.normal(size=3) + 1j,
            **({"extra": np.array(7, np.uint64)} if n > 1 else {}),
        }


def test_the_documents_reader_reads_fields_of_all_kinds(tmp_path, reader):
    graphs = list(wide())
    quiet(tmp_path / "cache", graphs)
    assert_same(reader["read_cache"](tmp_path / "cache"), graphs)


def test_the_documents_reader_reads_several_segments_in_another_order(tmp_path, reader):
    path = tmp_path / "cache"

    def make(n):
        return graph(n) | ({"size": np.zeros(n // 9)} if n < 10 else {})

    quiet(path, range(10), make, key=int)
    quiet(path, range(12, 2, -1), make, key=int)
    found = reader["read_cache"](path)
    wanted = [graph(n) for n in range(12, 2, -1)]
    assert [one.pop("size", None) is None for one in found] == [True] * 3 + [False] * 7
    assert_same(found, wanted)


def test_the_documents_reader_notices_damage(tmp_path, reader):
    write_example(tmp_path / "cache")
    (segment,) = (tmp_path / "cache").glob("segment-*")
    data = segment.read_bytes()
    for at in (30, 70, RECORDS[0] + 16, RECORDS[0] + 50, INDEX + 16, len(data) - 20):
        segment.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(AssertionError, match="damaged"):
            reader["read_cache"](tmp_path / "cache")
