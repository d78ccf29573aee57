"""A strict reader of caches, written from docs/graph_cache_format.md alone.

The document's own reader trusts the index; this one walks all frames, checks what the
document says of every byte, and reads files that no writer has closed.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainfast._core import crc32c

NONE, INCREMENT = 0xFFFF, 3
INTEGERS = ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"]
OTHERS = ["f2", "u2", "f4", "f8", "c8", "c16", "u1", "u1", "u1", "u1"]
DTYPES = ["?", "?", *INTEGERS, *OTHERS]  # by number; what NumPy has not as its bits
STORED = [None, None, "u1", "u2", "u4", "i1", "i2", "i4"]
BOOL, UNSIGNED, SIGNED, STRING, BYTES = 1, range(2, 6), range(6, 10), 18, 19


class Damaged(Exception):
    """A byte is not what the document says."""


def need(truth, what):
    if not truth:
        raise Damaged(what)


def zeros(data, start, end):
    need(start <= end <= len(data) and not any(data[start:end]), "zeros")


def aligned(at, to):
    return -(-at // to) * to


@dataclass
class Schema:
    counts: list  # (role, from, to, name) each
    fields: list  # (name, owner, dtype, shape, cat_dim, add, added, flags) each


@dataclass
class Record:
    at: int
    units: int
    crc: int
    key: bytes
    counts: tuple
    graph: dict


def read_schema(data):
    n_counts, n_fields, n_names = struct.unpack_from("<HHI", data)
    need(n_counts <= 4096 and n_fields <= 4096, "numbers of counts and fields")
    zeros(data, 8, 16)
    names_at = 16 + 16 * n_counts + 64 * n_fields
    need(len(data) == aligned(names_at + n_names, 16), "schema's length")
    zeros(data, names_at + n_names, len(data))
    names = data[names_at : names_at + n_names]
    at = 0

    def name(size):
        nonlocal at
        at += size
        need(at <= n_names and 0 not in names[at - size : at], "name")
        return names[at - size : at].decode()

    counts, fields = [], []
    for i in range(n_counts):
        role, start, end, size = struct.unpack_from("<B3xHHH6x", data, 16 + 16 * i)
        counts.append((role, start, end, name(size)))
        zeros(data, 17 + 16 * i, 20 + 16 * i)
        zeros(data, 26 + 16 * i, 32 + 16 * i)
        ends = (start < i, end < i) if role == 1 else (start == NONE, end == NONE)
        need(role < 4 and size <= 255 and all(ends), "count")
        need(role < 2 or size == 0, "a size has no name")
    need(counts == sorted(counts, key=lambda count: count[0]), "order of counts")
    for base in range(16 + 16 * n_counts, names_at, 64):
        size, owner, dtype, rank, cat_dim, add, *added, flags = struct.unpack_from(
            "<HHBBbB2HB", data, base
        )
        dims = struct.unpack_from("<8i", data, base + 16)
        zeros(data, base + 13, base + 16)
        zeros(data, base + 48, base + 64)
        need(1 <= size <= 255 and 1 <= dtype <= 19 and rank <= 8, "field")
        need(owner == NONE or counts[owner][0] < 2, "owner")
        need(all(-d <= n_counts for d in dims) and not any(dims[rank:]), "dims")
        need(-1 <= cat_dim < max(rank, 1) and add < 3 and flags < 4, "rule")
        need([a != NONE for a in added] == [add > 0, add > 1], "what is added")
        need(not flags & 2 or (rank == 0 and dtype in (BOOL, 9, 13)), "scalar")
        need(dtype < STRING or rank == 1, "text")
        need(add == 0 or dtype in UNSIGNED or dtype in SIGNED, "integers")
        need(add < 2 or dims[0] == 2, "rows")
        fixed = np.prod([d for d in dims if d > 0], dtype=object)
        need(fixed <= 2**48, "size")
        shape = dims[:rank]
        fields.append((name(size), owner, dtype, shape, cat_dim, add, added, flags))
    need(at == n_names, "names")
    things = [(role, name) for role, *_, name in counts if role < 2]
    need(len(set(things)) == len(things), "a type comes twice")
    keys = [(owner, name) for name, owner, *_ in fields]
    need(len(set(keys)) == len(keys), "a field comes twice")
    return Schema(counts, fields)


def read_header(data):
    """(uuid, schema, offset of the first frame)."""
    need(len(data) >= 64 and data[:8] == b"\x89TFG\r\n\x1a\n", "magic")
    major, _, size, order = struct.unpack_from("<HHIQ", data, 8)
    need(major == 1 and order == 0x0102030405060708, "version")
    zeros(data, 40, 60)
    need(size % 16 == 0 and 64 + size <= len(data), "schema's length")
    crc = crc32c(data[:60] + bytes(4) + data[64 : 64 + size])
    need(data[60:64] == struct.pack("<I", crc), "header's crc")
    return data[24:40], read_schema(data[64 : 64 + size]), aligned(64 + size, 4096)


def read_field(payload, at, stored, field, counts):
    """(value, offset behind it)."""
    _, _, dtype, shape, *_, flags = field
    shape = [d if d >= 0 else counts[-1 - d] for d in shape]
    element = np.dtype("<" + (STORED[stored] or DTYPES[dtype]))
    wide = np.dtype("<" + DTYPES[dtype])
    if stored > 1:
        need(dtype in UNSIGNED or dtype in SIGNED, "only integers are narrowed")
        need(element.itemsize < wide.itemsize, "narrowed to no fewer bytes")
        need(dtype in SIGNED or stored < 5, "an unsigned one stored as signed")
    start = aligned(at, min(element.itemsize, 8))
    zeros(payload, at, start)
    end = start + element.itemsize * int(np.prod(shape, dtype=object))
    need(end <= len(payload), "payload")
    if dtype in (STRING, BYTES):
        text = payload[start:end]
        return (text.decode() if dtype == STRING else text), end
    need(dtype != BOOL or set(payload[start:end]) <= {0, 1}, "bool")
    value = np.frombuffer(payload[start:end], element).reshape(shape).astype(wide)
    return (value.item() if flags & 2 else value), end


def check_indices(value, field, schema, counts):
    """Values to which a sum of nodes, edges or a size is added lie below it."""
    add, added = field[5:7]
    for row, count in zip(value if add == 2 else [value], added[:add]):
        if schema.counts[count][0] < INCREMENT:
            need(np.all((row >= 0) & (row < counts[count])), "index")


def key_of(schema, field):
    kind = schema.counts[field[1]][3] if field[1] != NONE else ""
    kind = tuple(kind.split("|")) if "|" in kind else kind
    return (kind, field[0]) if kind else field[0]


def read_record(data, at, uuid, schema):
    n, n_fields = len(schema.counts), len(schema.fields)
    head = aligned(32 + 4 * n + n_fields, 16)
    need(at + head <= len(data), "record")
    _, crc, payload_crc, units, key = struct.unpack_from("<4I16s", data, at)
    need(crc == crc32c(uuid + data[at + 8 : at + head]), "record's crc")
    need(head <= 16 * units <= len(data) - at, "record's length")
    payload = data[at + head : at + 16 * units]
    need(payload_crc == crc32c(payload), "payload's crc")
    counts = struct.unpack_from(f"<{n}I", data, at + 32)
    how = data[at + 32 + 4 * n : at + 32 + 4 * n + n_fields]
    zeros(data, at + 32 + 4 * n + n_fields, at + head)
    graph, place = {}, 0
    for stored, field in zip(how, schema.fields):
        need(stored < 8 and (stored or field[-1] & 1), "how a field is stored")
        if stored:
            value, place = read_field(payload, place, stored, field, counts)
            check_indices(value, field, schema, counts)
            graph[key_of(schema, field)] = value
    need(aligned(place, 16) == len(payload), "payload's length")
    zeros(payload, place, len(payload))
    return Record(at, units, crc, key, counts, graph)


def read_frames(data, at, uuid, schema):
    """(records that are committed, offset of the last commit, offset behind its zeros).

    Stops without a word at the first byte that belongs to no valid frame.
    """
    records, new, last, end = [], [], 0, at
    while True:
        try:
            if data[at : at + 4] == b"TFGR":
                new.append(read_record(data, at, uuid, schema))
                at += 16 * new[-1].units
                continue
            need(data[at : at + 4] == b"TFGC" and at + 32 <= len(data), "no frame")
            crc, total, before, crcs, rest = struct.unpack_from("<IQQII", data, at + 4)
            need(crc == crc32c(uuid + data[at + 8 : at + 32]), "commit's crc")
            need(total == len(records) + len(new) and before == last, "commit")
            sums = b"".join(struct.pack("<I", record.crc) for record in new)
            need(crcs == crc32c(sums) and rest == 0, "commit's records")
            following = aligned(at + 32, 4096)
            zeros(data, at + 32, following)
        except Damaged:
            return records, last, end
        records, new, last, at = records + new, [], at, following
        end = at


def read_sealed(data):
    """All records of a sealed segment, everything in it checked."""
    uuid, schema, at = read_header(data)
    zeros(data, 64 + int.from_bytes(data[12:16], "little"), at)
    records, last, end = read_frames(data, at, uuid, schema)
    trailer = len(data) - 64
    crc, index_crc, index, size, total, commit, n_counts = struct.unpack_from(
        "<IIQQQQI", data, trailer
    )
    need(data[-8:] == b"\n\x1a\n\rGFT\x89", "trailer's magic")
    need(crc == crc32c(data[trailer + 4 :]), "trailer's crc")
    need(index_crc == crc32c(data[index:trailer]), "index's crc")
    zeros(data, trailer + 44, trailer + 56)
    need((index, index + size) == (end, trailer), "index")
    need(
        (total, commit, n_counts) == (len(records), last, len(schema.counts)), "trailer"
    )
    columns = [("Q", [r.at for r in records]), ("I", [r.units for r in records])]
    columns += [("I", [r.counts[i] for r in records]) for i in range(n_counts)]
    for form, column in columns:
        packed = struct.pack(f"<{total}{form}", *column)
        need(data[end : end + len(packed)] == packed, "index")
        zeros(data, end + len(packed), aligned(end + len(packed), 64))
        end = aligned(end + len(packed), 64)
    need(end == trailer, "index")
    return records


def recover(data):
    """The records of a file whose writer has not closed it."""
    uuid, schema, at = read_header(data)
    return read_frames(data, at, uuid, schema)[0]


def graphs_of(path):
    """(key, graph) for each graph of a complete cache."""
    path = Path(path)
    data = (path / "manifest").read_bytes()
    need(data[:10] == b"\x89TFM\r\n\x1a\n\1\0", "manifest's magic")
    crc, _, n_segments, n_graphs, _, building, ordered = struct.unpack_from(
        "<I3Q16sII", data, 12
    )
    need(crc == crc32c(data[16:]) and not building and ordered < 2, "manifest")
    end = 64 + 48 * n_segments
    need(len(data) == end + 8 * n_graphs * ordered, "manifest's length")
    order = struct.unpack_from(f"<{n_graphs}Q", data, end) if ordered else None
    records = []
    for at in range(64, end, 48):
        uuid, n_records, size, crc = struct.unpack_from("<16sQQI", data, at)
        zeros(data, at + 36, at + 48)
        file = path / f"segment-{uuid.hex()}"
        numbers = range(len(records), len(records) + n_records)
        if not file.exists() and ordered and not set(order) & set(numbers):
            records += [None] * n_records  # a deleted segment
            continue
        segment = file.read_bytes()
        need(len(segment) == size and segment[24:40] == uuid, "segment")
        need(struct.unpack_from("<I", segment, size - 64)[0] == crc, "segment's crc")
        records += read_sealed(segment)
        need(len(records) == numbers.stop, "number of records")
    order = range(n_graphs) if order is None else order
    need(len(set(order)) == n_graphs, "order")
    return [(records[i].key, records[i].graph) for i in order]
