"""The loader: which graphs come when and as what."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.graph_cache.loading import (
    LONG,
    N,
    assert_is_batch_of,
    epoch,
    flat,
    long_batches,
    rows,
)
from tests.graph_cache.worlds import molecules
from trainfast import _core
from trainfast import graph_cache as gc
from trainfast.graph_cache.schema import Count, Field

ROOT = Path(gc.__file__).parents[2]
CHECKED = settings(max_examples=60, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def world():
    return molecules(N)


@pytest.fixture(scope="module")
def cache(world, tmp_path_factory):
    return gc.open(world.write(tmp_path_factory.mktemp("loader") / "cache"))


# ---- What comes when ---------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("prefetch", [0, 1, 7])
def test_batches_are_unions_of_their_graphs(cache, world, threads, prefetch):
    loader = gc.Loader(cache, 8, threads=threads, prefetch=prefetch)
    batches = list(loader)
    assert len(batches) == len(loader) == 7
    assert flat(rows(batch) for batch in batches) == list(range(N))
    for batch in batches:
        assert list(batch) == ["x", "edge_index", "edge_attr", "y", "batch", "ptr"]
        assert_is_batch_of(world, batch, rows(batch))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("prefetch", [1, 7])
def test_batches_of_threads_come_in_order(cache, world, threads, prefetch):
    data = long_batches(cache)
    batches = list(gc.Loader(data, LONG, threads=threads, prefetch=prefetch))
    assert flat(map(rows, batches)) == [i % N for i in range(len(data))]
    for batch in batches:
        assert_is_batch_of(world, batch, rows(batch))


@pytest.mark.parametrize("keywords", [{}, {"shuffle": True}, {"sampler": [1, 2]}])
def test_batch_size_must_be_given(cache, keywords):
    with pytest.raises(ValueError, match=r"batch_size must be given, .*batch_size=32"):
        gc.Loader(cache, **keywords)
    assert epoch(gc.Loader(cache, 1)) == [[i] for i in range(N)]


def test_drop_last_leaves_incomplete_batch_out(cache):
    loader = gc.Loader(cache, 8, drop_last=True)
    assert len(loader) == 6
    assert flat(epoch(loader)) == list(range(48))


def test_shuffled_epochs_have_each_graph_once_and_differ(cache):
    loader = gc.Loader(cache, 8, shuffle=True, seed=3)
    epochs = [flat(epoch(loader)) for _ in range(4)]
    assert all(sorted(order) == list(range(N)) for order in epochs)
    assert len({tuple(order) for order in epochs}) == 4
    assert list(range(N)) not in epochs


def test_same_seed_gives_same_order_and_another_seed_does_not(cache):
    first, again, other = (
        [epoch(gc.Loader(cache, 8, shuffle=True, seed=seed)) for _ in range(1)]
        for seed in (3, 3, 4)
    )
    assert first == again != other


SEEDED = """
import sys
import trainfast.graph_cache as gc
cache = gc.open(sys.argv[1])
if sys.argv[2] == "torch":
    import torch
    seed = torch.manual_seed
else:
    import numpy
    seed = numpy.random.seed
    assert "torch" not in sys.modules

def order(made_first):
    loader = gc.Loader(cache, 8, shuffle=True) if made_first else None
    seed(7)
    loader = loader or gc.Loader(cache, 8, shuffle=True)
    return [batch["x"].tobytes() for _ in range(2) for batch in loader]

