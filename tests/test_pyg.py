"""Cached PyG datasets: what they store, and that all of it comes back."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch_geometric", reason="an adapter's test")

from torch_geometric.data import Batch, Data, Dataset, HeteroData, InMemoryDataset
from torch_geometric.transforms import Constant

import trainfast.graph_cache
from tests.pyg_graphs import (
    assert_same_examples,
    assert_same_graph,
    attributes,
    heterogeneous,
    homogeneous,
)
from trainfast.torch import pyg
from trainfast.torch.pyg import DataLoader, cached


@pytest.fixture(autouse=True)
def fresh_stats():
    trainfast.reset_stats()


@pytest.fixture
def keep(tmp_path):
    """cached() at a new path each time, without a bar."""
    paths = iter(range(100))

    def keep(graphs, **options):
        path = tmp_path / f"cache{next(paths)}"
        return cached(graphs, path, progress=False, **options)

    return keep


def graph(n=3, e=4, kind=Data, **more):
    generator = torch.Generator().manual_seed(n * 100 + e)
    index = torch.randint(0, n, (2, e), generator=generator)
    x = torch.randn(n, 2, generator=generator)
    return kind(**{"x": x, "edge_index": index, **more})


def batch_of(dataset, **options):
    """All graphs in one batch, which must have been made natively."""
    trainfast.reset_stats()
    (batch,) = DataLoader(dataset, batch_size=len(dataset), **options)
    assert trainfast.stats().calls == {"pyg": {"loader": 1}}, trainfast.stats()
    return batch


def check(keep, graphs, **options):
    """The graphs and their batch are what they are in PyG."""
    dataset = keep(graphs)
    assert len(dataset) == len(graphs)
    for got, want in zip(dataset, graphs, strict=True):
        assert_same_graph(got, want)
    names = {"follow_batch": "follow_batch", "exclude_keys": "exclude_keys"}
    want = Batch.from_data_list(
        graphs, **{k: options[k] for k in names if k in options}
    )
    got = batch_of(dataset, **options)
    assert_same_graph(got, want)
    return dataset, got, want


# ---- Random graphs -------------------------------------------------------------------

FOLLOW = st.lists(
    st.sampled_from(["x", "edge_index", "y", "c", "edge_attr"]), max_size=2
)


def agree(graphs):
    """Whether PyG batches them; what they are without that is not to be cached."""
    try:
        Batch.from_data_list(graphs)
    except Exception:
        return False
    return True


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=12),
    attributes(),
    st.sampled_from(["x", "given"]),
    FOLLOW,
    st.lists(st.sampled_from(["x", "y", "c", "edge_attr"]), max_size=1),
)
def test_random_graphs_come_back(
    tmp_path_factory, seeds, attrs, nodes, follow, exclude
):
    graphs = [homogeneous(seed, attrs, nodes) for seed in seeds]
    if agree(graphs):
        options = {"follow_batch": follow, "exclude_keys": exclude}
        path = tmp_path_factory.mktemp("caches") / "c"
        check(lambda given: cached(given, path, progress=False), graphs, **options)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=10),
    attributes(),
    FOLLOW,
    st.lists(st.sampled_from(["x", "y", "c", "edge_attr"]), max_size=1),
)
def test_random_hetero_graphs_come_back(
    tmp_path_factory, seeds, attrs, follow, exclude
):
    graphs = [heterogeneous(seed, attrs) for seed in seeds]
    options = {"follow_batch": follow, "exclude_keys": exclude}
    path = tmp_path_factory.mktemp("caches") / "c"
    check(lambda given: cached(given, path, progress=False), graphs, **options)


# ---- What is stored ------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"my_index": torch.tensor([0, 2])},
        {"any_index": torch.tensor([-1, 99])},
        {"one_index": torch.tensor(1)},
        {"int_index": 5},
        {"face": torch.tensor([[0, 1], [1, 2], [2, 0]])},
        {"small_index": torch.tensor([0, 250], dtype=torch.uint8)},
        {"short_index": torch.tensor([[0, 1]], dtype=torch.int16)},
        {"x_batch": torch.tensor([0, 0, 1])},
        {"batch": torch.tensor([0, 1, 1])},
        {"ptr": torch.tensor([0, 3])},
        {"num_nodes": 7},
        {"node_index": torch.tensor([[0, 1]])},
        {"adj": torch.eye(3)},
        {"word": "wörd", "blob": b"\0\xff", "none": ""},
        {"flag": True, "number": -(2**40), "real": 1.25, "pi": 3.141592653589793},
        {"half": torch.ones(2, dtype=torch.bfloat16), "c": torch.ones(1) * 1j},
        {"empty": torch.empty(0), "also": torch.empty(0, 4)},
        {"nan": torch.tensor([float("nan"), float("inf")])},
        {"far": torch.arange(6).reshape(2, 3).t()},
        {"y": torch.tensor([[1.0, 2.0]]), "mask": torch.tensor([True, False, True])},
        {"x": torch.ones(4, 2, 3, dtype=torch.float64)},
    ],
    ids=lambda more: next(iter(more)),
)
@pytest.mark.parametrize("follow", [False, True])
def test_attribute_comes_back(keep, more, follow):
    graphs = [graph(3, 4, **more) for _ in range(2)]
    if "x" not in more:
        graphs += [graph(4, 2, **more), graph(3, 0, **more)]
    options = {"follow_batch": list(more)} if follow else {}
    _, got, want = check(keep, graphs, **options)
    if "batch" not in more:
        assert_same_examples(got, want)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"a": torch.eye(3).to_sparse()}, "'a' must be dense, got torch.sparse_coo"),
        ({"a": [1, 2]}, "'a' must be a dense tensor, .* got list"),
        ({"a": {"b": 1}}, "'a' must be a dense tensor, .* got dict"),
        ({"a": np.ones(2)}, "'a' must be a dense tensor, .* got ndarray"),
        ({"a": torch.nn.Parameter(torch.ones(1))}, "'a' must be .* got Parameter"),
        ({"a": torch.ones(1, requires_grad=True)}, "must not require gradients"),
        ({"a_index": torch.ones(2)}, "'a_index' must be integers, .* torch.float32"),
        ({"index": True}, "'index' must be integers, .* got bool"),
        ({"num_nodes": torch.tensor(3)}, "'num_nodes' must be an int, got Tensor"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(keep, more, message):
    with pytest.raises(NotImplementedError, match=message):
        keep([graph(**more)])


def test_classes_that_differ_are_refused(keep):
    with pytest.raises(
        NotImplementedError, match="all graphs must be Data, got a Pair"
    ):
        keep([graph(), pair(2, 3)])
    batch = Batch.from_data_list([graph()])
    for wrong in (batch, {"x": torch.ones(1)}, (graph(), graph())):
        with pytest.raises(NotImplementedError, match="graphs must be Data or Hetero"):
            keep([wrong])
    with pytest.raises(ValueError, match="dataset must have graphs"):
        keep([])


def test_type_without_attributes_is_refused(keep):
    data = heterogeneous(1, [])
    data["c"]
    with pytest.raises(NotImplementedError, match="type 'c' must have an attribute"):
        keep([data])


def test_sizes_that_contradict_the_first_graphs_come_back(keep):
    """The first graphs share a size by chance; the writer finds out later."""
    graphs = [graph(n, n, a=torch.ones(n), b=torch.ones(3)) for n in range(1, 10)]
    graphs += [graph(4, 3, a=torch.ones(2), b=torch.ones(5)) for _ in range(3)]
    check(keep, graphs, follow_batch=["a", "b"])


# ---- Own classes ---------------------------------------------------------------------


class PairData(Data):
    """Two graphs in one: PyG's documented use of __inc__."""

    def __inc__(self, key, value, *args, **kwargs):
        if key == "edge_index_s":
            return self.x_s.size(0)
        if key == "edge_index_t":
            return self.x_t.size(0)
        return super().__inc__(key, value, *args, **kwargs)


