"""`EpochReport`: the lines that a run prints after each epoch."""

import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from trainfast.log.bands import Bands, bands_of, verdict
from trainfast.report import attributes, one_line


@dataclass(frozen=True)
class Epoch:
    """The numbers of an epoch; printing it gives the report's lines.

    Attributes:
        epoch: counted from 1.
        epochs: how many the run has, or None.
        loss: mean over the samples; nan without samples.
        seconds: from the epoch's start to its end.
        samples: of all ranks that were added up.
        throughput: samples a second.
        verdict: the band's word, or None.
        remaining: seconds to the end of the run, or None.
        padding: share of the tokens that are padding, or None.
        mfu: share of the roof that the step's operations reach, or None.
        roof: TFLOP/s that `mfu` is a share of, or None.
    """

    epoch: int
    epochs: int | None
    loss: float
    seconds: float
    samples: int
    throughput: float
    verdict: str | None = None
    remaining: float | None = None
    padding: float | None = None
    mfu: float | None = None
    roof: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        of = "" if self.epochs is None else f"/{self.epochs}"
        word = "" if self.verdict is None else f" ({self.verdict})"
        lines = [
            f"Epoch [{self.epoch}{of}] Average Train Loss: {self.loss:.4f}",
            f"  Epoch time: {self.seconds:.1f}s | "
            f"Throughput: {self.throughput:.0f} samples/sec{word}",
        ]
        if self.remaining is not None:
            lines.append(f"  Remaining: {_duration(self.remaining)}")
        if self.padding is not None:
            lines.append(f"  Padding: {self.padding:.1%} of the tokens")
        if self.mfu is not None:
            lines.append(f"  MFU: {self.mfu:.1%} of {self.roof:.4g} TFLOP/s")
        return "\n".join(lines)


