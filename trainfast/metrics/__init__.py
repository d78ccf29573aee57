"""Metrics of predictions: errors of trajectories, and targets that they should meet."""

from trainfast.metrics.targets import TargetCheck, Targets, targets
from trainfast.metrics.trajectory import TrajectoryResult, trajectory_metrics

__all__ = [
    "TargetCheck",
    "Targets",
    "TrajectoryResult",
    "targets",
    "trajectory_metrics",
]
