"""Clouds of points, and what tests of neighbours compare."""

import numpy as np

from tests.arrays import DTYPES, Framed
from tests.neighbours import reference

FLOWS = ("source_to_target", "target_to_source")
BOUNDARIES = ("<=", "<")
SELECTIONS = ("nearest", "first")
CAPS = (None, 0, 1, 3, 7, 1000)
FEATURES = ("distance", "relative_position", "unit_vector")


def same(got, want):
    """The same edges in the same order."""
    got = np.asarray(got)
    assert got.ndim == 2 and got.shape[0] == 2
    assert got.tolist() == want.tolist()


def cloud(rng, n, dim, dtype="float32"):
    """Points of a normal distribution, as an array in a frame of canaries."""
    return Framed(rng.standard_normal((n, dim)), dtype)


def lattice(rng, n, dim, dtype="float64"):
    """Points on whole numbers, of which many coincide and many are equally far."""
    return rng.integers(-2, 3, (n, dim)).astype(DTYPES[dtype])


def sorted_batch(rng, n, items=6):
    """Graph numbers that leave some items empty, the first and the last among them."""
    return np.sort(rng.integers(1, items - 1, n)) if n else np.zeros(0, np.int64)


def radius_for(dim, share=0.3):
    """A radius that about this share of the pairs of a normal cloud is within."""
    points = np.random.default_rng(0).standard_normal((2, 4000, dim))
    return float(np.quantile(np.sqrt(((points[0] - points[1]) ** 2).sum(1)), share))


def check_features(pos, edges, found):
    """Distances and relative positions rounded once, unit vectors to two ulp."""
    want = reference.features(pos, edges)
    assert list(found) == list(FEATURES)
    for array in found.values():
        assert array.dtype == pos.dtype and array.flags.c_contiguous
    count, distance = edges.shape[1], want["distance"]
    assert found["distance"].shape == (count,)
    assert found["relative_position"].shape == (count, pos.shape[1])
    assert found["unit_vector"].shape == (count, pos.shape[1])
    for name in FEATURES[:2]:
        assert found[name].tolist() == want[name].astype(pos.dtype).tolist()
    apart = distance > 0
    units = found["unit_vector"].astype(np.float64)
    unit = want["relative_position"][apart] / distance[apart, None]
    assert np.abs(units[apart] - unit).max(initial=0) <= 2 * np.finfo(pos.dtype).eps
    assert (units[~apart] == 0).all()