class Bipartite(Data):
    """Rows of an index with increments of their own."""

    def __inc__(self, key, value, *args, **kwargs):
        if key == "edge_index":
            return torch.tensor([[self.x_s.size(0)], [self.x_t.size(0)]])
        return super().__inc__(key, value, *args, **kwargs)


class Stacked(Data):
    """Graph-level values in a new dimension."""

    def __cat_dim__(self, key, value, *args, **kwargs):
        return (
            None if key == "foo" else super().__cat_dim__(key, value, *args, **kwargs)
        )


class Sideways(HeteroData):
    def __cat_dim__(self, key, value, *args, **kwargs):
        return 1 if key == "wide" else super().__cat_dim__(key, value, *args, **kwargs)

    def __inc__(self, key, value, *args, **kwargs):
        return 100 if key == "number" else super().__inc__(key, value, *args, **kwargs)


class Needy(Data):
    """A class that cannot be made without arguments."""

    def __init__(self, size, **more):
        super().__init__(**more)
        self.made = 1


def pair(s, t):
    edges = [torch.randint(0, n, (2, 2 * n)) for n in (s, t)]
    return PairData(
        x_s=torch.randn(s, 2),
        x_t=torch.randn(t, 3),
        edge_index_s=edges[0],
        edge_index_t=edges[1],
        num_nodes=s,
    )


