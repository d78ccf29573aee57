"""`trainfast.huggingface.Callback`, for transformers' Trainer."""

import sys
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from trainfast.log import EpochReport, Logger
from trainfast.report import attributes, one_line
from trainfast.torch.run_report import RunReport, samples_of


class Callback(TrainerCallback):
    """Prints an EpochReport after each epoch, and logs what Trainer logs to a Logger.

    The loss is the mean of what Trainer logs, each value weighted by its samples.
    Trainer is asked to log at the end of an epoch, where it reads the loss from the
    GPU; nothing else waits. An epoch's time ends before the evaluation that follows it;
    evaluation within the epoch counts. Samples are counted as the model gets them in
    training, by a hook before its forward().

    `grad_norm` is added to the logs where Trainer has none and the optimizer does. All
    names are Trainer's; after an epoch come `epoch`, `train_loss_epoch` and
    `throughput`.

    Args:
        logger: a trainfast.Logger, which stays open; or None.
        samples: a function of the model's arguments, a dict, that returns the number of
            samples; None: the first dimension of the first tensor among them.
        **options: of trainfast.EpochReport, such as `bands`. The number of epochs and,
            where a run goes on, those that are done come from Trainer.

    Attributes:
        report: the trainfast.EpochReport of the run.
    """

    def __init__(
        self,
        logger: Logger | None = None,
        *,
        samples: Callable[[Any], int] | None = None,
        **options: Any,
    ) -> None:
        self.logger, self.samples = logger, samples
        self._run = RunReport(logger, samples, options)
        self._counter = _Counter(samples or samples_of)
        self._hook: Any = None
        self._epoch_has_ended = False

    def __repr__(self) -> str:
        """The settings, on one line."""
        return one_line(self, **attributes(self, "logger samples"))

    @property
    def report(self) -> EpochReport:
        return self._run.report

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self._remove_hook()  # of a run that an exception ended
        self._hook = model.register_forward_pre_hook(self._counter, with_kwargs=True)
        epochs = state.num_train_epochs  # sys.maxsize: as many as max_steps takes
        done = int(state.epoch or 0)
        self._run.begin(epochs if epochs < sys.maxsize else None, done)

    def on_epoch_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        self._end_epoch(state.global_step)
        self._counter.samples = 0
        self._run.begin_epoch()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if not self._counter.samples:  # Trainer has logged them
            self._run.end_epoch(state.global_step)
            return control
        self._epoch_has_ended = control.should_log = True
        return control

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        logs = {} if logs is None else logs
        if "loss" in logs:
            optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's
            norm = getattr(optimizer, "grad_norm", None)
            if norm is not None and "grad_norm" not in logs:
                logs["grad_norm"] = state.log_history[-1]["grad_norm"] = norm.item()
            if self._counter.samples:
                self._run.step(logs["loss"], self._counter.samples)
                self._counter.samples = 0
        self._run.log(logs, state.global_step)
        self._end_epoch(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._remove_hook()

    def _end_epoch(self, step: int) -> None:
        """Where the epoch has ended, once Trainer has logged its last loss, or has not
        because no step followed the log before."""
        if self._epoch_has_ended:
            self._epoch_has_ended = False
            self._run.end_epoch(step)

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


class _Counter:
    """A hook before forward() that counts the samples of training batches."""

    def __init__(self, count: Callable[[Any], int] | None) -> None:
        self.samples, self._count = 0, count

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if module.training and self._count is not None:
            self.samples += self._count(kwargs or args)

    def __reduce__(self) -> Any:
        return _Counter, (None,)  # a copy of the model has a hook that does not count
