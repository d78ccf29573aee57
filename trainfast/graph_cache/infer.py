"""Infers a schema from sample graphs and from rules about their keys.

A graph is a dict of arrays. Homogeneous: "x", "edge_index"; heterogeneous: ("paper",
"x") and (("author", "writes", "paper"), "edge_index"), with plain keys for the whole
graph. Where the samples leave a choice, the narrower schema is taken: a later graph can
then only require a wider one, which `fit.generalise` makes.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainfast.graph_cache.arrays import dtype_and_shape, is_scalar
from trainfast.graph_cache.schema import Count, Counted, Field, Rule, Schema

# Names whose first dimension is the number of nodes, or of edges; the first of a graph
# that it has is believed where two differ.
_OF_NODES = ("x", "pos", "z", "feat", "node_type", "n_id", "batch")
_OF_EDGES = ("edge_index", "edge_attr", "edge_weight", "edge_type", "e_id")

Type = str | tuple[str, ...]  # "" in homogeneous graphs, a triple for edges


def infer(
    graphs: Iterable[Mapping[Any, Any]], rules: Mapping[Hashable, Rule] | None = None
) -> Schema:
    """The schema of graphs like these; `rules` overrides by key what names imply.

    Element types and ranks must be the same in all graphs. A dimension of one size in
    all graphs is fixed; one that is the number of nodes or edges in all of them (by its
    name, or because there are at least two different sizes) is counted once for all
    such fields. Raises ValueError or TypeError naming the key of the first graph that
    does not fit those before it.
    """
    samples = list(graphs)
    if not samples:
        raise ValueError("graphs is empty; give at least one to infer a schema from")
    rules = rules or {}
    columns = _columns(samples, rules)
    unknown = [key for key in rules if key not in columns]
    if unknown and not all(rules[key].optional for key in unknown):
        raise ValueError(f"rules must be for keys of the graphs, got {unknown[0]!r}")
    return _Inference(samples, list(columns.values())).schema()


def nodes_key(kind: Type) -> Hashable:
    """The key of a graph's own number of nodes: "num_nodes" or (type, "num_nodes")."""
    return (kind, "num_nodes") if kind else "num_nodes"


@dataclass
class _Column:
    """One key in all samples."""

    key: Hashable
    name: str
    belongs: Type | None  # of a key with a type; else "" once it belongs, None
    role: str | None  # "nodes", "edges"
    dtype: str
    scalar: bool
    shapes: list[tuple[int, ...] | None]  # None: the graph has none
    rule: Rule
    cat_dim: int | None = None
    typed: bool = False

    @property
    def rank(self) -> int:
        return len(next(shape for shape in self.shapes if shape is not None))

    def sizes(self, dim: int) -> list[int | None]:
        return [None if shape is None else shape[dim] for shape in self.shapes]


def _columns(
    samples: Sequence[Mapping[Any, Any]], rules: Mapping[Hashable, Rule]
) -> dict[Hashable, _Column]:
    columns: dict[Hashable, _Column] = {}
    hetero = any(isinstance(key, tuple) for sample in samples for key in sample)
    for i, sample in enumerate(samples):
        for key, value in sample.items():
            try:
                dtype, shape = dtype_and_shape(value)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{key!r}: {error}") from None
            if key not in columns:
                rule = rules.get(key, Rule())
                columns[key] = _new_column(key, value, dtype, rule, hetero)
                columns[key].shapes = [None] * len(samples)
            columns[key].shapes[i] = shape
            _check_same(columns[key], value, dtype, shape)
    for column in columns.values():
        column.cat_dim = _cat_dim(column, hetero)
    return columns


def _new_column(
    key: Hashable, value: Any, dtype: str, rule: Rule, hetero: bool
) -> _Column:
    kind, name = _split_key(key)
    role: str | None = None
    if kind is not None:
        role = "nodes" if isinstance(kind, str) else "edges"
    elif rule.belongs != "auto":
        role = rule.belongs
        if role not in (None, "nodes", "edges"):
            raise ValueError(f'belongs must be "nodes", "edges" or None, got {role!r}')
    elif not hetero and dtype_and_shape(value)[1]:
        role = _role_of_name(name)
    belongs = kind if kind is not None or role is None else ""
    typed = kind is not None
    return _Column(
        *(key, name, belongs, role, dtype, is_scalar(value), [], rule), typed=typed
    )


def _split_key(key: Hashable) -> tuple[Type | None, str]:
    """(type, name); the type is None for a plain key."""
    if isinstance(key, str) and key:
        return None, key
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], str) and key[1]:
        kind = key[0]
        if isinstance(kind, str) and kind:
            return kind, key[1]
        if isinstance(kind, tuple) and len(kind) == 3 and all(map(_is_part, kind)):
            return kind, key[1]
    rule = "must be a name, (node type, name) or ((source, relation, target), name)"
    raise ValueError(f'a key {rule}, none empty or with "|", got {key!r}')