def bipartite(s, t):
    index = torch.stack([torch.randint(0, n, (4,)) for n in (s, t)])
    return Bipartite(
        x_s=torch.randn(s, 2), x_t=torch.randn(t, 2), edge_index=index, num_nodes=s + t
    )


def stacked(n):
    return graph(n, n, Stacked, foo=torch.randn(3), bar=torch.randn(2))


def sideways(n):
    data = heterogeneous(n, [], Sideways)
    data["a"].wide = torch.randn(2, n)
    data.number = torch.arange(n)
    return data


OWN = {
    "increments": [pair(2, 3), pair(4, 1), pair(3, 3)],
    "two increments": [bipartite(2, 3), bipartite(4, 1), bipartite(1, 5)],
    "stacked": [stacked(2), stacked(3)],
    "hetero": [sideways(1), sideways(2), sideways(4)],
}


@pytest.mark.parametrize("graphs", OWN.values(), ids=OWN.keys())
@pytest.mark.parametrize("follow", [["edge_index_s", "x_t", "foo", "wide"], []])
def test_own_rules_are_kept(keep, graphs, follow):
    _, got, want = check(keep, graphs, follow_batch=follow)
    assert type(got).__name__ == f"{type(graphs[0]).__name__}Batch"
    assert_same_examples(got, want)


def test_class_that_needs_arguments_is_kept(keep):
    graphs = [Needy(1, x=torch.ones(n, 1)) for n in (1, 2)]
    check(keep, graphs)


class Changing(Data):
    def __inc__(self, key, value, *args, **kwargs):
        return int(self.y) if key == "a" else super().__inc__(key, value, *args)

    def __cat_dim__(self, key, value, *args, **kwargs):
        return int(self.z) if key == "b" else super().__cat_dim__(key, value, *args)


def changing(y, z, n=1):
    a, b = torch.arange(2), torch.ones(2, 2)
    return [Changing(x=torch.ones(1, 1), a=a, b=b, y=y, z=z)] * n


def test_own_rules_that_change_their_kind_are_refused(keep):
    check(keep, changing(3, 1) + changing(0, 1))
    with pytest.raises(Exception, match="'a' must add the same kind of number"):
        keep(changing(0, 0, 9) + changing(1, 0))
    with pytest.raises(Exception, match="'b' must have the __cat_dim__ of the first"):
        keep(changing(0, 0, 9) + changing(0, 1))
    with pytest.raises(NotImplementedError, match=r"'a' must add a number in 0 \.\."):
        keep(changing(-1, 0))


def test_attribute_that_some_graphs_lack_is_left_to_pyg(keep):
    graphs = [graph(2), graph(3, z=torch.ones(3)), graph(4, word="w")]
    dataset = keep(graphs)
    for got, want in zip(dataset, graphs, strict=True):
        assert_same_graph(got, want)
    (batch,) = DataLoader(dataset, batch_size=3)
    assert_same_graph(batch, Batch.from_data_list(graphs))
    reason = "an attribute that not all graphs have"
    assert trainfast.stats().fallbacks == {"pyg": {reason: 1}}
    with pytest.raises(KeyError):
        list(DataLoader(dataset[1:], batch_size=2))
    assert_same_graph(
        batch_of(dataset, exclude_keys=["z", "word"]), Batch.from_data_list(graphs)
    )


# ---- Building ------------------------------------------------------------------------


class Counting:
    """A list that counts how often its graphs are taken."""

    def __init__(self, graphs):
        self.graphs, self.taken = graphs, 0

    def __len__(self):
        return len(self.graphs)

    def __getitem__(self, i):
        self.taken += 1
        return self.graphs[i]