class EpochReport:
    """Prints the mean loss, time and throughput of each epoch.

        report = trainfast.EpochReport(epochs=25)
        for epoch in range(25):
            report.start_epoch()
            for x, y in loader:
                ...
                report.step(loss, len(x))
            report.end_epoch()

    A loss on a GPU is added up there and read once, at the end of the epoch.

    Args:
        epochs: how many the run has; None: not known.
        start: how many are done already, for a run that goes on.
        remaining: adds a line with the remaining time, from this run's epochs until now
            with everything between them.
        bands: adds a word to the throughput: pairs of samples a second and the word
            that holds from there on, or the name of a GPU that a guide has bands for.
        flops_per_sample: floating-point operations of a training step for one sample,
            or see `count_flops`; with `roof`, adds a line with the share of the roof.
        roof: TFLOP/s of matrix products in the dtype of the run, as `trainfast roof`
            measures them.
        all_ranks: adds up samples and losses of all ranks of torch.distributed, which
            must then all call `end_epoch`; otherwise they are rank 0's.

    Only rank 0 prints.
    """

    def __init__(
        self,
        epochs: int | None = None,
        *,
        start: int = 0,
        remaining: bool = False,
        bands: str | Bands | None = None,
        flops_per_sample: float | None = None,
        roof: float | None = None,
        all_ranks: bool = False,
    ) -> None:
        for name, value in (("epochs", epochs), ("start", start)):
            if value is not None and (type(value) is not int or value < 0):
                raise ValueError(f"`{name}` must be a count of epochs, got {value!r}")
        if remaining and epochs is None:
            raise ValueError("`remaining` needs `epochs`, the number that the run has")
        if roof is not None and not roof > 0:
            raise ValueError(f"`roof` must be a rate in TFLOP/s, got {roof!r}")
        self.epochs, self.start, self.remaining = epochs, start, remaining
        self.flops_per_sample, self.roof = flops_per_sample, roof
        self.all_ranks = all_ranks
        self._bands = None if bands is None else bands_of(bands)
        self._done = start
        self.start_epoch()

    def __repr__(self) -> str:
        names = "epochs start remaining flops_per_sample roof all_ranks"
        return one_line(self, **attributes(self, names))

    def start_epoch(self) -> None:
        """Starts the epoch's clock again and forgets its steps. Without this call an
        epoch begins where the last one ended, so that validation between them counts.
        """
        self._loss, self._real, self._late_loss, self._late_real = 0.0, 0, None, None
        self._steps = self._samples = self._slots = 0
        self._epoch_began = time.perf_counter()
        if self._done == self.start:
            self._began = self._epoch_began

    def step(
        self,
        loss: Any,
        samples: int,
        *,
        mask: Any = None,
        tokens: tuple[int, int] | None = None,
    ) -> None:
        """Adds a batch.

        Args:
            loss: mean over the batch: a number, or a tensor of one element.
            samples: in the batch; the epoch's loss is weighted by it.
            mask: of the batch's tokens, True or 1 where there is no padding, such as a
                tokenizer's attention_mask; for the share of padding.
            tokens: the same as numbers: real tokens and padding.

        Raises:
            ValueError: the loss has several elements, or a number is negative.
        """
        if samples < 0:
            raise ValueError(f"`samples` must not be negative, got {samples}")
        self._steps += 1
        if samples:  # the mean over an empty batch is nan
            self._samples += samples
            self._add_loss(loss, samples)
        if mask is not None:
            self._add_mask(mask)
        if tokens is not None:
            real, padding = tokens
            if real < 0 or padding < 0:
                raise ValueError(f"`tokens` must not be negative, got {tokens}")
            self._real += real
            self._slots += real + padding

    def end_epoch(self) -> Epoch:
        """Prints the report, on rank 0, and starts the next epoch.

        Returns:
            The numbers.

        Raises:
            RuntimeError: there was no step.
        """
        if not self._steps:
            raise RuntimeError(
                "end_epoch() without a step() in this epoch; call step(loss, samples) "
                "after each batch"
            )
        loss, real = self._loss, self._real
        if self._late_loss is not None:
            loss += self._late_loss.item()  # waits for the device
        if self._late_real is not None:
            real += self._late_real.item()
        now = time.perf_counter()
        totals = [loss, self._samples, real, self._slots, 1]
        is_printed = True
        if "torch.distributed" in sys.modules:
            from trainfast.torch import ranks

            is_printed = ranks.rank() == 0
            if self.all_ranks and ranks.is_distributed():
                totals = ranks.total(totals)
        self._done += 1
        epoch = self._numbers(now, *totals)
        if is_printed:
            print(epoch, flush=True)
        self.start_epoch()
        return epoch

    def count_flops(self, step: Any, samples: int) -> float:
        """Counts the operations of a training step with torch's FlopCounterMode, and
        sets `flops_per_sample`. Products of matrices, convolutions and attention count.

        Args:
            step: called once; runs forward and backward of a batch.
            samples: in that batch.

        Returns:
            Operations for one sample.
        """
        if samples < 1:
            raise ValueError(f"`samples` must be positive, got {samples}")
        from trainfast.torch.flops import count_flops

        self.flops_per_sample = count_flops(step) / samples
        return self.flops_per_sample

    def _add_loss(self, loss: Any, samples: int) -> None:
        if type(loss) is not float:
            device = getattr(loss, "device", None)
            count = getattr(loss, "numel", None)
            if count is not None and count() != 1:
                raise ValueError(
                    "`loss` must be the batch's mean, got a tensor of shape "
                    f"{tuple(loss.shape)}; call .mean() first"
                )
            if getattr(device, "type", "cpu") != "cpu":
                self._late_loss = _added(self._late_loss, loss, samples)
                return
            # float() of a tensor that requires grad warns in torch 2.13
            loss = loss.item() if hasattr(loss, "item") else float(loss)
        self._loss += loss * samples

    def _add_mask(self, mask: Any) -> None:
        if getattr(getattr(mask, "device", None), "type", "cpu") != "cpu":
            self._slots += mask.numel()
            self._late_real = _added(self._late_real, (mask != 0).sum(), 1)
            return
        self._slots += mask.numel() if hasattr(mask, "numel") else mask.size
        self._real += int((mask != 0).sum())

    def _numbers(
        self,
        now: float,
        loss: float,
        samples: float,
        real: float,
        slots: float,
        devices: float,
    ) -> Epoch:
        seconds = max(now - self._epoch_began, 1e-9)
        throughput = samples / seconds
        left = None
        if self.remaining and self.epochs is not None:
            mean = (now - self._began) / (self._done - self.start)
            left = mean * max(0, self.epochs - self._done)
        mfu = None
        if self.flops_per_sample is not None and self.roof is not None:
            rate = throughput * self.flops_per_sample / devices
            mfu = rate / (self.roof * 1e12)
        return Epoch(
            epoch=self._done,
            epochs=self.epochs,
            loss=loss / samples if samples else float("nan"),
            seconds=seconds,
            samples=int(samples),
            throughput=throughput,
            verdict=None if self._bands is None else verdict(self._bands, throughput),
            remaining=left,
            padding=1 - real / slots if slots else None,
            mfu=mfu,
            roof=None if mfu is None else self.roof,
        )


def _added(total: Any, value: Any, times: int) -> Any:
    """total + value * times on the value's device, in one kernel: nothing is read."""
    value = value.detach().reshape(())
    if total is None:
        torch: Any = sys.modules["torch"]
        on_mps = value.device.type == "mps"
        with torch.inference_mode(False):  # so that it may be added to in any mode
            kind = torch.float32 if on_mps else torch.float64
            total = value.new_zeros((), dtype=kind)
    return total.add_(value, alpha=times)


def _duration(seconds: float) -> str:
    minutes, hours = round(seconds / 60), 0
    if minutes < 1:
        return f"{seconds:.0f}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}min" if hours else f"{minutes}min"
