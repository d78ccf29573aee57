"""The search for neighbours against all pairs in float64."""

from itertools import pairwise

import numpy as np

from trainfast import _core
from trainfast.numpy.arrays import dtype_name
from trainfast.tools._selftest_arrays import EPS, Array

NEIGHBOUR_DTYPES: list[tuple[str, ...]] = [(name,) for name in EPS]
PTR = np.array([0, 70, 70, 71, 200])  # graphs of 70, 0, 1 and 129 points
RADIUS, MOST = 1.0, 5


def check_neighbours(dtypes: tuple[str, ...], arrays: Array) -> tuple[float, float]:
    """How many edges are missing or wrong, and the largest error of a distance, which
    may be half a unit of its dtype."""
    (dtype,) = dtypes
    rng = np.random.default_rng(3)
    cloud = rng.standard_normal((PTR[-1], 3))
    lattice = rng.integers(-2, 3, (PTR[-1], 2)) / 2.0  # many pairs exactly at RADIUS
    errors = [
        _error(arrays.put(points, dtype), arrays, most)
        for points in (cloud, lattice)
        for most in (-1, MOST)
    ]
    return max(errors), EPS[dtype] / 2


def _error(points: Array, arrays: Array, most: int) -> float:
    made: list[Array] = []

    def make(n: int) -> tuple[Array | None, ...]:
        made.extend(arrays.put(np.zeros(n), "int64") for _ in range(2))
        made.append(arrays.put(np.zeros(n), dtype_name(points)))
        return (*made, None, None)

    _core.neighbours(
        points,
        None,
        PTR,
        None,
        make,
        r=RADIUS,
        most=most,
        scratch=lambda n: arrays.put(np.zeros(n), "float32"),
    )
    neighbour, centre, distance = (arrays.get(array) for array in made)
    got = np.stack([centre, neighbour])
    want = _all_pairs(arrays.get(points), most)
    if got.shape != want.shape or (got != want).any():
        return float(max(got.shape[1], want.shape[1], 1))
    a, b = (arrays.get(points)[row.astype(np.int64)] for row in want)
    exact = np.sqrt(((b - a) ** 2).sum(1))
    return float(np.max(np.abs(distance - exact) / np.maximum(exact, 1e-9)))


def _all_pairs(points: np.ndarray, most: int) -> np.ndarray:
    """[2, edges]: centres and neighbours, sorted; negative: all, not the nearest."""
    edges = []
    for first, end in pairwise(PTR):
        for centre in range(first, end):
            squares = ((points[first:end] - points[centre]) ** 2).sum(1)
            squares[centre - first] = np.inf
            order = np.argsort(squares, kind="stable")
            order = order[squares[order] <= RADIUS**2]
            kept = np.sort(order[: None if most < 0 else most])
            edges += [(centre, first + i) for i in kept]
    return np.array(edges, np.float64).reshape(-1, 2).T