def test_only_what_is_missing_is_built(tmp_path):
    graphs = Counting([graph(n, n) for n in range(1, 21)])
    cached(graphs, tmp_path / "c", progress=False)
    graphs.taken = 0
    again = cached(graphs, tmp_path / "c", progress=False)
    assert graphs.taken == 1  # for its class
    assert_same_graph(again[19], graphs.graphs[19])
    graphs.graphs = [graph(n, 1) for n in range(1, 21)]
    changed = cached(graphs, tmp_path / "c", transform_id="edges", progress=False)
    assert_same_graph(changed[19], graphs.graphs[19])
    graphs.graphs = graphs.graphs[:5]
    assert len(cached(graphs, tmp_path / "c", transform_id="edges")) == 5


def test_dataset_that_grew_is_completed(tmp_path):
    graphs = [graph(n, n, a=1.0) for n in range(1, 13)]
    cached(graphs[:10], tmp_path / "c", progress=False)
    counted = Counting(graphs)
    dataset = cached(counted, tmp_path / "c", progress=False)
    assert counted.taken == 1 + 7 + 2  # the class, the rules, what was missing
    assert_same_graph(batch_of(dataset), Batch.from_data_list(graphs))


class Failing(Counting):
    def __getitem__(self, i):
        if i == 9:
            raise RuntimeError("broken graph")
        return super().__getitem__(i)


def test_failure_keeps_what_was_built(tmp_path):
    graphs = [graph(n, n) for n in range(1, 13)]
    with pytest.raises(trainfast.graph_cache.BuildError, match="broken graph"):
        cached(Failing(graphs), tmp_path / "c", progress=False)
    counted = Counting(graphs)
    dataset = cached(counted, tmp_path / "c", progress=False)
    assert counted.taken < 1 + 7 + 12
    assert_same_graph(batch_of(dataset), Batch.from_data_list(graphs))


@pytest.mark.parametrize("graphs", [OWN["increments"] * 10, OWN["hetero"] * 10])
def test_workers_build_the_same(keep, graphs):
    got = batch_of(keep(graphs, workers=2))
    assert_same_graph(got, Batch.from_data_list(graphs))


def test_damaged_cache_is_not_served(tmp_path):
    cached([graph()] * 3, tmp_path / "c", progress=False)
    (segment,) = (tmp_path / "c").glob("segment-*")
    data = bytearray(segment.read_bytes())
    data[-40] ^= 1
    segment.write_bytes(data)
    with pytest.raises((ValueError, OSError)):
        cached([graph()] * 3, tmp_path / "c", progress=False)


# ---- As a dataset --------------------------------------------------------------------


class Small(InMemoryDataset):
    def __init__(self, graphs, transform=None):
        super().__init__(transform=transform)
        self.data, self.slices = self.collate(graphs)


@pytest.fixture(scope="module")
def ten():
    return [graph(n, 2 * n, y=n % 3, name=str(n)) for n in range(1, 11)]


@pytest.fixture(scope="module")
def dataset(ten, tmp_path_factory):
    return cached(ten, tmp_path_factory.mktemp("ten") / "c", progress=False)


SELECTIONS = [
    slice(2, 5),
    slice(None, None, 3),
    slice(0.5, None),
    [3, 1, 1, -1],
    (0, 2),
    torch.tensor([4, 2]),
    torch.arange(10) % 2 == 0,
    np.array([0, 9]),
    np.arange(10) > 6,
    [],
]


@pytest.mark.parametrize("index", SELECTIONS, ids=str)
def test_selection_is_pygs(dataset, ten, index):
    got = dataset[index]
    want = [ten[i] for i in Small(ten)[index].indices()]
    assert isinstance(got, pyg.CachedDataset) and isinstance(got, Dataset)
    assert len(got) == len(want)
    for mine, other in zip(got, want):
        assert_same_graph(mine, other)
    if len(got):
        assert_same_graph(batch_of(got), Batch.from_data_list(want))
        assert_same_graph(batch_of(got[-1:]), Batch.from_data_list([want[-1]]))


@pytest.mark.parametrize("index", [0, -1, np.int64(3), torch.tensor(2)], ids=str)
def test_one_index_gives_a_graph(dataset, ten, index):
    assert_same_graph(dataset[index], ten[int(index)])


def test_wrong_index_is_refused(dataset):
    for index in ("a", 1.5, None):
        with pytest.raises((IndexError, TypeError)):
            dataset[index]
    for index in (10, -11):
        with pytest.raises(IndexError):
            dataset[index]


