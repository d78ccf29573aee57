"""Graphs of neighbours of large clouds, which are sorted into the cells of a grid."""

import functools
from itertools import product

import numpy as np
import pytest

from tests.neighbours import reference
from tests.neighbours.clouds import BOUNDARIES, FLOWS, SELECTIONS, lattice, same
from tests.resident_memory import needs_honest_free, resident_bytes
from trainfast.numpy import knn, knn_graph, radius, radius_graph


def uniform(rng, n, dim):
    return rng.random((n, dim))


def clustered(rng, n, dim):
    centers = rng.random((20, dim))
    return centers[rng.integers(0, 20, n)] + 0.01 * rng.standard_normal((n, dim))


def with_an_outlier(rng, n, dim):
    pos = rng.random((n, dim))
    pos[n // 3] = 1e9
    return pos


def on_a_line(rng, n, dim):
    """Along one axis, where a grid of cells is one cell wide."""
    pos = np.zeros((n, dim))
    pos[:, dim - 1] = rng.permutation(n) / n
    return pos


CLOUDS = [uniform, clustered, with_an_outlier, on_a_line]


def radius_of(pos, neighbours):
    """A radius within which points have about so many neighbours; a little more than
    the distance of a pair."""
    spatial = pytest.importorskip("scipy.spatial")
    tree = spatial.cKDTree(pos)
    distances, _ = tree.query(pos[:: max(1, len(pos) // 300)], neighbours + 1)
    return float(np.median(distances[:, -1])) * (1 + 2.0**-8)


def directed(pairs):
    """Both directions of pairs (i, j), as sorted numbers of the pairs."""
    a, b = pairs.astype(np.int64).T
    return np.sort(np.concatenate([a << 32 | b, b << 32 | a]))


def check_against_tree(pos, r, got):
    """The same set as scipy's, in order, where no pair is within 4 ulp of r."""
    spatial = pytest.importorskip("scipy.spatial")
    tree = spatial.cKDTree(pos)
    margin = 4 * np.spacing(r)
    inner = tree.query_pairs(r - margin, output_type="ndarray")
    outer = tree.query_pairs(r + margin, output_type="ndarray")
    assert len(inner) == len(outer), "a pair is within 4 ulp of r: take another seed"
    numbers = got[1].astype(np.int64) << 32 | got[0]
    assert (np.diff(numbers) > 0).all(), "sorted by centre, then neighbour"
    assert (np.sort(numbers) == directed(inner)).all()


@pytest.mark.parametrize("n", [5_000, pytest.param(50_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("make", CLOUDS)
def test_radius_graph_of_large_clouds(backend, rng, make, dim, n):
    if backend in ("scalar", "wide"):
        n //= 5
    if backend == "simt":  # which has no cells, and compares all pairs
        n //= 20
    pos = make(rng, n, dim)
    r = radius_of(pos, 12)
    check_against_tree(pos, r, radius_graph(pos, r=r))


@pytest.mark.parametrize("dim", [4, 6, 8])
def test_radius_graph_of_large_clouds_in_many_dimensions(backend, rng, dim):
    pos = rng.random((4000, dim))
    r = radius_of(pos, 10)
    check_against_tree(pos, r, radius_graph(pos, r=r))


@pytest.mark.parametrize("cap", [1, 5])
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("make", CLOUDS)
def test_cap_and_options_on_large_clouds(backend, rng, make, selection, cap):
    pos = make(rng, 1500, 2).astype(np.float32)
    r = radius_of(pos, 12)
    options = {"max_num_neighbors": cap, "selection": selection, "loop": cap == 5}
    got = radius_graph(pos, r=r, flow=FLOWS[1], **options)
    same(got, reference.radius_graph(pos, r, flow=FLOWS[1], **options))


@pytest.mark.parametrize("k", [1, 33])
@pytest.mark.parametrize("make", CLOUDS)
@pytest.mark.parametrize("dim", [2, 3, 8])
def test_knn_graph_of_large_clouds(backend, rng, make, dim, k):
    pos = make(rng, 1500, dim)
    same(knn_graph(pos, k=k), nearest_by_brute_force(make, dim, k))


@functools.cache  # the same for every backend
def nearest_by_brute_force(make, dim, k):
    pos = make(np.random.default_rng(1234), 1500, dim)
    return reference.knn_graph(pos, k)


@pytest.mark.parametrize("make", CLOUDS)
def test_large_sets_of_different_extent(backend, rng, make):
    """Centres outside the cells of the points, on every side."""
    x, y = make(rng, 1500, 3), 3 * make(rng, 700, 3) - 1
    r = radius_of(x, 10)
    for cap in (None, 3):
        options = {"max_num_neighbors": cap}
        same(radius(x, y, r=r, **options), reference.radius(x, y, r, **options))
    same(knn(x, y, k=4), reference.knn(x, y, 4))


def test_large_items_beside_small_ones(backend, rng):
    ptr = np.array([0, 5, 1505, 1505, 1530, 3000, 3001])
    pos, batch = rng.random((3001, 2)), np.repeat(np.arange(6), np.diff(ptr))
    options = {"max_num_neighbors": 9}
    same(
        radius_graph(pos, r=0.05, ptr=ptr, **options),
        reference.radius_graph(pos, 0.05, batch=batch, **options),
    )
    same(knn_graph(pos, k=5, ptr=ptr), reference.knn_graph(pos, 5, batch=batch))


@pytest.mark.parametrize("r", [0.0, np.inf, 10.0])
def test_radius_that_makes_one_cell_or_none(backend, rng, r):
    pos = np.concatenate([lattice(rng, 2500, 2), rng.random((100, 2))])
    got = radius_graph(pos, r=r, max_num_neighbors=6)
    same(got, reference.radius_graph(pos, r, max_num_neighbors=6))


def test_lattice_across_the_borders_of_cells(backend, rng):
    """Points whose distance is r lie in neighbouring cells, on their borders."""
    axis = np.arange(40) * 0.1
    pos = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)[rng.permutation(1600)]
    for r, boundary in product((0.1, axis[3] - axis[2], 0.2), BOUNDARIES):
        got = radius_graph(pos, r=r, boundary=boundary)
        same(got, reference.radius_graph(pos, r, boundary=boundary))


@needs_honest_free
def test_many_searches_need_no_more_memory_than_a_few(rng):
    clouds = [rng.random((n, 2)) for n in (1000, 1500)]  # without a grid and with one
    for _ in range(3):
        edges = [radius_graph(pos, r=0.5).shape[1] for pos in clouds]
    before = resident_bytes()
    for _ in range(20):
        for pos in clouds:
            radius_graph(pos, r=0.5)
    assert resident_bytes() - before < 4 * sum(edges)  # one of 20 searches' lists


@pytest.mark.slow
def test_ten_million_points_on_a_line(backend):
    if backend in ("scalar", "simt", "wide"):
        pytest.skip("the vectorised backends share the path")
    n = 10**7
    pos = np.zeros((n, 2), np.float32)
    pos[:, 0] = np.arange(n)
    got = radius_graph(pos, r=1.0, index_dtype="int32")
    assert got.shape == (2, 2 * n - 2)
    centers = np.repeat(np.arange(n, dtype=np.int32), 2)[1:-1]
    assert (got[1] == centers).all()
    steps = np.tile(np.array([-1, 1], np.int32), n)[1:-1]
    assert (got[0] - centers == steps).all()
