"""The core's batches from Python: arrays of any kind, how long they live, prefetching,
and the order of graphs."""

import gc
import itertools
import os
import signal
import sys
import threading

import numpy as np
import pytest
import torch

from tests.graph_cache.core_calls import (
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
from tests.graph_cache.native_threads import end, native_threads
from tests.torch_version import TORCH, from_capsule
from trainfast import _core
from trainfast.graph_cache.schema import Field, Schema

# What torch's Tensor is before torch 2.10.
NoExchange = type("NoExchange", (), {"__module__": "torch"})
KINDS = {
    "numpy": None,
    "torch": torch.Tensor,
    "torch without exchange": NoExchange,
    "capsule": object,
}


def as_numpy(array):
    """Any of the kinds as a NumPy array."""
    if type(array).__name__ == "PyCapsule":
        array = from_capsule(array)
    if isinstance(array, torch.Tensor):
        name = str(array.dtype).removeprefix("torch.")
        array = array.contiguous().view(torch.uint8) if array.numel() else array
        shape = array.shape
        if array.numel() == 0:
            return np.zeros(shape, NUMPY[name])
        return array.numpy().view(NUMPY[name])
    return array


@pytest.fixture
def graphs(rng):
    return [plain_graph(rng, n, 2 * n) for n in (3, 1, 4, 0, 5)]


@pytest.fixture
def cache(tmp_path, graphs):
    return cached(tmp_path / "c", PLAIN, graphs)


# ---- Arrays ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_batch_is_the_disjoint_union(cache, graphs, kind):
    order = [4, 0, 3, 2]
    batch = collate(cache, order, batch_of=[0], array_type=KINDS[kind])
    chosen = [graphs[i] for i in order]
    starts = np.cumsum([0] + [len(graph["x"]) for graph in chosen])
    edges = [graph["edge_index"] + at for graph, at in zip(chosen, starts)]
    want = [
        np.concatenate([graph["x"] for graph in chosen]),
        np.concatenate(edges, 1),
        np.concatenate([graph["y"] for graph in chosen]),
    ]
    for found, values in zip(batch.fields, want):
        assert same(as_numpy(found), values)
    assert as_numpy(batch.ptrs[0]).tolist() == starts.tolist()
    assert as_numpy(batch.ptrs[1]).tolist() == (2 * starts).tolist()
    members = np.repeat(range(4), np.diff(starts))
    assert as_numpy(batch.batches[0]).tolist() == members.tolist()
    assert (batch.n_graphs, batch.n_slots) == (4, 4)
    assert batch.totals == (starts[-1], 2 * starts[-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", NUMPY)
def test_batch_has_the_dtype(tmp_path, rng, dtype, kind):
    if TORCH < (2, 10) and kind != "numpy" and "float8" in dtype:
        pytest.skip("this torch has no float8 through DLPack")
    values = random_bits(rng, dtype, (6, 2))
    graphs = [{"x": values[:4]}, {"x": values[4:]}]
    cache = cached(tmp_path / "c", one_field(dtype, (-1, 2)), graphs)
    (found,) = collate(cache, [0, 1], array_type=KINDS[kind]).fields
    if kind == "torch":
        assert found.dtype == getattr(torch, dtype)
        assert found.shape == (6, 2)
    assert same(as_numpy(found), values)


def test_strings_and_bytes_are_uint8_in_batches(tmp_path):
    schema = Schema((SIZE,), (Field("s", None, "string", (-1,), 0),))
    cache = cached(tmp_path / "c", schema, [{"s": "ab"}, {"s": ""}, {"s": "ö"}])
    batch = collate(cache, [2, 1, 0])
    assert batch.fields[0].tobytes().decode() == "öab"
    assert batch.fields[0].dtype == np.uint8
    assert batch.ptrs[0].tolist() == [0, 2, 2, 4]


def test_arrays_lie_in_the_arena_at_their_offsets(cache):
    batch = collate(cache, [0, 2], batch_of=[1])
    arena = batch.arena
    assert arena.nbytes == batch.nbytes
    start = arena.ctypes.data
    assert start % 64 == 0
    lists = (batch.fields, batch.ptrs, batch.batches)
    for arrays, offsets in zip(lists, batch.offsets):
        assert len(arrays) == len(offsets)
        for array, offset in zip(arrays, offsets):
            assert array.ctypes.data == start + offset
            assert offset % 64 == 0
            assert array.flags.writeable


def test_field_that_only_some_have_cannot_be_batched(tmp_path):
    schema = one_field("float32", optional=True)
    writer = _core.GraphWriter(str(tmp_path / "c"), schema.encode(), schema.keys)
    for graph in ({}, {"x": np.ones(2, np.float32)}, {}):
        assert writer.append(graph, None, [2]) is None
    writer.close()
    cache = _core.GraphCache(str(tmp_path / "c"))
    assert collate(cache, [0, 2]).fields == [None]
    assert collate(cache, [1, 1]).fields[0].tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="x"):
        collate(cache, [1, 2])


@pytest.mark.parametrize("threads", [0, 2])
def test_large_graphs_come_while_other_threads_run(tmp_path, rng, threads):
    values = [rng.standard_normal((400_000, 1)) for _ in range(3)]
    schema = one_field("float64", (-1, 1))
    cache = cached(tmp_path / "c", schema, [{"x": x} for x in values])
    assert same(cache.get(1)[0], values[1])
    assert same(
        collate(cache, [2, 0]).fields[0], np.concatenate([values[2], values[0]])
    )
    prefetch = _core.GraphPrefetch(_core.GraphSelection(cache, [0]), threads)
    for i in range(6):
        prefetch.submit(i, [i % 3])
    for i in range(6):
        assert same(prefetch.next(i).fields[0], values[i % 3])


def test_batch_of_no_graphs_is_empty(cache):
    batch = collate(cache, [])
    assert [a.shape for a in batch.fields] == [(0, 3), (2, 0), (0,)]
    assert [a.tolist() for a in batch.ptrs] == [[0], [0]]


def test_padding_fills_up(cache, graphs):
    batch = collate(cache, [0, 1], batch_of=[0], n_slots=4, totals=[10, 20])
    x, edge_index, y = batch.fields
    assert (x.shape, edge_index.shape, y.shape) == ((10, 3), (2, 20), (4,))
    assert (batch.n_graphs, batch.n_slots, batch.totals) == (2, 4, (10, 20))
    assert same(x[:3], graphs[0]["x"]) and not x[4:].any()
    assert (edge_index[:, 8:] == 4).all()
    assert batch.ptrs[0].tolist() == [0, 3, 4, 10, 10]
    assert batch.batches[0].tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    "indices",
    [
        [2, 0],
        (2, 0),
        range(2, -1, -2),
        np.array([2, 0]),
        np.array([2, 9, 0, 9])[::2],
        np.array([2, 0], np.int32),
        torch.tensor([2, 0]),
        torch.tensor([2, 0], dtype=torch.int16),
        [np.int64(2), torch.tensor(0)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_indices_may_be_any_integers(cache, graphs, indices):
    x = collate(cache, indices).fields[0]
    assert same(x, np.concatenate([graphs[2]["x"], graphs[0]["x"]]))


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        ([0, 5], ValueError, "5"),
        ([-1], ValueError, "-1"),
        ([0.0], TypeError, r"indices\[0\] must be an integer"),
        ([2**63], ValueError, r"indices\[0\] must fit int64"),
        (np.zeros((1, 1), np.int64), ValueError, "indices must have one dimension"),
        (np.zeros(2), TypeError, "integer"),
        (7, TypeError, "indices must be an int64 array or a sequence"),
    ],
)
def test_wrong_indices_are_refused(cache, indices, error, message):
    with pytest.raises(error, match=message):
        collate(cache, indices)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([3],), {}, ValueError, r"fields\[0\] must be in 0 \.\. 2, got 3"),
        (([0], [2]), {}, ValueError, r"batch_of\[0\] must be in 0 \.\. 1, got 2"),
        (([0],), {"n_slots": 3}, ValueError, "totals be given"),
        (([0],), {"totals": [1, 1]}, ValueError, "n_slots must be > 0"),
        (([0],), {"n_slots": 3, "totals": [1]}, ValueError, "2 numbers, got 1"),
        (([0],), {"n_slots": 3, "totals": [1, -2]}, ValueError, r"totals\[1\]"),
        (([0],), {"array_type": int}, TypeError, "DLPack exchange API"),
        (([0],), {"array_type": 3}, TypeError, "must be a type or None"),
    ],
)
def test_wrong_selection_is_refused(cache, arguments, options, error, message):
    with pytest.raises(error, match=message):
        _core.GraphSelection(cache, *arguments, **options)


