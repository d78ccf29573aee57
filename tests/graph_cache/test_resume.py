"""The loader over time: resuming, lifetimes, signals, other processes."""

import gc as garbage
import multiprocessing
import os
import pickle
import signal
import threading
import time
import weakref

import pytest

from tests.graph_cache.loading import (
    LONG,
    N,
    assert_is_batch_of,
    epoch,
    flat,
    long_batches,
    rows,
)
from tests.graph_cache.native_threads import end, native_threads
from tests.graph_cache.reference import same
from tests.graph_cache.worlds import molecules
from tests.resident_memory import needs_honest_free, resident_bytes
from trainfast import graph_cache as gc


@pytest.fixture(scope="module")
def world():
    return molecules(N)


@pytest.fixture(scope="module")
def cache(world, tmp_path_factory):
    return gc.open(world.write(tmp_path_factory.mktemp("loader") / "cache"))


# ---- Resuming ----------------------------------------------------------------------

WAYS = {
    "plain": {"batch_size": 8},
    "shuffled": {"batch_size": 8, "shuffle": True, "seed": 5},
    "inline": {"batch_size": 8, "shuffle": True, "seed": 0, "threads": 0},
    "far ahead": {
        "batch_size": 8,
        "shuffle": True,
        "prefetch": 9,
        "threads": 2,
        "seed": 0,
    },
    "budgets": {"max_nodes": 30, "max_edges": 60, "shuffle": True, "seed": 0},
    "a rank": {"batch_size": 4, "shuffle": True, "rank": 1, "world_size": 3},
    "sampler": {"batch_size": 8, "sampler": list(range(N))[::-1]},
    "batch sampler": {"batch_sampler": [[i, i + 1] for i in range(0, N - 1, 2)]},
}


@pytest.mark.parametrize("way", WAYS)
def test_resumed_epoch_goes_on_at_every_position(cache, way):
    def new():
        return gc.Loader(cache, **WAYS[way])

    loader = new()
    epochs = [epoch(loader) for _ in range(3)]
    for done in range(len(epochs[1]) + 1):
        loader = new()
        loader.set_epoch(1)
        iteration = iter(loader)
        for _ in range(done):
            next(iteration)
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        resumed = new()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert epoch(resumed) == epochs[1][done:]
        assert epoch(resumed) == epochs[2]


def test_state_after_an_epoch_is_the_next_one(cache):
    loader = gc.Loader(cache, 8, shuffle=True)
    epochs = [epoch(loader) for _ in range(2)]
    loader.set_epoch(0)
    epoch(loader)
    assert loader.state_dict()["epoch"] == 1
    resumed = gc.Loader(cache, 8, shuffle=True)
    resumed.load_state_dict(loader.state_dict())
    assert epoch(resumed) == epochs[1]


def test_state_has_the_seed_that_was_drawn(cache):
    loader = gc.Loader(cache, 8, shuffle=True)
    batches = epoch(loader)
    loader.set_epoch(0)
    iteration = iter(loader)
    next(iteration)
    state = loader.state_dict()
    for resumed in (
        gc.Loader(cache, 8, shuffle=True),
        pickle.loads(pickle.dumps(loader)),
    ):
        resumed.load_state_dict(state)
        assert resumed.seed == loader.seed
        assert epoch(resumed) == batches[1:]
    copies = [
        pickle.loads(pickle.dumps(gc.Loader(cache, 8, shuffle=True))) for _ in "ab"
    ]
    assert copies[0].seed != copies[1].seed
    fresh = gc.Loader(cache, 8, shuffle=True)
    assert pickle.loads(pickle.dumps(fresh)).seed == fresh.seed


def test_state_is_small_and_without_arrays(cache):
    state = gc.Loader(cache[::2], 8, shuffle=True).state_dict()
    assert all(type(v) in (int, str, bool, type(None)) for v in state.values())


def test_set_epoch_of_the_resumed_epoch_keeps_the_place(cache):
    loader = gc.Loader(cache, 8, shuffle=True)
    epochs = [epoch(loader) for _ in range(2)]
    loader.set_epoch(1)
    next(iter(loader))
    state = loader.state_dict()
    for number, want in ((1, epochs[1][1:]), (0, epochs[0])):
        resumed = gc.Loader(cache, 8, shuffle=True)
        resumed.load_state_dict(state)
        resumed.set_epoch(number)
        assert epoch(resumed) == want


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_epoch_of_two_ranks_goes_on_with_another_number(cache, world_size):
    loaders = [
        gc.Loader(cache, 4, shuffle=True, rank=rank, world_size=2) for rank in (0, 1)
    ]
    seen, states = [], []
    for loader in loaders:
        iteration = iter(loader)
        seen += flat([rows(next(iteration)) for _ in range(3)])
        states.append(loader.state_dict())
    assert states[0] == states[1]
    for rank in range(world_size):
        resumed = gc.Loader(cache, 4, shuffle=True, rank=rank, world_size=world_size)
        resumed.load_state_dict(states[0])
        seen += flat(epoch(resumed))
    assert sorted(seen) == list(range(N))


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("seed", {"seed": 1}),
        ("shuffle", {"shuffle": False}),
        ("batch_size", {"batch_size": 9}),
        ("drop_last", {"drop_last": True}),
        ("max_nodes", {"max_nodes": 50}),
        ("sampled", {"sampler": [1], "shuffle": False}),
    ],
)
def test_state_of_another_order_is_error(cache, name, keywords):
    state = gc.Loader(cache, 8, shuffle=True, seed=5).state_dict()
    other = gc.Loader(cache, **{"batch_size": 8, "shuffle": True, **keywords})
    with pytest.raises(ValueError, match=f"loader's {name} must be"):
        other.load_state_dict(state)


