"""Taking a cache's files apart, and giving damaged ones right checksums.

So that damage reaches what lies behind the checksums. Follows
docs/graph_cache_format.md from what the file said before it was damaged.
"""

import os
import struct
import tempfile
from dataclasses import dataclass

from trainfast._core import crc32c

COMMIT = b"TFGC"
BLOCK = 4096  # a commit frame is followed by zeros to a multiple of it


@dataclass
class Layout:
    """Where things lie in a sealed segment."""

    schema_bytes: int
    n_counts: int
    n_fields: int
    records: list  # (offset, bytes of the frame, bytes of its header) each
    commits: list  # offsets
    index: tuple  # (offset, bytes)
    size: int


def layout_of(data):
    """The layout of an undamaged sealed segment."""
    schema_bytes = struct.unpack_from("<I", data, 12)[0]
    n_counts, n_fields = struct.unpack_from("<HH", data, 64)
    index_offset, index_bytes = struct.unpack_from("<QQ", data, len(data) - 56)
    head = aligned(32 + 4 * n_counts + n_fields, 16)
    at = aligned(64 + schema_bytes, BLOCK)
    records, commits = [], []
    while at < index_offset:
        if data[at : at + 4] == COMMIT:
            commits.append(at)
            at = aligned(at + 32, BLOCK)
        else:
            units = struct.unpack_from("<I", data, at + 12)[0]
            records.append((at, 16 * units, head))
            at += 16 * units
    return Layout(
        schema_bytes,
        n_counts,
        n_fields,
        records,
        commits,
        (index_offset, index_bytes),
        len(data),
    )


def aligned(offset, to):
    return -(-offset // to) * to


def uuid_of(data):
    """With which the checksums of frames begin."""
    return bytes(data[24:40])


def folder_in_memory():
    """A temporary folder where fsync costs nothing, if there is one."""
    memory = "/dev/shm"
    usable = os.path.isdir(memory) and os.access(memory, os.W_OK)
    return tempfile.TemporaryDirectory(dir=memory if usable else None)


def put(data, offset, form, *values):
    struct.pack_into("<" + form, data, offset, *values)


def seal_header(data, layout):
    put(data, 60, "I", 0)
    put(data, 60, "I", crc32c(bytes(data[: 64 + layout.schema_bytes])))


def seal_records(data, layout):
    for at, size, head in layout.records:
        put(data, at + 8, "I", crc32c(bytes(data[at + head : at + size])))
        put(data, at + 4, "I", crc32c(uuid_of(data) + bytes(data[at + 8 : at + head])))


def seal_commits(data, layout):
    previous = 0
    for at in layout.commits:
        crcs = b"".join(
            bytes(data[record + 4 : record + 8])
            for record, _, _ in layout.records
            if previous < record < at
        )
        put(data, at + 24, "I", crc32c(crcs))
        put(data, at + 4, "I", crc32c(uuid_of(data) + bytes(data[at + 8 : at + 32])))
        previous = at


def seal_trailer(data, layout):
    offset, size = layout.index
    trailer = layout.size - 64
    put(data, trailer + 4, "I", crc32c(bytes(data[offset : offset + size])))
    put(data, trailer, "I", crc32c(bytes(data[trailer + 4 : layout.size])))


def seal_segment(data, layout):
    """Makes every checksum of a segment right again, as far as its frames stand."""
    seal_header(data, layout)
    seal_records(data, layout)
    seal_commits(data, layout)
    seal_trailer(data, layout)


def seal_manifest(manifest, segments):
    """Makes a manifest's checksums right: its own, and those of the segments.

    segments: {uuid as 32 hexadecimal digits: the file's bytes}.
    """
    n_segments = min(struct.unpack_from("<Q", manifest, 24)[0], 64)
    for number in range(n_segments):
        at = 64 + 48 * number
        data = segments.get(bytes(manifest[at : at + 16]).hex())
        if data is not None and len(manifest) >= at + 48 and len(data) >= 64:
            manifest[at + 32 : at + 36] = data[-64:-60]
    put(manifest, 12, "I", crc32c(bytes(manifest[16:])))


def read_cache(path):
    """(manifest, {uuid: segment}) as bytearrays."""
    segments = {
        file.name.removeprefix("segment-"): bytearray(file.read_bytes())
        for file in sorted(path.glob("segment-*"))
    }
    return bytearray((path / "manifest").read_bytes()), segments


def write_cache(path, manifest, segments):
    path.mkdir(exist_ok=True)
    (path / "manifest").write_bytes(manifest)
    for uuid, data in segments.items():
        (path / f"segment-{uuid}").write_bytes(data)
    return path
