"""PyG's graphs for tests: equality in every attribute, and random ones."""

import pytest
import torch
from hypothesis import strategies as st
from torch_geometric.data import Data, HeteroData

import trainfast
from trainfast.torch.pyg import DataLoader

DTYPES = (
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def assert_same(got, want, where="value"):
    """Same types, dtypes, shapes, values and order of keys, all the way down."""
    assert type(got) is type(want), f"{where}: {type(got)} for {type(want)}"
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype, f"{where}: {got.dtype} for {want.dtype}"
        assert got.shape == want.shape, f"{where}: {got.shape} for {want.shape}"
        assert got.device == want.device, where
        assert got.layout == want.layout, where
        if want.layout != torch.strided:
            return assert_same(got.to_dense(), want.to_dense(), where)
        assert got.is_contiguous() or not want.is_contiguous(), f"{where}: strides"
        assert torch.equal(got.isnan(), want.isnan()), where
        assert torch.equal(got.nan_to_num(), want.nan_to_num()), where
    elif isinstance(want, dict):
        assert list(got) == list(want), f"{where}: {list(got)} for {list(want)}"
        for key in want:
            assert_same(got[key], want[key], f"{where}[{key!r}]")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), f"{where}: {len(got)} for {len(want)} values"
        for i, pair in enumerate(zip(got, want)):
            assert_same(*pair, f"{where}[{i}]")
    else:
        assert got == want or (got != got and want != want), where


def inside(store):
    """A store's own names, without its attributes and its owner."""
    hidden = ("_mapping", "_parent", "_cached_attr")
    return {k: v for k, v in sorted(store.__dict__.items()) if k not in hidden}


def assert_same_graph(got, want):
    """Graphs or batches that nobody can tell apart."""
    assert type(got) is type(want)
    assert got.__dict__.keys() == want.__dict__.keys()
    assert [s._key for s in got.stores] == [s._key for s in want.stores]
    for mine, other in zip(got.stores, want.stores):
        assert type(mine) is type(other)
        assert mine._parent() is got
        assert_same(mine._mapping, other._mapping, f"store {other._key}")
        assert_same(inside(mine), inside(other), f"inside of store {other._key}")


def assert_same_examples(got, want):
    """Batches that come apart into the same graphs, or not at all: PyG cannot take a
    node type apart that has but its number."""
    assert len(got) == len(want)
    try:
        graphs = want.to_data_list()
    except KeyError:
        with pytest.raises(KeyError):
            got.to_data_list()
        return
    for mine, other in zip(got.to_data_list(), graphs, strict=True):
        assert_same_graph(mine, other)


def values(generator, dtype, shape):
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def edges(generator, sizes, n_edges):
    """int64 [2, n_edges] between nodes of two types; none where a type has none."""
    if 0 in sizes:
        n_edges = 0
    rows = [torch.randint(0, max(n, 1), (n_edges,), generator=generator) for n in sizes]
    return torch.stack(rows)


def graph(n=3, e=4, kind=Data, **more):
    """A graph of n nodes and e edges, the same each time."""
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


# One attribute of a random graph: what it is called and what it is.
NAMES = ("x", "pos", "z", "edge_attr", "y", "node_weight", "c", "d")
KINDS = ("nodes", "edges", "graph", "ragged", "zero-dim", "int", "float", "bool", "str")


@st.composite
def attributes(draw):
    """A list of (name, kind, dtype, trailing shape), the same for all graphs."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=5))
    return [
        (
            name,
            draw(st.sampled_from(KINDS)),
            draw(st.sampled_from(DTYPES)),
            draw(st.sampled_from([(), (1,), (3,), (2, 2)])),
        )
        for name in names
    ]


def attribute(generator, kind, dtype, trailing, n_nodes, n_edges):
    if kind in ("int", "float", "bool", "str"):
        number = int(torch.randint(0, 9, (), generator=generator))
        of = {"int": int, "float": lambda n: n / 4, "bool": bool, "str": str}
        return of[kind](number)
    if kind == "zero-dim":
        return values(generator, dtype, ())
    ragged = int(torch.randint(0, 4, (), generator=generator))
    size = {"nodes": n_nodes, "edges": n_edges, "graph": 1, "ragged": ragged}[kind]
    return values(generator, dtype, (size, *trailing))


def homogeneous(seed, attrs, num_nodes, kind=Data):
    """One random graph; `num_nodes`: "given" as an attribute, or told by "x"."""
    generator = torch.Generator().manual_seed(seed)
    n, e = (int(torch.randint(0, 6, (), generator=generator)) for _ in range(2))
    data = kind()
    if num_nodes == "x":
        data.x = torch.randn(n, 2, generator=generator)
    data.edge_index = edges(generator, (n, n), e)
    if num_nodes == "given":
        data.num_nodes = n
    for name, what, dtype, trailing in attrs:
        if name == "x" and num_nodes == "x":
            continue
        if name in ("x", "pos") and what != "nodes":
            name = f"other_{name}"
        size = data.edge_index.size(1)
        data[name] = attribute(generator, what, dtype, trailing, n, size)
    return data


def heterogeneous(seed, attrs, kind=HeteroData):
    """A random graph of two node types, one of them known by its number alone."""
    generator = torch.Generator().manual_seed(seed)
    n = [int(torch.randint(0, 5, (), generator=generator)) for _ in range(3)]
    data = kind()
    data["a"].x = torch.randn(n[0], 3, generator=generator)
    data["b"].num_nodes = n[1]
    for key, sizes in ((("a", "to", "b"), n[:2]), (("b", "in", "b"), n[1:2] * 2)):
        data[key].edge_index = edges(generator, sizes, n[2])
        data[key].edge_attr = torch.randn(
            data[key].edge_index.size(1), 2, generator=generator
        )
    stores = [data["a"], data["a", "to", "b"], data._global_store]
    for i, (name, what, dtype, trailing) in enumerate(attrs):
        if name in ("x", "pos", "node_weight", "edge_attr"):
            name = f"other_{i}"
        sizes = (n[0], data["a", "to", "b"].edge_index.size(1))
        stores[i % 3][name] = attribute(generator, what, dtype, trailing, *sizes)
    return data