def _is_part(part: Any) -> bool:
    return isinstance(part, str) and part != "" and "|" not in part


def _role_of_name(name: str) -> str | None:
    if name in _OF_EDGES or name.startswith("edge_"):
        return "edges"
    return "nodes" if name in _OF_NODES or name.startswith("node_") else None


def _check_same(
    column: _Column, value: Any, dtype: str, shape: tuple[int, ...]
) -> None:
    if dtype != column.dtype or is_scalar(value) != column.scalar:
        wanted = f"{column.dtype} scalar" if column.scalar else column.dtype
        got = f"{dtype} scalar" if is_scalar(value) else dtype
        what = f"{column.key!r}: its dtype"
        raise ValueError(f"{what} must be {wanted} as in the graphs before, got {got}")
    if len(shape) != column.rank:
        what = f"{column.key!r}: it"
        rule = f"must have {column.rank} dimensions as in the graphs before"
        raise ValueError(f"{what} {rule}, got shape {shape}")


def _cat_dim(column: _Column, hetero: bool) -> int | None:
    """The dimension along which a column is concatenated, by its rule or its name."""
    rank = column.rank
    given = column.rule.cat_dim
    if given is None or rank == 0:
        return None
    if given != "auto":
        if not -rank <= given < rank:
            what = f"the rule for {column.key!r}: cat_dim"
            raise ValueError(f"{what} must be a dimension of {rank}, got {given}")
        return given % rank
    last = column.name == "face" or "index" in column.name
    if hetero:
        last = "index" in column.name and column.role == "edges"
    if column.name == "edge_index" and (
        rank != 2 or {2} != {*column.sizes(0)} - {None}
    ):
        last = False  # pairs one below the other
    return rank - 1 if last else 0


