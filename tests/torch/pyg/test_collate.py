"""trainfast.patch("pyg"): lists of graphs in RAM, with PyG's own collate as oracle."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch_geometric", reason="an adapter's test")

from torch_geometric.data import Batch, Data, HeteroData, InMemoryDataset
from torch_geometric.data.collate import collate as theirs
from torch_geometric.loader import DataLoader

import trainfast
from tests.torch.pyg.graphs import (
    assert_same,
    assert_same_examples,
    assert_same_graph,
    attributes,
    graph,
    heterogeneous,
    homogeneous,
)
from trainfast.torch.pyg import collate as pyg_collate


@pytest.fixture(autouse=True)
def fresh_stats():
    trainfast.reset_stats()


def check(graphs, cls=Batch, **options):
    """Both give the same, or the same error. Returns the reasons for fallbacks."""
    trainfast.reset_stats()
    try:
        want = theirs(cls, graphs, **options)
    except Exception as error:
        with pytest.raises(type(error)):
            pyg_collate.collate(cls, graphs, **options)
        return trainfast.stats().fallbacks.get("pyg", {})
    got = pyg_collate.collate(cls, graphs, **options)
    assert_same_graph(got[0], want[0])
    assert_same(got[1:], want[1:], "slices and increments")
    return trainfast.stats().fallbacks.get("pyg", {})


def batches(graphs, **options):
    """The same batch made by PyG and with the patch."""
    want = Batch.from_data_list(graphs, **options)
    with trainfast.patch("pyg"):
        return Batch.from_data_list(graphs, **options), want


FOLLOW = st.lists(
    st.sampled_from(["x", "edge_index", "y", "c", "edge_attr"]), max_size=2
)


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=5),
    attributes(),
    st.sampled_from(["x", "given", "guess"]),
    FOLLOW,
    st.lists(st.sampled_from(["x", "y", "c", "edge_attr"]), max_size=1),
)
@pytest.mark.filterwarnings("ignore:Unable to accurately infer")
def test_collate_of_random_graphs_equals_pygs(seeds, attrs, nodes, follow, exclude):
    graphs = [homogeneous(seed, attrs, nodes) for seed in seeds]
    reasons = check(graphs, follow_batch=follow, exclude_keys=exclude)
    assert set(reasons) <= {"IndexError in collate", "RuntimeError in collate"}


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=4),
    attributes(),
    FOLLOW,
    st.booleans(),
)
def test_collate_of_random_hetero_graphs_equals_pygs(seeds, attrs, follow, increment):
    graphs = [heterogeneous(seed, attrs) for seed in seeds]
    reasons = check(graphs, follow_batch=follow, increment=increment)
    assert set(reasons) <= {"RuntimeError in collate"}


@pytest.mark.parametrize(
    "more",
    [
        {"my_index": torch.tensor([0, 2])},
        {"my_index": torch.tensor(1)},
        {"my_index": 5},
        {"face": torch.tensor([[0, 1], [1, 2], [2, 0]])},
        {"small_index": torch.tensor([0, 250], dtype=torch.uint8)},
        {"float_index": torch.tensor([0.5, 1.5], dtype=torch.float16)},
        {"bool_index": torch.tensor([True, False])},
        {"x_batch": torch.tensor([0, 0, 1])},
        {"batch": torch.tensor([0, 1, 1])},
        {"ptr": torch.tensor([0, 3])},
        {"num_nodes": 7},
        {"node_index": torch.tensor([[0, 1]])},
        {"adj": torch.eye(3).to_sparse()},
        {"words": ["a", "b"], "blob": b"ab", "name": "n"},
        {"nested": {"a": torch.ones(2), "b": {"c": 1}}},
        {"several": [torch.ones(2), torch.ones(3, 1)]},
        {"both": (1, 2.5)},
        {"frozen": torch.nn.Parameter(torch.ones(2))},
        {"empty": torch.empty(0), "also": torch.empty(0, 4)},
        {"half": torch.ones(2, dtype=torch.bfloat16), "c": torch.ones(1) * 1j},
        {"far": torch.arange(6).reshape(2, 3).t()},
    ],
    ids=lambda more: next(iter(more)),
)
def test_collate_of_unusual_attribute_equals_pygs(more):
    graphs = [graph(3, 4, **more), graph(4, 2, **more), graph(2, 0, **more)]
    check(graphs)
    check(graphs, follow_batch=list(more))
    check(graphs, increment=False, add_batch=False)
    check([graphs[0]])


def test_follow_batch_of_lists_and_dicts_equals_pygs():
    more = {"several": [torch.ones(2), torch.ones(3)], "named": {"a": torch.ones(1)}}
    more["words"] = "w"
    check([graph(**more)] * 3, follow_batch=["several", "named", "words"])


def test_collate_of_differing_graphs_equals_pygs():
    longer = graph(5, 1, extra=1.0)
    check([graph(), longer])  # the first one's attributes
    assert check([longer, graph()]) == {"KeyError in collate": 1}
    turned = Data(edge_index=graph().edge_index, x=graph().x)
    check([graph(), turned])
    check([Data(x=torch.ones(2, 1), pos=torch.ones(3, 1)), Data(x=torch.ones(1, 1))])
    check([Data(x=torch.ones(2, 1), n=1), Data(x=torch.ones(2, 1), n=1.5)])
    check([Data(x=torch.ones(2, 1)), Data(x=torch.ones(2, 1, dtype=torch.int64))])
    check([Data(x=torch.ones(2, 1)), Data(x=torch.ones(2, 2))])
    index = torch.zeros(2, 1, dtype=torch.int32)
    check([graph(), Data(x=torch.ones(2, 2), edge_index=index)])
    check([])


def test_collate_of_two_number_attributes_takes_the_first():
    a = Data(pos=torch.ones(2, 1), x=torch.ones(3, 1), my_index=torch.tensor([0]))
    b = Data(x=torch.ones(3, 1), pos=torch.ones(2, 1), my_index=torch.tensor([0]))
    for graphs in ([a, b], [b, a], [a, a]):
        check(graphs)
        check(graphs, exclude_keys=["x"])


class OwnIncrement(Data):
    def __inc__(self, key, value, *args, **kwargs):
        return 10 if key == "edge_index" else super().__inc__(key, value, *args)


class OwnDimension(Data):
    def __cat_dim__(self, key, value, *args, **kwargs):
        return None if key == "y" else super().__cat_dim__(key, value, *args)


class Named(Data):
    """Nothing of its own but a name."""


class Begun(Data):
    def __init__(self, needed=None, **more):
        super().__init__(**more)
        self.version = 3


class Doubled(Data):
    @property
    def num_nodes(self):
        return 2 * self.x.size(0)


@pytest.mark.parametrize("kind", [OwnIncrement, OwnDimension, Doubled])
def test_class_with_rules_of_its_own_is_left_to_pyg(kind):
    graphs = [
        kind(x=g.x, edge_index=g.edge_index, y=g.x[0]) for g in map(graph, (2, 3))
    ]
    reasons = check(graphs)
    assert len(reasons) == 1 and "of its own" in next(iter(reasons))
    assert trainfast.stats().calls == {}


@pytest.mark.parametrize("kind", [Named, Begun])
def test_class_without_rules_of_its_own_keeps_its_name(kind):
    graphs = [kind(x=g.x, edge_index=g.edge_index) for g in map(graph, (2, 3))]
    assert check(graphs) == {}
    got, want = batches(graphs)
    assert type(got).__name__ == f"{kind.__name__}Batch"
    assert_same_graph(got, want)


def test_rule_replaced_in_pygs_own_class_is_obeyed(monkeypatch):
    rule = Data.__inc__
    monkeypatch.setattr(Data, "__inc__", lambda *args: 100 * (rule(*args) > 0))
    assert check([graph(2), graph(3)]) == {"a class with __inc__ of its own": 1}


def test_batches_of_batches_equal_pygs():
    inner = [Batch.from_data_list([graph(2), graph(3)]) for _ in range(2)]
    got, want = batches(inner)
    assert_same_graph(got, want)


def test_hetero_graphs_with_differing_types_equal_pygs():
    full, less = heterogeneous(1, []), heterogeneous(2, [])
    del less["b", "in", "b"]
    check([less, full])
    check([full, less])
    bare = HeteroData()
    bare["a"].x = torch.ones(2, 1)
    bare["a", "to", "c"].edge_index = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.warns(UserWarning, match="infer 'num_nodes'"):
        check([bare, bare])
    flat = copy.copy(full)
    flat["a", "to", "b"].edge_index = torch.zeros(3, dtype=torch.int64)
    check([flat, flat])


def test_batch_does_all_that_pygs_does():
    graphs = [graph(n, n) for n in (2, 3, 4)]
    got, want = batches(graphs, follow_batch=["edge_index"])
    assert_same_graph(got, want)
    assert_same_examples(got, want)
    assert_same_graph(got[1], want[1])
    for way in (copy.copy, copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))):
        assert_same_graph(way(got), way(want))
    assert_same_graph(got.to("cpu"), want.to("cpu"))
    assert got.num_graphs == 3 and got.num_nodes == want.num_nodes
    assert repr(got) == repr(want)


def test_batch_shares_no_memory_with_its_graphs():
    graphs = [graph(), graph()]
    got, _ = batches(graphs[:1])
    got.x.zero_()
    got.edge_index.zero_()
    assert graphs[0].x.any() and graphs[0].edge_index.any()
    ptr = got._slice_dict["x"].clone()
    got.ptr += 5
    assert torch.equal(got._slice_dict["x"], ptr)


def test_gradients_flow_through_the_batch():
    leaves = [torch.ones(2, 1, requires_grad=True) for _ in range(2)]
    got, _ = batches([Data(x=leaf) for leaf in leaves])
    got.x.sum().backward()
    assert all(torch.equal(leaf.grad, torch.ones(2, 1)) for leaf in leaves)


def test_batch_is_freed_when_it_is_dropped():
    gc.disable()
    try:
        got = pyg_collate.collate(Batch, [graph(), graph()])
        watch = weakref.ref(got[0])
        del got
        assert watch() is None
    finally:
        gc.enable()


class Small(InMemoryDataset):
    def __init__(self, graphs):
        super().__init__()
        self.data, self.slices = self.collate(graphs)


@pytest.mark.filterwarnings("ignore")
def test_in_memory_dataset_is_the_same():
    graphs = [graph(n, n, y=n, name=str(n)) for n in (2, 3, 4)]
    want = Small(graphs)
    with trainfast.patch("pyg") as report:
        assert any("in_memory_dataset" in change.old for change in report.changes)
        trainfast.reset_stats()
        got = Small(graphs)
        assert trainfast.stats().calls == {"pyg": {"collate": 1}}
    assert_same_graph(got._data, want._data)
    assert_same(got.slices, want.slices, "slices")
    for mine, other in zip(got, want):
        assert_same_graph(mine, other)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.forks)])
def test_loader_over_list_gives_pygs_batches(workers):
    graphs = [graph(n, n, y=float(n)) for n in range(1, 8)]
    options = {"batch_size": 3, "follow_batch": ["x"], "num_workers": workers}
    want = list(DataLoader(graphs, **options))
    with trainfast.patch("pyg"):
        got = list(DataLoader(graphs, **options))
    for mine, other in zip(got, want, strict=True):
        assert_same_graph(mine, other)
        assert mine.x.is_shared() == other.x.is_shared() == bool(workers)


def test_patch_is_taken_back():
    from torch_geometric.data import batch, in_memory_dataset

    before = batch.collate, in_memory_dataset.collate
    with trainfast.patch("pyg"):
        assert batch.collate is pyg_collate.collate
        assert in_memory_dataset.collate is pyg_collate.collate_dataset
    assert (batch.collate, in_memory_dataset.collate) == before
    assert before[0] is theirs


def test_patch_without_names_leaves_pyg_alone():
    from torch_geometric.data import batch

    with trainfast.patch():
        assert batch.collate is theirs


def test_default_device_that_is_not_the_cpu_is_left_to_pyg():
    graphs = [graph(), graph()]
    with torch.device("meta"), pytest.raises(RuntimeError, match="meta"):
        pyg_collate.collate(Batch, graphs)  # PyG's own words
    reason = "a default device that is not the CPU"
    assert trainfast.stats().fallbacks == {"pyg": {reason: 1}}