first = order(False)
assert order(False) == order(True) == first
seed(8)
drawn = gc.Loader(cache, 8, shuffle=True).seed
seed(8)
plain = gc.Loader(cache, 8)  # draws nothing, as nothing is shuffled
assert list(plain) and plain.state_dict()
assert gc.Loader(cache, 8, shuffle=True).seed == drawn
assert gc.Loader(cache, 8, shuffle=True).seed != drawn
assert gc.Loader(cache, 8, shuffle=True, seed=0).seed == 0
"""


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_seed_that_is_not_given_follows_the_users(cache, library):
    if library == "torch":
        pytest.importorskip("torch")
    script = [sys.executable, "-c", SEEDED, str(cache.path), library]
    subprocess.run(script, check=True, cwd=ROOT)


def test_ranks_without_a_seed_agree_on_one(cache):
    for seed in (1, 2):
        np.random.seed(seed)
        loader = gc.Loader(cache, 4, shuffle=True, world_size=2)
        assert loader.seed == 0


def test_set_epoch_gives_that_epoch(cache):
    loader = gc.Loader(cache, 8, shuffle=True)
    epochs = [epoch(loader) for _ in range(3)]
    loader.set_epoch(1)
    assert epoch(loader) == epochs[1]
    assert epoch(loader) == epochs[2]
    loader.set_epoch(0)
    assert epoch(loader) == epochs[0]


def test_leaving_an_epoch_early_ends_it(cache):
    loader = gc.Loader(cache, 8, shuffle=True)
    epochs = [epoch(loader) for _ in range(2)]
    loader.set_epoch(0)
    for batch in loader:
        assert rows(batch) == epochs[0][0]
        break
    assert epoch(loader) == epochs[1]


def test_several_iterations_at_once_do_not_disturb_each_other(cache):
    loader = gc.Loader(cache, 5, shuffle=True)
    apart = [epoch(loader), epoch(loader)]
    loader.set_epoch(0)
    first, second = iter(loader), iter(loader)
    pairs = [(rows(a), rows(b)) for a, b in zip(first, second)]
    assert [a for a, _ in pairs] == apart[0]
    assert [b for _, b in pairs] == apart[1]


def test_finished_iteration_stays_finished(cache):
    iteration = iter(gc.Loader(cache, 50))
    assert len(list(iteration)) == 2
    with pytest.raises(StopIteration):
        next(iteration)


@pytest.mark.parametrize("shuffle", [False, True])
def test_subset_gives_its_graphs(cache, shuffle):
    subset = cache[[7, 3, 50, 11, 3]]
    loader = gc.Loader(subset, 2, shuffle=shuffle)
    got = flat(epoch(loader))
    assert sorted(got) == [3, 3, 7, 11, 50]
    assert shuffle or got == [7, 3, 50, 11, 3]


def test_empty_subset_and_empty_cache_give_no_batches(cache, tmp_path):
    assert list(gc.Loader(cache[:0], 4)) == []
    empty = gc.open(molecules(0).write(tmp_path / "empty"))
    for loader in (gc.Loader(empty, 4), gc.Loader(empty, 4, pad_to=(5, 9, 9))):
        assert len(loader) == 0
        assert list(loader) == []


# ---- Budgets -----------------------------------------------------------------------


@given(
    nodes=st.none() | st.integers(9, 60),
    edges=st.none() | st.integers(20, 120),
    size=st.none() | st.integers(1, 12),
    shuffle=st.booleans(),
    world_size=st.integers(1, 4),
    seed=st.integers(0, 5),
)
@CHECKED
def test_any_budgets_are_kept_and_nothing_is_lost(
    cache, world, nodes, edges, size, shuffle, world_size, seed
):
    size = 1 if size is None and nodes is edges is None else size
    if size == 1 and N % world_size:
        return  # no share of one graph a batch comes out even
    loaders = [
        gc.Loader(
            cache,
            size,
            max_nodes=nodes,
            max_edges=edges,
            shuffle=shuffle,
            seed=seed,
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]
    lengths = [len(loader) for loader in loaders]
    shares = [epoch(loader) for loader in loaders]
    assert lengths == [len(share) for share in shares]
    assert len(set(lengths)) == 1
    assert sorted(flat(flat(shares))) == list(range(N))
    for batch in flat(shares):
        assert 0 < len(batch) <= (size or N)
        assert nodes is None or sum(world.counts[i][0] for i in batch) <= nodes
        assert edges is None or sum(world.counts[i][1] for i in batch) <= edges


def test_length_with_budgets_is_of_the_epoch(cache):
    loader = gc.Loader(cache, max_nodes=20, shuffle=True)
    for number in range(6):
        loader.set_epoch(number)
        before = len(loader)
        seen = 0
        for _ in loader:
            assert len(loader) == before
            seen += 1
        assert seen == before


def test_budgets_fill_batches(cache, world):
    loader = gc.Loader(cache, max_nodes=40)
    batches = epoch(loader)
    for batch, after in pairwise(batches):
        more = [*batch, after[0]]
        assert sum(world.counts[i][0] for i in more) > 40


def test_graph_beyond_budget_is_error_before_first_batch(cache, world):
    biggest = max(range(N), key=lambda i: world.counts[i][1])
    size = world.counts[biggest][1]
    first = next(i for i in range(N) if world.counts[i][1] > size - 1)
    message = rf"max_edges must .*, got {size - 1} and graph {first} with {size}"
    with pytest.raises(ValueError, match=message):
        gc.Loader(cache, max_edges=size - 1)
    others = [i for i in range(N) if world.counts[i][1] < size]
    gc.Loader(cache[others], max_edges=size - 1)  # it is not among these


def test_graph_beyond_budget_can_come_alone(cache, world):
    loader = gc.Loader(cache, max_nodes=5, oversize="alone")
    batches = epoch(loader)
    assert sorted(flat(batches)) == list(range(N))
    over = [i for i in range(N) if world.counts[i][0] > 5]
    assert over
    for batch in batches:
        assert len(batch) == 1 or not set(batch) & set(over)


# ---- Samplers ----------------------------------------------------------------------


def test_sampler_decides_order(cache):
    loader = gc.Loader(cache, 2, sampler=[5, 3, 5, 0, 9])
    assert len(loader) == 3
    assert epoch(loader) == epoch(loader) == [[5, 3], [5, 0], [9]]
    assert epoch(gc.Loader(cache, 2, sampler=[5, 3, 9], drop_last=True)) == [[5, 3]]


def test_sampler_with_budget_fills_batches(cache, world):
    order = list(range(N))[::-1]
    loader = gc.Loader(cache, max_nodes=30, sampler=order)
    batches = epoch(loader)
    assert flat(batches) == order
    assert all(sum(world.counts[i][0] for i in batch) <= 30 for batch in batches)
    with pytest.raises(TypeError, match="no length"):
        len(loader)


def test_batch_sampler_decides_batches(cache):
    batches = [[1, 2, 3], [3], [52, 0]]
    loader = gc.Loader(cache, batch_sampler=batches)
    assert len(loader) == 3
    assert epoch(loader) == batches


def test_sampler_of_subset_counts_within_it(cache):
    subset = cache[10:20]
    assert epoch(gc.Loader(subset, 2, sampler=[0, 9, 4])) == [[10, 19], [14]]
    loader = gc.Loader(subset, 2, sampler=[0, 1, 10])
    iteration = iter(loader)
    assert rows(next(iteration)) == [10, 11]
    with pytest.raises(IndexError, match=r"must be in 0 \.\. 9, got 10"):
        next(iteration)


def test_error_of_sampler_comes_after_batches_before_it(cache):
    def sampler():
        yield from ([0], [1], [2])
        raise RuntimeError("no more")

    iteration = iter(gc.Loader(cache, batch_sampler=sampler(), prefetch=8))
    assert [rows(next(iteration)) for _ in range(3)] == [[0], [1], [2]]
    with pytest.raises(RuntimeError, match="no more"):
        next(iteration)
    with pytest.raises(StopIteration):
        next(iteration)


class Interrupted:
    """The indices 1 .. 6, with Ctrl-C in front of some, and before the first call."""

    def __init__(self, at, begins=0):
        self.at, self.begins, self.n = at, begins, 0

    def __iter__(self):
        if self.begins > 0:
            self.begins -= 1
            raise KeyboardInterrupt
        return self

    def __next__(self):
        if self.at and self.at[0] == self.n + 1:
            self.at = self.at[1:]
            raise KeyboardInterrupt
        self.n += 1
        if self.n > 6:
            raise StopIteration
        return self.n


@pytest.mark.parametrize("at", [[], [1], [1, 1, 2], [3], [6]])
@pytest.mark.parametrize("begins", [0, 1, 2])
@pytest.mark.parametrize("pad_to", [None, (8, 299, 999)])
def test_interruption_in_a_sampler_of_indices_loses_none(cache, at, begins, pad_to):
    sampler = Interrupted(at, begins)
    loader = gc.Loader(cache, sampler=sampler, batch_size=2, prefetch=2, pad_to=pad_to)
    iteration, got, interrupted = iter(loader), [], 0
    while len(got) < 3:
        try:
            got.append(rows(next(iteration))[:2])
        except KeyboardInterrupt:
            interrupted += 1
    assert next(iteration, None) is None
    assert got == [[1, 2], [3, 4], [5, 6]]
    assert interrupted == len(at) + begins
    assert loader.state_dict() | {"epoch": 1, "position": 0} == loader.state_dict()


@pytest.mark.parametrize("interrupted_at", [[4], [1], [2], [1, 2, 3]])
@pytest.mark.parametrize("dataset", [lambda x: x, lambda x: x[10:30]])
@pytest.mark.parametrize("keywords", [{}, {"threads": 0}, {"pad_to": (2, 99, 299)}])
def test_interruption_in_sampler_neither_waits_nor_loses_a_batch(
    cache, dataset, keywords, interrupted_at
):
    class Sampler:
        at = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.at += 1
            if self.at in interrupted_at:
                raise KeyboardInterrupt
            if self.at > 6:
                raise StopIteration
            return [self.at]

    loader = gc.Loader(dataset(cache), batch_sampler=Sampler(), prefetch=2, **keywords)
    iteration, got, interrupted = iter(loader), [], 0
    while len(got) < 6 - len(interrupted_at):
        try:
            got.append(rows(next(iteration))[0])
        except KeyboardInterrupt:
            interrupted += 1
            assert loader.state_dict()["position"] == len(got) < 3
    assert next(iteration, None) is None
    assert interrupted == len(interrupted_at)
    expected = [at for at in range(1, 7) if at not in interrupted_at]
    assert [row - got[0] for row in got] == [at - expected[0] for at in expected]


@pytest.mark.parametrize(
    "made", [list, tuple, np.array, np.uint8, lambda x: [np.int32(i) for i in x]]
)
@pytest.mark.parametrize("of", ["cache", "subset"])
def test_batches_of_a_sampler_may_be_any_integers(cache, made, of):
    dataset, first = (cache, 0) if of == "cache" else (cache[10:40], 10)
    loader = gc.Loader(dataset, batch_sampler=[made([3, 4, 5]), made([7, 8])])
    assert epoch(loader) == [[first + i for i in x] for x in ([3, 4, 5], [7, 8])]


def test_iteration_goes_on_where_a_sampler_was(cache):
    loader = gc.Loader(cache[10:40], batch_sampler=[[0, 1], (2,), np.array([3]), [4]])
    for done, _ in enumerate(loader):
        assert loader.state_dict()["position"] == done + 1
        other = gc.Loader(cache[10:40], batch_sampler=loader.batch_sampler)
        other.load_state_dict(loader.state_dict())
        assert epoch(other) == [[10, 11], [12], [13], [14]][done + 1 :]
    assert done == 3


def test_sampler_that_asks_for_its_own_batch_is_refused(cache):
    def sampler():
        yield [0]
        next(iteration)

    iteration = iter(gc.Loader(cache, batch_sampler=sampler()))
    assert rows(next(iteration)) == [0]
    with pytest.raises(RuntimeError, match="must not be used by two threads at once"):
        next(iteration)


def test_set_epoch_reaches_sampler(cache):
    class Sampler(list):
        def set_epoch(self, epoch):
            self[:] = [epoch, epoch + 1]

    loader = gc.Loader(cache, 2, sampler=Sampler())
    loader.set_epoch(7)
    assert epoch(loader) == [[7, 8]]


def test_index_outside_is_error_of_its_batch(cache):
    iteration = iter(gc.Loader(cache, batch_sampler=[[0], [1, N], [2]]))
    assert rows(next(iteration)) == [0]
    with pytest.raises((ValueError, IndexError), match=f"{N}"):
        next(iteration)


# ---- Keys --------------------------------------------------------------------------


def test_fields_and_exclude_choose_keys(cache):
    batch = next(iter(gc.Loader(cache, 4, fields=["y", "x"])))
    assert list(batch) == ["x", "y", "batch", "ptr"]
    batch = next(iter(gc.Loader(cache, 4, exclude=["x", "not there"])))
    assert list(batch) == ["edge_index", "edge_attr", "y", "batch", "ptr"]


def test_follow_batch_tells_graph_of_each_entry(cache, world):
    loader = gc.Loader(cache, 4, follow_batch=["edge_attr", "y"])
    batch = next(iter(loader))
    edges = [world.counts[i][1] for i in range(4)]
    assert batch["edge_attr_batch"].tolist() == np.repeat(range(4), edges).tolist()
    assert batch["edge_attr_ptr"].tolist() == [0, *np.cumsum(edges)]
    assert batch["y_batch"].tolist() == [0, 1, 2, 3]
    assert batch["y_ptr"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be .* at least 1, got 0"),
        ({"batch_size": 2.5}, ValueError, "batch_size must be an integer"),
        ({"max_nodes": 0}, ValueError, "max_nodes must be .* at least 1, got 0"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank must be below world_size"),
        ({"rank": -1}, ValueError, "rank must be .* at least 0, got -1"),
        ({"world_size": 0}, ValueError, "world_size must be .* at least 1"),
        ({"threads": -1}, ValueError, "threads must be .* at least 0"),
        ({"prefetch": -1}, ValueError, "prefetch must be .* at least 0"),
        ({"output": "dgl"}, ValueError, "output must be one of .*, got 'dgl'"),
        ({"oversize": "skip"}, ValueError, "oversize must be one of .*, got 'skip'"),
        ({"fields": ["z"]}, ValueError, "fields must be keys of the cache, .* got 'z'"),
        ({"fields": "x"}, ValueError, "fields must be a list of keys, got 'x'"),
        ({"follow_batch": ["z"]}, ValueError, "follow_batch must be keys"),
        (
            {"sampler": [1], "shuffle": True},
            ValueError,
            "shuffle cannot be combined with sampler; pass one of them",
        ),
        (
            {"batch_sampler": [[1]], "batch_size": 2},
            ValueError,
            "batch_size cannot be combined with batch_sampler",
        ),
    ],
)
def test_wrong_argument_is_error(cache, keywords, error, message):
    size = {} if "batch_sampler" in keywords else {"batch_size": 1}
    with pytest.raises(error, match=message):
        gc.Loader(cache, **size | keywords)


def test_what_is_no_cache_is_error(cache):
    with pytest.raises(TypeError, match="cache must be a Cache or a Subset, got list"):
        gc.Loader([1, 2])


def test_key_of_the_cache_that_batches_add_is_error(tmp_path):

    schema = gc.Schema((), (Field("batch", None, "int64", (1,), 0),))
    writer = _core.GraphWriter(str(tmp_path / "c"), schema.encode(), ["batch"])
    writer.append({"batch": np.zeros(1, int)})
    writer.close()
    loader = gc.Loader(gc.open(tmp_path / "c"), 1)  # nothing has nodes here
    assert list(next(iter(loader))) == ["batch"]
    schema = gc.Schema((Count("nodes"),), (Field("batch", 0, "int64", (-1,), 0),))
    writer = _core.GraphWriter(str(tmp_path / "d"), schema.encode(), ["batch"])
    writer.append({"batch": np.zeros(1, int)})
    writer.close()
    with pytest.raises(ValueError, match=r"key 'batch' must be free.*exclude"):
        gc.Loader(gc.open(tmp_path / "d"), 1)


def test_pyg_output_is_their_batch(cache, world):
    data = pytest.importorskip("torch_geometric.data")
    torch = pytest.importorskip("torch")

    def theirs(graph):
        return data.Data(**{k: torch.from_numpy(v) for k, v in graph.items()})

    loader = gc.Loader(cache, 8, output="pyg", follow_batch=["edge_attr"])
    for number, batch in enumerate(loader):
        graphs = world.graphs[8 * number : 8 * number + 8]
        want = data.Batch.from_data_list(
            [theirs(graph) for graph in graphs], follow_batch=["edge_attr"]
        )
        assert type(batch) is type(want)
        assert set(batch.keys()) == set(want.keys())
        assert batch.num_graphs == want.num_graphs
        for key in sorted(want.keys()):
            assert torch.equal(batch[key], want[key]), key


def test_shares_that_cannot_be_are_an_error_at_once(cache):
    with pytest.raises(ValueError, match="multiple of the ranks"):
        gc.Loader(cache, 1, rank=0, world_size=2)
    with pytest.raises(ValueError, match="at least as many as ranks"):
        gc.Loader(cache[:3], 4, rank=0, world_size=4)
    assert flat(epoch(gc.Loader(cache, 1, world_size=2, drop_last=True)))


@pytest.mark.parametrize("batch", [[0.5], ["1"], [None], [1, 2.0]])
def test_sampler_without_integers_is_error(cache, batch):
    for keywords in ({"batch_sampler": [batch]}, {"batch_size": 1, "sampler": batch}):
        with pytest.raises(TypeError, match="integer"):
            list(gc.Loader(cache, **keywords))


@pytest.mark.parametrize("mask", [[True, False], (True, False), np.array([True])])
def test_mask_of_a_batch_sampler_is_error(cache, mask):
    with pytest.raises(TypeError, match="must be integers"):
        list(gc.Loader(cache, batch_sampler=[mask]))


def test_prefetch_beyond_the_epoch_is_the_epoch(cache):
    assert flat(epoch(gc.Loader(cache, 8, prefetch=2**40))) == list(range(N))


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64])
def test_seed_of_more_than_64_bits_is_error(cache, seed):
    with pytest.raises(ValueError, match="seed must be"):
        gc.Loader(cache, 8, seed=seed)


def test_negative_seed_is_a_seed(cache):
    orders = {
        tuple(flat(epoch(gc.Loader(cache, 8, shuffle=True, seed=seed))))
        for seed in (-1, 1, 2**64 - 2)
    }
    assert len(orders) == 3
