"""Fits graphs and a schema: counts that shapes do not give, and wider schemas."""

import operator
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

from trainfast.graph_cache.arrays import dtype_and_shape, largest, smallest
from trainfast.graph_cache.infer import UNTRUSTED, infer, nodes_key, trust
from trainfast.graph_cache.schema import Count, Field, Rule, Schema

_UNTOLD = -1  # the core takes the count from the shapes


class Counter:
    """Finds the counts of graphs that the shapes of their arrays do not give.

    `needed` is False if the shapes give all counts in every graph of the schema.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._by_shape: list[list[Hashable]] = [[] for _ in schema.counts]
        self._adding: list[list[tuple[Hashable, int | None]]]
        self._adding = [[] for _ in schema.counts]
        told = set()
        for field, key in zip(schema.fields, schema.keys):
            for count in {-1 - dim for dim in field.dims if dim < 0}:
                self._by_shape[count].append(key)
                told |= set() if field.optional else {count}
            for row, count in enumerate(field.add):
                in_rows = len(field.add) == 2
                self._adding[count].append((key, row if in_rows else None))
        numbers = [nodes_key(kind) for kind in schema.nodes]
        untold = len(told) < len(schema.counts)
        self.needed = untold or any(key in schema.keys for key in numbers)

    def counts(
        self, graph: Mapping[Any, Any], given: Mapping[tuple[Any, ...], int]
    ) -> list[int]:
        """All counts; -1: the graph's shapes give the count.

        A number of nodes is the given one, the graph's own "num_nodes", or else the
        largest index + 1. An increment is the given one, or else the largest value + 1.
        """
        found = []
        for i, count in enumerate(self._schema.counts):
            size = self._given(i, count, graph, given)
            if size is None:
                size = self._untold(i, count, graph)
            found.append(size)
        return found

    def _given(
        self,
        i: int,
        count: Count,
        graph: Mapping[Any, Any],
        given: Mapping[tuple[Any, ...], int],
    ) -> int | None:
        if count.role == "increment":
            key, row = self._adding[i][0]
            return given.get(
                ("increment", key) if row is None else ("increment", key, row)
            )
        if count.role == "size":
            return None
        kind = self._schema.type_of(i)
        size = given.get((count.role, kind))
        if size is None and count.role == "nodes":
            size = graph.get(nodes_key(kind))
        return None if size is None else _number(count.role, size)

    def _untold(self, i: int, count: Count, graph: Mapping[Any, Any]) -> int:
        if any(key in graph for key in self._by_shape[i]):
            return _UNTOLD
        if count.role in ("edges", "size"):
            return 0
        adding = [at for at in self._adding[i] if at[0] in graph]
        return 1 + max((largest(graph[key], row) for key, row in adding), default=-1)


def _number(role: str, size: Any) -> int:
    try:
        number = operator.index(size.item() if hasattr(size, "item") else size)
    except (TypeError, ValueError, RuntimeError):  # no integer, or several
        number = -1
    if number < 0:
        raise ValueError(f"the number of {role} must be an integer >= 0, got {size!r}")
    return number


def agrees(a: Schema, b: Schema) -> bool:
    """Whether graphs of both can be in one cache. Two schemas agree if they differ only
    in sizes, in which fields are optional, and in fields that one has behind the
    other's."""
    both = min(len(a.fields), len(b.fields))
    return _frame(a, both) == _frame(b, both)


def _frame(schema: Schema, n_fields: int) -> tuple[Any, ...]:
    """The parts of a schema's first fields that must be equal."""
    named = [count for count in schema.counts if count.role in ("nodes", "edges")]
    fields = [
        replace(
            field,
            dims=(0,) * len(field.dims),
            add=tuple(i if i < len(named) else -1 for i in field.add),
            optional=False,
        ).__dict__
        for field in schema.fields[:n_fields]
    ]
    return named, fields


