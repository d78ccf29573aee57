"""The contents of a batch, and the assembler of batches that are dicts.

The core puts graphs together into one arena (`GraphBatch`). An assembler turns that
into what the training loop gets. The assembler for dicts is here.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from trainfast import adapters
from trainfast._core import GraphBatch, GraphCache, GraphSelection
from trainfast.graph_cache.schema import Field, Schema

Assemble = Callable[[GraphBatch], Any]


@dataclass(frozen=True)
class Follow:
    """A key of `follow_batch`: each of its entries gets the number of its graph."""

    key: Hashable
    count: int | None  # the count of its entries; None: each graph has `size` entries
    size: int


@dataclass(frozen=True)
class BatchPlan:
    """What every batch of a loader holds; assemblers read it once.

    In a GraphBatch, `fields[i]` is the array of the schema's field `plan.fields[i]`,
    whose key is `plan.keys[i]`, or None if no graph has the field. `batches[i]` has the
    graph of each node, edge or entry that count `plan.batch_of[i]` counts, int64 (nodes
    of each type first, in the schema's order). `ptrs[k]` are the prefix sums of count k
    over the graphs, int64 [slots + 1].
    """

    schema: Schema
    fields: tuple[int, ...]
    keys: tuple[Hashable, ...]
    batch_of: tuple[int, ...]
    follow: tuple[Follow, ...] = ()
    padded: bool = False

    def selection(
        self,
        core: GraphCache,
        array_type: type | None,
        slots: int = 0,
        totals: Sequence[int] | None = None,
    ) -> GraphSelection:
        return GraphSelection(
            core,
            self.fields,
            self.batch_of,
            n_slots=slots,
            totals=totals,
            array_type=array_type,
        )


def plan_batches(
    schema: Schema,
    fields: Iterable[Hashable] | None = None,
    exclude: Iterable[Hashable] = (),
    follow_batch: Iterable[Hashable] = (),
    *,
    padded: bool = False,
) -> BatchPlan:
    """The plan for the keys in `fields` (None: all) that are not in `exclude`.

    A name selects its keys of all types: "x" selects ("paper", "x") and ("author",
    "x"). Raises ValueError for a key that no field has.
    """
    wanted = list(schema.keys) if fields is None else _expand(schema, fields, "fields")
    unwanted = set(_expand(schema, exclude, "exclude", missing_ok=True))
    keys = tuple(k for k in schema.keys if k in set(wanted) and k not in unwanted)
    follow = tuple(
        _follow(schema, key)
        for key in _expand(schema, follow_batch, "follow_batch")
        if key in keys
    )
    counts = list(schema.nodes.values())
    counts += [f.count for f in follow if f.count is not None]
    return BatchPlan(
        schema,
        tuple(map(schema.field_of, keys)),
        keys,
        tuple(dict.fromkeys(counts)),
        follow,
        padded,
    )


def _expand(
    schema: Schema, keys: Iterable[Hashable], argument: str, missing_ok: bool = False
) -> list[Hashable]:
    """Keys of the schema for keys or bare names."""
    found: list[Hashable] = []
    for key in keys:
        same = [k for k in schema.keys if k == key]
        named = same or [
            k for k, field in zip(schema.keys, schema.fields) if field.name == key
        ]
        if not named and not missing_ok:
            raise ValueError(
                f"{argument} must be keys of the cache, {list(schema.keys)}, got "
                f"{key!r}"
            )
        found += named
    return found


def _follow(schema: Schema, key: Hashable) -> Follow:
    field = schema.fields[schema.field_of(key)]
    if field.cat_dim is None or field.dtype in ("string", "bytes"):
        return Follow(key, None, 1)
    size = field.dims[field.cat_dim]
    return Follow(key, -1 - size, 0) if size < 0 else Follow(key, None, size)


def batch_key(kind: Hashable, name: str) -> Hashable:
    """ "batch", or ("paper", "batch") where nodes have types."""
    return (kind, name) if kind else name


def follow_key(key: Hashable, suffix: str) -> Hashable:
    """ "x_batch", or ("paper", "x_batch")."""
    if isinstance(key, tuple):
        return (*key[:-1], key[-1] + suffix)
    return f"{key}{suffix}"


def dict_assembler(plan: BatchPlan) -> Assemble:
    """Returns a function from a GraphBatch to a dict of its arrays.

    The dict has the fields, and "batch" (int64 [nodes], the graph of each node) and
    "ptr" (int64 [graphs + 1], the first node of each graph), in heterogeneous graphs
    (type, "batch") and (type, "ptr"); "x_batch" and "x_ptr" for x in follow_batch; with
    padding "graph_mask" (bool [graphs], True for real graphs). Strings are lists. A
    field that no graph of the batch has is left out.
    """
    schema = plan.schema
    nodes = schema.nodes.items()
    batch_keys = tuple(batch_key(kind, "batch") for kind, _ in nodes)
    ptr_keys = tuple((batch_key(kind, "ptr"), count) for kind, count in nodes)
    texts = _texts(plan)
    follows = tuple(
        (follow_key(f.key, "_batch"), follow_key(f.key, "_ptr"), f) for f in plan.follow
    )
    made = [*batch_keys, *(key for key, _ in ptr_keys)]
    made += [key for pair in follows for key in pair[:2]]
    made += ["graph_mask"] * plan.padded
    _check_made(plan, made)
    keys = plan.keys
    optional = tuple(
        key for key, i in zip(keys, plan.fields) if schema.fields[i].optional
    )
    more = bool(texts or follows or plan.padded or optional)
    first_keys = (*keys, *batch_keys)  # behind these, `batches` has those of `follows`

    def assemble(batch: GraphBatch) -> dict[Hashable, Any]:
        out = dict(zip(first_keys, batch.fields + batch.batches))
        ptrs = batch.ptrs
        if more:
            _finish(out, batch, ptrs)
        for key, count in ptr_keys:
            out[key] = ptrs[count]
        return out

    def _finish(out: dict[Hashable, Any], batch: GraphBatch, ptrs: list[Any]) -> None:
        for key in optional:
            if out[key] is None:
                del out[key]
        for key, count, is_string in texts:
            if key in out:
                out[key] = split_text(out[key], ptrs[count], is_string, batch.n_graphs)
        for batch_name, ptr_name, follow in follows:
            if follow.key in out:
                out[batch_name], out[ptr_name] = followed(plan, batch, ptrs, follow)
        if plan.padded:
            out["graph_mask"] = graph_mask(batch)

    return assemble


def _texts(plan: BatchPlan) -> tuple[tuple[Hashable, int, bool], ...]:
    fields = [(key, plan.schema.fields[i]) for key, i in zip(plan.keys, plan.fields)]
    return tuple(
        (key, _text_count(field), field.dtype == "string")
        for key, field in fields
        if field.dtype in ("string", "bytes")
    )


def _text_count(field: Field) -> int:
    if field.dims[0] >= 0:
        raise NotImplementedError(
            f"field {field.name!r} must have a size of its own, got {field.dims[0]}"
        )
    return -1 - field.dims[0]


def _check_made(plan: BatchPlan, made: list[Hashable]) -> None:
    for key in made:
        if key in plan.keys:
            raise ValueError(
                f"key {key!r} must be free: each batch adds it; omit the cache's own "
                f"field with exclude=[{key!r}]"
            )


def split_text(data: Any, ptr: Any, is_string: bool, n_graphs: int) -> list[Any]:
    """The strings or bytes of a batch, one for each graph; empty for padding."""
    whole = bytes(np.asarray(data.cpu() if hasattr(data, "cpu") else data))
    ends = ptr.tolist()
    parts = [whole[a:b] for a, b in pairwise(ends[: n_graphs + 1])]
    parts += [b""] * (len(ends) - 1 - n_graphs)
    return [part.decode() for part in parts] if is_string else parts


def followed(
    plan: BatchPlan, batch: GraphBatch, ptrs: list[Any], follow: Follow
) -> tuple[Any, Any]:
    """The graph of each entry of a followed key, and the first entry of each graph."""
    if follow.count is not None:
        place = plan.batch_of.index(follow.count)
        return batch.batches[place], ptrs[follow.count]
    slots = np.arange(batch.n_slots + 1, dtype=np.int64)
    # Of the kind of `ptrs`: an array of NumPy's, or a tensor on the batch's device.
    convert = _like(ptrs)
    return convert(np.repeat(slots[:-1], follow.size)), convert(slots * follow.size)


def graph_mask(batch: GraphBatch) -> Any:
    """bool [slots]: True for the real graphs of a padded batch."""
    mask = np.arange(batch.n_slots) < batch.n_graphs
    return _like(batch.ptrs)(mask)


def _like(ptrs: list[Any]) -> Callable[[np.ndarray], Any]:
    if not ptrs or isinstance(ptrs[0], np.ndarray):
        return lambda array: array
    device = ptrs[0].device
    return lambda array: adapters.load("torch").tensor(array, device)
