"""The example in docs/graph_cache_format.md. Run as a script it writes it anew."""

import tempfile
from pathlib import Path

import numpy as np

from trainfast.graph_cache import Writer
from trainfast.graph_cache.infer import infer

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "graph_cache_format.md"
BEGIN, END = "<!-- begin example -->\n", "<!-- end example -->"
GRAPHS = [
    {
        "x": np.array([[1, 2], [3, 4]], np.float32),
        "edge_index": np.array([[0, 1], [1, 0]]),
        "name": "ab",
    },
    {
        "x": np.array([[5, 6]], np.float32),
        "edge_index": np.zeros((2, 0), np.int64),
        "name": "c",
    },
]
# Where frames and the index lie, and what is said about the lines.
RECORDS, COMMIT, INDEX = (0x1000, 0x1050), 0x1090, 0x2000
MANIFEST_NOTES = {
    0x00: "magic, version 1.0, crc",
    0x10: "generation, 1 segment",
    0x20: "2 graphs; the cache's uuid begins",
    0x30: "it ends; not building, not ordered",
    0x40: "the segment's uuid",
    0x50: "2 records, size of the file",
    0x60: "crc in the trailer",
}
SEGMENT_NOTES = {
    0x00: "magic, version 1.0, 272 bytes of schema",
    0x10: "byte order; the uuid begins",
    0x20: "the uuid ends",
    0x30: "crc of header and schema",
    0x40: "schema: 3 counts, 3 fields, 15 bytes of names",
    0x50: "count 0: nodes, no name",
    0x60: "count 1: edges from and to count 0",
    0x70: "count 2: a size",
    0x80: '"x": 1 byte of name, of count 0, float32, rank 2',
    0x90: "dims: count 0 (-1), 2",
    0xC0: '"edge_index": of count 1, int64, along 1, adds count 0',
    0xD0: "dims: 2, count 1 (-2)",
    0x100: '"name": of the whole graph, string, rank 1',
    0x110: "dims: count 2 (-3)",
    0x140: "the names",
    RECORDS[0]: "record 0: magic, two crcs, 5 units",
    RECORDS[0] + 0x10: "its key",
    RECORDS[0] + 0x20: "counts 2, 2, 2; stored: as is, as u8, as is",
    RECORDS[0] + 0x30: "payload: x",
    RECORDS[0] + 0x40: "edge_index, then name",
    RECORDS[1]: "record 1: magic, two crcs, 4 units",
    RECORDS[1] + 0x10: "its key",
    RECORDS[1] + 0x20: "counts 1, 0, 1",
    RECORDS[1] + 0x30: "payload: x, no edge, name",
    COMMIT: "commit: magic, crc, 2 records",
    COMMIT + 0x10: "none before; crc of the records' crcs",
    INDEX: f"index: offsets {RECORDS[0]:#x} and {RECORDS[1]:#x}",
    INDEX + 0x40: "lengths 5 and 4",
    INDEX + 0x80: "count 0: 2, 1",
    INDEX + 0xC0: "count 1: 2, 0",
    INDEX + 0x100: "count 2: 2, 1",
    INDEX + 0x140: f"trailer: two crcs, index at {INDEX:#x}",
    INDEX + 0x150: "0x140 bytes of index, 2 records",
    INDEX + 0x160: f"last commit at {COMMIT:#x}, 3 counts",
    INDEX + 0x170: "magic",
}


def write_example(path):
    with Writer(path, infer(GRAPHS)) as writer:
        for i, graph in enumerate(GRAPHS):
            writer.append(graph, key=bytes([i + 1, *bytes(15)]))


def dumped(data, notes):
    """16 bytes a line; "*" for zeros after a line of them."""
    lines, before = [], None
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        if row == before == bytes(16) and at not in notes:
            lines += [] if lines[-1] == "*" else ["*"]
        else:
            lines.append(f"{at:04x}  {row.hex(' ')}  {notes.get(at, '')}".rstrip())
        before = row
    return "\n".join([*lines, f"{len(data):04x}"])


def example():
    """The text between the document's marks, with bytes that are written now."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache"
        write_example(path)
        manifest = dumped((path / "manifest").read_bytes(), MANIFEST_NOTES)
        (segment,) = path.glob("segment-*")
        dump = dumped(segment.read_bytes(), SEGMENT_NOTES)
    return (
        f"`manifest`:\n\n```\n{manifest}\n```\n\n"
        f"`{segment.name}`; `*` stands for lines of zeros:\n\n```\n{dump}\n```\n"
    )


if __name__ == "__main__":
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text(before + BEGIN + example() + END + after)
