"""The metrics of trajectories as a torchmetrics.Metric, for loops and Lightning."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from trainfast.metrics.trajectory import (
    METRICS,
    TrajectoryResult,
    make_result,
    measure,
    mode_note,
)
from trainfast.report import attributes, one_line

__all__ = ["TrajectoryMetrics"]


class TrajectoryMetrics(Metric):
    """`trainfast.trajectory_metrics` over many batches and processes.

    Its states are float64 sums and counts, which processes add: the result is the mean
    over all agents of all batches, however they were split.

    Args:
        definition: as for `trainfast.trajectory_metrics`, like all others.
        miss_threshold: in the unit of the coordinates.
        final: "last" or "strict".
        top_k: min_ and the miss rate look at this many most probable modes.
        kwargs: for torchmetrics.Metric.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    sums: Tensor
    counts: Tensor

    def __init__(
        self,
        definition: str = "seed",
        miss_threshold: float = 2.0,
        final: str = "last",
        top_k: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.definition = definition
        self.miss_threshold = miss_threshold
        self.final = final
        self.top_k = top_k
        self._note = "no batch yet"
        for state in ("sums", "counts"):
            zeros = torch.zeros(len(METRICS), dtype=torch.float64)
            self.add_state(state, zeros, dist_reduce_fx="sum")

    def __repr__(self) -> str:
        """The settings, on one line."""
        names = "definition miss_threshold final top_k"
        return one_line(self, **attributes(self, names))

    def update(
        self,
        pred: Tensor,
        target: Tensor,
        mask: Tensor | None = None,
        probabilities: Tensor | None = None,
    ) -> None:
        """Adds a batch, which is measured where `pred` is. If the metric is on the same
        GPU (`metric.to(device)`), nothing waits for it.

        Args:
            pred: [agents, modes, steps, D] or [agents, steps, D].
            target: [agents, steps, D].
            mask: bool [agents, steps]: True: the step counts.
            probabilities: [agents, modes].
        """
        totals, _ = measure(
            pred,
            target,
            mask=mask,
            probabilities=probabilities,
            definition=self.definition,
            miss_threshold=self.miss_threshold,
            final=self.final,
            top_k=self.top_k,
        )
        self._note = mode_note(pred, probabilities)
        sums, counts = torch.as_tensor(totals)
        self.sums += sums.to(self.sums.device)
        self.counts += counts.to(self.counts.device)

    def compute(self) -> dict[str, Tensor]:
        """The means by name; NaN where no agent has the metric. Without probabilities
        there are no brier scores."""
        means = self.sums / self.counts
        return {
            name: means[m]
            for m, name in enumerate(METRICS)
            if not name.startswith("brier") or self.counts[m] > 0
        }

    def report(self) -> TrajectoryResult:
        """This process's means so far as a table, for `trainfast.targets`."""
        totals = torch.stack((self.sums, self.counts)).cpu().numpy()
        has_brier = bool(totals[1, METRICS.index("brier_min_ade")] > 0)
        return make_result(totals, self._note, self.definition, has_brier)
