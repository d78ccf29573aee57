"""The core's graph cache from Python: values in, values out, and what is refused."""

import array
import gc
import os
import sys
import threading

import numpy as np
import pytest
import torch

from tests.graph_cache.core_calls import (
    INTEGERS,
    NODES,
    NUMPY,
    PLAIN,
    SIZE,
    cached,
    collate,
    one_field,
    plain_graph,
    random_bits,
    same,
    write,
)
from trainfast import _core
from trainfast.graph_cache.schema import Count, Field, Schema


def writer_of(path, schema=PLAIN):
    return _core.GraphWriter(str(path), schema.encode(), schema.keys, durable=False)


def round_trip(path, schema, graph):
    """The values of a graph's fields after writing and reading."""
    return cached(path, schema, [graph]).get(0)


class OnlyDLPack:
    """Exports through __dlpack__() and nothing else."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


# ---- Round trips -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (300,)])
def test_numpy_array_of_dtype_comes_back(tmp_path, rng, dtype, shape):
    values = random_bits(rng, dtype, shape)
    (found,) = round_trip(tmp_path / "c", one_field(dtype), {"x": values})
    assert same(found, values)


@pytest.mark.parametrize("dtype", NUMPY)
def test_torch_tensor_of_dtype_comes_back(tmp_path, rng, dtype):
    values = random_bits(rng, dtype, (33,))
    tensor = torch.from_numpy(values.view(np.uint8)).view(getattr(torch, dtype))
    (found,) = round_trip(tmp_path / "c", one_field(dtype), {"x": tensor})
    assert same(found, values)


@pytest.mark.parametrize("dtype", NUMPY)
def test_dlpack_capsule_of_dtype_comes_back(tmp_path, rng, dtype):
    values = random_bits(rng, dtype, (33,))
    tensor = torch.from_numpy(values.view(np.uint8)).view(getattr(torch, dtype))
    try:
        tensor.__dlpack__()
    except (BufferError, RuntimeError) as error:  # torch's own: float8 before 2.10
        pytest.skip(str(error))
    (found,) = round_trip(tmp_path / "c", one_field(dtype), {"x": OnlyDLPack(tensor)})
    assert same(found, values)


@pytest.mark.parametrize("code", "bBhHiIlLqQfd")
def test_buffer_of_format_comes_back(tmp_path, code):
    values = array.array(code, [0, 1, 100])
    want = np.asarray(values)
    (found,) = round_trip(tmp_path / "c", one_field(want.dtype.name), {"x": values})
    assert same(found, want)


@pytest.mark.parametrize("dtype", NUMPY)
def test_numpy_scalar_is_an_array_without_dimensions(tmp_path, rng, dtype):
    values = random_bits(rng, dtype, (1,))
    schema = Schema((NODES,), (Field("x", None, dtype),))
    writer = writer_of(tmp_path / "c", schema)
    assert writer.append({"x": values[0]}, None, [0]) is None
    writer.close()
    (found,) = _core.GraphCache(str(tmp_path / "c")).get(0)
    assert same(found, values.reshape(()))


@pytest.mark.parametrize("dtype", ["int64", "float32", "bool", "complex128"])
@pytest.mark.parametrize("order", ["C", "F", "step", "reversed", "broadcast"])
def test_strided_array_comes_back_in_c_order(tmp_path, rng, dtype, order):
    values = random_bits(rng, dtype, (6, 4))
    values = {
        "C": values,
        "F": np.asfortranarray(values),
        "step": np.repeat(np.repeat(values, 2, 0), 3, 1)[::2, ::3],
        "reversed": values[::-1, ::-1].copy()[::-1, ::-1],
        "broadcast": np.broadcast_to(values[0], (6, 4)),
    }[order]
    schema = one_field(dtype, (-1, 4))
    path = tmp_path / "c"
    graphs = [{"x": values}, {"x": torch.from_numpy(values.copy()).T.contiguous().T}]
    cache = cached(path, schema, graphs)
    for i in range(2):
        assert same(cache.get(i)[0], values)


def test_swapped_and_misaligned_arrays_are_copied(tmp_path, rng):
    values = rng.integers(-(2**40), 2**40, 9)
    odd = np.frombuffer(b"\0" + values.tobytes(), np.int64, offset=1)
    assert not odd.flags.aligned
    table = np.zeros(9, [("a", "u1"), ("x", "i8")])
    table["x"] = values
    graphs = [{"x": values.astype(">i8")}, {"x": odd}, {"x": table["x"]}]
    cache = cached(tmp_path / "c", one_field("int64"), graphs)
    for i in range(3):
        assert same(cache.get(i)[0], values)


LAZY = {
    "conjugate": lambda z: z.conj(),
    "imaginary": lambda z: z.conj().imag,
    "one": lambda z: z[:1].conj().imag.reshape(1),
    "matrix": lambda z: z.reshape(2, 3).conj().imag.T,
    "both": lambda z: torch._neg_view(z.conj()),
    "column": lambda z: z.conj().imag[:, None],
}


@pytest.mark.parametrize("view", LAZY)
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_lazy_view_of_torch_is_stored_as_its_values(tmp_path, rng, dtype, view):
    tensor = LAZY[view](torch.from_numpy(random_bits(rng, dtype, (6,))))
    assert tensor.is_neg() or tensor.is_conj()
    want = tensor.resolve_conj().resolve_neg().numpy()
    schema = one_field(want.dtype.name, (-1, *want.shape[1:]))
    (found,) = round_trip(tmp_path / "c", schema, {"x": tensor})
    assert same(found, want)


EDGE_VALUES = [0, 1, 127, 128, 255, 256, 32767, 32768, 65535, 65536]
EDGE_VALUES += [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
EDGE_VALUES += [-1, -128, -129, -32768, -32769, -(2**31), -(2**31) - 1, -(2**63)]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_around_narrowing_come_back(tmp_path, dtype):
    limits = np.iinfo(dtype)
    fit = [v for v in EDGE_VALUES if limits.min <= v <= limits.max]
    graphs = [{"x": np.array([0, v, 0], dtype)} for v in fit]
    graphs += [{"x": np.array([limits.min, limits.max], dtype)}]
    cache = cached(tmp_path / "c", one_field(dtype), graphs)
    for i, graph in enumerate(graphs):
        assert same(cache.get(i)[0], graph["x"])
    (batch,) = collate(cache, range(len(graphs))).fields
    assert same(batch, np.concatenate([graph["x"] for graph in graphs]))


def test_small_integers_are_stored_narrow(tmp_path, rng):
    small = {"x": rng.integers(0, 256, 4096)}
    large = {"x": rng.integers(0, 2**40, 4096)}
    sizes = cached(tmp_path / "c", one_field("int64"), [small, large]).counts(-1)
    assert sizes[0] < 4096 + 200 < 8 * 4096 < sizes[1]


def test_view_of_file_is_read_only_and_keeps_cache(tmp_path, rng):
    graph = plain_graph(rng)
    x = round_trip(tmp_path / "c", PLAIN, graph)[0]
    gc.collect()
    assert not x.flags.writeable
    assert isinstance(x.base, _core.GraphCache)
    assert same(x, graph["x"])


def test_pread_gives_arrays_that_live_on(tmp_path, rng):
    graph = plain_graph(rng)
    write(tmp_path / "c", PLAIN, [graph])
    values = _core.GraphCache(str(tmp_path / "c"), pread=True).get(0)
    gc.collect()
    for found, want in zip(values, graph.values()):
        assert same(found, want)


SCALARS = {
    "bool": [True, False],
    "int64": [0, 1, -1, 255, -129, 2**31, 2**63 - 1, -(2**63)],
    "float64": [0.0, -0.0, 1.5, float("inf"), 5e-324],
}


@pytest.mark.parametrize("dtype", SCALARS)
def test_python_scalar_comes_back_as_itself(tmp_path, dtype):
    schema = Schema((), (Field("y", None, dtype, scalar=True),))
    graphs = [{"y": value} for value in SCALARS[dtype]]
    cache = cached(tmp_path / "c", schema, graphs)
    for i, value in enumerate(SCALARS[dtype]):
        (found,) = cache.get(i)
        assert type(found) is type(value)
        assert repr(found) == repr(value)


def test_scalar_takes_numbers_of_the_same_value(tmp_path):
    schema = Schema(
        (), (Field("f", None, "float64", scalar=True), Field("i", None, "int64"))
    )
    graph = {"f": 3, "i": np.int64(7)}
    f, i = round_trip(tmp_path / "c", schema, graph)
    assert type(f) is float and f == 3.0
    assert i == 7


@pytest.mark.parametrize("text", ["", "a", "ö\0\U0001f600", "x" * 70000])
def test_string_and_bytes_come_back(tmp_path, text):
    schema = Schema(
        (SIZE, SIZE),
        (
            Field("s", None, "string", (-1,), 0),
            Field("b", None, "bytes", (-2,), 0),
        ),
    )
    s, b = round_trip(tmp_path / "c", schema, {"s": text, "b": text.encode()})
    assert (s, b) == (text, text.encode())


def test_optional_field_may_be_missing_or_none(tmp_path):
    schema = one_field("float32", optional=True)
    writer = writer_of(tmp_path / "c", schema)
    for graph in ({}, {"x": None}):
        assert writer.append(graph, None, [2]) is None
    assert writer.append({"x": np.ones(3, np.float32)}) is None
    writer.close()
    cache = _core.GraphCache(str(tmp_path / "c"))
    assert [cache.get(i)[0] is None for i in range(3)] == [True, True, False]
    assert cache.counts(0).tolist() == [2, 2, 3]


def test_hetero_and_ragged_graph_comes_back(tmp_path, rng):
    counts = (
        Count("nodes", "paper"),
        Count("nodes", "author"),
        Count("edges", "author|writes|paper", 1, 0),
        SIZE,
    )
    schema = Schema(
        counts,
        (
            Field("x", 0, "float32", (-1, 4), 0),
            Field("x", 1, "int64", (-2,), 0),
            Field("edge_index", 2, "int64", (2, -3), 1, add=(1, 0)),
            Field("words", None, "uint8", (-4, 2, 3), 0),
        ),
    )
    edge_type = ("author", "writes", "paper")
    assert schema.keys[2] == (edge_type, "edge_index")
    graph = {
        ("paper", "x"): rng.standard_normal((3, 4)).astype(np.float32),
        ("author", "x"): rng.integers(0, 9, 2),
        (edge_type, "edge_index"): np.array([[0, 1, 1], [2, 0, 1]]),
        "words": rng.integers(0, 256, (5, 2, 3), dtype=np.uint8),
    }
    empty = {
        ("paper", "x"): np.zeros((0, 4), np.float32),
        ("author", "x"): np.zeros(0, np.int64),
        (edge_type, "edge_index"): np.zeros((2, 0), np.int64),
        "words": np.zeros((0, 2, 3), np.uint8),
    }
    cache = cached(tmp_path / "c", schema, [graph, empty, graph])
    for i, want in enumerate([graph, empty, graph]):
        for found, value in zip(cache.get(i), want.values()):
            assert same(found, value)
    assert [cache.counts(k).tolist() for k in range(4)] == [
        [3, 0, 3],
        [2, 0, 2],
        [3, 0, 3],
        [5, 0, 5],
    ]
    edges = collate(cache, [0, 1, 2]).fields[2]
    assert edges.tolist() == [[0, 1, 1, 2, 3, 3], [2, 0, 1, 5, 3, 4]]


def test_cache_tells_what_it_holds(tmp_path, rng):
    graphs = [plain_graph(rng, n, 2 * n) for n in (1, 4, 0)]
    keys = [bytes([i]) * 16 for i in range(3)]
    writer = write(tmp_path / "c", PLAIN, graphs, keys=keys)
    assert (writer.appended, writer.committed) == (3, 3)
    cache = _core.GraphCache(tmp_path / "c")
    assert len(cache) == 3
    assert cache.segments == 1
    assert cache.schema == PLAIN.encode()
    assert cache.keys() == b"".join(keys)
    assert cache.counts(0).tolist() == [1, 4, 0]
    assert cache.counts(1).tolist() == [2, 8, 0]
    assert 0 < cache.counts(-1).sum() < cache.file_bytes
    assert len(cache.fingerprint) == 16
    assert cache.verify(0, 3, True) == []


def test_mapping_that_is_no_dict_is_taken(tmp_path, rng):
    class Store:
        def __init__(self, graph):
            self.graph = graph

        def __getitem__(self, key):
            return self.graph[key]

    graph = plain_graph(rng)
    cache = cached(tmp_path / "c", PLAIN, [Store(graph)])
    assert same(cache.get(0)[0], graph["x"])


# ---- What is refused ---------------------------------------------------------------


def refused(tmp_path, schema, graph, error, message):
    writer = writer_of(tmp_path / "c", schema)
    with pytest.raises(error, match=message or None):
        writer.append(graph)
    assert writer.appended == 0
    writer.close()


X = np.ones((4, 3), np.float32)
E = np.array([[0, 1], [1, 0]])
Y = np.zeros(1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": None}, ValueError, r"graph\['x'\] must be there .*, got None"),
        ({"z": 1}, ValueError, r"keys must be those of .*, got \['z'\] besides"),
        ({"x": X.astype(np.float64)}, ValueError, "x.*float32.*float64"),
        ({"x": X[0]}, ValueError, "x.*"),
        ({"x": [1.0]}, TypeError, r"graph\['x'\] must be an array"),
        ({"x": X.astype(object)}, NotImplementedError, r"graph\['x'\] must be of bool"),
        ({"x": torch.ones(4, 3, device="meta")}, Exception, r"graph\['x'\] must"),
        ({"edge_index": E + 3}, ValueError, "edge_index"),
        ({"edge_index": E - 1}, ValueError, "edge_index"),
    ],
)
def test_wrong_value_is_named(tmp_path, change, error, message):
    graph = {"x": X, "edge_index": E, "y": Y, **change}
    refused(tmp_path, PLAIN, graph, error, message)


def test_missing_field_is_named(tmp_path):
    graph = {"edge_index": E, "y": Y}
    message = r"graph\['x'\] must be there \(it is not optional\), got no such key"
    refused(tmp_path, PLAIN, graph, ValueError, message)


def test_graph_that_is_no_mapping_is_refused(tmp_path):
    refused(tmp_path, PLAIN, 7, TypeError, "not subscriptable")


@pytest.mark.parametrize(
    ("dtype", "value", "error", "message"),
    [
        ("int64", 2**63, ValueError, r"graph\['y'\] must fit int64"),
        ("int64", 1.0, TypeError, r"graph\['y'\] must be an int, got float"),
        ("bool", 1, TypeError, r"graph\['y'\] must be a bool, got int"),
        ("float64", "1", TypeError, r"graph\['y'\] must be an array"),
    ],
)
def test_wrong_scalar_is_named(tmp_path, dtype, value, error, message):
    schema = Schema((), (Field("y", None, dtype, scalar=True),))
    refused(tmp_path, schema, {"y": value}, error, message)


@pytest.mark.parametrize(
    ("dtype", "value", "error"),
    [
        ("string", b"a", TypeError),
        ("string", "\ud800", ValueError),
        ("bytes", "a", TypeError),
    ],
)
def test_wrong_text_is_refused(tmp_path, dtype, value, error):
    schema = Schema((SIZE,), (Field("s", None, dtype, (-1,), 0),))
    refused(tmp_path, schema, {"s": value}, error, "")


@pytest.mark.parametrize(
    ("change", "field"),
    [({"x": X[:, :2]}, 0), ({"y": np.zeros(2)}, 2)],
)
def test_size_that_does_not_fit_is_a_misfit(tmp_path, change, field):
    writer = writer_of(tmp_path / "c")
    graph = {"x": X, "edge_index": E, "y": Y}
    assert writer.append({**graph, **change}) == field
    assert writer.appended == 0
    assert writer.append(graph) is None
    writer.close()
    assert len(_core.GraphCache(str(tmp_path / "c"))) == 1


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ((b"short",), ValueError, "key must be 16 bytes"),
        (("0123456789abcdef",), ValueError, "key must be 16 bytes"),
        ((None, [4]), ValueError, "counts must have 2 numbers, got 1"),
        ((None, [4, -2]), ValueError, r"counts\[1\] must be >= -1, got -2"),
        ((None, [4.0, 2]), TypeError, ""),
        ((None, [5, 2]), ValueError, ""),
    ],
)
def test_wrong_argument_of_append_is_refused(tmp_path, more, error, message):
    writer = writer_of(tmp_path / "c")
    with pytest.raises(error, match=message or None):
        result = writer.append({"x": X, "edge_index": E, "y": Y}, *more)
        raise ValueError(f"misfit {result}")  # a count that a shape contradicts
    assert writer.appended == 0


def test_append_takes_one_to_three_arguments(tmp_path):
    writer = writer_of(tmp_path / "c")
    with pytest.raises(TypeError, match="1 to 3 arguments, got 0"):
        writer.append()
    with pytest.raises(TypeError, match="1 to 3 arguments, got 4"):
        writer.append({}, None, None, None)


def test_index_outside_is_refused(tmp_path, rng):
    cache = cached(tmp_path / "c", PLAIN, [plain_graph(rng)])
    for index in (-1, 1, 2**62):
        with pytest.raises(IndexError, match=r"index must be in 0 \.\. 0, got"):
            cache.get(index)
    with pytest.raises(ValueError, match=r"count must be in -1 \.\. 1, got 2"):
        cache.counts(2)
    with pytest.raises(ValueError, match="0 <= first <= end <= 1, got 0 and 2"):
        cache.verify(0, 2, False)


def test_keys_must_be_as_many_as_fields(tmp_path):
    with pytest.raises(ValueError, match="each of the schema's 3 fields, got 1"):
        _core.GraphWriter(str(tmp_path / "c"), PLAIN.encode(), ["x"])
    with pytest.raises(ValueError, match="schema must have at least 16 bytes, got 9"):
        _core.GraphWriter(str(tmp_path / "c"), b"no schema", [])


# ---- Closing, threads, forks -------------------------------------------------------


def test_closed_writer_is_refused(tmp_path, rng):
    writer = writer_of(tmp_path / "c")
    writer.append(plain_graph(rng))
    writer.close()
    writer.close()
    writer.abandon()
    for call in (lambda: writer.append(plain_graph(rng)), writer.commit):
        with pytest.raises(ValueError, match="writer must be open, got a closed one"):
            call()
    assert (writer.appended, writer.committed) == (1, 1)


def test_abandoned_writer_leaves_what_was_committed(tmp_path, rng):
    writer = writer_of(tmp_path / "c")
    graph = plain_graph(rng)
    writer.append(graph)
    assert writer.commit() == 1
    writer.append(plain_graph(rng))
    writer.abandon()
    kept, lost = _core.graph_adopt(str(tmp_path / "c"))
    assert kept == 1 and lost <= 1
    assert same(_core.GraphCache(str(tmp_path / "c")).get(0)[0], graph["x"])


def test_second_thread_in_append_is_refused(tmp_path, rng):
    writer = writer_of(tmp_path / "c")
    graph = plain_graph(rng)

    class Waits:
        """While its export is asked for, another thread appends."""

        def __dlpack__(self, **_):
            caught = []

            def append():
                try:
                    writer.append(graph)
                except RuntimeError as error:
                    caught.append(str(error))

            thread = threading.Thread(target=append)
            thread.start()
            thread.join()
            (message,) = caught
            assert message.startswith("writer must not be used by two threads at once")
            return torch.ones(5, 3).__dlpack__()

    assert writer.append({**graph, "x": Waits()}) is None
    assert writer.append(graph) is None
    writer.close()
    assert writer.committed == 2


def test_open_cache_can_be_read_after_fork(tmp_path, rng):
    graphs = [plain_graph(rng) for _ in range(4)]
    cache = cached(tmp_path / "c", PLAIN, graphs)
    child = os.fork()
    if child == 0:
        good = all(same(cache.get(i)[0], graphs[i]["x"]) for i in range(4))
        good &= len(collate(cache, range(4)).fields) == 3
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_forked_child_cannot_harm_writer(tmp_path, rng):
    writer = writer_of(tmp_path / "c")
    graph = plain_graph(rng)
    writer.append(graph)
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (lambda: writer.append(graph), writer.commit, writer.close):
            try:
                call()
            except RuntimeError:
                refused += 1
        writer.abandon()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    writer.close()
    cache = _core.GraphCache(str(tmp_path / "c"))
    assert len(cache) == 1
    assert same(cache.get(0)[0], graph["x"])


def test_types_cannot_be_subclassed_or_made_empty():
    for name in ("Writer", "Cache", "Selection", "Batch", "Prefetch", "Order"):
        kind = getattr(_core, f"Graph{name}")
        with pytest.raises(TypeError):
            type("Sub", (kind,), {})
        with pytest.raises(TypeError):
            kind()


def test_references_are_given_back(tmp_path, rng):
    graph = plain_graph(rng)
    graph["x"] = torch.from_numpy(graph["x"])
    bad = {**graph, "y": np.zeros(2)}
    writer = writer_of(tmp_path / "c")
    things = [*graph.values(), *bad.values(), *graph]

    def use():
        for _ in range(10):
            writer.append(graph)
            writer.append(bad)
            with pytest.raises(ValueError, match="besides"):
                writer.append({**graph, "other": 1})

    use()
    # "x" is one object in the whole process, and garbage of other tests may hold it.
    gc.collect()
    before = [sys.getrefcount(thing) for thing in things]
    use()
    assert [sys.getrefcount(thing) for thing in things] == before
    writer.close()
    cache = _core.GraphCache(str(tmp_path / "c"))
    before = sys.getrefcount(cache)
    values = cache.get(0)
    assert sys.getrefcount(cache) == before + 2  # two views of the file
    del values
    assert sys.getrefcount(cache) == before
