"""`find_batch_size`: the largest batch that fits, or the fastest, by running it."""

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from trainfast.memory.batch_size import BatchSizeReport, Probe, knee
from trainfast.memory.gpus import Gpu, gpu_of
from trainfast.torch.memory.estimate import estimate_memory
from trainfast.torch.memory.meter import Meter, is_out_of_memory, without_frames
from trainfast.torch.memory.snapshot import Snapshot
from trainfast.torch.memory.step import autocast, autocast_dtype, forward_and_loss
from trainfast.torch.private import tree_map
from trainfast.torch.ranks import highest, is_distributed, lowest

_PROBES = 5  # sizes that are run for objective="memory"
_PROBES_WITHOUT_GUESS = 8
_STEPS, _STEPS_ON_CPU = 3, 8  # of each size; a heap's peak rises for more than three
_AMP = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_GUESSES = 3  # estimates for the first guess
# Of the budget, on the CPU: where heaps have other holes in each run of a process. A
# size is chosen to take the first share, and good enough from the second on.
_AIM, _ENOUGH = 0.98, 0.97


def find_batch_size(
    model: torch.nn.Module,
    make_batch: Callable[[int], Any],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    step: Callable[[Any, Any], torch.Tensor] | None = None,
    amp: str | None = None,
    scaler: Any = None,
    schedulers: Any = (),
    objective: str = "memory",
    mode: str = "train",
    target: float = 0.9,
    multiple: int = 8,
    limit: int | None = None,
    max_batch_size: int = 1 << 16,
    validation: Callable[[int], Any] | None = None,
    dataset_size: int | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> BatchSizeReport:
    """Finds the batch size by running training steps, at most five sizes.

    `estimate_memory` gives the first guess; half of it is run, then what the measured
    line predicts, and corrected. The answer has itself been run, with a validation
    batch of the same size. Weights, optimizer and everything else that the steps
    change are put back bit for bit. Without a guess up to eight sizes are run.

    Args:
        model: on the device that it trains on.
        make_batch: make_batch(n) gives a batch of n samples, as the loader would: a
            tensor, a pair of inputs and targets, a tuple or a dict.
        optimizer: None for mode="forward".
        loss_fn, step: as in `estimate_memory`.
        amp: "bf16" or "fp16" for autocast.
        scaler: a GradScaler.
        schedulers: learning rate schedulers, to put their state back.
        objective: "memory" for the largest batch, "throughput" for the smallest within
            3 % of the fastest.
        mode: "train", or "forward" for a forward pass without gradients.
        target: the share of the memory that the batch may take, with the rest. On the
            CPU, where peaks differ from run to run, 98 % of it is aimed at; they may
            exceed it by a few per cent.
        multiple: the answer is a multiple of it, unless only fewer samples fit.
        limit: bytes of memory; None: what is free, on the GPU or for this process. On
            the CPU sizes are approached from below, so that the system stays healthy;
            a copy of the state, which the search holds, comes on top.
        max_batch_size: the largest size to try.
        validation: makes the validation batch; None: `make_batch`.
        dataset_size: samples in the data set, to tell updates an epoch.
        progress: called with the name of each stage.

    With torch.distributed all ranks must call it; they agree on the smallest size.

    Raises:
        TypeError, ValueError: an argument is wrong, or a single sample does not fit.
        Exception: what the step raises, other than that memory ran out.
    """
    _check(objective, mode, target, multiple, max_batch_size)
    if loss_fn is not None and step is not None:
        raise TypeError("`loss_fn` cannot be combined with `step`; pass one of them")
    if mode == "train" and optimizer is None:
        raise TypeError('`optimizer` is needed with mode="train"')
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    meter = Meter(device, limit)
    runner = _Runner(
        *(model, make_batch, validation or make_batch, optimizer, loss_fn, step),
        *(autocast_dtype(amp), scaler, mode, meter),
    )
    snapshot = Snapshot(model, optimizer, scaler, schedulers)
    search = _Search(runner, snapshot, target, multiple, max_batch_size, progress)
    try:
        if mode == "train":
            progress("estimating")
            search.guess = guess_size(runner, search.budget, multiple)
            runner.plan = None  # it holds a copy of the model
            snapshot.restore()
        best = search.largest()
        if objective == "throughput":
            search.climb(best)
    finally:
        snapshot.restore()
        meter.clear()
    if objective == "throughput":
        best = knee([p for p in search.probes if p.size <= best])
        search.notes.append("the smallest batch within 3 % of the best rate")
    return BatchSizeReport(
        *(best, search.probes, meter.limit, target, objective, dataset_size),
        notes=search.notes,
    )


def find_max_batch_size(
    model: torch.nn.Module,
    input_shape: tuple[int, ...],
    device: Any = None,
    start_batch: int = 1,
    *,
    mode: str = "train",
) -> int:
    """The largest batch of random inputs, by `find_batch_size`.

    Args:
        model: a module; it is moved to the device.
        input_shape: of one sample.
        device: None for the model's own.
        start_batch: the answer is a multiple of it.
        mode: "train" for steps with AdamW and the mean of the output as their loss;
            "forward" for a forward pass without gradients, which is no measure of
            training.
    """
    device = torch.device(device or next(model.parameters()).device)
    model.to(device)
    optimizer = None
    if mode == "train":
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(params)
    return find_batch_size(
        model,
        lambda n: torch.randn(n, *input_shape, device=device),
        optimizer,
        mode=mode,
        multiple=start_batch,
    ).batch_size


class Guess(NamedTuple):
    """What the estimator says: the largest size, and bytes a sample there."""

    size: int
    slope: float


def guess_size(runner: "_Runner", budget: int, multiple: int) -> Guess | None:
    """The first guess; None where the step cannot be estimated.

    The ranks of torch.distributed take the smallest of their guesses.
    """
    sizes = [multiple, 4 * multiple]
    guess = None
    try:
        totals = [runner.estimated(n) for n in sizes]
        for _ in range(_GUESSES):
            slope = (totals[-1] - totals[-2]) / (sizes[-1] - sizes[-2])
            slope = max(slope, budget / (1 << 20))
            size = max(1, int(sizes[-1] + (budget - totals[-1]) / slope))
            guess = Guess(size, slope)
            if size in sizes:
                break
            sizes.append(size)
            totals.append(runner.estimated(size))
    except Exception:  # if it is the step's own error, running the step will show it
        guess = None
    if not is_distributed():
        return guess
    least = lowest(guess.size if guess else 0)
    if guess is None or least < 1:
        return None
    return Guess(least, guess.slope)


class _Runner:
    """Runs the steps of one size."""

    def __init__(
        self,
        model: torch.nn.Module,
        make_batch: Callable[[int], Any],
        validation: Callable[[int], Any],
        optimizer: torch.optim.Optimizer | None,
        loss_fn: Any,
        step: Any,
        dtype: torch.dtype | None,
        scaler: Any,
        mode: str,
        meter: Meter,
    ) -> None:
        self.model, self.make_batch, self.validation = model, make_batch, validation
        self.optimizer, self.loss_fn, self.step = optimizer, loss_fn, step
        self.dtype, self.scaler, self.mode, self.meter = dtype, scaler, mode, meter
        self.plan: Any = None  # an estimate, which can be made again for other sizes

    def run(self, size: int) -> float:
        """Samples a second, without the first step."""
        variables: dict[str, Any] = {}
        times = []
        for _ in range(_STEPS if self.meter.cuda else _STEPS_ON_CPU):
            began = time.perf_counter()
            batch = self.make_batch(size)
            if batch is None:
                raise TypeError("`make_batch` returned None; it must return a batch")
            if self.mode == "forward":
                self._validate(batch, variables)
            else:
                self._train(batch, variables)
            if self.meter.cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        if self.mode == "train":
            variables.clear()
            self._validate(self.validation(size), variables)
        return size / min(times[1:])

    def estimated(self, size: int) -> int:
        """Bytes that a training step of this size takes, as the estimator sees it."""
        self.plan = self.plan or self._plan(size)
        estimate = self.plan.again(batch_size=size)
        # What is free on a GPU is free besides the context.
        return estimate.reserved if self.meter.cuda else estimate.total

    def _plan(self, size: int) -> Any:
        def on_host(leaf: Any) -> Any:
            return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf

        gpu = gpu_of("T4")  # unused on the CPU
        if self.meter.cuda:
            card = torch.cuda.get_device_properties(self.meter.device)
            capability = 10 * card.major + card.minor
            gpu = Gpu(
                *(card.name, card.total_memory, capability),
                *(gpu.context, card.multi_processor_count),
            )
        return estimate_memory(
            copy.deepcopy(self.model).cpu(),
            tree_map(on_host, self.make_batch(size)),
            loss_fn=self.loss_fn,
            step=self.step,
            amp=None if self.dtype is None else _AMP[self.dtype],
            device=self._device,
            gpu=gpu,
        )

    def _train(self, batch: Any, variables: dict[str, Any]) -> None:
        assert self.optimizer is not None
        self.model.train()
        with autocast(self._device, self.dtype):
            loss = self._loss(batch, variables)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    def _validate(self, batch: Any, variables: dict[str, Any]) -> None:
        self.model.eval()
        with torch.no_grad(), autocast(self._device, self.dtype):
            self._loss(batch, variables)

    def _loss(self, batch: Any, variables: dict[str, Any]) -> torch.Tensor:
        if self.step is not None:
            loss: torch.Tensor = self.step(self.model, batch)
            return loss
        return forward_and_loss(self.model, batch, self.loss_fn, variables)

    @property
    def _device(self) -> str:
        return "cuda" if self.meter.cuda else "cpu"


class _Search:
    """Chooses sizes; all ranks choose the same ones."""

    def __init__(
        self,
        runner: _Runner,
        snapshot: Snapshot,
        target: float,
        multiple: int,
        most: int,
        progress: Callable[[str], None],
    ) -> None:
        self.runner, self.snapshot, self.progress = runner, snapshot, progress
        self.multiple, self.most = multiple, most
        self.target = target
        self.budget = self._budget()
        self.guess: Guess | None = None
        self.probes: list[Probe] = []
        self.notes: list[str] = []

    def largest(self) -> int:
        first = min(self.multiple, self.most)
        if not self._fits(first) and first > 1:
            self.notes.append(f"a batch of {first} does not fit: not a multiple of it")
            self.multiple, first = 1, 1
            self._fits(1)
        if not self.good:
            peak = self.probes[-1].peak
            needs = "" if peak is None else f": it takes {peak / 2**20:,.0f} MiB"
            raise ValueError(
                f"a single sample does not fit into {self.budget / 2**20:,.0f} MiB"
                f"{needs}; use a smaller model, autocast or checkpointing"
            )
        most = _PROBES if self.guess is not None else _PROBES_WITHOUT_GUESS
        while len(self.probes) < most:
            size = self._next()
            if size is None:
                break
            self._fits(size)
        return max(self.good)

    def climb(self, best: int) -> None:
        """Runs the ladder of powers of two and one and a half times them."""
        ran = {probe.size for probe in self.probes}
        rungs = {n for i in range(17) for n in (1 << i, 3 << i) if n < best}
        for size in sorted(rungs - ran):
            if size >= min(self.multiple, best):
                self._fits(size)

    def _budget(self) -> int:
        """Bytes that a size may take: on the rank that has the fewest."""
        budget = int(self.runner.meter.budget(self.target))
        return lowest(budget) if is_distributed() else budget

    @property
    def aim(self) -> float:
        """What the next size should take."""
        return self.budget * (1 if self.runner.meter.cuda else _AIM)

    @property
    def good(self) -> dict[int, int]:
        """Peaks by size, of sizes that fit."""
        return {
            p.size: p.peak
            for p in self.probes
            if p.peak is not None and p.peak <= self.budget
        }

    def _next(self) -> int | None:
        """The next size to run; None: the largest one is known."""
        good = self.good
        low = max(good)
        above = [p for p in self.probes if p.size > low]
        if not self.runner.meter.cuda and good[low] >= _ENOUGH * self.budget:
            return None
        if above:
            size = self._between(low, good[low], min(above, key=lambda p: p.size))
        elif len(good) == 1:
            size = 2 * low if self.guess is None else self.guess.size // 2
        else:
            before = sorted(good)[-2]
            slope = (good[low] - good[before]) / (low - before)
            if self.guess is not None and slope < 0.5 * self.guess.slope:
                slope = self.guess.slope  # small batches: the optimizer's step decides
            most = low * (1 << 10) if self.guess else 4 * low
            size = most
            if slope * (most - low) > self.aim - good[low]:
                size = int(low + (self.aim - good[low]) / slope)
        size = min(size, self.most) // self.multiple * self.multiple
        if not above and low < 2 * self.multiple <= self.most:
            size = max(size, 2 * self.multiple)
        return size if size > low else None

    def _between(self, low: int, peak: int, high: Probe) -> int:
        """A size above `low`, which fits, and below `high`, which does not."""
        room = high.size - low
        step = int((low * high.size) ** 0.5) - low if high.size > 2 * low else room // 2
        if high.peak is not None:
            step = int(room * (self.aim - peak) / (high.peak - peak))
        largest = high.size - self.multiple
        return min(max(low + step, low + self.multiple), largest)

    def _fits(self, size: int) -> bool:
        self.progress(f"running a batch of {size}")
        meter, rate, failed = self.runner.meter, None, None
        with meter.measured():
            try:
                rate = self.runner.run(size)
            except Exception as error:
                failed = without_frames(error)
        ran_out = failed is not None and is_out_of_memory(failed)
        self.snapshot.restore()
        worst = _agreed(meter.peak, ran_out, failed is not None and not ran_out)
        if failed is not None and not ran_out:
            raise failed
        if worst is None and not ran_out:
            self.notes.append("another rank ran out of memory first")
        if not self.probes:  # what the search holds is known now
            self.budget = self._budget()
        self.probes.append(Probe(size, worst, rate))
        return worst is not None and worst <= self.budget


def _agreed(peak: int, ran_out: bool, failed: bool) -> int | None:
    """The highest peak of all ranks; None where one of them ran out of memory.

    Raises:
        RuntimeError: the step failed on another rank.
    """
    if not is_distributed():
        return None if ran_out else peak
    said = [peak, int(ran_out), int(failed)]
    peak, any_ran_out, any_failed = highest(said)
    if any_failed and not failed:
        raise RuntimeError("the step failed on another rank; its error is there")
    return None if any_ran_out else peak


def _check(
    objective: str, mode: str, target: float, multiple: int, max_batch_size: int
) -> None:
    if objective not in ("memory", "throughput"):
        raise ValueError(
            f'`objective` must be "memory" or "throughput", got {objective!r}'
        )
    if mode not in ("train", "forward"):
        raise ValueError(f'`mode` must be "train" or "forward", got {mode!r}')
    if not 0 < target <= 1:
        raise ValueError(f"`target` must be above 0 and at most 1, got {target}")
    for name, value in (("multiple", multiple), ("max_batch_size", max_batch_size)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` must be a positive integer, got {value!r}")