def test_dataset_tells_what_pygs_tells(dataset, ten):
    other = Small(ten)
    assert dataset.num_features == other.num_features == 2
    assert dataset.num_edge_features == other.num_edge_features
    assert dataset.num_classes == other.num_classes == 3
    mine, summary = dataset.get_summary(), other.get_summary()
    mine.name = summary.name
    assert mine == summary
    assert repr(dataset) == "CachedDataset(10)"
    torch.manual_seed(3)
    shuffled, perm = dataset.shuffle(return_perm=True)
    assert_same_graph(shuffled[0], ten[perm[0]])


def test_graphs_own_their_memory(dataset):
    dataset[0].x.zero_()
    first = dataset[0]
    first.edge_index.add_(5)
    assert dataset[0].x.any()
    assert dataset[0].edge_index.max() < 1
    assert not first.x.requires_grad


def add_one(data):
    data.x = data.x + 1
    return data


def test_transform_is_applied_on_access(tmp_path, ten):
    source = Small(ten, add_one)
    dataset = cached(source, tmp_path / "c", progress=False)
    assert source.transform is dataset.transform is add_one
    assert_same_graph(dataset[2], source[2])
    assert_same_graph(dataset[1:][2], source[3])
    (batch,) = DataLoader(dataset, batch_size=10)
    assert_same_graph(batch, Batch.from_data_list(list(source)))
    assert trainfast.stats().fallbacks == {"pyg": {"a transform": 1}}
    again = cached(source, tmp_path / "c", transform=Constant(), progress=False)
    assert_same_graph(again[0], Constant()(source[0]))
    subset = torch.utils.data.Subset(source, [3, 1])
    picked = cached(subset, tmp_path / "d", progress=False)
    assert_same_graph(picked[1], source[1])
    assert picked.transform is add_one


def test_transform_none_stores_what_it_gives(tmp_path, ten):
    source = Small(ten, add_one)
    dataset = cached(source, tmp_path / "c", transform=None, progress=False)
    assert dataset.transform is None
    assert_same_graph(batch_of(dataset), Batch.from_data_list(list(source)))
    plain = cached(source, tmp_path / "c", progress=False)
    assert_same_graph(plain.get(2), source.get(2))


@pytest.mark.parametrize(
    "way", [copy.copy, copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))]
)
def test_copies_of_the_dataset_work(dataset, ten, way):
    batch_of(dataset)
    other = way(dataset[2:5])
    assert_same_graph(other[1], ten[3])
    assert_same_graph(batch_of(other), Batch.from_data_list(ten[2:5]))


def test_batch_does_all_that_pygs_does(dataset, ten):
    got, want = batch_of(dataset), Batch.from_data_list(ten)
    assert_same_examples(got, want)
    for index in (2, slice(1, 3), [0, 4], torch.tensor([1]), np.arange(10) < 2):
        mine, other = got[index], want[index]
        if not isinstance(mine, list):
            mine, other = [mine], [other]
        for pair_of in zip(mine, other, strict=True):
            assert_same_graph(*pair_of)
    for way in (copy.copy, copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))):
        assert_same_graph(way(got), way(want))
    assert_same_graph(got.to("cpu"), want.to("cpu"))
    assert_same_graph(got.clone(), want.clone())
    assert got.num_graphs == len(got) == got.batch_size == 10
    assert repr(got) == repr(want)
    got.x.mul_(2)
    got.ptr.zero_()
    assert torch.equal(got.get_example(3).edge_index, ten[3].edge_index)


def test_batch_of_cached_batches_is_pygs(dataset, ten):
    mine = [batch_of(dataset[:3]), batch_of(dataset[3:5])]
    other = [Batch.from_data_list(ten[:3]), Batch.from_data_list(ten[3:5])]
    assert_same_graph(Batch.from_data_list(mine), Batch.from_data_list(other))


def test_default_dtype_is_that_of_pygs_floats(keep):
    dataset = keep([graph(y=0.1), graph(y=0.2)])
    torch.set_default_dtype(torch.float64)
    try:
        batch = batch_of(dataset)
        assert batch.y.dtype == torch.float64
        assert batch.y.tolist() == [0.1, 0.2]
    finally:
        torch.set_default_dtype(torch.float32)


def test_loader_of_the_cache_makes_pygs_batches(dataset, ten):
    loader = trainfast.graph_cache.Loader(dataset.cache, batch_size=4, output="pyg")
    for i, batch in enumerate(loader):
        assert_same_graph(batch, Batch.from_data_list(ten[4 * i : 4 * i + 4]))