def test_selection_and_collate_want_their_types(cache):
    with pytest.raises(TypeError, match="cache must be a GraphCache"):
        _core.GraphSelection(3, [])
    with pytest.raises(TypeError, match="selection must be a GraphSelection"):
        _core.graph_collate(cache, [0])


# ---- Lifetime ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_outlive_batch_and_cache(tmp_path, graphs, kind):
    cache = cached(tmp_path / "c", PLAIN, graphs)
    kept = collate(cache, [0], array_type=KINDS[kind]).fields
    for i in range(20):  # would write into a free arena
        collate(cache, [i % 5] * 3)
    del cache
    gc.collect()
    assert same(as_numpy(kept[0]), graphs[0]["x"])
    assert same(as_numpy(kept[1]), graphs[0]["edge_index"])


@pytest.mark.parametrize("kind", KINDS)
def test_held_batches_are_never_overwritten(cache, graphs, kind):
    held = [collate(cache, [i % 5], array_type=KINDS[kind]) for i in range(50)]
    arrays = [batch.fields[0] for batch in held]
    del held
    for i, array in enumerate(arrays):
        assert same(as_numpy(array), graphs[i % 5]["x"])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_arena_comes_back_when_all_arrays_are_gone(cache, kind):
    def address():
        array = collate(cache, [0], array_type=KINDS[kind]).fields[0]
        return array.ctypes.data if kind == "numpy" else array.data_ptr()

    address()
    assert len({address() for _ in range(50)}) == 1


