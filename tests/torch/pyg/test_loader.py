"""The DataLoader of PyG's signature, with PyG's own as oracle."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch

pytest.importorskip("torch_geometric", reason="an adapter's test")

from torch.utils.data import DistributedSampler, Subset, WeightedRandomSampler
from torch_geometric.data import Batch
from torch_geometric.loader import DataLoader as TheirLoader
from torch_geometric.loader import DynamicBatchSampler, ImbalancedSampler

import trainfast
from tests.torch.pyg.graphs import assert_same_graph, heterogeneous, homogeneous
from trainfast.torch.graphs import device as graph_device
from trainfast.torch.pyg import DataLoader, cached
from trainfast.torch.pyg import collate as pyg_collate
from trainfast.torch.pyg import loader as pyg_loader

ATTRS = [("y", "int", None, ()), ("c", "str", None, ()), ("pos", "nodes", None, (3,))]
ATTRS = [(name, kind, torch.float32, trailing) for name, kind, _, trailing in ATTRS]


@pytest.fixture(autouse=True)
def fresh_stats():
    trainfast.reset_stats()


@pytest.fixture(scope="module")
def graphs():
    return [homogeneous(seed, ATTRS, "x") for seed in range(23)]


@pytest.fixture(scope="module")
def dataset(graphs, tmp_path_factory):
    return cached(graphs, tmp_path_factory.mktemp("loader") / "c", progress=False)


def drain(loader, epochs=2, seed=7):
    torch.manual_seed(seed)
    # Not list(loader): that asks for a length, which some samplers do not know.
    return [[batch for batch in loader] for _ in range(epochs)]


def check(ours, theirs, native=True):
    """Two epochs of both, one after the other, from the same seed."""
    for mine, other in zip(drain(ours), drain(theirs), strict=True):
        for pair in zip(mine, other, strict=True):
            assert_same_graph(*pair)
    assert bool(trainfast.stats().calls) == native, trainfast.stats()


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 4},
        {"batch_size": 4, "drop_last": True},
        {"batch_size": 4, "shuffle": True},
        {"batch_size": 30, "shuffle": True, "follow_batch": ["pos", "c"]},
        {"batch_size": 5, "exclude_keys": ["pos", "y"], "follow_batch": ["x", "y"]},
        {"batch_size": 5, "exclude_keys": ["no such"], "follow_batch": ["nor this"]},
    ],
    ids=str,
)
def test_loader_gives_pygs_batches(dataset, graphs, options, workers):
    ours = DataLoader(dataset, num_workers=workers, **options)
    theirs = TheirLoader(graphs, **options)
    assert len(ours) == len(theirs)
    assert isinstance(ours, TheirLoader)
    check(ours, theirs)


def test_hetero_loader_gives_pygs_batches(tmp_path):
    graphs = [heterogeneous(seed, ATTRS) for seed in range(9)]
    dataset = cached(graphs, tmp_path / "c", progress=False)
    options = {"batch_size": 4, "shuffle": True, "follow_batch": ["x", "edge_attr"]}
    check(DataLoader(dataset, **options), TheirLoader(graphs, **options))


@pytest.mark.parametrize("workers", [0, 2])
def test_generator_gives_the_same_order(dataset, graphs, workers):
    def loader(kind, source, **more):
        generator = torch.Generator().manual_seed(3)
        return kind(source, 4, shuffle=True, generator=generator, **more)

    check(loader(DataLoader, dataset, num_workers=workers), loader(TheirLoader, graphs))


def test_random_numbers_after_an_epoch_are_the_same(dataset, graphs):
    drawn = []
    for loader in (DataLoader(dataset, 4, True), TheirLoader(graphs, 4, True)):
        torch.manual_seed(0)
        drawn.append([(len(batch), torch.rand(1).item()) for batch in loader])
    assert drawn[0] == drawn[1]


@pytest.mark.forks
def test_workers_that_persist_keep_their_seed(dataset, graphs):
    drawn = []
    options = {"num_workers": 1, "persistent_workers": True}
    for kind, source in ((DataLoader, dataset), (TheirLoader, graphs)):
        torch.manual_seed(0)
        loader = kind(source, 4, True, **options)
        drawn.append([(len([*loader]), torch.rand(1).item()) for _ in range(3)])
    assert drawn[0] == drawn[1]


class Reversed:
    """A sampler of one's own."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n)[::-1])

    def __len__(self):
        return self.n


