"""What the graphs of a cache look like: the schema, and the rules it is made from.

The bytes are those of csrc/graph_cache/format.h; docs/graph_cache_format.md tells them.
"""

import struct
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, Literal

from trainfast.report import Table, one_line

# What a count counts, and a field's type of elements: at the place that is its number
# in the file (dtypes begin with 1).
ROLES = ("nodes", "edges", "size", "increment")
DTYPES = (
    *("", "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32"),
    *("int64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "string", "bytes"),
)

_HEADER = struct.Struct("<HHI2I")
_COUNT = struct.Struct("<B3sHHH3H")
_FIELD = struct.Struct("<HHBBbB2HB3s8i16s")
_NONE = 0xFFFF
_MAX_RANK = 8
_MAX_ENTRIES = 4096
_MAX_NAME = 255
_OPTIONAL, _SCALAR = 1, 2


@dataclass(frozen=True)
class Rule:
    """How one key of the graphs is batched; "auto" decides by the key's name, as PyG.

    By the name: a key that contains "index", or is "face", is concatenated along the
    last dimension, and the number of nodes is added (for each row that of the edge
    type's two ends). To a key that contains "batch" its maximum + 1 is added. All other
    keys are concatenated along the first dimension.

    Args:
        cat_dim: the dimension along which graphs are concatenated (negative: from the
            end). None: graphs are stacked in a new first dimension.
        add: what the graphs before add to the values: None, "nodes" (the number of
            nodes of the key's own type), ("nodes", type), ("rows", source type, target
            type) for two rows, "increment" or "increments" (one number, or one for each
            of two rows, that comes with each graph: see `Counted`).
        belongs: whose array it is: None (the whole graph's), "nodes" or "edges". A key
            with a type, ("paper", "x"), belongs to that type.
        optional: whether a graph may lack the key. A key that one of the first graphs
            lacks is optional in any case.

    Raises:
        TypeError: an argument of another type.
    """

    cat_dim: int | Literal["auto"] | None = "auto"
    add: str | tuple[str, ...] | None = "auto"
    belongs: str | None = "auto"
    optional: bool = False

    def __post_init__(self) -> None:
        dim, add = self.cat_dim, self.add
        is_dim = (
            dim == "auto" if isinstance(dim, str) else isinstance(dim, Integral | None)
        )
        is_add = isinstance(add, str | None) or (
            isinstance(add, tuple) and all(isinstance(part, str) for part in add)
        )
        for name, right, kinds in (
            ("cat_dim", is_dim, 'an int, None or "auto"'),
            ("add", is_add, "a str, a tuple of str or None"),
            ("belongs", isinstance(self.belongs, str | None), "a str or None"),
            ("optional", isinstance(self.optional, bool), "a bool"),
        ):
            if not right:
                raise TypeError(f"{name} must be {kinds}, got {getattr(self, name)!r}")


class Counted(dict[Any, Any]):
    """A graph with counts that its arrays do not tell.

    Args:
        graph: the graph's arrays by key.
        counts: numbers by ("nodes", type) (type "" in homogeneous graphs), ("edges",
            type), ("increment", key) or, for "increments", ("increment", key, row).
    """

    __slots__ = ("counts",)

    def __init__(
        self, graph: Mapping[Any, Any], counts: Mapping[tuple[Any, ...], int]
    ) -> None:
        super().__init__(graph)
        self.counts = counts

    def __repr__(self) -> str:
        counts = getattr(self, "counts", None)
        counted = None if counts is None else list(map(str, counts))
        return one_line(self, keys=list(map(str, self)), counts=counted)


@dataclass(frozen=True)
class Count:
    """A number of things that each graph has its own of.

    `role`: "nodes", "edges", "size" (of a ragged dimension), "increment" (what a graph
    adds to the values of those after it). `name`: of nodes the type, of edges
    "source|relation|target", "" in homogeneous graphs. `source`, `target`: of edges,
    the places of their counts of nodes.
    """

    role: str
    name: str = ""
    source: int | None = None
    target: int | None = None


@dataclass(frozen=True)
class Field:
    """A named array that each graph has.

    `type`: the place of the count of the nodes or edges it belongs to, None: the whole
    graph. `dims`: each >= 0 is a fixed size, -1 - k is counts[k]. `cat_dim`: graphs
    are put together along it, None: in a new first dimension. `add`: places of the
    counts whose sums over the graphs before are added: (), one, or one for each of two
    rows. `optional`: a graph may lack it. `scalar`: a Python bool, int or float.
    """

    name: str
    type: int | None
    dtype: str
    dims: tuple[int, ...] = ()
    cat_dim: int | None = None
    add: tuple[int, ...] = ()
    optional: bool = False
    scalar: bool = False


@dataclass(frozen=True, repr=False)
class Schema:
    """The counts and fields of all graphs of a cache; print it for a table.

    Args:
        counts: what each graph has a number of: nodes, edges, sizes, increments.
        fields: the named arrays of each graph, which refer to counts by their place.

    Raises:
        ValueError: a field or count that breaks a rule of the format.
    """

    counts: tuple[Count, ...]
    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        _check(self)

    @cached_property
    def keys(self) -> tuple[Hashable, ...]:
        """The key in a graph's dict, of each field."""
        return tuple(self.key_of(field) for field in self.fields)

    def key_of(self, field: Field) -> Hashable:
        """ "x", ("paper", "x") or (("author", "writes", "paper"), "edge_index").

        Args:
            field: one of `fields`.
        """
        kind = "" if field.type is None else self.type_of(field.type)
        return (kind, field.name) if kind else field.name

    def type_of(self, count: int) -> str | tuple[str, ...]:
        """The type that a count of nodes or edges counts; "": homogeneous.

        Args:
            count: its place in `counts`.
        """
        found = self.counts[count]
        edges = found.role == "edges" and found.name
        return tuple(found.name.split("|")) if edges else found.name

    def field_of(self, key: Hashable) -> int:
        """The place of a field in `fields`.

        Args:
            key: the field's key.

        Raises:
            KeyError: no field has this key.
        """
        return self._places[key]

    @cached_property
    def nodes(self) -> dict[str, int]:
        """The place of each node type's count; the homogeneous type is ""."""
        return self._counts_of("nodes")

    @cached_property
    def edges(self) -> dict[str | tuple[str, ...], int]:
        """The place of each edge type's count; the homogeneous type is ""."""
        return self._counts_of("edges")

    def increments(self, key: Hashable) -> tuple[int, ...]:
        """The places of a key's own counts with the role "increment".

        Args:
            key: a field's key.
        """
        add = self.fields[self.field_of(key)].add
        return tuple(i for i in add if self.counts[i].role == "increment")

    def encode(self) -> bytes:
        """The schema as in a file."""
        names = [count.name.encode() for count in self.counts]
        names += [field.name.encode() for field in self.fields]
        text = b"".join(names)
        parts = [_HEADER.pack(len(self.counts), len(self.fields), len(text), 0, 0)]
        sizes = iter(map(len, names))
        for count in self.counts:
            ends = (_place(count.source), _place(count.target))
            role = ROLES.index(count.role)
            parts.append(_COUNT.pack(role, b"", *ends, next(sizes), 0, 0, 0))
        parts += [_pack_field(field, next(sizes)) for field in self.fields]
        return b"".join([*parts, text, b"\0" * (-len(text) % 16)])

    @classmethod
    def decode(cls, data: bytes) -> "Schema":
        """The schema from a file's bytes; ValueError: they are none."""
        try:
            schema = _decode(data)
        except (struct.error, IndexError, UnicodeDecodeError, TypeError) as error:
            raise ValueError(f"data must be a schema, got {error}") from error
        if schema.encode() != data:
            raise ValueError("data must be a schema, got other bytes in its gaps")
        return schema

    def table(self) -> Table:
        """One row a field, with the names of the counts as sizes."""
        rows = [self._row(field, key) for field, key in zip(self.fields, self.keys)]
        title = f"{len(self.fields)} fields, {len(self.counts)} counts a graph"
        columns = ("key", "dtype", "shape", "batched", "adds", "optional")
        return Table(title, columns, rows)

    def count_name(self, count: int) -> str:
        """A count's name for messages: "nodes", "edges of a|b|c", "size 3".

        Args:
            count: its place in `counts`.
        """
        found = self.counts[count]
        if found.role in ("nodes", "edges"):
            return f"{found.role} of {found.name}" if found.name else found.role
        return f"{found.role} {count}"

    def __repr__(self) -> str:
        return str(self.table())

    @cached_property
    def _places(self) -> dict[Hashable, int]:
        return {key: i for i, key in enumerate(self.keys)}

    def _counts_of(self, role: str) -> dict[Any, int]:
        return {self.type_of(i): i for i, c in enumerate(self.counts) if c.role == role}

    def _row(self, field: Field, key: Hashable) -> tuple[Any, ...]:
        sizes = [str(d) if d >= 0 else self.count_name(-1 - d) for d in field.dims]
        how = "stacked" if field.cat_dim is None else f"along {field.cat_dim}"
        adds = ", ".join(map(self.count_name, field.add))
        kind = f"{field.dtype} scalar" if field.scalar else field.dtype
        optional = "yes" if field.optional else ""
        return str(key), kind, f"({', '.join(sizes)})", how, adds, optional


def _place(count: int | None) -> int:
    return _NONE if count is None else count


def _pack_field(field: Field, name_bytes: int) -> bytes:
    add = [*field.add, _NONE, _NONE][:2]
    return _FIELD.pack(
        name_bytes,
        _place(field.type),
        DTYPES.index(field.dtype),
        len(field.dims),
        -1 if field.cat_dim is None else field.cat_dim,
        len(field.add),
        *add,
        _OPTIONAL * field.optional | _SCALAR * field.scalar,
        b"",
        *field.dims,
        *[0] * (_MAX_RANK - len(field.dims)),
        b"",
    )


def _decode(data: bytes) -> Schema:
    n_counts, n_fields, *_ = _HEADER.unpack_from(data)
    at = _HEADER.size
    names_at = at + n_counts * _COUNT.size + n_fields * _FIELD.size
    name_at = names_at
    counts, fields = [], []

    def name(size: int) -> str:
        nonlocal name_at
        name_at += size
        return data[name_at - size : name_at].decode()

    def place(number: int) -> int | None:
        return None if number == _NONE else number

    for _ in range(n_counts):
        role, _, source, target, size, *_ = _COUNT.unpack_from(data, at)
        counts.append(Count(ROLES[role], name(size), place(source), place(target)))
        at += _COUNT.size
    for _ in range(n_fields):
        entry = _FIELD.unpack_from(data, at)
        size, kind, dtype, rank, cat_dim, mode, *add, flags, _ = entry[:10]
        fields.append(
            Field(
                name(size),
                place(kind),
                DTYPES[dtype],
                entry[10 : 10 + rank],
                None if cat_dim == -1 else cat_dim,
                tuple(add[:mode]),
                bool(flags & _OPTIONAL),
                bool(flags & _SCALAR),
            )
        )
        at += _FIELD.size
    return Schema(tuple(counts), tuple(fields))


def _check(schema: Schema) -> None:
    """Raises ValueError where a rule of the format is broken."""
    for what in ("counts", "fields"):
        number = len(getattr(schema, what))
        if number > _MAX_ENTRIES:
            raise ValueError(f"{what} must be at most {_MAX_ENTRIES}, got {number}")
    for i, count in enumerate(schema.counts):
        _check_count(schema, i, count)
    roles = [ROLES.index(count.role) for count in schema.counts]
    if roles != sorted(roles):
        raise ValueError(f"counts must be sorted by role, got {roles}")
    for field in schema.fields:
        _check_field(schema, field)
    keys = schema.keys
    if len(set(keys)) != len(keys):
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise ValueError(f"fields must have different keys, got {twice!r} twice")
    named = [c for c in schema.counts if c.role in ("nodes", "edges")]
    if len({(c.role, c.name) for c in named}) != len(named):
        raise ValueError("counts of nodes and edges must have different names")


def _check_count(schema: Schema, i: int, count: Count) -> None:
    what = f"counts[{i}]"
    if count.role not in ROLES:
        raise ValueError(f"{what}'s role must be one of {ROLES}, got {count.role!r}")
    _check_name(f"{what}'s name", count.name)
    if count.role == "edges":
        parts = count.name.split("|")
        if count.name and (len(parts) != 3 or not all(parts)):
            rule = "must be 'source|relation|target', none of them empty"
            raise ValueError(f"{what}'s name {rule}, got {count.name!r}")
        for end in (count.source, count.target):
            if end is None or _role(schema, end) != "nodes":
                raise ValueError(f"{what}'s ends must be counts of nodes, got {end}")
        return
    if (count.source, count.target) != (None, None):
        raise ValueError(f"{what} must have no ends, got role {count.role!r}")
    if count.name and count.role != "nodes":
        raise ValueError(f"{what} must have no name, got {count.name!r}")


def _check_field(schema: Schema, field: Field) -> None:
    what = f"field {field.name!r}"
    _check_name(f"{what}'s name", field.name)
    if not field.name:
        raise ValueError("a field's name must not be empty, got ''")
    if field.dtype not in DTYPES[1:]:
        raise ValueError(f"{what}'s dtype must be a dtype, got {field.dtype!r}")
    rank = len(field.dims)
    if rank > _MAX_RANK:
        raise ValueError(f"{what} must have at most {_MAX_RANK} dims, got {rank}")
    if max(field.dims, default=0) >= 2**31:
        raise ValueError(f"{what} must have dims < 2^31, got {field.dims}")
    if field.type is not None and _role(schema, field.type) not in ROLES[:2]:
        raise ValueError(f"{what}'s type must be nodes or edges, got {field.type}")
    for count in [*field.add, *(-1 - dim for dim in field.dims if dim < 0)]:
        _role(schema, count)
    if field.cat_dim is not None and not 0 <= field.cat_dim < rank:
        rule = f"must be None or in 0 .. {rank - 1}"
        raise ValueError(f"{what}'s cat_dim {rule}, got {field.cat_dim}")
    if len(field.add) > 2:
        raise ValueError(f"{what} must add at most two counts, got {field.add}")
    if len(field.add) == 2 and field.dims[:1] != (2,):
        raise ValueError(f"{what} must have two rows to add to, got {field.dims}")
    if field.dtype in ("string", "bytes") and rank != 1:
        raise ValueError(f"{what} must have rank 1 as a {field.dtype}, got {rank}")
    if field.scalar and (rank or field.dtype not in ("bool", "int64", "float64")):
        raise ValueError(f"{what} must be one bool, int64 or float64 as a scalar")


def _check_name(what: str, name: str) -> None:
    size = len(name.encode())
    if size > _MAX_NAME or "\0" in name:
        rule = f"must have at most {_MAX_NAME} bytes of UTF-8 and no zeros"
        raise ValueError(f"{what} {rule}, got {name!r}")


def _role(schema: Schema, count: int) -> str:
    if not 0 <= count < len(schema.counts):
        limit = len(schema.counts)
        raise ValueError(f"a count's place must be in 0 .. {limit - 1}, got {count}")
    return schema.counts[count].role
