"""`auto_micro_batch`: a batch that is too large runs in parts."""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from trainfast.torch.data.batches import tensors
from trainfast.torch.memory.batches import batch_size, split
from trainfast.torch.memory.meter import is_out_of_memory, without_frames
from trainfast.torch.memory.snapshot import Gradients
from trainfast.torch.private import tree_leaves
from trainfast.torch.random_states import RandomStates
from trainfast.torch.ranks import highest

_IGNORED = -100  # of torch's losses: labels that do not count
_SHARDED = ("FullyShardedDataParallel", "FSDPModule")


def auto_micro_batch(
    model: torch.nn.Module,
    *,
    count: Callable[[Any], Any] | str | None = None,
    scaler: Any = None,
    size: int | None = None,
) -> Callable[[Callable[..., torch.Tensor]], "MicroBatches"]:
    """Runs a forward and a backward pass in parts where memory runs out.

        @trainfast.auto_micro_batch(model)
        def train(batch):
            x, y = batch
            return loss_fn(model(x.to(device)), y.to(device))

        for batch in loader:
            loss = train(batch)  # with the backward pass
            optimizer.step()
            optimizer.zero_grad()

    When memory runs out, gradients, buffers and random states return to what they were
    before the call, and the batch runs again in parts of half the size. The gradient
    stays that of the whole batch, so learning rate and schedule stay right. The size
    is remembered. BatchNorm sees the smaller parts.

    With DistributedDataParallel the parts before the last run under `no_sync`, the
    ranks agree, and the last part's backward pass reduces the gradients. A whole batch
    that is larger than any before is first run once under `no_sync`: where memory runs
    out, no other rank may be waiting.

    Args:
        model: all that the loss depends on, wrapped in DistributedDataParallel or not.
        count: what the loss is a mean over: None or "samples", or a function of a part
            that gives its number of terms, such as
            `lambda batch: (batch["labels"][:, 1:] != -100).sum()` for tokens.
        scaler: a GradScaler, whose scale is applied.
        size: samples in a part to begin with; None: the whole batch.

    The decorated function takes a batch (tensors, containers of them, or a PyG batch)
    and other arguments, and returns the mean loss. What is called returns the mean
    loss of the whole batch, without its graph. Calls without gradients are errors.

    Raises:
        TypeError, ValueError: an argument is wrong; the loss is not one number; labels
            of -100 are spread unevenly and `count` is not given.
        torch.OutOfMemoryError: a single sample does not fit, or memory ran out while
            the ranks reduced gradients.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {model!r}")
    if not (count is None or count == "samples" or callable(count)):
        raise ValueError(f'`count` must be "samples" or a function, got {count!r}')
    if size is not None and (not isinstance(size, int) or size < 1):
        raise ValueError(f"`size` must be a positive integer, got {size!r}")
    return lambda loss_of: MicroBatches(loss_of, model, count, scaler, size)


class _Part(NamedTuple):
    batch: Any
    samples: int
    weight: float | torch.Tensor  # its share of the mean


class MicroBatches:
    """What `auto_micro_batch` makes of a function.

    Attributes:
        size: samples in a part at most; None until memory ran out.
    """

    def __init__(
        self,
        loss_of: Callable[..., torch.Tensor],
        model: torch.nn.Module,
        count: Callable[[Any], Any] | str | None,
        scaler: Any,
        size: int | None,
    ) -> None:
        functools.update_wrapper(self, loss_of)
        self.size = size
        self._loss_of, self._model = loss_of, model
        self._count, self._scaler = count, scaler
        self._checked = count is not None  # that labels are spread evenly
        self._ddp = _ddp(model)
        self._largest = 0  # elements of the largest part that has run

    def __repr__(self) -> str:
        return f"<auto_micro_batch {self._loss_of!r}, size={self.size}>"

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "the decorated function runs a backward pass; call the model itself "
                "where gradients are off"
            )
        call = functools.partial(_call, self._loss_of, args, kwargs)
        start, before, loss = _Start(self._model), self.size, None
        while loss is None:
            with self._others_told():
                parts = self._parts(batch)
            loss = self._attempt(parts, start, call)
        if self.size != before and (self._ddp is None or _rank(self._ddp) == 0):
            warnings.warn(self._what_was_done(batch_size(batch)), stacklevel=2)
        return loss

    def _parts(self, batch: Any) -> list[_Part]:
        """Parts of nearly one size, larger ones first; without those that count 0."""
        samples = batch_size(batch)
        if not samples:
            raise ValueError("the batch has no samples")
        n = math.ceil(samples / (self.size or samples))
        if self._count is None and (n > 1 or not self._checked):
            _check_labels(batch, samples)
            self._checked = True
        if n == 1:
            return [_Part(batch, samples, 1.0)]
        sizes = [samples // n + (i < samples % n) for i in range(n)]
        batches = split(batch, sizes)
        if not callable(self._count):
            return [_Part(b, k, k / samples) for b, k in zip(batches, sizes)]
        counts = [float(self._count(b)) for b in batches]
        if min(counts) < 0:
            raise ValueError(f"`count` must not be negative, got {min(counts)}")
        total = sum(counts)
        if total == 0:  # nothing counts in the whole batch: its loss stays NaN
            return [_Part(b, k, k / samples) for b, k in zip(batches, sizes)]
        return [_Part(b, k, c / total) for b, k, c in zip(batches, sizes, counts) if c]

    def _attempt(
        self, parts: list[_Part], start: "_Start", call: Callable[[Any], torch.Tensor]
    ) -> torch.Tensor | None:
        """The mean loss; None where memory ran out and smaller parts are to be run."""
        if self._ddp is None:
            losses, failed = self._run(parts, call)
            if failed is not None:
                self._halve(parts, failed, parts[0].samples)
                start.restore()
                return None
            return _sum(losses)
        return self._attempt_with_ranks(self._ddp, parts, start, call)

    def _attempt_with_ranks(
        self,
        ddp: DistributedDataParallel,
        parts: list[_Part],
        start: "_Start",
        call: Callable[[Any], torch.Tensor],
    ) -> torch.Tensor | None:
        """All ranks get through the same agreements, however many parts they have."""
        *first, last = parts
        elements = max(_elements(part.batch) for part in parts)
        losses, failed = self._run_apart(ddp, first, call)
        unknown = not first and failed is None and elements > self._largest
        ran_out, biggest, rehearse = self._agree(ddp, parts, failed, unknown)
        if rehearse and not ran_out:
            if unknown:
                _, failed = self._run_apart(ddp, [last], call)
                start.restore()
            ran_out, biggest, _ = self._agree(ddp, parts, failed, False)
        if ran_out:
            self._halve(parts, failed, biggest)
            start.restore()
            return None
        self._largest = max(self._largest, elements)
        ddp.require_forward_param_sync = True
        try:
            losses.append(self._backward(last, call))
        except Exception as error:
            if is_out_of_memory(error):
                error.add_note(
                    "Memory ran out while the ranks reduce gradients, so the step "
                    f"cannot run again: use auto_micro_batch(size={last.samples // 2}) "
                    "or less on all ranks."
                )
            raise
        return _sum(losses)

    def _run(
        self, parts: list[_Part], call: Callable[[Any], torch.Tensor]
    ) -> tuple[list[torch.Tensor], Exception | None]:
        """The losses by their weights, and the error where memory ran out."""
        losses: list[torch.Tensor] = []
        try:
            for part in parts:
                losses.append(self._backward(part, call))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return [], without_frames(error)
        return losses, None

    def _run_apart(
        self,
        ddp: DistributedDataParallel,
        parts: list[_Part],
        call: Callable[[Any], torch.Tensor],
    ) -> tuple[list[torch.Tensor], Exception | None]:
        """As `_run`, without a collective operation."""
        ddp.require_forward_param_sync = False  # which would broadcast buffers
        with self._others_told(), ddp.no_sync():
            return self._run(parts, call)

    @contextlib.contextmanager
    def _others_told(self) -> Iterator[None]:
        """Other ranks, which wait for this one to agree, end as well if it fails."""
        try:
            yield
        except Exception:
            if self._ddp is not None:
                self._agree(self._ddp, [], None, False, broken=True)
            raise

    def _backward(
        self, part: _Part, call: Callable[[Any], torch.Tensor]
    ) -> torch.Tensor:
        loss = call(part.batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise TypeError(
                f"{getattr(self, '__name__', 'the function')} must return the mean "
                f"loss, a tensor of one element, got {_described(loss)}"
            )
        share = loss * part.weight
        (share if self._scaler is None else self._scaler.scale(share)).backward()
        return share.detach()

    def _agree(
        self,
        ddp: DistributedDataParallel,
        parts: list[_Part],
        failed: Exception | None,
        unknown: bool,
        broken: bool = False,
    ) -> tuple[bool, int, bool]:
        """Whether memory ran out anywhere, the largest part there, and whether a rank
        must rehearse.

        Raises:
            RuntimeError: the step failed on another rank.
        """
        biggest = max((part.samples for part in parts), default=0)
        said = [int(failed is not None), biggest, int(unknown), int(broken)]
        ran_out, biggest, rehearse, any_broken = highest(said, ddp.process_group)
        if any_broken and not broken:
            raise RuntimeError("the step failed on another rank; its error is there")
        return bool(ran_out), biggest, bool(rehearse)

    def _halve(
        self, parts: list[_Part], failed: Exception | None, biggest: int
    ) -> None:
        if biggest == 1:
            if failed is None:
                raise RuntimeError("a single sample does not fit on another rank")
            failed.add_note("A single sample at a time does not fit.")
            raise failed
        self.size = math.ceil(biggest / 2)

    def _what_was_done(self, samples: int | None) -> str:
        said = (
            f"memory ran out: batches run in parts of at most {self.size} samples "
            f"(this one has {samples}); the gradient stays that of the whole batch"
        )
        if any(_has_statistics(m) and m.training for m in self._model.modules()):
            said += ", but BatchNorm sees the smaller parts"
        return said


class _Start:
    """Gradients, buffers and random states at the start of a step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._gradients = Gradients(model.parameters())
        self._buffers = [
            (module, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
        self._random = RandomStates()

    @torch.no_grad()
    def restore(self) -> None:
        """Also gives the failed step's memory back, in whole segments."""
        self._gradients.restore()
        for module, name, buffer, kept in self._buffers:
            module._buffers[name] = buffer
            if buffer is not None and kept is not None:
                buffer.copy_(kept)
        self._random.restore()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _call(
    loss_of: Callable[..., torch.Tensor], args: Any, kwargs: Any, batch: Any
) -> torch.Tensor:
    return loss_of(batch, *args, **kwargs)


def _sum(losses: list[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, losses)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"one of shape {list(value.shape)}"
    return type(value).__name__


def _elements(batch: Any) -> int:
    return sum(tensor.numel() for tensor in tensors(batch))


def _has_statistics(module: torch.nn.Module) -> bool:
    """BatchNorm and InstanceNorm of any dimension."""
    return getattr(module, "running_mean", None) is not None


def _rank(ddp: DistributedDataParallel) -> int:
    return int(torch.distributed.get_rank(ddp.process_group))


def _ddp(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The wrapper that reduces gradients, if there are other ranks.

    Raises:
        ValueError: the forward pass itself talks to other ranks.
    """
    modules = list(model.modules())
    names = {base.__name__ for module in modules for base in type(module).__mro__}
    sharded = next((name for name in _SHARDED if name in names), None)
    if sharded is not None:
        raise ValueError(
            f"{sharded} gathers weights in the forward pass, where a rank that runs "
            "out of memory cannot go back; find_batch_size tells the size that fits"
        )
    ddp = next((m for m in modules if isinstance(m, DistributedDataParallel)), None)
    if ddp is not None and "SyncBatchNorm" in names:
        raise ValueError(
            "SyncBatchNorm waits for other ranks in the forward pass, where a rank "
            "that runs out of memory cannot go back; use BatchNorm or find_batch_size"
        )
    return ddp


def _check_labels(batch: Any, samples: int) -> None:
    """Raises where a mean over labels, parts or not, would not be a mean over samples.

    Raises:
        ValueError: labels of -100, which torch's losses leave out, are uneven.
    """
    for leaf in tree_leaves(batch):
        if not isinstance(leaf, torch.Tensor) or leaf.dtype != torch.int64:
            continue
        if not leaf.dim() or len(leaf) != samples or not leaf.numel():
            continue
        ignored = (leaf == _IGNORED).reshape(samples, -1).sum(1)
        least, most = int(ignored.min()), int(ignored.max())
        if least != most:
            raise ValueError(
                f"samples have {least} to {most} labels of {_IGNORED}, so parts of the "
                "batch have means over unequal numbers of labels; pass count=, a "
                "function that gives the number of labels that count in a part, or "
                'count="samples" where the loss is a mean over samples'
            )
