"""What batches of graphs must be, in NumPy: the truth for the graph cache.

A restatement of the rules for putting graphs together, from a schema and the graphs
alone, one graph after the other and without regard to speed.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

TEXT = ("string", "bytes")


class DoNotFit(Exception):
    """The graphs cannot be in one batch, or not in the padding."""


@dataclass
class Batch:
    fields: list  # an array each, None where no graph has it
    ptrs: list  # int64 [slots + 1] for each count
    batches: list  # int64 [total] for each count
    n_graphs: int


def counts_of(schema, graph, given=()):
    """The counts of a graph, from its arrays; `given` is {place: number} beforehand."""
    counts = dict(given)
    for key, field in zip(schema.keys, schema.fields):
        value = graph.get(key)
        if value is None:
            continue
        for dim, size in zip(field.dims, shape_of(field, value)):
            if dim >= 0:
                assert size == dim, (key, size, dim)
            else:
                assert counts.setdefault(-1 - dim, size) == size, (key, size)
    return [counts.get(place, 0) for place in range(len(schema.counts))]


def shape_of(field, value):
    if field.dtype == "string":
        return (len(value.encode()),)
    if field.dtype == "bytes":
        return (len(value),)
    return np.shape(value)


def array_of(field, value):
    """A field's value as the array that is concatenated."""
    if field.dtype in TEXT:
        raw = value.encode() if field.dtype == "string" else value
        return np.frombuffer(raw, np.uint8)
    if field.scalar:
        kinds = {"bool": np.bool_, "int64": np.int64, "float64": np.float64}
        return np.array(value, kinds[field.dtype])
    return np.asarray(value)


def collate(schema, graphs, counts, *, n_slots=0, totals=None):
    """The batch of these graphs; counts: a list of each graph's counts."""
    n = len(graphs)
    counts = [list(row) for row in counts]
    if n_slots:
        counts += padding(schema, counts, n_slots, totals)
    table = np.array(counts, np.int64).reshape(len(counts), len(schema.counts))
    ptrs = [np.concatenate([[0], np.cumsum(column)]) for column in table.T]
    batches = [np.repeat(np.arange(len(counts)), column) for column in table.T]
    fields = [
        join(schema, number, graphs, table, ptrs)
        for number in range(len(schema.fields))
    ]
    return Batch(fields, ptrs, batches, n)


def padding(schema, counts, n_slots, totals):
    """The counts of the graphs that fill a batch up."""
    table = np.array(counts, np.int64).reshape(len(counts), len(schema.counts))
    sums = table.sum(axis=0)
    missing = [total - int(have) for total, have in zip(totals, sums)]
    spare = n_slots - len(counts)
    if min(missing, default=0) < 0 or spare < 0 or (any(missing) and not spare):
        raise DoNotFit(missing)
    return [missing, *[[0] * len(missing)] * (spare - 1)][:spare]


def join(schema, number, graphs, table, ptrs):
    """One field of the batch."""
    field = schema.fields[number]
    key = schema.keys[number]
    values = [graph.get(key) for graph in graphs]
    if all(value is None for value in values):
        return None
    if any(value is None for value in values):
        raise DoNotFit(key)
    arrays = [array_of(field, value) for value in values]
    others = {other_dims(field, array.shape) for array in arrays}
    if len(others) > 1:
        raise DoNotFit(key)
    check_indices(schema, field, arrays[0].dtype, ptrs)
    parts = []
    for slot, row in enumerate(table):
        if slot < len(arrays):
            array, place = arrays[slot], slot
        else:  # padding: zeros, and indices that point at its first node
            array = np.zeros(padded_shape(field, row, arrays), arrays[0].dtype)
            place = len(arrays)
            check_target(schema, field, array, table[place])
        parts.append(add(field, array, ptrs, place))
    if field.cat_dim is None:
        return np.stack(parts)
    return np.concatenate(parts, axis=field.cat_dim)


def check_indices(schema, field, dtype, ptrs):
    """Indices of the whole batch must fit into the field's dtype."""
    for place in field.add:
        if int(ptrs[place][-1]) - 1 > np.iinfo(dtype).max:
            raise DoNotFit(field.name)


def check_target(schema, field, array, counts):
    """Indices of the padding must have a node to point at."""
    for place in field.add:
        is_index = schema.counts[place].role != "increment"
        if is_index and array.size and counts[place] == 0:
            raise DoNotFit(field.name)


def other_dims(field, shape):
    return tuple(size for dim, size in enumerate(shape) if dim != field.cat_dim)


def padded_shape(field, row, arrays):
    """A padding graph has what is counted, and the others' size elsewhere."""
    shape = list(arrays[0].shape)
    if field.cat_dim is not None and field.dims[field.cat_dim] < 0:
        shape[field.cat_dim] = row[-1 - field.dims[field.cat_dim]]
    return shape


def add(field, array, ptrs, slot):
    """The array with the counts of the graphs before it added."""
    if not field.add:
        return array
    offsets = [int(ptrs[place][slot]) for place in field.add]
    if len(offsets) == 1:
        return array + np.array(offsets[0]).astype(array.dtype)
    shape = (2,) + (1,) * (array.ndim - 1)
    return array + np.array(offsets).astype(array.dtype).reshape(shape)


def texts(field, joined, ptr, n_graphs):
    """A batch's strings or bytes as a list, one a slot."""
    raw = joined.tobytes()
    parts = [raw[a:b] for a, b in pairwise(ptr)]
    parts[n_graphs:] = [b""] * (len(parts) - n_graphs)
    return [part.decode() for part in parts] if field.dtype == "string" else parts


def same(a, b):
    """Equal bit for bit, with shape and dtype."""
    a, b = np.asarray(a), np.asarray(b)
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
    )
