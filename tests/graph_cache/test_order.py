"""The order of graphs (csrc/graph_cache/order.c, shuffle.c), compiled alone:
permutations, batches by number and by size, and what ranks get of them."""

import ctypes
import itertools
import os
import random
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ["csrc/graph_cache/order.c", "csrc/graph_cache/shuffle.c", "csrc/status.c"]
COMPILER = shutil.which(os.environ.get("CC", "cc").split()[0])
FLAGS = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
SANITIZE = ["-fsanitize=undefined", "-fno-sanitize-recover=all"]
SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1000, 5000]
INT64 = ctypes.POINTER(ctypes.c_int64)


class Order(ctypes.Structure):
    _fields_ = [
        ("n", ctypes.c_int64),
        ("subset", INT64),
        ("seed", ctypes.c_uint64),
        ("epoch", ctypes.c_uint64),
        ("shuffle", ctypes.c_bool),
        ("rank", ctypes.c_int64),
        ("world_size", ctypes.c_int64),
        ("batch_size", ctypes.c_int64),
        ("drop_last", ctypes.c_bool),
        ("n_budgets", ctypes.c_int),
        ("sizes", ctypes.POINTER(INT64)),
        ("budgets", INT64),
        ("oversize_alone", ctypes.c_bool),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not COMPILER:
        pytest.skip("needs a C compiler")
    target = tmp_path_factory.mktemp("order") / "order.so"
    sources = [str(ROOT / source) for source in SOURCES]
    include = f"-I{ROOT / 'csrc'}"
    command = [COMPILER, *FLAGS, *SANITIZE, include, *sources, "-o", str(target), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(target))
    library.tfast_message.restype = ctypes.c_char_p
    library.tfast_graph_order_at.restype = ctypes.c_int64
    library.tfast_graph_order_at.argtypes = [ctypes.POINTER(Order), ctypes.c_int64]
    return library


def int64s(values):
    return (ctypes.c_int64 * max(len(values), 1))(*map(int, values))


class Epoch:
    """One rank's epoch: `next` gives its batches as lists."""

    def __init__(self, library, n, *, sizes=(), budgets=(), subset=None, **options):
        self.library = library
        self.sizes = [int64s(column) for column in sizes]
        pointers = [ctypes.cast(column, INT64) for column in self.sizes]
        self.pointers = (INT64 * max(len(pointers), 1))(*pointers)
        self.order = Order(n=n, world_size=1, batch_size=4)
        for name, value in options.items():
            setattr(self.order, name, value)
        self.order.n_budgets = len(self.sizes)
        self.order.sizes = self.pointers
        self.order.budgets = self.budgets = int64s(budgets)
        if subset is not None:
            self.order.subset = self.subset = int64s(subset)
        room = min(self.order.batch_size, max(n, 0) + 1)
        self.room = int64s([-1] * (room + 1))
        self.position = ctypes.c_int64(0)

    def check(self, status):
        if status != 0:
            raise ValueError(self.library.tfast_message().decode())

    def next(self):
        n = ctypes.c_int64(-1)
        self.check(
            self.library.tfast_graph_order_next(
                ctypes.byref(self.order),
                ctypes.byref(self.position),
                self.room,
                ctypes.byref(n),
            )
        )
        assert self.room[len(self.room) - 1] == -1  # nothing is written past the room
        return list(self.room[: n.value])

    def all(self):
        batches = []
        while batch := self.next():
            batches.append(batch)
        return batches

    def batches(self):
        n = ctypes.c_int64(-1)
        self.check(
            self.library.tfast_graph_order_batches(
                ctypes.byref(self.order), ctypes.byref(n)
            )
        )
        return n.value


def permutation(library, n, seed=0, epoch=0):
    e = Epoch(library, n, shuffle=True, seed=seed, epoch=epoch)
    at = library.tfast_graph_order_at
    return [at(ctypes.byref(e.order), i) for i in range(n)]


def ranks(library, n, world_size, **options):
    """The batches of each rank, all checked to be as many as batches() says."""
    found = []
    for rank in range(world_size):
        e = Epoch(library, n, rank=rank, world_size=world_size, **options)
        found.append(e.all())
        assert e.batches() == len(found[-1])
        assert e.next() == []  # the end stays the end
    return found


def graphs_of(batches):
    return list(itertools.chain(*batches))


def check_shares(batches_of_ranks, graphs, batch_size, sizes=(), budgets=(), alone=()):
    """Each graph once, as many batches for each rank, none empty, none too large."""
    assert len({len(batches) for batches in batches_of_ranks}) == 1
    batches = graphs_of(batches_of_ranks)
    assert sorted(graphs_of(batches)) == sorted(graphs)
    assert all(1 <= len(batch) <= batch_size for batch in batches)
    for column, budget in zip(sizes, budgets, strict=True):
        for batch in batches:
            total = sum(int(column[graph]) for graph in batch)
            assert total <= budget or (len(batch) == 1 and batch[0] in alone)


# ---- The permutation


@pytest.mark.parametrize("n", SIZES)
def test_shuffle_is_permutation(library, n):
    for seed in range(5):
        assert sorted(permutation(library, n, seed)) == list(range(n))


def test_shuffle_of_each_small_n_reaches_all_permutations_equally(library):
    """Chi squared with 1, 5, 23 and 119 degrees of freedom, p about 1e-6."""
    for n, limit in (2, 24), (3, 36), (4, 71), (5, 205):
        draws = 6000
        counts = Counter(tuple(permutation(library, n, seed)) for seed in range(draws))
        kinds = {2: 2, 3: 6, 4: 24, 5: 120}[n]
        expected = draws / kinds
        chi = sum((count - expected) ** 2 / expected for count in counts.values())
        chi += (kinds - len(counts)) * expected
        assert chi < limit, n


def test_shuffle_sends_every_place_everywhere(library):
    """17 x 17 cells of 3400 draws each at 200 expected: chi squared, 256 degrees."""
    n, draws = 17, 3400
    counts = np.zeros((n, n))
    for epoch in range(draws):
        counts[np.arange(n), permutation(library, n, 7, epoch)] += 1
    assert ((counts - draws / n) ** 2 / (draws / n)).sum() < 380


def test_shuffle_neighbours_are_unrelated(library):
    order = np.array(permutation(library, 20000, 3))
    correlation = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 0.03
    fixed = np.count_nonzero(order == np.arange(len(order)))
    assert fixed < 12


def test_shuffle_differs_by_seed_and_epoch(library):
    orders = [
        tuple(permutation(library, 500, seed, epoch))
        for seed in (0, 1, 2**64 - 1)
        for epoch in (0, 1, 2)
    ]
    assert len(set(orders)) == len(orders)


def test_shuffle_stays_the_same_for_ever(library):
    """A saved position means nothing if the order of another version is not this."""
    assert permutation(library, 10, 1, 2) == [0, 1, 4, 7, 2, 5, 6, 9, 3, 8]
    first = [196, 1576, 1451, 1699, 1619, 459, 1560, 952]
    assert permutation(library, 2048, 1, 2)[:8] == first


def test_huge_n_is_permuted_without_memory(library):
    n = 2**60
    e = Epoch(library, 1, shuffle=True)
    e.order.n = n
    places = [0, 1, n // 2, n - 1]
    at = library.tfast_graph_order_at
    found = [at(ctypes.byref(e.order), place) for place in places]
    assert len(set(found)) == 4
    assert all(0 <= graph < n for graph in found)


def test_subset_is_what_is_ordered(library):
    subset = [90, 10, 50, 10, 70]
    plain = Epoch(library, 5, subset=subset, batch_size=2).all()
    assert plain == [[90, 10], [50, 10], [70]]
    shuffled = Epoch(library, 5, subset=subset, shuffle=True).all()
    assert sorted(graphs_of(shuffled)) == sorted(subset)


# ---- Batches by number


def test_batches_without_shuffle_are_consecutive(library):
    assert Epoch(library, 5, batch_size=2).all() == [[0, 1], [2, 3], [4]]
    assert Epoch(library, 5, batch_size=2, drop_last=True).all() == [[0, 1], [2, 3]]
    assert Epoch(library, 0).all() == []
    assert Epoch(library, 3, batch_size=2**62).all() == [[0, 1, 2]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 32, 2**62])
def test_ranks_share_every_graph(library, world_size, batch_size):
    for n in SIZES:
        if n < world_size or (batch_size == 1 and n % world_size):
            continue
        for shuffle in False, True:
            found = ranks(
                library, n, world_size, batch_size=batch_size, shuffle=shuffle
            )
            check_shares(found, range(n), batch_size)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_drop_last_keeps_only_full_batches(library, world_size):
    for n in SIZES:
        found = ranks(library, n, world_size, batch_size=4, drop_last=True)
        rounds = n // (4 * world_size)
        assert [len(batches) for batches in found] == [rounds] * world_size
        graphs = sorted(graphs_of(graphs_of(found)))
        assert graphs == list(range(rounds * 4 * world_size))


def test_global_batch_does_not_depend_on_world_size(library):
    """Eight graphs a step: by one rank, or two on each of four."""
    one = Epoch(library, 64, batch_size=8, shuffle=True).all()
    four = ranks(library, 64, 4, batch_size=2, shuffle=True)
    assert one == [graphs_of(parts) for parts in zip(*four, strict=True)]


# ---- Batches by size


def random_sizes(n, rng, kind):
    if kind == "small":
        return [rng.randint(1, 10) for _ in range(n)]
    if kind == "mixed":
        return [rng.choice([1, 1, 2, 30, 100]) for _ in range(n)]
    if kind == "many oversize":
        return [rng.choice([1, 150]) for _ in range(n)]
    return [150] * n


def test_budgets_fill_greedily(library):
    sizes = [3, 3, 3, 9, 1, 10, 2]
    e = Epoch(library, 7, sizes=[sizes], budgets=[10], batch_size=4)
    assert e.batches() == 4
    assert e.all() == [[0, 1, 2], [3, 4], [5], [6]]


def test_every_budget_holds(library):
    nodes, edges = [1, 1, 1, 1], [5, 5, 1, 1]
    e = Epoch(library, 4, sizes=[nodes, edges], budgets=[3, 10], batch_size=4)
    assert e.all() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("kind", ["small", "mixed", "many oversize"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_budgets_share_every_graph(library, kind, world_size):
    rng = random.Random(f"{kind}{world_size}")
    for n in [8, 9, 31, 64, 100, 257]:
        for _ in range(4):
            sizes = [random_sizes(n, rng, kind), random_sizes(n, rng, "small")]
            options = {"sizes": sizes, "budgets": [100, 60]}
            options |= {"batch_size": 8, "shuffle": True, "seed": rng.randrange(99)}
            alone = {g for g in range(n) if sizes[0][g] > 100}
            try:
                found = ranks(library, n, world_size, oversize_alone=True, **options)
            except ValueError:
                assert cannot_be_shared(library, n, world_size, options)
                continue
            check_shares(found, range(n), 8, sizes, [100, 60], alone)


def cannot_be_shared(library, n, world_size, options):
    """Whole rounds would need more batches than there are graphs."""
    greedy = len(Epoch(library, n, oversize_alone=True, **options).all())
    return -(-greedy // world_size) * world_size > n


@pytest.mark.parametrize("tail", range(12))
def test_long_tail_of_large_graphs_is_shared(library, tail):
    """Only graphs far before the end can make up for what the last round lacks."""
    sizes = [1] * 24 + [150] * (9 + tail)
    n = len(sizes)
    found = ranks(
        library,
        n,
        4,
        sizes=[sizes],
        budgets=[100],
        batch_size=8,
        oversize_alone=True,
    )
    check_shares(found, range(n), 8, [sizes], [100], set(range(24, n)))


def test_last_round_is_cut_evenly(library):
    found = ranks(library, 32, 8, sizes=[[1] * 32], budgets=[100], batch_size=32)
    assert [[len(batch) for batch in batches] for batches in found] == [[4]] * 8
    found = ranks(library, 32, 4, sizes=[[1] * 32], budgets=[16], batch_size=32)
    assert [[len(batch) for batch in batches] for batches in found] == [[8]] * 4


@pytest.mark.parametrize("world_size", [1, 3])
def test_budgets_drop_only_the_last_round(library, world_size):
    sizes = [2] * 50
    options = {"sizes": [sizes], "budgets": [10], "batch_size": 8, "drop_last": True}
    found = ranks(library, 50, world_size, **options)
    graphs = sorted(graphs_of(graphs_of(found)))
    rounds = 10 // world_size
    assert [len(batches) for batches in found] == [rounds] * world_size
    assert graphs == list(range(rounds * world_size * 5))
    one = Epoch(library, 3, sizes=[[2] * 3], budgets=[10], drop_last=True)
    assert one.all() == []  # a batch that only the end has cut short is incomplete


# ---- Going on from a position


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("budgets", [[], [100]])
def test_every_position_can_be_resumed(library, world_size, budgets):
    rng = random.Random(1)
    n = 101
    sizes = [random_sizes(n, rng, "mixed")] if budgets else []
    options = {"sizes": sizes, "budgets": budgets, "batch_size": 6, "shuffle": True}
    for rank in range(world_size):
        options |= {"rank": rank, "world_size": world_size}
        whole = Epoch(library, n, **options)
        positions, batches = [], []
        while True:
            positions.append(whole.position.value)
            if not (batch := whole.next()):
                break
            batches.append(batch)
        for i, position in enumerate(positions):
            resumed = Epoch(library, n, **options)
            resumed.position.value = position
            assert resumed.all() == batches[i:]


def test_positions_are_the_same_on_all_ranks(library):
    options = {"sizes": [[3] * 70], "budgets": [20], "batch_size": 8, "world_size": 4}
    epochs = [Epoch(library, 70, rank=rank, **options) for rank in range(4)]
    while all([e.next() for e in epochs]):
        assert len({e.position.value for e in epochs}) == 1
    assert len({e.position.value for e in epochs}) == 1


def test_epoch_goes_on_with_another_world_size(library):
    before = [Epoch(library, 97, rank=r, world_size=4, shuffle=True) for r in range(4)]
    seen = [g for _ in range(3) for e in before for g in e.next()]
    after = [Epoch(library, 97, rank=r, world_size=2, shuffle=True) for r in range(2)]
    for e in after:
        e.position.value = before[0].position.value
        seen += graphs_of(e.all())
    assert sorted(seen) == list(range(97))


# ---- Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"world_size": 0}, "world_size must be at least 1, got 0"),
        ({"rank": 1}, "rank must be at least 0 and below world_size, got 1"),
        ({"rank": -1}, "rank must be at least 0 and below world_size, got -1"),
        ({"sizes": [[1] * 9], "budgets": [-1]}, "a budget must be at least 0, got -1"),
        (
            {"sizes": [[1] * 4 + [12] + [1] * 4], "budgets": [10]},
            "graph 4 must be within budget 0 of a batch, 10, got 12",
        ),
        (
            {"world_size": 10},
            r"graphs must be at least as many as ranks \(10\), got 9",
        ),
        (
            {"world_size": 2, "batch_size": 1},
            r"must be a multiple of the ranks \(2\), got 9",
        ),
        (
            {
                "world_size": 2,
                "sizes": [[11] * 9],
                "budgets": [10],
                "oversize_alone": True,
            },
            "graphs must be enough for batches of all 2 ranks, got 9",
        ),
    ],
)
def test_order_that_cannot_be_is_refused(library, options, message):
    with pytest.raises(ValueError, match=message):
        Epoch(library, 9, **options).batches()
    with pytest.raises(ValueError, match=message):
        Epoch(library, 9, **options).all()


@pytest.mark.parametrize("position", [-1, 10, 2**63 - 1])
def test_position_outside_epoch_is_refused(library, position):
    e = Epoch(library, 9)
    e.position.value = position
    with pytest.raises(ValueError, match=f"position must be .* got {position}"):
        e.next()
    assert e.position.value == position


def test_n_out_of_range_is_refused(library):
    for n in -1, 2**62:
        e = Epoch(library, 1)
        e.order.n = n
        with pytest.raises(ValueError, match="n must be at least 0"):
            e.next()