class Tensors(Reversed):
    def __iter__(self):
        return (torch.tensor(i) for i in range(self.n))


SAMPLERS = {
    "reversed": lambda data: Reversed(len(data)),
    "tensors": lambda data: Tensors(len(data)),
    "list": lambda data: [3, 1, -1, 3],
    "array": lambda data: np.array([5, 2, 2]),
    "weighted": lambda data: WeightedRandomSampler(torch.ones(len(data)), 7),
    "rank 1 of 3": lambda data: DistributedSampler(data, 3, 1, seed=4),
    "imbalanced": lambda data: ImbalancedSampler(torch.arange(len(data)) % 3),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS.keys())
def test_sampler_is_honoured(dataset, graphs, make, workers):
    ours = DataLoader(dataset, 3, sampler=make(dataset), num_workers=workers)
    check(ours, TheirLoader(graphs, 3, sampler=make(graphs)))


BATCH_SAMPLERS = {
    "lists": lambda data: [[1, 2], [0], [5, 5, -2]],
    "tensors": lambda data: list(torch.arange(len(data)).split(4)),
    "arrays": lambda data: [np.array([1, 2], np.int32), np.array([4], np.uint8)],
    "tuples": lambda data: [(1, 2), (0, 3)],
    "ranges": lambda data: [range(3), range(5, 2, -1)],
    "nodes": lambda data: DynamicBatchSampler(data, 12, "node", shuffle=True),
    "edges": lambda data: DynamicBatchSampler(data, 9, "edge", num_steps=4),
    "skip": lambda data: DynamicBatchSampler(data, 4, skip_too_big=True, num_steps=3),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", BATCH_SAMPLERS.values(), ids=BATCH_SAMPLERS.keys())
def test_batch_sampler_is_honoured(dataset, graphs, make, workers):
    ours = DataLoader(dataset, batch_sampler=make(dataset), num_workers=workers)
    check(ours, TheirLoader(graphs, batch_sampler=make(graphs)))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("wrong", [[[0], [23]], [[0], [-24]], [[0], [1.5]], [[0], []]])
def test_wrong_index_is_an_error_in_its_turn(dataset, wrong, workers):
    iteration = iter(DataLoader(dataset, batch_sampler=wrong, num_workers=workers))
    assert next(iteration).num_graphs == 1
    with pytest.raises(IndexError, match=r"index must be|must be a list"):
        next(iteration)


class Broken(Reversed):
    def __iter__(self):
        yield from (0, 1, 2)
        raise RuntimeError("no more")


@pytest.mark.parametrize("workers", [0, 2])
def test_error_of_a_sampler_comes_after_its_batches(dataset, workers):
    sampler = Broken(9)
    iteration = iter(DataLoader(dataset, 1, sampler=sampler, num_workers=workers))
    assert [next(iteration).num_graphs for _ in range(3)] == [1, 1, 1]
    with pytest.raises(RuntimeError, match="no more"):
        next(iteration)


def test_sampler_is_not_read_ahead_without_threads(dataset):
    read = []
    sampler = map(lambda i: read.append(i) or i, range(10))
    iteration = iter(
        DataLoader(dataset, batch_sampler=[[i] for i in range(0)] or _Once(sampler))
    )
    next(iteration)
    assert read == [0]


class _Once:
    def __init__(self, indices):
        self.indices = indices

    def __iter__(self):
        return ([i] for i in self.indices)


# ---- Subsets and wrappers ------------------------------------------------------------

VIEWS = {
    "slice": lambda data: data[3:20:2],
    "shuffled": lambda data: data.shuffle(),
    "subset": lambda data: Subset(data, [4, 0, 4, -1]),
    "subset of a slice": lambda data: Subset(data[5:], torch.tensor([1, 3])),
    "subset of a subset": lambda data: Subset(Subset(data, range(9)), [8, 2]),
    "split": lambda data: torch.utils.data.random_split(data, [0.5, 0.5])[1],
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_view_is_batched_natively(dataset, view, workers):
    torch.manual_seed(1)
    part = view(dataset)
    items = [part[i] for i in range(len(part))]
    ours = DataLoader(part, 2, shuffle=True, num_workers=workers)
    check(ours, TheirLoader(items, 2, shuffle=True))


@pytest.mark.parametrize("loader", [TheirLoader, DataLoader])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.forks)])
def test_view_works_in_other_loaders(dataset, graphs, loader, workers):
    """PyG's over our dataset, and ours over the dataset in a wrapper it cannot see
    through."""
    both = torch.utils.data.ConcatDataset([dataset[:2], dataset[2:]])
    sources = [both, dataset] if loader is TheirLoader else [both]
    for source in sources:
        ours = loader(source, 4, num_workers=workers)
        check(ours, TheirLoader(graphs, 4), native=False)