def looks_like(schema: Schema, graph: Any) -> bool:
    """Whether an object has the schema's keys, dtypes and ranks; True if it is not a
    graph."""
    wanted = {
        key: (field.dtype, len(field.dims))
        for key, field in zip(schema.keys, schema.fields)
    }
    try:
        found = {key: dtype_and_shape(value) for key, value in graph.items()}
    except (AttributeError, TypeError, ValueError):
        return True
    return all(
        wanted.get(key) == (dtype, len(shape)) for key, (dtype, shape) in found.items()
    )


def check_indices(
    schema: Schema, graph: Mapping[Any, Any], given: Mapping[tuple[Any, ...], int]
) -> None:
    """Raises ValueError if an index of a graph is not one of its nodes."""
    counts = Counter(schema).counts(graph, given)
    for field, key in zip(schema.fields, schema.keys):
        for dim, size in zip(field.dims, _shape(graph, key) or ()):
            if dim < 0 and counts[-1 - dim] == _UNTOLD:
                counts[-1 - dim] = size
    for field, key in zip(schema.fields, schema.keys):
        for row, count in enumerate(field.add if key in graph else ()):
            if schema.counts[count].role == "increment":
                continue
            at = row if len(field.add) == 2 else None
            low, high = smallest(graph[key], at), largest(graph[key], at)
            if low < 0 or high >= counts[count]:
                rule = f"must have indices in 0 .. {counts[count] - 1}"
                got = low if low < 0 else high
                raise ValueError(f"{key!r} {rule}, got {got}")


def generalise(
    schema: Schema,
    graph: Mapping[Any, Any],
    misfit: int,
    given: Mapping[tuple[Any, ...], int] | None = None,
) -> Schema:
    """A schema for the graphs so far and for `graph`, whose field `misfit` did not fit.

    A fixed size that the graph contradicts becomes a count of its own. If fields share
    a count and their sizes in the graph differ, the field with the most trusted name
    keeps the count. A field that the graph lacks becomes optional. Raises ValueError if
    the graph still does not fit.
    """
    wider = without(schema, graph)
    for i, dim in _misfits(schema, graph, given or {}):
        wider = with_size(wider, i, dim)
    if wider == schema:
        key = schema.keys[misfit]
        raise ValueError(f"{key!r} must fit the schema, got {_shape(graph, key)}")
    return wider


def without(schema: Schema, graph: Mapping[Any, Any]) -> Schema:
    """The schema in which the fields that `graph` lacks are optional."""
    wider = schema
    for i, field in enumerate(schema.fields):
        if schema.keys[i] not in graph and not field.optional:
            wider = _with_field(wider, i, optional=True)
    return wider


def with_late(
    schema: Schema, graph: Mapping[Any, Any], rules: Mapping[Hashable, Rule]
) -> Schema:
    """The schema with the fields that only `graph` has, appended as optional fields.

    `infer` makes these fields from this graph alone. Raises ValueError if they need
    nodes or edges that the schema does not count.
    """
    own = infer([graph], rules)
    late = [i for i, key in enumerate(own.keys) if key not in schema.keys]
    added = [i for f in late for i in _counts_in(own.fields[f])]
    new = [i for i in sorted(set(added)) if own.counts[i].role in ("size", "increment")]
    sizes = [i for i in new if own.counts[i].role == "size"]
    at = sum(count.role != "increment" for count in schema.counts)
    wider = schema
    for _ in sizes:
        wider = _with_size(wider)
    places = {i: at + n for n, i in enumerate(sizes)}
    increments = [i for i in new if i not in places]
    places |= {i: len(wider.counts) + n for n, i in enumerate(increments)}
    counts = (*wider.counts, *(Count("increment") for _ in increments))
    known: dict[str, dict[Any, int]] = {"nodes": schema.nodes, "edges": schema.edges}
    for i, count in enumerate(own.counts):
        if count.role in known:
            places[i] = known[count.role].get(own.type_of(i), _UNTOLD)
    fields = [_placed(own, i, places) for i in late]
    return Schema(counts, (*wider.fields, *fields))