def test_state_of_another_cache_is_error(cache, world, tmp_path):
    state = gc.Loader(cache, 8).state_dict()
    other = gc.open(world.write(tmp_path / "other"))
    with pytest.raises(ValueError, match="loader's fingerprint must be"):
        gc.Loader(other, 8).load_state_dict(state)
    with pytest.raises(ValueError, match="loader's subset must be"):
        first, second = gc.Loader(cache[:4], 8), gc.Loader(cache[1:5], 8)
        first.load_state_dict(second.state_dict())


# ---- Lifetime, signals, other processes --------------------------------------------


def test_batches_kept_for_ever_stay_as_they_were(cache, world):
    kept = []
    loader = gc.Loader(long_batches(cache), LONG, shuffle=True, threads=2, prefetch=3)
    for _ in range(5):
        kept += list(loader)
    for batch in kept:
        assert_is_batch_of(world, batch, rows(batch))


def test_one_array_of_a_batch_keeps_its_memory(cache, world):
    kept = [batch["x"] for _ in range(5) for batch in gc.Loader(cache, 8)]
    want = list(gc.Loader(cache, 8)) * 5
    assert all(same(x, batch["x"]) for x, batch in zip(kept, want))


def test_iteration_left_early_ends_its_threads(cache):
    before = native_threads()
    loader = gc.Loader(long_batches(cache), LONG, threads=3)
    iteration = iter(loader)
    next(iteration)
    own = native_threads() - before
    assert len(own) == 3
    del iteration
    garbage.collect()
    assert end(own)


def test_loader_and_cache_are_freed(world, tmp_path):
    cache = gc.open(world.write(tmp_path / "cache"))
    loader = gc.Loader(cache, 4)
    next(iter(loader))
    seen = weakref.ref(loader), weakref.ref(cache)
    del loader, cache
    assert [ref() for ref in seen] == [None, None]  # without the garbage collector


def test_pickled_loader_goes_on_where_it_was(cache):
    loader = gc.Loader(cache[::2], 4, shuffle=True, pad_to="max", follow_batch=["x"])
    whole = [batch["y"].tolist() for batch in loader]
    after = [batch["y"].tolist() for batch in loader]
    loader.set_epoch(0)
    iteration = iter(loader)
    next(iteration), next(iteration)
    again = pickle.loads(pickle.dumps(loader))
    assert [batch["y"].tolist() for batch in again] == whole[2:]
    assert [batch["y"].tolist() for batch in again] == after


def test_iteration_cannot_be_pickled(cache):
    with pytest.raises(TypeError, match="pickle its loader"):
        pickle.dumps(iter(gc.Loader(cache, 4)))


def _epoch_in_child(loader, queue):
    queue.put(epoch(loader))


@pytest.mark.parametrize(
    "method",
    [pytest.param("fork", marks=pytest.mark.forks), "spawn", "forkserver"],
)
def test_loader_works_in_other_process(cache, method):
    loader = gc.Loader(long_batches(cache), LONG, shuffle=True, threads=2)
    want = epoch(loader)
    loader.set_epoch(0)
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_epoch_in_child, args=(loader, queue))
    child.start()
    assert queue.get(timeout=240) == want
    child.join()
    assert child.exitcode == 0


@pytest.mark.forks
def test_fork_in_the_middle_of_an_epoch_leaves_both_well(cache):
    loader = gc.Loader(long_batches(cache), LONG, shuffle=True, threads=2)
    want = epoch(loader)
    loader.set_epoch(0)
    iteration = iter(loader)
    assert rows(next(iteration)) == want[0]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(120)
            loader.set_epoch(0)
            code = 0 if epoch(loader) == want else 2  # an iteration of its own
            del iteration
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [rows(batch) for batch in iteration] == want[1:]


