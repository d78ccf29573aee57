"""Graphs of neighbours of degenerate input, and how exactly distances are compared."""

import functools

import numpy as np
import pytest

from tests.neighbours import reference
from tests.neighbours.clouds import (
    BOUNDARIES,
    FEATURES,
    cloud,
    lattice,
    same,
    sorted_batch,
)
from trainfast.numpy import knn, knn_graph, radius, radius_graph

# ---- Degenerate input ----------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2, 3, 8])
def test_no_points(backend, dim):
    pos = np.zeros((0, dim), np.float32)
    edges, found = radius_graph(pos, r=1.0, features=FEATURES)
    assert edges.shape == (2, 0) and edges.dtype == np.int64
    assert found["distance"].shape == (0,)
    assert found["unit_vector"].shape == (0, dim)
    one = np.zeros((1, dim), np.float32)
    for arrays in ((pos, one), (one, pos), (pos, pos)):
        assert radius(*arrays, r=1.0).shape == (2, 0)
        assert knn(*arrays, k=3).shape == (2, 0)
    assert knn_graph(pos, k=3).shape == (2, 0)
    none = np.zeros(0, np.int64)
    assert radius_graph(pos, r=1.0, batch=none).shape == (2, 0)
    assert radius_graph(pos, r=1.0, batch=none, batch_size=3).shape == (2, 0)
    assert radius_graph(pos, r=1.0, ptr=np.zeros(4, np.int64)).shape == (2, 0)


def test_one_point(backend):
    pos = np.ones((1, 3), np.float32)
    assert radius_graph(pos, r=1.0).shape == (2, 0)
    assert radius_graph(pos, r=0.0, loop=True).tolist() == [[0], [0]]
    assert knn_graph(pos, k=2).shape == (2, 0)
    assert knn_graph(pos, k=2, loop=True).tolist() == [[0], [0]]


