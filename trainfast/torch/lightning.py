"""Lightning: mixed precision that clips in the optimizer's step, and a callback.

trainer = lightning.Trainer(
    gradient_clip_val=1.0,
    plugins=[trainfast.lightning.Precision("16-mixed", "cuda")],
    callbacks=[trainfast.lightning.Callback()],
)

The classes derive from those of the package `lightning` or, where only that one has
been imported or is installed, `pytorch_lightning`; a Trainer of the other package
refuses them.
"""

import math
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from trainfast.log import EpochReport, Logger
from trainfast.report import attributes, one_line
from trainfast.torch.amp import GradScaler
from trainfast.torch.optim.fused_step import FusedStep
from trainfast.torch.run_report import RunReport

__all__ = ["Callback", "Precision"]

_OLD = "pytorch_lightning"
_ONLY_OLD = "lightning" not in sys.modules and _OLD in sys.modules
_NAME = _OLD if _ONLY_OLD or find_spec("lightning") is None else "lightning.pytorch"
pl: Any = import_module(_NAME)
_Base: Any = pl.plugins.MixedPrecision
_CallbackBase: Any = pl.Callback
_is_overridden: Any
_is_overridden = import_module(f"{_NAME}.utilities.model_helpers").is_overridden
_Wrapper: Any = import_module(f"{_NAME}.core.optimizer").LightningOptimizer


