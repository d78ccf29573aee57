"""What PyG's users write around a dataset: the cached one does as the one it is of."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("torch_geometric", reason="an adapter's test")

from torch.utils.data import ConcatDataset, Subset
from torch.utils.data import DataLoader as TorchLoader
from torch_geometric.data import Batch, Data, Dataset, HeteroData, InMemoryDataset
from torch_geometric.loader import DataLoader as TheirLoader

import trainfast.graph_cache
from tests.torch.pyg.graphs import assert_same, assert_same_graph, batch_of, graph
from trainfast.torch import pyg
from trainfast.torch.pyg import DataLoader, cached


@pytest.fixture(scope="module")
def ten():
    return [graph(n, 2 * n, y=n % 3, name=str(n)) for n in range(1, 11)]


@pytest.fixture
def dataset(ten, tmp_path):
    return cached(ten, tmp_path / "c", progress=False)


def assert_same_batches(got, want):
    assert len(got) == len(want)
    for mine, other in zip(got, want):
        assert_same_graph(mine, other)


# ---- collate_fn of one's own -------------------------------------------------------


def doubled(graphs):
    for data in graphs:
        data.x = data.x * 2
    return Batch.from_data_list(graphs)


def first_zeroed(graphs):
    graphs[0].x.zero_()
    return Batch.from_data_list(graphs)


def numbered(graphs):
    for i, data in enumerate(graphs):
        data.number = i
    return Batch.from_data_list(graphs)


def as_a_list(graphs):
    graphs.append(graphs[0])
    graphs.sort(key=lambda data: -data.num_nodes)
    graphs[0], graphs[1] = graphs[1], graphs[0]
    del graphs[-1]
    assert graphs == graphs[:] and graphs != [] and repr(graphs) == repr(graphs[:])
    assert len(graphs.copy()) == len(graphs) == len([] + graphs)  # noqa: RUF005
    return Batch.from_data_list(graphs * 2 + graphs[:1])


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("collate", [doubled, first_zeroed, numbered, as_a_list])
def test_collate_fn_that_changes_graphs_keeps_its_changes(
    dataset, ten, collate, patched
):
    copies = [data.clone() for data in ten]
    want = list(TorchLoader(copies, batch_size=3, collate_fn=collate))
    if patched:
        trainfast.patch("pyg")
    try:
        got = list(TorchLoader(dataset, batch_size=3, collate_fn=collate))
    finally:
        trainfast.unpatch()
    assert_same_batches(got, want)


# ---- subclasses --------------------------------------------------------------------


class Shifted(pyg.CachedDataset):
    def get(self, idx):
        data = super().get(idx)
        data.x = data.x + 100
        return data


class Relabelled(pyg.CachedDataset):
    def __getitem__(self, index):
        data = super().__getitem__(index)
        if not isinstance(data, pyg.CachedDataset):
            data.y = -data.y
        return data


@pytest.mark.parametrize("kind", [Shifted, Relabelled])
@pytest.mark.parametrize("loader", [DataLoader, TheirLoader])
def test_subclass_with_graphs_of_its_own_is_obeyed(dataset, kind, loader):
    own = kind(dataset.cache)
    want = Batch.from_data_list([own[i] for i in range(10)])
    (got,) = loader(own, batch_size=10)
    assert_same_graph(got, want)
    (got,) = loader(Subset(own, [3, 1]), batch_size=10)
    assert_same_graph(got, Batch.from_data_list([own[3], own[1]]))


# ---- what __inc__ says ---------------------------------------------------------------


class Told(Data):
    """Its `foo` is incremented by what the class says at the time."""

    says = 0

    def __inc__(self, key, value, *args, **kwargs):
        own = super().__inc__(key, value, *args, **kwargs)
        return type(self).says if key == "foo" else own


def told(foo):
    return [Told(x=torch.ones(n, 1), foo=foo) for n in range(1, 4)]


@pytest.mark.parametrize(
    "says",
    [1.5, 2.0, None, "1", (1, 2), torch.tensor(1.5), np.float64(2), [None], [1.5]],
    ids=repr,
)
def test_increment_that_is_no_integer_is_refused(tmp_path, monkeypatch, says):
    monkeypatch.setattr(Told, "says", says)
    with pytest.raises(NotImplementedError, match="'foo' must "):
        cached(told(torch.tensor([0, 1])), tmp_path / "c", progress=False)


@pytest.mark.parametrize(
    "says",
    [[[3], [1]], ((3,), (1,)), torch.tensor([[3], [1]]), np.int64(2)],
    ids=repr,
)
def test_increment_in_other_words_is_pygs(tmp_path, monkeypatch, says):
    monkeypatch.setattr(Told, "says", says)
    graphs = told(torch.tensor([[0, 1], [1, 0]]))
    dataset = cached(graphs, tmp_path / "c", progress=False)
    assert_same_graph(batch_of(dataset), Batch.from_data_list(graphs))


REPLACED = """
import sys, torch
from torch_geometric.data import Batch, Data
own = Data.__inc__
Data.__inc__ = lambda self, key, *args, **kwargs: (
    10 if key == "edge_index" else own(self, key, *args, **kwargs)
)
edges = torch.tensor([[0, 1], [1, 0]])
graphs = [Data(x=torch.ones(2, 1), edge_index=edges) for _ in range(3)]
want = Batch.from_data_list(graphs).edge_index
assert want.max() == 21
import trainfast
dataset = trainfast.torch.pyg.cached(graphs, sys.argv[1], progress=False)
(got,) = trainfast.torch.pyg.DataLoader(dataset, batch_size=3)
assert torch.equal(got.edge_index, want)
trainfast.patch("pyg")
assert torch.equal(Batch.from_data_list(graphs).edge_index, want)
"""


@pytest.mark.slow
def test_rule_that_was_replaced_before_us_is_obeyed(tmp_path):
    script = [sys.executable, "-c", REPLACED, str(tmp_path / "c")]
    subprocess.run(script, check=True, cwd=Path(trainfast.__file__).parents[1])


# ---- names and types -----------------------------------------------------------------


def typed(n):
    data = HeteroData(y=torch.tensor([n]))
    data["paper"].x, data["paper"].y = torch.ones(n, 2), torch.arange(n)
    data["author"].x = torch.ones(n + 1, 3)
    data["author", "writes", "paper"].edge_index = torch.zeros(2, n, dtype=torch.long)
    return data


@pytest.mark.parametrize(
    "options", [{"exclude_keys": ["y"]}, {"follow_batch": ["y"]}], ids=str
)
def test_name_of_a_type_and_of_the_whole_graph_means_both(tmp_path, options):
    graphs = [typed(n) for n in range(1, 4)]
    dataset = cached(graphs, tmp_path / "c", progress=False)
    assert_same_graph(
        batch_of(dataset, **options), Batch.from_data_list(graphs, **options)
    )


@pytest.mark.parametrize("without", [0, 1])
def test_type_that_some_graphs_lack_is_not_there(tmp_path, without):
    graphs = [typed(n) for n in range(1, 4)]
    del graphs[without]["author"], graphs[without]["author", "writes", "paper"]
    dataset = cached(graphs, tmp_path / "c", progress=False)
    for mine, other in zip(dataset, graphs, strict=True):
        assert_same_graph(mine, other)
    for size, options in ((2, {}), (3, {"exclude_keys": ["x", "edge_index"]})):
        got = list(DataLoader(dataset, batch_size=size, **options))
        want = list(TheirLoader(graphs, batch_size=size, **options))
        assert_same_batches(got, want)


def test_graphs_own_batch_vector_is_not_that_of_following(tmp_path):
    more = {"x_batch": torch.tensor([5])}
    graphs = [graph(n, 2, **more) for n in (1, 3)]
    dataset = cached(graphs, tmp_path / "c", progress=False)
    want = Batch.from_data_list(graphs, follow_batch=["x"])
    assert_same_graph(batch_of(dataset, follow_batch=["x"]), want)


@pytest.mark.parametrize("more", [{}, {"y": 1}])
def test_nodes_that_only_num_nodes_tells_are_batched(tmp_path, more):
    graphs = [Data(num_nodes=n, **more) for n in (2, 0, 3)]
    dataset = cached(graphs, tmp_path / "c", progress=False)
    assert_same_graph(batch_of(dataset), Batch.from_data_list(graphs))


def test_conjugated_views_are_stored_as_their_values(tmp_path, recwarn):
    values = torch.arange(3) + 1j
    graphs = [Data(num_nodes=n, a=values.conj(), b=values.conj().imag) for n in (1, 2)]
    for _ in range(2):  # built, and found again
        dataset = cached(graphs, tmp_path / "c", progress=False)
    assert torch.equal(dataset[1].a, values.conj().resolve_conj())
    assert torch.equal(dataset[1].b, torch.full((3,), -1.0))
    assert not recwarn.list


def test_graphs_without_nodes_are_stored_without_a_word(tmp_path, recwarn):
    cached([Data(y=n) for n in range(3)], tmp_path / "c", progress=False)
    assert not recwarn.list


# ---- what the dataset says of all its graphs -----------------------------------------


class Small(InMemoryDataset):
    def __init__(self, graphs, transform=None):
        super().__init__(transform=transform)
        self.data, self.slices = self.collate(graphs)


def test_attribute_of_all_graphs_is_pygs(tmp_path):
    graphs = [graph(n, 2 * n, y=torch.rand(1, 3), k=n, f=n / 2) for n in range(1, 6)]
    theirs = Small(graphs)
    ours = cached(theirs, tmp_path / "c", progress=False)
    for name in ("x", "y", "k", "f", "edge_index"):
        for part in (slice(None), slice(1, 3), [4, 0]):
            got, want = getattr(ours[part], name), getattr(theirs[part], name)
            assert_same(got, want)
    assert hasattr(ours, "y") and not hasattr(ours, "edge_attr")
    for name in ("edge_attr", "data", "_data", "get_idx_split"):
        with pytest.raises(AttributeError, match="nor have all its graphs"):
            getattr(ours, name)


class Other(Data):
    pass


@pytest.mark.parametrize(
    "change",
    [
        lambda graph: graph.x.requires_grad_(),
        lambda graph: graph.to("meta"),
        lambda graph: object.__setattr__(graph, "__class__", Other),
    ],
    ids=["gradients", "device", "class"],
)
def test_first_graph_that_somebody_changed_is_not_batched_from_the_cache(
    dataset, change
):
    picked = dataset.__getitems__([1, 2])
    change(picked[0])
    assert picked.batch((), ()) is None
    assert dataset.__getitems__([1, 2]).batch((), ()) is not None


def test_dataset_that_draws_is_used_again_under_a_name_alone(tmp_path):
    class Drawing(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return Data(x=torch.rand(4, 2))

    with pytest.warns(UserWarning, match="is another each time"):
        cached(Drawing(), tmp_path / "c", progress=False)
    with pytest.raises(ValueError, match=r"graph 0 .'x' differs.*transform_id="):
        cached(Drawing(), tmp_path / "c", progress=False)
    with pytest.warns(UserWarning, match="is another each time"):
        cached(Drawing(), tmp_path / "d", transform_id=1, progress=False)
    assert len(cached(Drawing(), tmp_path / "d", transform_id=1, progress=False)) == 3


def doubled_y(data):
    data.y = 2 * data.y
    return data


def test_place_beyond_the_cache_is_an_index_error(dataset, ten):
    assert_same_graph(dataset.get(-1), ten[-1])
    for place in (10, -11):
        with pytest.raises(IndexError):
            dataset.get(place)


def test_num_classes_of_labels_that_are_not_all_there_are_pygs(tmp_path):
    for i, first in enumerate(({}, {"y": torch.tensor([7])})):
        graphs = [graph(3, 4, **first), graph(3, 4, y=torch.tensor([2])), graph(3, 4)]
        dataset = cached(graphs, tmp_path / str(i), progress=False)
        assert dataset.num_classes == (8 if first else 3)
    assert cached([graph(2, 2)], tmp_path / "2", progress=False).num_classes == 0


def test_num_classes_of_a_part_are_pygs(tmp_path):
    graphs = [graph(3, 4, y=torch.tensor([n % 4])) for n in range(8)]
    for i, transform in enumerate((None, doubled_y)):
        theirs = Small(graphs, transform)
        ours = cached(theirs, tmp_path / str(i), progress=False)
        for part in (slice(None), slice(2), [1]):
            assert ours[part].num_classes == theirs[part].num_classes


# ---- datasets that draw --------------------------------------------------------------


class Drawn(Dataset):
    def len(self):
        return 5

    def get(self, idx):
        return graph(3, 4, drawn=torch.rand(2))


def test_dataset_that_draws_is_said(tmp_path):
    with pytest.warns(UserWarning, match="graph 0 is another each time .'drawn'"):
        cached(Drawn(), tmp_path / "c", progress=False)


def jittered(data):
    data.x = data.x + torch.rand_like(data.x)
    return data


def test_transform_of_all_parts_is_applied_on_access(tmp_path, ten, recwarn):
    parts = ConcatDataset([Small(ten, jittered), Small(ten[:3], jittered)])
    dataset = cached(parts, tmp_path / "c", progress=False)
    assert dataset.transform is jittered and len(dataset) == 13
    assert not torch.equal(dataset[11].x, dataset[11].x)
    assert_same_graph(dataset.get(11), Small(ten)[1])
    assert not recwarn.list


def test_error_of_pygs_loader_is_its_own(tmp_path, ten):
    dataset = cached(Small(ten, jittered), tmp_path / "c", progress=False)
    with pytest.raises(AssertionError) as caught:
        iter(DataLoader(dataset, timeout=1))
    # torch 2.6 has it in the statement alone
    assert "timeout == 0" in f"{caught.value} {caught.traceback[-1].statement}"
    assert caught.value.__context__ is None


# ---- paths ---------------------------------------------------------------------------


def test_cache_is_found_from_another_directory(tmp_path, monkeypatch, ten):
    monkeypatch.chdir(tmp_path)
    dataset = cached(ten, "c", progress=False)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert_same_graph(pickle.loads(pickle.dumps(dataset))[3], ten[3])


def test_tilde_is_the_home(tmp_path, monkeypatch, ten):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    cached(ten, "~/c", progress=False)
    assert len(trainfast.graph_cache.open(tmp_path / "home" / "c")) == 10
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize("kind", [set, iter, lambda batch: dict.fromkeys(batch).keys()])
def test_batch_of_any_kind_is_taken(dataset, ten, kind):
    for part, places in ((dataset, (1, 2)), (dataset[::2], (2, 4))):
        (got,) = DataLoader(part, batch_sampler=[kind([1, 2])])
        assert_same_graph(got, Batch.from_data_list([ten[i] for i in places]))