def test_ctrl_c_ends_iteration_and_next_one_works(cache):
    loader = gc.Loader(long_batches(cache), LONG, shuffle=True, threads=2)
    want = epoch(loader)
    main = threading.main_thread().ident
    for _ in range(20):
        loader.set_epoch(0)
        timer = threading.Timer(0.002, signal.pthread_kill, (main, signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            while True:
                for _ in loader:
                    pass
                time.sleep(0)
        timer.join()
    loader.set_epoch(0)
    assert epoch(loader) == want


def test_own_assembler_gets_plan_and_core_batches(cache):
    plans = []

    def output(plan):
        plans.append(plan)
        return lambda batch: (batch.n_graphs, batch.totals)

    batches = list(gc.Loader(cache, 8, output=output))
    assert [n for n, _ in batches] == [8] * 6 + [5]
    assert plans[0].keys == ("x", "edge_index", "edge_attr", "y")
    assert plans[0].batch_of == (0,)


@pytest.mark.forks
def test_iteration_of_the_parent_is_error_in_a_forked_child(cache):
    iteration = iter(gc.Loader(long_batches(cache), LONG))
    next(iteration)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(120)
            next(iteration)
        except ValueError as error:
            code = 0 if "forked child" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list(iteration)) == 6


def test_iteration_that_is_never_asked_uses_up_no_epoch(cache):
    """Lightning makes one only to see whether it can."""
    want = epoch(gc.Loader(cache, 8, shuffle=True, seed=3))
    loader = gc.Loader(cache, 8, shuffle=True, seed=3)
    state = loader.state_dict()
    first, second = iter(loader), iter(loader)
    assert loader.state_dict() == state
    assert [rows(batch) for batch in second] == want
    assert [rows(batch) for batch in first] != want
    assert loader.state_dict()["epoch"] == 2


def test_threads_read_one_cache_at_once(cache, world):
    wrong = []

    def read(seed):
        long = long_batches(cache)
        loader = gc.Loader(long, LONG, shuffle=True, seed=seed, threads=seed % 3)
        for _ in range(3):
            for batch in loader:
                try:
                    assert_is_batch_of(world, batch, rows(batch))
                except BaseException as error:
                    wrong.append(error)
                    raise

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert wrong == []


@needs_honest_free
@pytest.mark.parametrize(
    "keywords",
    [
        {"batch_size": 2, "shuffle": True},
        {"batch_size": 2, "shuffle": True, "threads": 0},
        # The first batch takes so long that each epoch starts a thread.
        {"batch_sampler": [[0] * LONG, *([i, i + 1] for i in range(N - 1))]},
    ],
)
def test_many_epochs_need_no_more_memory_than_a_few(cache, keywords):
    loader = gc.Loader(cache, **keywords)
    for _ in range(20):
        list(loader)
    before = resident_bytes()
    for _ in range(400):  # 10800 batches of about 2 KB, or more
        for _ in loader:
            pass
    # The system's allocator may take memory for each thread that meets another one.
    assert resident_bytes() - before < 8 << 20


def test_interrupted_wait_loses_no_batch(tmp_path):
    world = molecules(2, nodes=(2000, 2001), edges=(40000, 40001), features=64)
    cache = gc.open(world.write(tmp_path / "large"))
    batches = [[1], [0, 1] * 200, [0]]  # the second takes many milliseconds

    def interrupt(*_):
        raise TimeoutError("long enough")

    def interrupted():
        """A loader, its iteration, and whether the second batch came too early."""
        loader = gc.Loader(cache, batch_sampler=batches, fields=["x", "y"], prefetch=1)
        iteration = iter(loader)
        assert rows(next(iteration)) == [1]
        came = False
        with pytest.raises(TimeoutError):
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            next(iteration)
            came = True
            while True:
                pass
        return loader, iteration, came

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        came = True
        while came:
            loader, iteration, came = interrupted()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert loader.state_dict()["position"] == 1
    assert [rows(batch) for batch in iteration] == batches[1:]


@pytest.mark.parametrize("threads", [0, 1])
def test_damaged_graph_is_an_error_of_its_batch_alone(world, tmp_path, threads):
    path = world.write(tmp_path / "damaged")
    segment = next(path.glob("segment-*"))
    data = bytearray(segment.read_bytes())
    data[data.index(world.graphs[20]["x"].tobytes())] ^= 1
    segment.write_bytes(data)
    loader = gc.Loader(gc.open(path), 8, threads=threads)
    iteration = iter(loader)
    assert [rows(next(iteration))[0] for _ in range(2)] == [0, 8]
    position = loader.state_dict()["position"]
    with pytest.raises(OSError, match="graph 20"):
        next(iteration)
    assert loader.state_dict()["position"] == position
    assert [rows(batch)[0] for batch in iteration] == [24, 32, 40, 48]


@pytest.mark.parametrize("name", ["epoch", "position", "fingerprint"])
def test_state_of_something_else_is_error(cache, name):
    loader = gc.Loader(cache, 8)
    state = loader.state_dict()
    del state[name]
    with pytest.raises(ValueError, match=f"state must be of a Loader, .*'{name}'"):
        loader.load_state_dict(state)