def test_tensors_may_be_dropped_by_any_thread(cache, graphs):
    boxes = [collate(cache, [2], array_type=torch.Tensor).fields for _ in range(40)]
    threads = [threading.Thread(target=boxes.pop) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert boxes == []
    assert same(collate(cache, [2]).fields[0], graphs[2]["x"])


def test_unused_capsule_gives_its_batch_back(cache):
    before = sys.getrefcount(cache)
    capsules = collate(cache, [0], array_type=object).fields
    used = from_capsule(capsules.pop())
    del capsules, used
    assert sys.getrefcount(cache) == before
    address = as_numpy(collate(cache, [0], array_type=object).fields[0]).ctypes.data
    again = as_numpy(collate(cache, [0], array_type=object).fields[0]).ctypes.data
    assert address == again


def test_batches_leak_nothing(cache):
    selections = [
        _core.GraphSelection(cache, [0, 1, 2], [0], array_type=kind)
        for kind in KINDS.values()
    ]

    def use():
        for selection in selections:
            for _ in range(50):
                batch = _core.graph_collate(selection, [0, 1])
                del batch.fields[0], batch.ptrs[0], batch.batches[0]
                assert batch.offsets and batch.totals and batch.arena is not None
                assert len(batch.slices) == len(batch.starts) == 2
            with pytest.raises(ValueError):
                _core.graph_collate(selection, [99])

    use()
    gc.collect()
    before = sys.getallocatedblocks()
    use()
    gc.collect()
    assert abs(sys.getallocatedblocks() - before) < 50
    for selection in selections:
        assert sys.getrefcount(selection) == 3  # here, in the list, as the argument


# ---- Prefetch ----------------------------------------------------------------------


def awake(cache, fields, threads):
    """A prefetch whose next submit() starts its threads: its batch 0 took long."""
    made = _core.GraphPrefetch(_core.GraphSelection(cache, fields), threads)
    made.submit(0, [0] * 50_000)
    made.next(0)
    return made


@pytest.fixture(params=[(0, False), (1, False), (3, False), (0, True), (2, True)])
def prefetch(request, tmp_path, graphs):
    threads, pread = request.param
    cache = cached(tmp_path / "c", PLAIN, graphs, pread=pread)
    return awake(cache, [0, 1, 2], threads)


def test_prefetched_batches_come_in_order(prefetch, graphs):
    order = [i * 7 % 5 for i in range(41)]
    for at, i in enumerate(order[1:11], 1):
        prefetch.submit(at, [i])
    for at, i in enumerate(order[1:], 1):
        if at + 10 < len(order):
            prefetch.submit(at + 10, np.array([order[at + 10]]))
        assert same(prefetch.next(at).fields[0], graphs[i]["x"])


def test_prefetched_batch_comes_as_often_as_its_number_is_asked_for(prefetch, graphs):
    for number, i in ((3, 0), (3, 1), (2, 1), (7, 2)):
        prefetch.submit(number, [i])  # 3 again and 2 are ignored
    for number, i in ((1, 0), (1, 0), (5, 2), (5, 2)):
        assert same(prefetch.next(number).fields[0], graphs[i]["x"])
    with pytest.raises(ValueError, match=r"call submit\(\) before next"):
        prefetch.next(6)


def test_error_comes_with_its_batch(prefetch, graphs):
    for number, index in enumerate((0, 99, 2), 1):
        prefetch.submit(number, [index])
    assert same(prefetch.next(1).fields[0], graphs[0]["x"])
    with pytest.raises(ValueError, match="99"):
        prefetch.next(2)
    assert same(prefetch.next(3).fields[0], graphs[2]["x"])


def test_threads_start_after_a_batch_that_took_long_and_end_with_their_prefetch(cache):
    before = native_threads()
    prefetch = awake(cache, [0], 2)
    assert not native_threads() - before
    prefetch.submit(1, [0])
    own = native_threads() - before
    assert len(own) == 2
    del prefetch
    assert end(own)


@pytest.mark.forks
def test_prefetch_in_forked_child_is_an_error_and_no_hang(cache):
    prefetch = awake(cache, [0], 2)
    prefetch.submit(1, [0])
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        try:
            prefetch.next(1)
        except ValueError:
            del prefetch
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert prefetch.next(1).n_graphs == 1


def test_wrong_prefetch_is_refused(cache):
    with pytest.raises(TypeError, match="selection must be a GraphSelection"):
        _core.GraphPrefetch(cache, 1)
    with pytest.raises(ValueError, match="threads"):
        _core.GraphPrefetch(_core.GraphSelection(cache, [0]), -1)


# ---- Verify and signals ------------------------------------------------------------


def test_verify_finds_what_is_damaged(tmp_path, rng):
    graphs = [plain_graph(rng, 50, 100) for _ in range(9)]
    write(tmp_path / "c", PLAIN, graphs)
    (segment,) = (tmp_path / "c").glob("segment-*")
    data = bytearray(segment.read_bytes())
    at = data.find(graphs[4]["x"].tobytes())
    data[at + 5] ^= 1
    segment.write_bytes(data)
    cache = _core.GraphCache(str(tmp_path / "c"))
    damaged = cache.verify(0, 9, False)
    assert [index for index, _ in damaged] == [4]
    assert damaged[0][1]
    assert cache.verify(0, 4, False) == []
    with pytest.raises(OSError) as caught:
        cache.get(4)
    assert caught.value.errno is None
    with pytest.raises(OSError):
        collate(cache, [3, 4])


@pytest.mark.parametrize("n", [3, 600])  # fewer and more than one slice
def test_verify_of_all_looks_between_graphs(tmp_path, n):
    write(tmp_path / "c", one_field("float32"), [{"x": np.ones(1, np.float32)}] * n)
    (segment,) = (tmp_path / "c").glob("segment-*")
    data = bytearray(segment.read_bytes())
    data[data.rfind(b"TFGC") + 4] ^= 1  # a commit frame, by its magic
    segment.write_bytes(data)
    cache = _core.GraphCache(str(tmp_path / "c"))
    assert [index for index, _ in cache.verify(0, n, False)] == [-1]
    assert [index for index, _ in cache.verify(n, n, False)] == [-1]
    assert cache.verify(1, n, False) == []


def test_verify_of_values_finds_nan(tmp_path):
    schema = one_field("float32")
    graphs = [{"x": np.ones(3, np.float32)}, {"x": np.full(2, np.nan, np.float32)}]
    cache = cached(tmp_path / "c", schema, graphs)
    assert cache.verify(0, 2, False) == []
    assert [index for index, _ in cache.verify(0, 2, True)] == [1]
    assert np.isnan(cache.get(1)[0]).all()


def test_interrupt_ends_a_long_verify(tmp_path):
    schema = one_field("float32")
    write(tmp_path / "c", schema, [{"x": np.ones(2, np.float32)}] * 20000)
    cache = _core.GraphCache(str(tmp_path / "c"))

    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.raises(Stop):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            while True:
                cache.verify(0, 20000, True)
    finally:
        signal.signal(signal.SIGALRM, before)


# ---- Order -------------------------------------------------------------------------


def batches_of(order):
    batches = list(order)
    assert all(batch.dtype == np.int64 for batch in batches)
    return [batch.tolist() for batch in batches]


def test_order_gives_every_graph_once_and_goes_on_anywhere():
    options = {"batch_size": 7, "shuffle": True, "seed": 2**70 + 3, "epoch": 2}
    order = _core.GraphOrder(100, **options)
    positions, whole = [], []
    while True:
        positions.append(order.position)
        batch = next(order, None)
        if batch is None:
            break
        whole.append(batch.tolist())
    assert sorted(itertools.chain(*whole)) == list(range(100))
    assert len(whole) == order.batches() == 15
    again = _core.GraphOrder(100, **options)
    again.position = positions[9]
    assert batches_of(again) == whole[9:]


def test_order_keeps_budgets_and_subset():
    sizes = np.arange(50)
    order = _core.GraphOrder(
        3,
        subset=[40, 9, 30],
        batch_size=3,
        sizes=[sizes, sizes * 0],
        budgets=[49, 0],
    )
    assert batches_of(order) == [[40, 9], [30]]
    with pytest.raises(ValueError, match="49"):
        batches_of(_core.GraphOrder(50, batch_size=9, sizes=[sizes], budgets=[48]))


@pytest.mark.parametrize(
    ("n", "options", "message"),
    [
        (3, {"batch_size": 0}, "batch_size"),
        (-1, {"batch_size": 1}, "n must be"),
        (3, {"batch_size": 1, "rank": 2, "world_size": 2}, "rank"),
        (3, {"batch_size": 1, "world_size": 0}, "world_size"),
        (3, {"batch_size": 1, "subset": [1]}, "n must be subset's length 1, got 3"),
        (1, {"batch_size": 1, "subset": [-1]}, r"subset\[0\] must be >= 0, got -1"),
        (3, {"batch_size": 1, "sizes": [[1]]}, "sizes and budgets must be as many"),
        (
            3,
            {"batch_size": 1, "sizes": [[1, 1]], "budgets": [1]},
            "a number for each graph, got 2, and graph 2",
        ),
    ],
)
def test_wrong_order_is_refused(n, options, message):
    with pytest.raises(ValueError, match=message):
        _core.GraphOrder(n, **options)


def test_order_wants_sensible_places():
    order = _core.GraphOrder(4, batch_size=2)
    with pytest.raises(ValueError, match="position must be >= 0, got -1"):
        order.position = -1
    with pytest.raises(TypeError, match="must not be deleted"):
        del order.position
    order.position = 5
    with pytest.raises(ValueError, match="position"):
        next(order)