def test_subset_with_a_wrong_index_is_an_error(dataset):
    with pytest.raises(IndexError):
        list(DataLoader(Subset(dataset, [23]), 1))


def test_what_is_not_native_is_counted(dataset, graphs):
    check(DataLoader(graphs, 4), TheirLoader(graphs, 4), native=False)
    assert trainfast.stats().fallbacks == {"pyg": {"dataset: list": 2}}
    iter(DataLoader(dataset, batch_size=None))
    assert trainfast.stats().fallbacks["pyg"]["batch_size=None"] == 1


def test_collate_fn_is_ignored_as_in_pyg(dataset, graphs):
    ours = DataLoader(dataset, 4, collate_fn=len)
    check(ours, TheirLoader(graphs, 4, collate_fn=len))
    ours.collate_fn = len
    assert list(ours) == [4, 4, 4, 4, 4, 3]
    assert trainfast.stats().fallbacks == {"pyg": {"a collate_fn of its own": 1}}


# ---- Life ----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_may_be_kept(dataset, graphs, workers):
    kept = list(DataLoader(dataset, 2, num_workers=workers)) * 2
    again = list(DataLoader(dataset, 2, num_workers=workers))
    for i, batch in enumerate(kept):
        assert_same_graph(batch, again[i % len(again)])
    assert len({batch.x.data_ptr() for batch in kept[:12] if batch.x.numel()}) > 6


@pytest.mark.parametrize("workers", [0, 2])
def test_several_iterations_at_once(dataset, graphs, workers):
    loader = DataLoader(dataset, 3, num_workers=workers)
    theirs = list(TheirLoader(graphs, 3))
    for i, (a, b) in enumerate(zip(loader, loader)):
        assert_same_graph(a, theirs[i])
        assert_same_graph(b, theirs[i])
    abandoned = iter(loader)
    next(abandoned)
    del abandoned
    assert len(iter(loader)) == len(loader) == 8


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_graph_fails_its_own_batch_only(graphs, tmp_path, workers):
    dataset = cached(graphs, tmp_path / "c", verify="always", progress=False)
    pos = graphs[9].pos.numpy().tobytes()
    assert len(pos) > 8
    (segment,) = (tmp_path / "c").glob("segment-*")
    data = segment.read_bytes()
    with segment.open("r+b") as file:
        file.seek(data.index(pos))
        file.write(bytes([pos[0] ^ 1]))
    iteration = iter(DataLoader(dataset, 1, num_workers=workers))
    damaged = []
    for i in range(23):
        try:
            want = Batch.from_data_list(graphs[i : i + 1])
            assert_same_graph(next(iteration), want)
        except (OSError, ValueError):
            damaged.append(i)
    assert damaged == [9]
    with pytest.raises(StopIteration):
        next(iteration)


