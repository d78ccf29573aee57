"""trainfast.patch("pyg"): graphs of neighbours without pyg-lib and torch-cluster."""

import inspect
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("torch_geometric", reason="an adapter's test")

import torch_geometric
from torch_geometric import nn
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import Compose, KNNGraph, RadiusGraph

import trainfast
from tests.neighbours import reference
from trainfast.torch import pyg
from trainfast.torch.pyg import neighbours

NAMES = ("radius_graph", "knn_graph", "radius", "knn")
THEIRS = {name: getattr(nn, name) for name in NAMES}

needs_library = pytest.mark.skipif(
    not neighbours._has_library(), reason="needs pyg-lib or torch-cluster"
)


@pytest.fixture
def patched():
    with trainfast.patch("pyg"):
        yield


def same(got, want):
    assert got.dtype == torch.int64 and got.is_contiguous()
    assert got.tolist() == want.tolist()


def edge_set(edges):
    return set(map(tuple, edges.t().tolist()))


def positions(n, dim=2, seed=0):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))


BATCH = torch.tensor([0] * 20 + [2] * 35 + [3] * 5)


# ---- Under patch ---------------------------------------------------------------------


@pytest.mark.slow
def test_transforms_and_functions_work_without_pyg_lib(tmp_path):
    """In a process that cannot import either library, imported before and after."""
    script = """
import sys
sys.modules["pyg_lib"] = sys.modules["torch_cluster"] = None
import torch
from torch_geometric.nn import radius_graph as early
from torch_geometric.data import Data
import trainfast
pos = torch.tensor([[0.0, 0.0], [1.0, 0.0], [3.0, 0.0]])
for call in (early, lambda *a: torch_geometric.nn.radius_graph(*a)):
    try:
        call(pos, 1.5)
    except (ImportError, AttributeError, NameError):
        pass
    else:
        raise SystemExit("PyG's own function was to fail")
    trainfast.patch("pyg")
import torch_geometric
import torch_geometric.transforms as T
from torch_geometric.nn import knn, knn_graph, radius, radius_graph
from torch_geometric.nn.pool import knn as pooled
assert early is radius_graph and pooled is knn
assert early(pos, 1.5).tolist() == [[1, 0], [0, 1]]
assert knn_graph(pos, 1).tolist() == [[1, 0, 1], [0, 1, 2]]
assert knn(pos, pos[2:], 2).tolist() == [[0, 0], [1, 2]]
assert radius(pos, pos[:1], 1.5).tolist() == [[0, 0], [0, 1]]
assert T.RadiusGraph(1.5)(Data(pos=pos)).edge_index.tolist() == [[1, 0], [0, 1]]
assert T.KNNGraph(1)(Data(pos=pos)).edge_index.tolist() == [[1, 0, 1], [0, 1, 2]]
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_place_is_patched_and_restored():
    holders = [nn, nn.pool, torch_geometric.nn.models.schnet, nn.models.dimenet]
    holders.append(torch_geometric.nn.unpool.knn_interpolate)
    bound = [
        (module, name) for module in holders for name in NAMES if hasattr(module, name)
    ]
    bound = [(m, name) for m, name in bound if inspect.isfunction(getattr(m, name))]
    assert len(bound) >= 10
    with trainfast.patch("pyg"):
        for module, name in bound:
            assert getattr(module, name) is getattr(pyg, name), (module, name)
    for module, name in bound:
        assert getattr(module, name) is THEIRS[name], (module, name)


def test_report_names_the_places():
    with trainfast.patch("pyg") as report:
        assert not report.skipped
        places = {c.old: c.places for c in report.changes}
    found = places["torch_geometric.nn.pool.radius_graph"]
    assert found[0] == "torch_geometric.nn.pool.radius_graph"
    assert {"torch_geometric.nn.radius_graph"} <= set(found)


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_those_of_pyg(name):
    def arguments(function):
        return [
            (p.name, p.kind, p.default)
            for p in inspect.signature(function).parameters.values()
        ]

    assert arguments(getattr(pyg, name)) == arguments(THEIRS[name])


def test_calls_are_counted(patched):
    nn.radius_graph(positions(9), 1.0)
    nn.knn(positions(9), positions(3), 2)
    assert trainfast.stats().calls["pyg"] == {"radius_graph": 1, "knn": 1}


# ---- Transforms ----------------------------------------------------------------------


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_radius_graph_transform(patched, loop, flow):
    pos = positions(60)
    data = Data(pos=pos, edge_attr=torch.ones(3))
    got = RadiusGraph(0.8, loop, 5, flow)(data)
    options = {"loop": loop, "max_num_neighbors": 5, "flow": flow, "boundary": "<"}
    same(got.edge_index, reference.radius_graph(pos.numpy(), 0.8, **options))
    assert got.edge_attr is None


@pytest.mark.parametrize("loop", [False, True])
def test_transforms_of_a_batch(patched, loop):
    graphs = [Data(pos=positions(n, 3, n)) for n in (5, 1, 30)]
    batch = Batch.from_data_list(graphs)
    got = RadiusGraph(1.5, loop)(batch.clone()).edge_index
    want = reference.radius_graph(
        batch.pos.numpy(),
        1.5,
        batch=batch.batch,
        loop=loop,
        max_num_neighbors=32,
        boundary="<",
    )
    same(got, want)
    got = KNNGraph(3, loop=loop)(batch.clone()).edge_index
    same(got, reference.knn_graph(batch.pos.numpy(), 3, batch=batch.batch, loop=loop))


def test_undirected_knn_graph_transform(patched):
    pos = positions(40)
    got = KNNGraph(k=4, force_undirected=True)(Data(pos=pos))
    one_way = edge_set(torch.from_numpy(reference.knn_graph(pos.numpy(), 4).copy()))
    both = one_way | {(b, a) for a, b in one_way}
    assert edge_set(got.edge_index) == both


def test_transforms_by_their_functional_names(patched):
    transform = Compose([RadiusGraph(r=1.0)])
    assert transform(Data(pos=positions(20))).edge_index.shape[0] == 2


# ---- Functions -----------------------------------------------------------------------


def test_cap_is_32_by_default():
    pos = positions(100)
    got = pyg.radius_graph(pos, 100.0)
    assert torch.bincount(got[1]).tolist() == [32] * 100
    options = {"max_num_neighbors": 32, "boundary": "<"}
    same(got, reference.radius_graph(pos.numpy(), 100.0, **options))
    got = pyg.radius(pos, pos[:3], 100.0)
    assert torch.bincount(got[0]).tolist() == [32] * 3


def test_radius_is_open():
    pos = torch.tensor([[0.0], [1.0], [2.0]])
    assert pyg.radius_graph(pos, 1.0).shape == (2, 0)
    assert pyg.radius(pos, pos, 1.0).tolist() == [[0, 1, 2], [0, 1, 2]]


def test_positional_order_of_all_arguments():
    pos, batch, flow = positions(60), BATCH, "target_to_source"
    got = pyg.radius_graph(pos, 1.0, batch, True, 4, flow, 7, 5)
    options = {"max_num_neighbors": 4, "loop": True, "flow": flow, "boundary": "<"}
    same(got, reference.radius_graph(pos.numpy(), 1.0, batch=batch, **options))
    got = pyg.knn_graph(pos, 4, batch, True, flow, False, 7, 5)
    options = {"loop": True, "flow": flow}
    same(got, reference.knn_graph(pos.numpy(), 4, batch=batch, **options))
    got = pyg.knn_graph(pos, 3, batch, False, flow, True, 7, 5)
    options = {"flow": flow, "cosine": True}
    same(got, reference.knn_graph(pos.numpy(), 3, batch=batch, **options))


@pytest.mark.parametrize("batch_size", [None, 4, 9])
def test_batches_with_different_empty_items(batch_size):
    x, y = positions(60, 3), positions(20, 3, 1)
    batch_y = torch.tensor([0] * 4 + [1] * 6 + [3] * 10)
    for bx, by in ((BATCH, batch_y), (BATCH, batch_y.clamp(max=1))):
        batches = {"batch_x": bx, "batch_y": by}
        got = pyg.radius(x, y, 1.5, bx, by, 6, 1, batch_size)
        options = {"max_num_neighbors": 6, "boundary": "<", **batches}
        same(got, reference.radius(x.numpy(), y.numpy(), 1.5, **options))
        got = pyg.knn(x, y, 3, bx, by, False, 1, batch_size)
        same(got, reference.knn(x.numpy(), y.numpy(), 3, **batches))


def test_one_batch_alone_is_for_one_graph():
    x, zeros = positions(20), torch.zeros(20, dtype=torch.long)
    same(pyg.knn(x, x, 2, zeros), reference.knn(x.numpy(), x.numpy(), 2))
    same(pyg.knn(x, x, 2, None, zeros), reference.knn(x.numpy(), x.numpy(), 2))
    with pytest.raises(ValueError, match=r"batch_y must .*; pass"):
        pyg.radius(x, x, 1.0, zeros + 1)
    with pytest.raises(ValueError, match=r"batch_x must .*; pass"):
        pyg.knn(x, x, 1, None, zeros, batch_size=3)


def test_positions_of_one_dimension_and_integers():
    pos = torch.tensor([0.0, 0.5, 3.0, 3.4])
    want = [[1, 0, 3, 2], [0, 1, 2, 3]]
    assert pyg.radius_graph(pos, 1.0).tolist() == want
    assert pyg.knn_graph(pos, 1).tolist() == want
    assert pyg.radius(pos, pos[:1], 1.0).tolist() == [[0, 0], [0, 1]]
    assert pyg.radius_graph(torch.tensor([0, 1, 5]), 2).tolist() == [[1, 0], [0, 1]]


def test_no_points():
    none = torch.zeros(0, 3)
    empty = torch.zeros(0, dtype=torch.long)
    for got in (
        pyg.radius_graph(none, 1.0),
        pyg.radius_graph(none, 1.0, empty),
        pyg.knn_graph(none, 3, empty, batch_size=2),
        pyg.radius(none, positions(3, 3), 1.0),
        pyg.knn(positions(3, 3), none, 2, torch.zeros(3, dtype=torch.long), empty),
    ):
        assert got.shape == (2, 0) and got.dtype == torch.int64


def test_positions_that_require_gradients_and_tensors_as_radius():
    pos = positions(30).requires_grad_()
    want = reference.radius_graph(pos.detach().numpy(), 0.5, boundary="<")
    same(pyg.radius_graph(pos, torch.tensor(0.5)), want)
    assert pos.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    pos = positions(40, 3).to(dtype)
    want = reference.radius_graph(pos.double().numpy(), 1.0, boundary="<")
    same(pyg.radius_graph(pos, 1.0), want)


def test_errors():
    pos = positions(6)
    with pytest.raises(ValueError, match="batch"):
        pyg.radius_graph(pos, 1.0, torch.tensor([0, 1, 0, 1, 1, 1]))
    with pytest.raises(ValueError, match=r"\b4\b"):
        pyg.knn_graph(pos.index_fill(0, torch.tensor([4]), torch.nan), 2)
    with pytest.raises(ValueError, match="flow"):
        pyg.radius_graph(pos, 1.0, flow="sideways")


# ---- Tensors that are not on the CPU -------------------------------------------------


class FakeGPU(torch.Tensor):
    """A tensor that says that it lies on a GPU until it is copied to the CPU."""

    device = torch.device("cuda", 0)

    def detach(self):
        return self

    def cpu(self):
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("name", NAMES)
def test_pyg_computes_on_a_gpu_where_it_can(monkeypatch, name):
    got = []
    monkeypatch.setitem(neighbours._theirs, name, lambda *args: got.append(args))
    monkeypatch.setattr(neighbours, "_has_library", lambda: True)
    pos = positions(5).as_subclass(FakeGPU)
    arguments = (pos, pos, 2) if name in ("radius", "knn") else (pos, 2)
    assert getattr(pyg, name)(*arguments) is None
    bound = inspect.signature(THEIRS[name]).bind(*got[0])
    defaults = inspect.signature(THEIRS[name]).bind(*arguments)
    defaults.apply_defaults()
    for key, value in defaults.arguments.items():
        assert bound.arguments[key] is value
    reasons = {f"{name} on a GPU is left to PyG": 1}
    assert trainfast.stats().fallbacks["pyg"] == reasons


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_tensors_are_searched_where_pyg_lacks_its_library(monkeypatch):
    monkeypatch.setattr(neighbours, "_has_library", lambda: False)
    pos = positions(30)
    edges = pyg.radius_graph(pos.cuda(), 1.0, torch.zeros(30, dtype=int).cuda())
    assert edges.is_cuda
    same(edges, reference.radius_graph(pos.numpy(), 1.0, boundary="<"))


# ---- Models --------------------------------------------------------------------------


def test_models_that_build_their_graphs(patched):
    torch.manual_seed(0)
    z, pos = torch.randint(1, 9, (24,)), 2 * positions(24, 3)
    batch = torch.arange(24) // 8
    schnet = nn.SchNet(hidden_channels=8, num_filters=8, num_interactions=1, cutoff=2.0)
    assert schnet(z, pos, batch).shape == (3, 1)
    visnet = nn.models.ViSNet(hidden_channels=16, num_heads=2, num_layers=1, cutoff=2.0)
    assert visnet(z, pos, batch)[0].shape == (3, 1)
    counted = trainfast.stats().calls["pyg"]
    assert counted["radius_graph"] == 2


def test_interpolation_by_knn(patched):
    x, pos_x, pos_y = positions(20, 4), positions(20, 3, 1), positions(9, 3, 2)
    got = nn.knn_interpolate(x, pos_x, pos_y, k=3)
    rows, cols = reference.knn(pos_x.numpy(), pos_y.numpy(), 3)
    weights = 1 / (pos_x[cols] - pos_y[rows]).pow(2).sum(1, keepdim=True)
    want = torch.zeros(9, 4).index_add_(0, torch.tensor(rows), x[cols] * weights)
    total = torch.zeros(9, 1).index_add_(0, torch.tensor(rows), weights)
    assert torch.allclose(got, want / total, rtol=1e-5)


# ---- PyG's own results ---------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("dim", [1, 2, 3, 6])
@pytest.mark.parametrize("loop", [False, True])
def test_same_sets_as_pyg(dim, loop):
    """Where no pair is within 4 ulp of r and no cap binds."""
    pos, y, r = positions(60, dim).double(), positions(30, dim, 1).double(), 0.9
    assert reference.is_clear_of(pos.numpy(), pos.numpy(), r)
    assert reference.is_clear_of(pos.numpy(), y.numpy(), r)
    batch_y = torch.tensor([0] * 9 + [1] * 4 + [3] * 17)
    for name, arguments in {
        "radius_graph": (pos, r, BATCH, loop, 1000),
        "knn_graph": (pos, 4, BATCH, loop),
        "radius": (pos, y, r, BATCH, batch_y, 1000),
        "knn": (pos, y, 4, BATCH, batch_y),
    }.items():
        got, want = getattr(pyg, name)(*arguments), THEIRS[name](*arguments)
        assert edge_set(got) == edge_set(want), name


@needs_library
def test_same_count_as_pyg_where_the_cap_binds():
    pos = positions(200).double()
    got = pyg.radius_graph(pos, 1.0, None, False, 5)
    want = THEIRS["radius_graph"](pos, 1.0, None, False, 5)
    assert torch.bincount(got[1]).tolist() == torch.bincount(want[1]).tolist()
    full = reference.radius_graph(pos.numpy(), 1.0, boundary="<")
    assert edge_set(got) <= edge_set(torch.from_numpy(np.ascontiguousarray(full)))


@needs_library
def test_random_calls_find_the_sets_of_pyg():
    """Among them graphs without points, and more neighbours than a graph has."""
    rng = np.random.default_rng(0)
    for case in range(300):
        dim, graphs, k = (int(rng.integers(1, most)) for most in (9, 7, 40))
        n, m = int(rng.integers(400)), int(rng.integers(200))
        x, y = (torch.from_numpy(rng.standard_normal((rows, dim))) for rows in (n, m))
        batch, batch_y = (
            torch.from_numpy(np.sort(rng.integers(0, graphs, rows))) for rows in (n, m)
        )
        r, loop = float(rng.uniform(0.05, 3)), bool(rng.integers(2))
        flow = ("source_to_target", "target_to_source")[rng.integers(2)]
        assert reference.is_clear_of(x.numpy(), x.numpy(), r)
        assert reference.is_clear_of(x.numpy(), y.numpy(), r)
        for name, arguments in {
            "radius_graph": (x, r, batch, loop, 1000, flow, 1, graphs),
            "knn_graph": (x, k, batch, loop, flow, False, 1, graphs),
            "radius": (x, y, r, batch, batch_y, 1000, 1, graphs),
            "knn": (x, y, k, batch, batch_y, False, 1, graphs),
        }.items():
            got, want = getattr(pyg, name)(*arguments), THEIRS[name](*arguments)
            assert edge_set(got) == edge_set(want), (case, name)
