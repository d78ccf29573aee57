"""Cached PyG datasets: what they store, and that all of it comes back."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch_geometric", reason="an adapter's test")

from torch_geometric.data import Batch, Data, HeteroData

import trainfast.graph_cache
from tests.torch.pyg.graphs import (
    assert_same_examples,
    assert_same_graph,
    attributes,
    batch_of,
    graph,
    heterogeneous,
    homogeneous,
)
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


@settings(max_examples=50)
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


@settings(max_examples=40)
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
        ({"a": torch.ones(1, requires_grad=True)}, "requires gradients; .detach"),
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
    with pytest.raises(ValueError, match="dataset is empty"):
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


class Doubled(Data):
    """Its edges are between more nodes than x has."""

    @property
    def num_nodes(self):
        return 2 * self.x.size(0)


def test_own_number_of_nodes_is_kept(keep):
    graphs = [graph(n, n, Doubled, my_index=torch.arange(2)) for n in (2, 3, 4)]
    _, got, _ = check(keep, graphs)
    assert got._inc_dict["edge_index"].tolist() == [0, 4, 10]


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
    assert 1 + 3 <= graphs.taken <= 1 + 20  # for its class, and to compare them
    assert_same_graph(again[19], graphs.graphs[19])
    graphs.graphs = [graph(n, 1) for n in range(1, 21)]
    changed = cached(graphs, tmp_path / "c", transform_id="edges", progress=False)
    assert_same_graph(changed[19], graphs.graphs[19])
    graphs.graphs = graphs.graphs[:5]
    assert len(cached(graphs, tmp_path / "c", transform_id="edges")) == 5


@pytest.mark.parametrize("note", [None, b"", b"[]", b'{"fingerprint": "0"}', b"\xff"])
def test_complete_cache_is_known_without_its_note(tmp_path, note):
    graphs = Counting([graph(n, n) for n in range(1, 21)])
    cached(graphs, tmp_path / "c", progress=False)
    path = tmp_path / "c/pyg.json"
    path.unlink() if note is None else path.write_bytes(note)
    graphs.taken = 0
    cached(graphs, tmp_path / "c", progress=False)
    assert 1 + 3 <= graphs.taken <= 1 + 20
    assert path.read_bytes() != note
    others = [graph(5, 1)] * 20
    cached(others, tmp_path / "c", transform_id=2, progress=False)
    assert_same_graph(cached(graphs, tmp_path / "c", progress=False)[3], graphs[3])


def test_dataset_that_grew_is_completed(tmp_path):
    graphs = [graph(n, n, a=1.0) for n in range(1, 13)]
    cached(Counting(graphs[:10]), tmp_path / "c", progress=False)
    counted = Counting(graphs)
    dataset = cached(counted, tmp_path / "c", progress=False)
    # for the class, the rules, what was missing, and a comparison
    assert 1 + 7 + 2 + 3 <= counted.taken <= 1 + 7 + 2 + 10
    assert_same_graph(batch_of(dataset), Batch.from_data_list(graphs))


def test_dataset_that_changed_its_kind_is_built_again(tmp_path):
    others = [graph(z=torch.ones(3)), Data(x=torch.ones(2, 2, 2)), heterogeneous(1, [])]
    for i, other in enumerate([graph(), *others, graph()]):
        dataset = cached([other] * 3, tmp_path / "c", transform_id=i, progress=False)
        assert_same_graph(batch_of(dataset), Batch.from_data_list([other] * 3))


def test_graphs_that_do_not_fit_those_kept_are_refused(tmp_path):
    cached([graph()] * 3, tmp_path / "c", progress=False)
    grown = [graph()] * 3 + [Data(x=torch.ones(2, 2, 2), edge_index=graph().edge_index)]
    with pytest.raises(ValueError, match="input 3: x must have 2 dimensions, got 3"):
        cached(grown, tmp_path / "c", progress=False)
    assert len(cached(grown[:3], tmp_path / "c", progress=False)) == 3


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
    dataset = cached(counted, tmp_path / "c", progress=False, rebuild=False)
    assert counted.taken <= 1 + 7 + 9 + 3
    assert_same_graph(batch_of(dataset), Batch.from_data_list(graphs))


@pytest.mark.forks
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
