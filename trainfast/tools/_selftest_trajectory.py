"""Trajectory metrics against vectorised float64."""

import numpy as np

from trainfast import _core
from trainfast.tools._selftest_arrays import EPS, Array

TRAJECTORY_DTYPES: list[tuple[str, ...]] = [(name,) for name in EPS]
THRESHOLD = 2.0


def check_trajectory(dtypes: tuple[str, ...], arrays: Array) -> tuple[float, float]:
    """The largest relative error of the sums over agents, and what is allowed."""
    (dtype,) = dtypes
    rng = np.random.default_rng(4)
    agents, modes, steps = 150, 5, 37
    pred = arrays.put(rng.standard_normal((agents, modes, steps, 2)), dtype)
    target = arrays.put(rng.standard_normal((agents, steps, 2)), dtype)
    totals = arrays.put(np.full((2, 7), -1.0), "float64")
    _core.trajectory(
        pred,
        target,
        totals,
        miss_threshold=THRESHOLD,
        scratch=lambda n: arrays.put(np.zeros(n), "float32"),
    )
    sums, counts = arrays.get(totals)
    want = _sums(arrays.get(pred), arrays.get(target))
    errors = np.abs(sums[: len(want)] / want - 1)
    missing = np.abs(counts - np.where(np.arange(7) < len(want), agents, 0))
    arithmetic = EPS["float64" if dtype == "float64" else "float32"]
    return float(max(errors.max(), missing.max())), 8 * arithmetic


def _sums(pred: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Of ADE, FDE, minADE, minFDE and misses, as the guides define them."""
    distances = np.sqrt(((pred - target[:, None]) ** 2).sum(-1))
    ade, fde = distances.mean(2), distances[:, :, -1]
    missed = (fde[:, 0] > THRESHOLD).astype(float)
    columns = [ade[:, 0], fde[:, 0], ade.min(1), fde.min(1), missed]
    return np.array([column.sum() for column in columns])