@pytest.mark.parametrize("workers", [0, 2])
def test_iteration_and_batches_are_freed_when_dropped(dataset, workers):
    loader = DataLoader(dataset, 5, num_workers=workers)
    gc.disable()
    try:
        iteration = iter(loader)
        watched = [weakref.ref(iteration), *(weakref.ref(b) for b in iteration)]
        del iteration
        assert [watch() for watch in watched] == [None] * 6
    finally:
        gc.enable()


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.loads])
def test_copies_of_the_loader_work(dataset, graphs, way):
    loader = DataLoader(dataset, 4, follow_batch=["x"])
    list(loader)
    loader = way(pickle.dumps(loader)) if way is pickle.loads else way(loader)
    check(loader, TheirLoader(graphs, 4, follow_batch=["x"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "context", [pytest.param("fork", marks=pytest.mark.forks), "spawn"]
)
def test_torchs_own_workers_make_native_batches(dataset, graphs, context):
    """What happens when another framework takes our dataset and collate_fn."""
    ours = DataLoader(dataset, 4, follow_batch=["x"])
    other = torch.utils.data.DataLoader(
        ours.dataset,
        batch_sampler=ours.batch_sampler,
        collate_fn=ours.collate_fn,
        num_workers=1,
        multiprocessing_context=context,
    )
    theirs = TheirLoader(graphs, 4, follow_batch=["x"])
    for mine, want in zip(other, theirs, strict=True):
        assert_same_graph(mine, want)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_options_without_meaning_are_taken(dataset, graphs):
    options = {
        "worker_init_fn": print,
        "persistent_workers": True,
        "prefetch_factor": 3,
        "timeout": 5,
        "pin_memory": True,
        "multiprocessing_context": "spawn",
    }
    check(DataLoader(dataset, 4, num_workers=2, **options), TheirLoader(graphs, 4))


@pytest.mark.parametrize("workers", [0, 2])
def test_pinned_batches_are_pygs(dataset, graphs, workers, monkeypatch):
    """With a stand-in for a machine's pinned memory."""
    moved = []

    def move(core):
        moved.append(core)
        return graph_device.MovedBatch(core, core.arena.clone())

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(pyg_loader, "mover", lambda *_, pin_memory: move)
    options = {"follow_batch": ["c", "pos"]}
    ours = DataLoader(dataset, 4, pin_memory=True, num_workers=workers, **options)
    check(ours, TheirLoader(graphs, 4, **options))
    assert len(moved) == 12


def test_wrong_options_are_refused_as_in_torch(dataset):
    with pytest.raises(ValueError, match="batch_sampler option is mutually exclusive"):
        DataLoader(dataset, 4, batch_sampler=[[1]])
    with pytest.raises(ValueError, match="prefetch_factor option could only be"):
        DataLoader(dataset, prefetch_factor=2)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.forks)])
def test_pygs_loader_is_native_with_the_patch(dataset, graphs, workers, monkeypatch):
    options = {"follow_batch": ["x"], "exclude_keys": ["pos"]}
    want = [batch for batch in TheirLoader(graphs, 4, **options)]
    with trainfast.patch("pyg"):
        monkeypatch.setattr(pyg_collate, "_Job", None)  # not collated from graphs
        loader = TheirLoader(dataset, 4, num_workers=workers, **options)
        for got, other in zip(loader, want, strict=True):
            assert_same_graph(got, other)
    assert trainfast.stats().fallbacks == {}


# ---- Frameworks ----------------------------------------------------------------------


def model():
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1)


def train(loader, prepare=lambda *parts: parts):
    """A plain loop; returns the weights."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    net, optimizer, loader = prepare(net, optimizer, loader)
    torch.manual_seed(5)
    for _ in range(2):
        for batch in loader:
            sums = torch.zeros(batch.num_graphs, 1).index_add(
                0, batch.batch, net(batch.x)
            )
            loss = (sums.squeeze(1) - batch.y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.weight.detach()


def test_plain_loop_learns_the_same(dataset, graphs):
    ours = train(DataLoader(dataset, 4, shuffle=True))
    assert torch.equal(ours, train(TheirLoader(graphs, 4, shuffle=True)))


@pytest.mark.filterwarnings("ignore")
def test_lightning_learns_the_same(dataset, graphs, tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model()
            self.sizes = []

        def training_step(self, batch, _):
            self.sizes.append(batch.num_graphs)
            return (self.net(batch.x).sum() - batch.y.sum()).square() / len(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    def fit(loader):
        torch.manual_seed(5)
        module = Module()
        lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        ).fit(module, loader)
        return module

    ours = fit(DataLoader(dataset, 4, shuffle=True))
    theirs = fit(TheirLoader(graphs, 4, shuffle=True))
    assert ours.sizes == theirs.sizes == [4, 4, 4, 4, 4, 3] * 2
    assert torch.equal(ours.net.weight, theirs.net.weight)
    assert trainfast.stats().calls["pyg"]["loader"] == 2


def test_accelerate_learns_the_same(dataset, graphs):
    accelerate = pytest.importorskip("accelerate")

    def prepare(*parts):
        return accelerate.Accelerator(cpu=True).prepare(*parts)

    ours = train(DataLoader(dataset, 4, shuffle=True), prepare)
    assert torch.equal(ours, train(TheirLoader(graphs, 4, shuffle=True), prepare))
