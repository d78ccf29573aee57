"""Targets for the metrics of trajectories, and whether a result meets them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainfast.metrics.trajectory import TrajectoryResult
from trainfast.report import Report, Table

# The guides' targets: metres, and shares of agents.
_LIMITS = {
    "competition": {
        "ade": 0.22,
        "min_ade": 0.14,
        "fde": 0.35,
        "min_fde": 0.22,
        "miss_rate": 0.005,
    },
    "world_class": {
        "ade": 0.18,
        "min_ade": 0.10,
        "fde": 0.28,
        "min_fde": 0.18,
        "miss_rate": 0.002,
    },
}


@dataclass(frozen=True, repr=False)
class TargetCheck(Report):
    """Which targets a result meets.

    Attributes:
        name: of the targets.
        rows: (metric, value, limit, whether the value is below the limit).
        passed: whether all are.
    """

    name: str
    rows: tuple[tuple[str, float, float, bool], ...]

    @property
    def passed(self) -> bool:
        return all(row[3] for row in self.rows)

    def __bool__(self) -> bool:
        return self.passed

    def tables(self) -> list[Table]:
        """One row for each target."""
        rows: list[tuple[Any, ...]] = [
            (name, value, limit, "pass" if met else "fail")
            for name, value, limit, met in self.rows
        ]
        title = f"Targets {self.name}: {'passed' if self.passed else 'failed'}"
        return [Table(title, ("metric", "value", "below", "result"), rows)]

    def to_dict(self) -> dict[str, Any]:
        """The rows as dicts."""
        keys = ("metric", "value", "below", "met")
        rows = [dict(zip(keys, row, strict=True)) for row in self.rows]
        return {"name": self.name, "passed": self.passed, "rows": rows}


@dataclass(frozen=True, repr=False)
class Targets(Report):
    """Limits that metrics should be below.

    Attributes:
        name: of the targets.
        limits: by the names of `TrajectoryResult`'s attributes.
    """

    name: str
    limits: Mapping[str, float]

    def check(self, result: TrajectoryResult) -> TargetCheck:
        """Whether each metric is below its limit; NaN is not.

        Args:
            result: of `trajectory_metrics`, with reduce="mean".

        Returns:
            A table that is true if all targets are met.

        Raises:
            ValueError: the result has an entry for each agent.
        """
        rows = []
        for name, limit in self.limits.items():
            value = getattr(result, name)
            if not isinstance(value, float):
                raise ValueError(
                    "result must hold means, got a value for each agent; measure with "
                    "reduce='mean'"
                )
            rows.append((name, value, limit, not math.isnan(value) and value < limit))
        return TargetCheck(self.name, tuple(rows))

    def tables(self) -> list[Table]:
        """One row for each limit."""
        rows: list[tuple[Any, ...]] = list(self.limits.items())
        return [Table(f"Targets {self.name}", ("metric", "below"), rows)]

    def to_dict(self) -> dict[str, Any]:
        """The name and the limits."""
        return {"name": self.name, "limits": dict(self.limits)}


def targets(name: str) -> Targets:
    """The guides' targets for a model of trajectories.

    Args:
        name: "competition" or "world_class".

    Returns:
        Limits, with a method `check` for results of `trajectory_metrics`.

    Raises:
        ValueError: another name.
    """
    if name not in _LIMITS:
        raise ValueError(f"name must be one of {sorted(_LIMITS)}, got {name!r}")
    return Targets(name, dict(_LIMITS[name]))
