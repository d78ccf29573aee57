"""Graphs of neighbours on every backend, against brute force in float64."""

import functools
from itertools import pairwise, product

import numpy as np
import pytest

from tests.arrays import Framed
from tests.neighbours import reference
from tests.neighbours.clouds import (
    BOUNDARIES,
    CAPS,
    FEATURES,
    FLOWS,
    SELECTIONS,
    check_features,
    cloud,
    lattice,
    radius_for,
    same,
    sorted_batch,
)
from trainfast.numpy import knn, knn_graph, radius, radius_graph

# ---- The campaign --------------------------------------------------------------------


@pytest.mark.parametrize("dim", range(1, 9))
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 16, 17, 33, 64, 230])
def test_radius_graph_of_every_size(backend, rng, n, dim, dtype):
    frame = cloud(rng, n, dim, dtype)
    r = radius_for(dim)
    got = radius_graph(frame.array, r=r)
    same(got, reference.radius_graph(frame.array, r))
    assert got.dtype == np.int64 and got.flags.c_contiguous
    frame.get()


@pytest.mark.parametrize("dim", range(1, 9))
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("k", [1, 2, 6, 16, 40])
def test_knn_graph_of_every_size(backend, rng, k, dim, dtype):
    for n in (1, 2, 9, 17, 70):
        pos = cloud(rng, n, dim, dtype).array
        got = knn_graph(pos, k=k)
        same(got, reference.knn_graph(pos, k))
        assert got.shape[1] == n * min(k, n - 1)


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("cap", CAPS)
def test_options_on_a_lattice(backend, rng, loop, boundary, selection, cap):
    for dim, r, flow in product((1, 2, 3), (0.0, 1.0, 2.0, np.sqrt(2.0)), FLOWS):
        pos = lattice(rng, 40, dim)
        batch = sorted_batch(rng, 40)
        options = {
            "loop": loop,
            "max_num_neighbors": cap,
            "flow": flow,
            "boundary": boundary,
            "selection": selection,
        }
        got = radius_graph(pos, r=r, batch=batch, batch_size=6, **options)
        same(got, reference.radius_graph(pos, r, batch=batch, **options))


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("k", [0, 1, 2, 5, 12, 100])
def test_knn_graph_takes_the_lower_index_of_equal_distances(
    backend, rng, k, flow, loop
):
    for dim, dtype in product((1, 2, 3, 8), ("float32", "float64")):
        pos = lattice(rng, 40, dim, dtype)
        batch = sorted_batch(rng, 40)
        got = knn_graph(pos, k=k, batch=batch, loop=loop, flow=flow)
        same(got, reference.knn_graph(pos, k, batch=batch, loop=loop, flow=flow))


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("cap", CAPS)
def test_radius_between_two_sets(backend, rng, boundary, selection, cap):
    for dim, dtype in product((1, 2, 3, 5), ("float32", "float64", "float16")):
        x, y = lattice(rng, 35, dim, dtype), lattice(rng, 21, dim, dtype)
        options = {
            "batch_x": np.sort(rng.choice([0, 2, 3], 35)),
            "batch_y": np.sort(rng.choice([1, 2, 3, 5], 21)),
            "max_num_neighbors": cap,
            "boundary": boundary,
            "selection": selection,
        }
        got = radius(x, y, r=1.0, batch_size=7, **options)
        same(got, reference.radius(x, y, 1.0, **options))


@pytest.mark.parametrize("k", [0, 1, 3, 50])
def test_knn_between_two_sets(backend, rng, k):
    for dim, dtype in product((1, 2, 3, 8), ("float32", "float64", "float16")):
        x, y = lattice(rng, 35, dim, dtype), lattice(rng, 21, dim, dtype)
        batches = {
            "batch_x": np.sort(rng.choice([0, 2, 3], 35)),
            "batch_y": np.sort(rng.choice([1, 2, 3, 5], 21)),
        }
        got = knn(x, y, k=k, batch_size=7, **batches)
        same(got, reference.knn(x, y, k, **batches))
        same(knn(x, y, k=k), reference.knn(x, y, k))


def test_cosine_takes_the_smallest_angles(backend, rng):
    for dim in (2, 3, 8):
        pos = rng.standard_normal((60, dim))
        same(
            knn_graph(pos, k=5, cosine=True),
            reference.knn_graph(pos, 5, cosine=True),
        )
        x, y = rng.standard_normal((2, 30, dim))
        same(knn(x, y, k=4, cosine=True), reference.knn(x, y, 4, cosine=True))


def test_cosine_does_not_depend_on_lengths(backend, rng):
    pos = rng.standard_normal((50, 3))
    longer = pos * 2.0 ** rng.integers(-8, 9, (50, 1))
    same(knn_graph(longer, k=3, cosine=True), knn_graph(pos, k=3, cosine=True))