class _Inference:
    """The steps from columns to a schema."""

    def __init__(
        self, samples: list[Mapping[Any, Any]], columns: list[_Column]
    ) -> None:
        self.samples = samples
        self.columns = columns
        self.counts: list[tuple[Any, ...]] = []  # in order: (role, type or own id)
        self.hetero = any(column.typed for column in columns)

    def schema(self) -> Schema:
        adds = [self._adds(column) for column in self.columns]
        edge_types = [c.belongs for c in self.columns if c.role == "edges"]
        node_types = [c.belongs for c in self.columns if c.role == "nodes"]
        node_types += [kind for add in adds for what, kind in add if what == "nodes"]
        if not self.hetero and any("num_nodes" in sample for sample in self.samples):
            node_types.append("")  # though no array may have one entry a node
        for kind in edge_types:
            node_types += [kind[0], kind[2]] if kind else [""]
        self.counts = [("nodes", kind) for kind in dict.fromkeys(node_types)]
        self.counts += [("edges", kind) for kind in dict.fromkeys(edge_types)]
        sizes = {count: self._sizes_of(*count) for count in self.counts}
        dims = [self._dims(i, column, sizes) for i, column in enumerate(self.columns)]
        own = [d for row in dims for d in row if isinstance(d, tuple)]
        self.counts += [d for d in dict.fromkeys(own) if d not in self.counts]
        self.counts += [a for add in adds for a in add if a[0] == "increment"]
        place = {count: i for i, count in enumerate(self.counts)}
        fields = [
            self._field(column, row, add, place)
            for column, row, add in zip(self.columns, dims, adds)
        ]
        counts = [self._count(count, place) for count in self.counts]
        return Schema(tuple(counts), tuple(fields))

    def _adds(self, column: _Column) -> list[tuple[Any, ...]]:
        """What is added to a column: ("nodes", type) or ("increment", (key, row))."""
        add = column.rule.add
        if add == "auto":
            add = self._add_of_name(column)
        if add is None:
            return []
        if add in ("increment", "increments"):
            n_rows = 1 if add == "increment" else 2
            return [("increment", (column.key, row)) for row in range(n_rows)]
        if add == "nodes" and not isinstance(column.belongs, tuple):
            return [("nodes", column.belongs or "")]
        if isinstance(add, tuple) and (*add[:1], len(add)) in (
            ("nodes", 2),
            ("rows", 3),
        ):
            return [("nodes", kind) for kind in add[1:]]
        what = f"the rule for {column.key!r}: add"
        forms = 'None, "nodes", ("nodes", type), ("rows", type, type), "increment(s)"'
        raise ValueError(f"{what} must be one of {forms}, got {add!r}")

    def _add_of_name(self, column: _Column) -> str | tuple[str, ...] | None:
        if column.rank == 0 or column.dtype.lstrip("u")[:3] != "int":
            if column.name == "edge_index" and column.dtype not in ("string", "bytes"):
                got = column.dtype
                raise TypeError(f"{column.key!r} must have integers, got {got}")
            return None
        if "batch" in column.name:
            return "increment"
        if not self.hetero:
            is_index = "index" in column.name or column.name == "face"
            return "nodes" if is_index else None
        if column.role != "edges" or "index" not in column.name:
            return None
        rows = column.rank == 2 and {*column.sizes(0)} - {None} == {2}
        kind: Any = column.belongs
        return ("rows", kind[0], kind[2]) if rows else None

    def _sizes_of(self, role: str, kind: Type) -> list[int | None]:
        """The number of nodes or edges of a type in each sample; None: not known."""
        given = nodes_key(kind) if role == "nodes" else None
        named = self._by_trust(role, kind)
        found: list[int | None] = []
        for i, sample in enumerate(self.samples):
            counts = sample.counts if isinstance(sample, Counted) else {}
            size = counts.get((role, kind), sample.get(given) if given else None)
            for column in named:
                if size is None and column.shapes[i] is not None:
                    size = column.sizes(column.cat_dim or 0)[i]
            found.append(size)
        return found

    def _by_trust(self, role: str, kind: Type) -> list[_Column]:
        """The columns whose names imply a type's number, the most trusted first."""
        return sorted(
            (
                column
                for column in self.columns
                if (column.role, column.belongs) == (role, kind)
                and column.cat_dim is not None
                and (trust(column.name) < UNTRUSTED or not column.typed)
            ),
            key=lambda column: trust(column.name),
        )

    def _dims(
        self, i: int, column: _Column, sizes: dict[tuple[Any, ...], list[int | None]]
    ) -> list[Any]:
        """Each a fixed size, or one of `self.counts`, or a count of its own."""
        dims: list[Any] = []
        for dim in range(column.rank):
            seen = {*column.sizes(dim)} - {None}
            fixed = len(seen) == 1 and (seen != {0} or dim != column.cat_dim)
            text = column.dtype in ("string", "bytes")
            dims.append(seen.pop() if fixed and not text else ("size", (i, dim)))
        if column.cat_dim is None or column.dtype in ("string", "bytes"):
            return dims
        shared = self._shared(column, sizes)
        if shared is not None:
            dims[column.cat_dim] = shared
        return dims

    def _shared(
        self, column: _Column, sizes: dict[tuple[Any, ...], list[int | None]]
    ) -> tuple[Any, ...] | None:
        """The count of nodes or edges that a column's size is, if it is one."""
        own = column.sizes(column.cat_dim or 0)
        if column.role is not None:
            count = (column.role, column.belongs)
            guess = column.typed and trust(column.name) == UNTRUSTED
            return count if _equal(own, sizes[count], all_known=guess) else None
        if self.hetero or column.rule.belongs is None or len({*own} - {None}) < 2:
            return None
        for role in ("nodes", "edges"):
            if (role, "") in sizes and _equal(own, sizes[role, ""], all_known=True):
                column.role, column.belongs = role, ""
                return role, ""
        return None

    def _field(
        self,
        column: _Column,
        dims: list[Any],
        add: list[tuple[Any, ...]],
        place: dict[tuple[Any, ...], int],
    ) -> Field:
        role = column.role
        return Field(
            name=column.name,
            type=None if role is None else place[role, column.belongs],
            dtype=column.dtype,
            dims=tuple(-1 - place[d] if isinstance(d, tuple) else d for d in dims),
            cat_dim=column.cat_dim,
            add=tuple(place[count] for count in add),
            optional=column.rule.optional or None in column.shapes,
            scalar=column.scalar,
        )

    def _count(
        self, count: tuple[Any, ...], place: dict[tuple[Any, ...], int]
    ) -> Count:
        role, kind = count
        if role == "nodes":
            return Count(role, kind)
        if role != "edges":
            return Count(role)
        ends = (kind[0], kind[2]) if kind else ("", "")
        source, target = (place["nodes", end] for end in ends)
        return Count(role, "|".join(kind), source, target)


UNTRUSTED = 100


def trust(name: str) -> int:
    """The rank of trust that a field's size is its type's count; 0 is the most."""
    for names in (_OF_NODES, _OF_EDGES):
        if name in names:
            return names.index(name)
    return UNTRUSTED - 1 if name.startswith(("node_", "edge_")) else UNTRUSTED


def _equal(
    own: list[int | None], count: list[int | None], all_known: bool = False
) -> bool:
    """Whether sizes are equal wherever both are known."""
    if all_known and None in count:
        return False
    return all(a == b for a, b in zip(own, count) if None not in (a, b))
