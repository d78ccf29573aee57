"""What the frameworks' callbacks share: EpochReport, Logger, samples of a batch."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainfast.log import EpochReport, Logger
from trainfast.torch.data.batches import tensors

_NOT_NAMES = ("step", "time")  # of the Logger's own columns


def samples_of(batch: Any) -> int:
    """The first dimension of the first tensor in the batch; graphs of a PyG batch.

    Raises:
        TypeError: there is no tensor with a dimension in the batch.
    """
    graphs = getattr(batch, "num_graphs", None)
    if isinstance(graphs, int):
        return graphs
    for tensor in tensors(batch):
        if tensor.dim():
            return int(tensor.shape[0])
    raise TypeError(
        f"cannot tell the samples of a batch of type {type(batch).__name__}; pass "
        "`samples`, a function of the batch that returns their number"
    )


class RunReport:
    """An EpochReport and a Logger for the callback of a framework.

    Args:
        logger: what logs, or None.
        samples: the number of samples of a batch; None: see samples_of.
        options: of EpochReport; the framework says the epochs where they do not.
    """

    def __init__(
        self,
        logger: Logger | None,
        samples: Callable[[Any], int] | None,
        options: dict[str, Any],
    ) -> None:
        EpochReport(**{"epochs": 1} | options)  # tells wrong options before the run
        self.samples = samples or samples_of
        self.report = EpochReport()
        self._logger, self._options, self._is_empty = logger, options, True

    def begin(self, epochs: int | None, done: int) -> None:
        """The run begins, or goes on where some epochs are done."""
        options = {"epochs": epochs, "start": done} | self._options
        if options["epochs"] is None:
            options.pop("remaining", None)  # of a run that ends after some steps
        self.report = EpochReport(**options)
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self.report.start_epoch()
        self._is_empty = True

    def step(self, loss: Any, samples: int) -> None:
        self.report.step(loss, samples)
        self._is_empty = False

    def end_epoch(self, step: int) -> None:
        """Prints the report of the epoch's steps; nothing where there were none."""
        if self._is_empty:
            return
        epoch = self.report.end_epoch()
        self._is_empty = True
        values = {"epoch": epoch.epoch, "train_loss_epoch": epoch.loss}
        self.log({**values, "throughput": epoch.throughput}, step)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Logs the numbers and strings among the values, tensors of one element too."""
        if self._logger is not None:
            kept = {n: v for n, v in values.items() if _can_be_logged(n, v)}
            if kept:
                self._logger.log(kept, step)


def _can_be_logged(name: Any, value: Any) -> bool:
    if not isinstance(name, str) or name in _NOT_NAMES or not name.isprintable():
        return False
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, bool | int | float | str)