def test_ptr_is_batch_in_other_words(backend, rng):
    pos = cloud(rng, 90, 2).array
    ptr = np.array([0, 0, 20, 20, 55, 90, 90])
    batch = np.repeat(np.arange(6), np.diff(ptr))
    want = reference.radius_graph(pos, 0.8, batch=batch)
    same(radius_graph(pos, r=0.8, ptr=ptr), want)
    same(radius_graph(pos, r=0.8, batch=batch, batch_size=6), want)
    same(knn_graph(pos, k=4, ptr=ptr), reference.knn_graph(pos, 4, batch=batch))
    x, y, ptr_y = pos, pos[:30], np.array([0, 5, 5, 20, 20, 30, 30])
    batches = {"batch_x": batch, "batch_y": np.repeat(np.arange(6), np.diff(ptr_y))}
    same(
        radius(x, y, r=0.8, ptr_x=ptr, ptr_y=ptr_y),
        reference.radius(x, y, 0.8, **batches),
    )
    same(knn(x, y, k=3, ptr_x=ptr, ptr_y=ptr_y), reference.knn(x, y, 3, **batches))


@pytest.mark.parametrize("sizes", [(230,) * 5, (23,) * 40, (1,) * 30, (0, 300, 1, 2)])
def test_graphs_of_a_batch_are_those_of_each_alone(backend, rng, sizes):
    pos = cloud(rng, sum(sizes), 2).array
    ptr = np.cumsum([0, *sizes])
    alone = [radius_graph(pos[a:b], r=0.7) + a for a, b in pairwise(ptr)]
    same(radius_graph(pos, r=0.7, ptr=ptr), np.concatenate(alone, axis=1))


# ---- Features ------------------------------------------------------------------------


@pytest.mark.parametrize("dim", range(1, 9))
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("flow", FLOWS)
def test_features_are_those_of_the_edges(backend, rng, dim, dtype, flow):
    pos = cloud(rng, 60, dim, dtype).array
    pos[7] = pos[3]
    batch = sorted_batch(rng, 60)
    for call in (
        functools.partial(radius_graph, r=radius_for(dim)),
        functools.partial(knn_graph, k=5),
    ):
        edges, found = call(pos, batch=batch, flow=flow, features=FEATURES)
        same(edges, call(pos, batch=batch, flow=flow))
        check_features(pos, edges if flow == FLOWS[0] else edges[::-1], found)


def test_features_alone_and_in_the_order_asked_for(backend, rng):
    pos = cloud(rng, 40, 3).array
    _, everything = radius_graph(pos, r=1.0, features=FEATURES)
    for names in [(name,) for name in FEATURES] + [FEATURES[::-1], FEATURES[1:]]:
        _, found = radius_graph(pos, r=1.0, features=names)
        assert list(found) == list(names)
        for name in names:
            assert found[name].tobytes() == everything[name].tobytes()


def test_features_between_two_sets(backend, rng):
    x, y = cloud(rng, 40, 3).array, cloud(rng, 25, 3).array
    edges, found = radius(x, y, r=1.2, features=("relative_position", "distance"))
    same(edges, reference.radius(x, y, 1.2))
    relative = x[edges[1]] - y[edges[0]]
    assert found["relative_position"].tolist() == relative.tolist()
    _, found = knn(x, y, k=3, features=("distance",))
    assert found["distance"].shape == (75,)


def test_unknown_feature_is_an_error(backend, rng):
    with pytest.raises(ValueError, match="speed"):
        radius_graph(cloud(rng, 4, 2).array, r=1.0, features=("speed",))


# ---- Arrays --------------------------------------------------------------------------


def test_strided_arrays(backend, rng):
    whole = rng.standard_normal((120, 9)).astype(np.float32)
    for pos in (
        whole[::2, :3],
        whole[::-1, 1:4],
        whole[:, ::-3],
        np.asfortranarray(whole[:50, :2]),
        whole.T[:3].T,
        np.broadcast_to(whole[:1, :2], (30, 2)),
    ):
        same(radius_graph(pos, r=1.0), reference.radius_graph(pos, 1.0))
        same(knn_graph(pos, k=3), reference.knn_graph(pos, 3))
        batch = np.repeat(np.arange(len(pos)), 2)[::2] // 7
        same(
            radius_graph(pos, r=1.0, batch=batch),
            reference.radius_graph(pos, 1.0, batch=batch),
        )


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("offset", [1, 3, 7])
def test_misaligned_and_read_only_arrays(backend, rng, dtype, offset):
    frame = Framed(rng.standard_normal((61, 3)), dtype, offset=offset)
    frame.array.flags.writeable = False
    batch = sorted_batch(rng, 61)
    batch.flags.writeable = False
    got, found = radius_graph(frame.array, r=1.0, batch=batch, features=FEATURES)
    same(got, reference.radius_graph(frame.array, 1.0, batch=batch))
    check_features(frame.array, got, found)
    frame.get()