class MixedPrecision(_Base):
    """Lightning's MixedPrecision plugin, with clipping by norm inside the step.

    trainfast.AdamW and trainfast.Adam get `gradient_clip_val` as their `max_grad_norm`
    for the step, so that unscaling, the check for infinities, the norm, clipping and
    the update read the gradients twice and write none. `optimizer.grad_norm` is the
    norm before clipping. Clipping by value and other optimizers go Lightning's way.

    An optimizer's own `max_grad_norm` stays in force where it is smaller. The gradients
    stay scaled and unclipped, unless the optimizer has `write_back_grads`. Where the
    module overrides `configure_gradient_clipping`, or it or a callback overrides
    `on_before_optimizer_step`, the gradients are unscaled before that hook runs, as
    with Lightning's plugin, which is another pass over them.

    The name of the class is Lightning's, because checkpoints store the state of the
    scaler under it: they load both ways.

    Args:
        precision: "16-mixed" (float16 with a GradScaler) or "bf16-mixed" (without).
        device: the type of device for torch.autocast, "cuda" or "cpu".
        scaler: the GradScaler of "16-mixed"; None: a trainfast.GradScaler(device).

    Raises:
        ValueError: another precision.
    """

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        device: str,
        scaler: Any = None,
    ) -> None:
        if scaler is None and precision == "16-mixed":
            scaler = GradScaler(device)
        super().__init__(precision, device, scaler)
        self._norms: dict[Optimizer, float | None] = {}  # to restore after the step

    def __repr__(self) -> str:
        """The settings, on one line."""
        return one_line(self, **attributes(self, "precision device"))

    def optimizer_step(
        self,
        optimizer: Any,
        model: Any,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Runs the closure (forward and backward pass), clips, and steps.

        Args:
            optimizer: the optimizer to step.
            model: the LightningModule.
            closure: what Lightning runs before the step.
            **kwargs: for the optimizer's step().

        Returns:
            What the optimizer's step() returned; None if the scaler skipped it.
        """
        try:
            if self.scaler is None or not _unscales_itself(optimizer, model):
                return super().optimizer_step(optimizer, model, closure, **kwargs)
            loss = closure()
            self._after_closure(model, optimizer)
            if loss is None and model.automatic_optimization:
                return None  # training_step() returned None: there was no backward pass
            stepped = self.scaler.step(optimizer, **kwargs)
            self.scaler.update()
            return stepped
        finally:
            if optimizer in self._norms:
                optimizer.max_grad_norm = self._norms.pop(optimizer)

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: Any = "norm",
    ) -> None:
        """Clips the gradients, or has the optimizer's next step() clip them.

        Args:
            optimizer: the optimizer that will step with the gradients.
            clip_val: the largest norm or value; 0: does not clip.
            gradient_clip_algorithm: "norm" or "value".
        """
        if isinstance(optimizer, _Wrapper):
            optimizer = optimizer.optimizer
        by_norm = clip_val > 0 and gradient_clip_algorithm == "norm"
        if not (by_norm and isinstance(optimizer, FusedStep)):
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
            return
        self._norms.setdefault(optimizer, optimizer.max_grad_norm)
        optimizer.max_grad_norm = min(clip_val, optimizer.max_grad_norm or math.inf)


Precision = MixedPrecision


def _unscales_itself(optimizer: Any, model: Any) -> bool:
    """True where nothing needs unscaled gradients before the optimizer's step()."""
    if not isinstance(optimizer, FusedStep):
        return False
    trainer = model.trainer
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        return False
    observers = [model, *trainer.callbacks]
    if any(_is_overridden("on_before_optimizer_step", x) for x in observers):
        return False
    return not _is_overridden("configure_gradient_clipping", model)


class Callback(_CallbackBase):
    """Prints an EpochReport after each epoch, and logs to a Logger.

    The loss is the mean over the epoch's samples of what training_step() returned. An
    epoch's time ends with its last batch, before the validation that follows it;
    validation within the epoch counts.

    Logged are, every `log_every_n_steps` of the Trainer, `train_loss`, `learning_rate`
    and, of an optimizer that has it, `grad_norm`; after an epoch `epoch`,
    `train_loss_epoch` and `throughput`; after validation the Trainer's metrics. Nothing
    waits for a GPU but the end of an epoch.

    Args:
        logger: a trainfast.Logger, which stays open; or None.
        samples: a function of the batch that returns the number of its samples; None:
            the first dimension of the first tensor in it, or the graphs of a PyG batch.
        **options: of trainfast.EpochReport, such as `bands`. The number of epochs and,
            where a run goes on, those that are done come from the Trainer.

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
        self._last = 0  # the last step that was logged
        self._rates: dict[str, Any] = {}

    def __repr__(self) -> str:
        """The settings, on one line."""
        return one_line(self, **attributes(self, "logger samples"))

    @property
    def report(self) -> EpochReport:
        return self._run.report

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        epochs = trainer.max_epochs
        self._last = trainer.global_step
        self._run.begin(
            epochs if epochs and epochs > 0 else None, trainer.current_epoch
        )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._run.begin_epoch()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._rates = _of_optimizers(trainer, "learning_rate", _rate_of)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not pl_module.automatic_optimization:
            loss = math.nan if loss is None else loss  # there is a batch in any case
        elif loss is not None:
            loss = loss * trainer.accumulate_grad_batches  # which Lightning divides by
        if loss is not None:
            self._run.step(loss, self._run.samples(batch))
        if trainer.global_step - self._last >= trainer.log_every_n_steps:
            self._last = trainer.global_step
            norms = _of_optimizers(trainer, "grad_norm", _norm_of)
            values = {"train_loss": loss, **self._rates, **norms}
            self._run.log(values, self._last)
        if trainer.is_last_batch:
            self._run.end_epoch(trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.end_epoch(trainer.global_step)  # of one that max_steps ended

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._run.log(trainer.callback_metrics, trainer.global_step)


def _of_optimizers(
    trainer: Any, name: str, value_of: Callable[[Any], Any]
) -> dict[str, Any]:
    """A value of each optimizer that has it: `name`, `name_1`, ..."""
    values = [value_of(optimizer) for optimizer in trainer.optimizers]
    names = [f"{name}_{i}" if i else name for i in range(len(values))]
    return {n: v for n, v in zip(names, values, strict=True) if v is not None}


def _rate_of(optimizer: Any) -> Any:
    rate = optimizer.param_groups[0]["lr"]
    return rate.clone() if isinstance(rate, Tensor) else rate


def _norm_of(optimizer: Any) -> Any:
    return getattr(optimizer, "grad_norm", None)
