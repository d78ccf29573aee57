"""Cached PyG datasets as datasets: what PyG's do, with a list of graphs as oracle."""

import copy
import os
import pickle

import numpy as np
import pytest
import torch

pytest.importorskip("torch_geometric", reason="an adapter's test")

from torch_geometric.data import Batch, Dataset, InMemoryDataset, OnDiskDataset
from torch_geometric.transforms import Constant

import trainfast.graph_cache
from tests.torch.pyg.graphs import (
    assert_same_examples,
    assert_same_graph,
    batch_of,
    graph,
)
from trainfast.graph_cache import StaleCacheError
from trainfast.torch import pyg
from trainfast.torch.pyg import DataLoader, cached


@pytest.fixture(autouse=True)
def fresh_stats():
    trainfast.reset_stats()


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


def test_default_dtype_is_that_of_pygs_floats(tmp_path):
    graphs = [graph(y=0.1), graph(y=0.2)]
    dataset = cached(graphs, tmp_path / "c", progress=False)
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


def test_on_disk_dataset_is_cached(tmp_path, ten):
    """PyG's own answer to data beyond memory, as what is read once."""
    source = OnDiskDataset(str(tmp_path / "db"), log=False)
    source.extend(ten[:4])
    source.append(ten[4])
    dataset = cached(source, tmp_path / "c", progress=False)
    source.close()
    assert len(dataset) == 5
    for got, want in zip(dataset, ten[:5], strict=True):
        assert_same_graph(got, want)
    assert_same_graph(batch_of(dataset[[4, 0]]), Batch.from_data_list([ten[4], ten[0]]))


@pytest.mark.parametrize("other", [slice(5, 10), slice(5, 8)])
def test_cache_of_another_dataset_is_said(tmp_path, ten, other):
    cached(ten[:5], tmp_path / "c", progress=False)
    with pytest.raises(StaleCacheError, match=r"changed: graph 0, .* another path"):
        cached(ten[other], tmp_path / "c", progress=False)


class BytesPath:
    def __init__(self, path):
        self.path = os.fsencode(path)

    def __fspath__(self):
        return self.path


@pytest.mark.parametrize("kind", [os.fsencode, BytesPath, str])
@pytest.mark.parametrize("name", ["c", "caché", "c\udcff"])
def test_path_is_what_open_takes(tmp_path, ten, kind, name):
    path = kind(tmp_path / name)
    for part in (ten[:5], ten[:5], ten):  # built, found and built on
        assert len(cached(part, path, progress=False)) == len(part)
    assert len(trainfast.graph_cache.open(path)) == 10
    assert [x.name for x in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("path", [5, None, "", b"", "a\0b", ["x"]])
def test_path_that_is_none_is_named(tmp_path, monkeypatch, ten, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError), match="path must "):
        cached(ten, path, progress=False)
    assert not list(tmp_path.iterdir())


def test_cache_of_the_same_dataset_is_used_without_a_word(tmp_path, ten, recwarn):
    for part in (ten[:5], ten[:5], ten, ten[:3]):
        cached(part, tmp_path / "c", progress=False)
    assert not recwarn.list


# ---- Caches of something else --------------------------------------------------------


class Doubled(torch.utils.data.Dataset):
    def __init__(self, graphs, factor=2):
        self.graphs, self.factor = graphs, factor

    def __len__(self):
        return len(self.graphs)

    def __getitem__(self, i):
        data = copy.copy(self.graphs[i])
        data.x = data.x * self.factor
        return data


class Halved(Doubled):
    def __getitem__(self, i):
        return self.graphs[i]


@pytest.fixture(scope="module")
def many():
    return [graph(n % 7 + 1, 2 * n, y=n, name=str(n)) for n in range(100)]


def others_of(graphs):
    yield "reversed", graphs[::-1]
    yield "one is gone", graphs[:50] + graphs[51:]
    yield "the second last is gone", graphs[:-2] + graphs[-1:]
    yield "filtered", [one for one in graphs if one.y % 10]
    yield "shuffled", [graphs[i] for i in np.random.default_rng(0).permutation(100)]
    yield "two changed places", [*graphs[:40], graphs[41], graphs[40], *graphs[42:]]
    yield "more after others", [*graphs[1:], *graphs]


@pytest.mark.parametrize("wrap", [list, Small, Doubled])
@pytest.mark.parametrize("named", [{}, {"transform_id": "v1"}])
def test_reordered_and_filtered_datasets_are_found(
    tmp_path, many, wrap, named, recwarn
):
    def get(graphs, **options):
        return cached(wrap(graphs), tmp_path / "c", progress=False, **named, **options)

    get(many)
    for what, others in others_of(many):
        with pytest.raises(StaleCacheError, match=r"changed: graph \d+, "):
            print(what, get(others))
    assert_same_graph(get(many)[41], wrap(many)[41])
    found = get(many[::-1], rebuild=True)
    assert_same_graph(batch_of(found), Batch.from_data_list([*wrap(many[::-1])]))
    assert not recwarn.list


def one_more(data):
    return add_one(add_one(copy.copy(data)))


def test_code_of_a_dataset_is_compared(tmp_path, many, monkeypatch):
    path = tmp_path / "c"
    cached(Doubled(many), path, progress=False)
    with pytest.raises(StaleCacheError, match="changed: graph 0, which differs in 'x'"):
        cached(Doubled(many, 3), path, progress=False)
    own = Doubled.__getitem__

    def same_for_these(self, i):
        return own(self, i) if i < 1000 else None

    monkeypatch.setattr(Doubled, "__getitem__", same_for_these)
    with pytest.raises(StaleCacheError, match=r"changed: the method `Doubled.__getit"):
        cached(Doubled(many), path, progress=False)
    for _ in range(2):
        found = cached(Doubled(many), path, progress=False, rebuild=False)
        assert_same_graph(found[3], Doubled(many)[3])
    assert len(cached(Doubled(many), path, progress=False)) == 100
    with pytest.raises(StaleCacheError):
        cached(Halved(many), path, progress=False)


def test_code_of_stored_transforms_is_compared(tmp_path, ten):
    source = Small(ten, one_more)
    cached(source, tmp_path / "c", transform=None, progress=False)
    cached(source, tmp_path / "c", transform=None, progress=False)
    for other in (add_one, lambda data: add_one(data=add_one(copy.copy(data)))):
        source.transform = other
        with pytest.raises(StaleCacheError, match=r"changed: the code of `transform`"):
            cached(source, tmp_path / "c", transform=None, progress=False)
    cached(Small(ten, one_more), tmp_path / "d", progress=False)
    cached(Small(ten, add_one), tmp_path / "d", progress=False)  # applied on access
    plain = Small(ten)
    plain.pre_transform = add_one
    with pytest.raises(StaleCacheError, match="`pre_transform`"):
        cached(plain, tmp_path / "d", progress=False)


def test_dataset_of_closed_cache_cannot_be_read(ten, tmp_path):
    made = cached(ten, tmp_path / "c", progress=False)
    loader = DataLoader(made, 5)
    assert len(list(loader)) == 2
    made.cache.close()
    with pytest.raises(ValueError, match="is closed; open it again"):
        made[0]
    with pytest.raises(ValueError, match="is closed; open it again"):
        list(loader)
