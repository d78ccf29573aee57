"""`trainfast.accelerate.Tracker`: accelerate's log() writes to a trainfast.Logger.

accelerator = Accelerator(log_with=trainfast.accelerate.Tracker(logger))
accelerator.init_trackers("project", config={"lr": 3e-4})
accelerator.log({"train_loss": loss}, step=step)
accelerator.end_training()
"""

from typing import Any

from accelerate.tracking import GeneralTracker

from trainfast.log import Logger
from trainfast.report import attributes, one_line

__all__ = ["Tracker"]


class Tracker(GeneralTracker):
    """A Logger for `Accelerator(log_with=...)`. Values may be tensors on a GPU: no call
    waits for it.

    Args:
        logger: a trainfast.Logger; accelerator.end_training() closes it.
    """

    name = "trainfast"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self._logger, self._next = logger, 0

    def __repr__(self) -> str:
        """The logger, on one line."""
        return one_line(self, **attributes(self, "_logger"))

    @property
    def tracker(self) -> Logger:
        """The Logger, as accelerator.get_tracker("trainfast", unwrap=True) has it."""
        return self._logger

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Logs the configuration as a record of step 0.

        Args:
            values: by name. What is neither a number nor a string is logged as its
                str().
        """
        plain = (bool, int, float, str)
        config = {n: v if isinstance(v, plain) else str(v) for n, v in values.items()}
        if config:
            self._logger.log(config, 0)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Logs values.

        Args:
            values: see Logger.log.
            step: None: the one after the last.
        """
        step = self._next if step is None else step
        self._next = step + 1
        self._logger.log(values, step)

    def finish(self) -> None:
        """Closes the Logger, which writes what waits."""
        self._logger.close()