def _counts_in(field: Field) -> set[int]:
    """The counts that a field's type, sizes and addends refer to."""
    named = () if field.type is None else (field.type,)
    return {*named, *field.add, *(-1 - dim for dim in field.dims if dim < 0)}


def _placed(schema: Schema, i: int, places: Mapping[int, int]) -> Field:
    """A schema's field, optional, with its counts at other places."""
    field = schema.fields[i]
    for count in _counts_in(field):
        if places[count] == _UNTOLD:
            raise ValueError(
                f"{schema.keys[i]!r} must come with the first graphs, which have no "
                f"{schema.count_name(count)}: more samples, or one of those first"
            )
    return replace(
        field,
        type=None if field.type is None else places[field.type],
        dims=tuple(-1 - places[-1 - dim] if dim < 0 else dim for dim in field.dims),
        add=tuple(places[count] for count in field.add),
        optional=True,
    )


def _misfits(
    schema: Schema, graph: Mapping[Any, Any], given: Mapping[tuple[Any, ...], int]
) -> list[tuple[int, int]]:
    """(field, dimension) where the graph contradicts the schema."""
    found = []
    shared: dict[int, list[tuple[int, int, int, int]]] = {}  # trust, field, dim, size
    for i, (field, key) in enumerate(zip(schema.fields, schema.keys)):
        shape = _shape(graph, key)
        if shape is None:
            continue
        _check_rows(field, key, shape)
        for dim, (wanted, size) in enumerate(zip(field.dims, shape, strict=True)):
            if wanted < 0:
                told = dim == field.cat_dim
                at = trust(field.name) if told else UNTRUSTED + 1
                shared.setdefault(-1 - wanted, []).append((at, i, dim, size))
            elif wanted != size:
                found.append((i, dim))
    counts = Counter(schema).counts(graph, given)
    for count, users in shared.items():
        true = counts[count] if counts[count] != _UNTOLD else min(users)[-1]
        found += [(i, dim) for _, i, dim, size in users if size != true]
    return found


def _check_rows(field: Field, key: Hashable, shape: tuple[int, ...]) -> None:
    if len(shape) != len(field.dims):
        rule = f"must have {len(field.dims)} dimensions"
        raise ValueError(f"{key!r} {rule}, got shape {shape}")
    if len(field.add) == 2 and shape[0] != 2:
        raise ValueError(f"{key!r} must have two rows, got shape {shape}")


def _shape(graph: Mapping[Any, Any], key: Hashable) -> tuple[int, ...] | None:
    return dtype_and_shape(graph[key])[1] if key in graph else None


def with_size(schema: Schema, field: int, dim: int) -> Schema:
    """The schema in which a dimension of a field has a count of its own."""
    at = sum(count.role != "increment" for count in schema.counts)
    wider = _with_size(schema)
    dims = list(wider.fields[field].dims)
    dims[dim] = -1 - at
    return _with_field(wider, field, dims=tuple(dims))


def _with_size(schema: Schema) -> Schema:
    """The schema with one more count of a size, behind the others."""
    at = sum(count.role != "increment" for count in schema.counts)
    counts = (*schema.counts[:at], Count("size"), *schema.counts[at:])

    def moved(count: int) -> int:
        return count + (count >= at)

    fields = []
    for old in schema.fields:
        dims = tuple(-1 - moved(-1 - d) if d < 0 else d for d in old.dims)
        fields.append(replace(old, dims=dims, add=tuple(map(moved, old.add))))
    return Schema(counts, tuple(fields))


def _with_field(schema: Schema, field: int, **changes: Any) -> Schema:
    fields = list(schema.fields)
    fields[field] = replace(fields[field], **changes)
    return Schema(schema.counts, tuple(fields))