@pytest.mark.parametrize("n", [3, 40, 3000])
def test_all_points_equal(backend, n):
    """Also where a grid has no extent; of the nearest the lowest indices are kept."""
    pos = np.full((n, 3), 0.1, np.float32)
    got = radius_graph(pos, r=0.0, max_num_neighbors=4)
    want = [[j for j in range(min(n, 6)) if j != i][:4] for i in range(n)]
    assert got[0].tolist() == [j for row in want for j in row]
    same(knn_graph(pos, k=4), got)
    assert radius_graph(pos, r=0.5, boundary="<", max_num_neighbors=1).shape[1] == n
    assert radius_graph(pos, r=0.0, boundary="<").shape == (2, 0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("n", [9, 40, 3000])
def test_first_point_that_is_not_finite_is_named(backend, rng, value, dtype, n):
    pos = cloud(rng, n, 3, dtype).array
    first = n // 2 + 1
    pos[n - 1, 0] = pos[first, 2] = value
    for call in (
        functools.partial(radius_graph, pos, r=0.1),
        functools.partial(knn_graph, pos, k=2),
        functools.partial(radius, pos, pos[:3], r=0.1),
        functools.partial(radius, pos[:3], pos, r=0.1),
        functools.partial(knn, pos, pos[:3], k=2),
    ):
        with pytest.raises(ValueError, match=rf"\b{first}\b"):
            call()


@pytest.mark.parametrize("r", [-1.0, -1e-300, np.nan, -np.inf])
def test_radius_below_0_or_nan_is_an_error(backend, rng, r):
    pos = cloud(rng, 5, 2).array
    with pytest.raises(ValueError, match="r must"):
        radius_graph(pos, r=r)
    with pytest.raises(ValueError, match="r must"):
        radius(pos, pos, r=r)


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("r", [np.inf, 1e200, 1e30])
def test_infinite_radius_makes_complete_graphs(backend, rng, r, loop):
    pos, batch = cloud(rng, 60, 3).array, sorted_batch(rng, 60)
    same(
        radius_graph(pos, r=r, batch=batch, loop=loop),
        reference.radius_graph(pos, r, batch=batch, loop=loop),
    )
    full = radius_graph(pos, r=r, boundary="<", loop=loop)
    assert full.shape[1] == 60 * (60 if loop else 59)


def test_radius_0_joins_coincident_points(backend, rng):
    pos = lattice(rng, 50, 2)
    got = radius_graph(pos, r=0.0)
    same(got, reference.radius_graph(pos, 0.0))
    assert got.shape[1] > 0
    assert radius_graph(pos, r=0.0, boundary="<").shape == (2, 0)


def test_k_beyond_the_graph_and_empty_items(backend, rng):
    pos, ptr = cloud(rng, 12, 2).array, np.array([0, 0, 1, 3, 3, 12, 12])
    got = knn_graph(pos, k=5, ptr=ptr)
    assert got.shape[1] == 0 + 2 * 1 + 9 * 5
    batch = np.repeat(np.arange(6), np.diff(ptr))
    same(got, reference.knn_graph(pos, 5, batch=batch))
    same(knn_graph(pos, k=2**40, ptr=ptr), reference.knn_graph(pos, 12, batch=batch))


@pytest.mark.parametrize("k", [-1, -(2**40)])
def test_negative_k_and_cap_are_errors(backend, rng, k):
    pos = cloud(rng, 5, 2).array
    with pytest.raises(ValueError, match="k must"):
        knn_graph(pos, k=k)
    with pytest.raises(ValueError, match="max_num_neighbors must"):
        radius_graph(pos, r=1.0, max_num_neighbors=k)


def test_batch_must_be_sorted_and_fit(backend, rng):
    pos = cloud(rng, 6, 2).array
    for batch, options in (
        ([0, 0, 2, 1, 2, 2], {}),
        ([-1, 0, 0, 1, 1, 1], {}),
        ([0, 0, 1, 1, 1], {}),
        ([0, 0, 0, 1, 1, 1, 1], {}),
        ([0, 0, 0, 1, 1, 4], {"batch_size": 4}),
    ):
        batch = np.array(batch)
        with pytest.raises(ValueError, match="batch"):
            radius_graph(pos, r=1.0, batch=batch, **options)
        with pytest.raises(ValueError, match="batch"):
            knn_graph(pos, k=2, batch=batch, **options)
        with pytest.raises(ValueError, match="batch"):
            radius(pos, pos, r=1.0, batch_x=np.zeros(6, int), batch_y=batch, **options)


@pytest.mark.parametrize("ptr", [[0, 4, 2, 6], [1, 6], [0, 5], [0, 7], [-1, 6], []])
def test_ptr_must_rise_from_0_to_the_number_of_points(backend, rng, ptr):
    with pytest.raises(ValueError, match="ptr"):
        radius_graph(cloud(rng, 6, 2).array, r=1.0, ptr=np.array(ptr, np.int64))


def test_both_batch_and_ptr_are_an_error(backend, rng):
    with pytest.raises(ValueError, match="ptr"):
        radius_graph(
            cloud(rng, 4, 2).array,
            r=1.0,
            batch=np.zeros(4, np.int64),
            ptr=np.array([0, 4]),
        )


@pytest.mark.parametrize(
    ("option", "value"),
    [("flow", "upwards"), ("boundary", "=="), ("selection", "random"),
     ("index_dtype", "int8")],
)  # fmt: skip
def test_unknown_choices_are_errors(backend, rng, option, value):
    with pytest.raises((TypeError, ValueError), match=option):
        radius_graph(cloud(rng, 4, 2).array, r=1.0, **{option: value})


def test_sets_of_different_dimensions_are_an_error(backend, rng):
    with pytest.raises(ValueError, match="dim"):
        radius(cloud(rng, 4, 2).array, cloud(rng, 4, 3).array, r=1.0)


# ---- Exactness -----------------------------------------------------------------------


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("n", [200, 3000])
def test_comparison_is_exact_far_from_the_origin(backend, rng, boundary, n):
    """Coordinates of 1e6 and r of 1e-3: float32 would see none of it."""
    near = np.concatenate(
        [1e6 + 5e-4 * rng.integers(0, 12, (n, 3)), -1e6 + rng.random((n, 3))]
    )
    got = radius_graph(near, r=1e-3, boundary=boundary)
    same(got, reference.radius_graph(near, 1e-3, boundary=boundary))
    assert got.shape[1] > n


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("spacing", [0.1, 1.0, 1e-3, 1 / 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_distances_of_a_lattice_equal_r(backend, boundary, spacing, dtype):
    """Each compared as float64 computes it from the inputs, one rounding at a time."""
    axis = (np.arange(9) * spacing).astype(dtype)
    pos = np.stack(np.meshgrid(axis, axis, axis), -1).reshape(-1, 3)
    for r in (spacing, float(axis[1]), 2 * spacing, spacing * np.sqrt(2)):
        got = radius_graph(pos, r=r, boundary=boundary)
        same(got, reference.radius_graph(pos, r, boundary=boundary))


def test_radius_one_ulp_around_a_distance(backend):
    pos = np.array([[0.1, 0.2, 0.3], [0.7, 0.5, 0.9]])
    distance = np.sqrt(reference.squared_distances(pos[0], pos[1:]))[0]
    for r in (np.nextafter(distance, 0), distance, np.nextafter(distance, 9)):
        for boundary in BOUNDARIES:
            same(
                radius_graph(pos, r=r, boundary=boundary),
                reference.radius_graph(pos, r, boundary=boundary),
            )


@pytest.mark.parametrize("scale", [1e-30, 1e-160, 1e30, 1e150, 1e300])
def test_tiny_and_huge_coordinates(backend, rng, scale):
    """Squares underflow and overflow as those of float64 do."""
    pos = rng.standard_normal((40, 2)) * scale
    with np.errstate(over="ignore", under="ignore"):
        for r in (scale, 0.0):
            same(radius_graph(pos, r=r), reference.radius_graph(pos, r))
        same(knn_graph(pos, k=3), reference.knn_graph(pos, 3))