def test_bytes_that_are_not_aligned_to_elements_are_an_error(backend):
    raw = bytearray(1 + 8 * 60)
    pos = np.frombuffer(raw, np.float64, 60, offset=1).reshape(20, 3)
    with pytest.raises(ValueError, match="aligned to 8 bytes"):
        radius_graph(pos, r=1.0)


@pytest.mark.parametrize("index_dtype", ["int64", "int32"])
def test_index_dtype(backend, rng, index_dtype):
    pos = cloud(rng, 70, 2).array
    calls = {
        radius_graph: ((pos,), {"r": 0.9}),
        knn_graph: ((pos,), {"k": 3}),
        radius: ((pos, pos[:9]), {"r": 0.9}),
        knn: ((pos, pos[:9]), {"k": 3}),
    }
    for call, (arrays, options) in calls.items():
        got = call(*arrays, **options, index_dtype=index_dtype)
        assert got.dtype == index_dtype
        same(got, getattr(reference, call.__name__)(*arrays, *options.values()))


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_batch_of_either_dtype(backend, rng, dtype):
    pos, batch = cloud(rng, 50, 2).array, sorted_batch(rng, 50).astype(dtype)
    same(
        radius_graph(pos, r=1.0, batch=batch),
        reference.radius_graph(pos, 1.0, batch=batch),
    )


def test_points_of_one_dimension_may_be_a_vector(backend, rng):
    pos = rng.standard_normal(30)
    same(radius_graph(pos[:, None], r=0.5), reference.radius_graph(pos, 0.5))


@pytest.mark.parametrize("dim", [0, 9])
def test_other_numbers_of_dimensions_are_an_error(backend, dim):
    with pytest.raises(ValueError, match="8"):
        radius_graph(np.zeros((4, dim), np.float32), r=1.0)


@pytest.mark.parametrize("pos", [np.zeros((4, 2), np.int64), np.zeros((4, 2), complex)])
def test_other_dtypes_are_an_error(backend, pos):
    with pytest.raises(NotImplementedError, match="must be float64, float32"):
        radius_graph(pos, r=1.0)


def test_results_do_not_alias_the_next_ones(backend, rng):
    pos = cloud(rng, 50, 2).array
    first = radius_graph(pos, r=1.0)
    kept = first.copy()
    radius_graph(cloud(rng, 50, 2).array, r=1.0)
    assert (first == kept).all()


# ---- torch ---------------------------------------------------------------------------


def torch_or_skip():
    return pytest.importorskip("torch")


def test_tensors_give_tensors(backend, rng):
    torch = torch_or_skip()
    pos = torch.randn(40, 3)
    batch = torch.arange(40) // 9
    edges, found = radius_graph(pos, r=1.0, batch=batch, features=FEATURES)
    assert isinstance(edges, torch.Tensor) and edges.dtype == torch.int64
    same(edges, reference.radius_graph(pos.numpy(), 1.0, batch=batch.numpy()))
    assert found["unit_vector"].dtype == torch.float32
    assert knn_graph(pos, k=3, index_dtype="int32").dtype == torch.int32
    for edges in (radius(pos, pos, r=1.0), knn(pos, pos, k=2)):
        assert isinstance(edges, torch.Tensor)


def test_half_tensors(backend):
    torch = torch_or_skip()
    for dtype in (torch.float16, torch.bfloat16):
        pos = torch.randn(50, 2).to(dtype)
        want = reference.radius_graph(pos.double().numpy(), 0.7)
        same(radius_graph(pos, r=0.7), want)


def test_positions_that_require_gradients(backend):
    """Edges have none; features would have, and torch's two lines are shown."""
    torch = torch_or_skip()
    pos = torch.randn(20, 2, requires_grad=True)
    same(radius_graph(pos, r=1.0), reference.radius_graph(pos.detach().numpy(), 1.0))
    with pytest.raises(
        (ValueError, RuntimeError), match=r"pos\[.*\] - pos\["
    ) as raised:
        radius_graph(pos, r=1.0, features=("distance",))
    assert "requires_grad" in str(raised.value)
    with torch.no_grad():
        radius_graph(pos.detach(), r=1.0, features=("distance",))


@pytest.mark.parametrize("n", [70, 2000])
def test_threads_do_not_change_bits(backend, n):
    torch = torch_or_skip()
    before = torch.get_num_threads()
    pos = torch.from_numpy(np.random.default_rng(3).standard_normal((n, 3)))
    ptr = torch.tensor([0, n // 3, n // 3, n // 2, n])
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for cap in (None, 4):
                edges, found = radius_graph(
                    pos, r=0.4, ptr=ptr, max_num_neighbors=cap, features=FEATURES
                )
                results.append([edges, *found.values(), knn_graph(pos, k=6, ptr=ptr)])
    finally:
        torch.set_num_threads(before)
    for one, other in ((0, 2), (0, 4), (1, 3), (1, 5)):
        for a, b in zip(results[one], results[other], strict=True):
            assert a.numpy().tobytes() == b.numpy().tobytes()
