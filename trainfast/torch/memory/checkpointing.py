"""Activation checkpointing for models that do not offer it."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainfast.report import one_line
from trainfast.torch.memory.estimate import Estimate, estimate_memory
from trainfast.torch.memory.recompute import Recomputed, recompute
from trainfast.torch.memory.snapshot import Snapshot
from trainfast.torch.memory.step import forward_and_loss
from trainfast.torch.private import tree_map

_RUNS = 3  # of forward and backward, of which the fastest counts
_MOST_LIMITS = 100  # for a segment's activations that are tried


@dataclass(frozen=True)
class Cost:
    """Of a training step.

    Attributes:
        memory: most bytes that tensors take at once, as `estimate_memory` says.
        seconds: of the forward and backward pass; None where it would not fit.
    """

    memory: int
    seconds: float | None

    def __str__(self) -> str:
        took = "" if self.seconds is None else f", {1e3 * self.seconds:.0f} ms"
        return f"{self.memory / (1 << 20):,.0f} MiB{took}"


class Checkpointing:
    """What `enable_checkpointing` did; `remove()` undoes it.

    Attributes:
        how: "blocks", or the name of the model's own switch.
        modules: the names of the modules that are run again in the backward pass.
        before, after: the `Cost` of a step; None without a batch.
    """

    before: Cost | None = None
    after: Cost | None = None

    def __init__(self, done: Recomputed) -> None:
        self.how, self.modules = done.how, done.modules
        self._undo: Callable[[], None] | None = done.undo

    def remove(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None

    def __repr__(self) -> str:
        costs = {"before": self.before, "after": self.after}
        told = {name: f"{cost}" for name, cost in costs.items() if cost is not None}
        return one_line(self, how=self.how, modules=len(self.modules) or None, **told)


def enable_checkpointing(
    model: nn.Module,
    batch: Any = None,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    offload: bool = False,
) -> Checkpointing:
    """Keeps only the inputs of a model's repeated blocks for the backward pass.

    Each block runs again when its gradients are needed, with the same random numbers,
    so gradients are the same bits. Activations fall to about those of a single block,
    and a step takes about a third longer.

    A model's own switch is used where it has one (transformers, timm). Else the blocks
    are the modules of one class that stand in one nn.ModuleList or nn.Sequential and
    hold most parameters, as in nn.TransformerEncoder; a plain nn.Sequential of other
    layers is cut into segments: with a batch where its layers' activations make memory
    smallest, otherwise of about the square root of its length.

    Args:
        model: it is changed in place. Its state_dict keeps its keys; a copy is
            checkpointed, too, a pickle is not.
        batch: as for `trainfast.estimate_memory`. With it the result says what memory
            and time a step takes, before and after: some steps run, if they fit, after
            which weights, gradients, buffers and random states are as before.
        loss_fn: as for `trainfast.estimate_memory`.
        offload: also move the blocks' inputs to the host until they are needed. Not
            for models with a switch of their own.

    Raises:
        ValueError: the model has no blocks to choose, or is checkpointed already.
        Exception: what a step with the batch raises; the model is as before then.
    """
    if batch is None:
        return Checkpointing(recompute(model, offload=offload))

    def estimate() -> Estimate:
        device = _device(model).type
        return estimate_memory(model, batch, loss_fn=loss_fn, device=device, steps=1)

    def checkpointed(ends: Sequence[int] = ()) -> tuple[Recomputed, Estimate]:
        done = recompute(model, offload=offload, ends=ends)
        try:
            return done, estimate()
        finally:
            done.undo()

    plain = estimate()
    ends: tuple[int, ...] = ()
    done, less = checkpointed()
    if done.sequential:
        (name,) = done.modules
        best = best_ends(_by_layer(plain, model, name))
        chosen = checkpointed(best)[1]
        if chosen.allocated < less.allocated:
            ends, less = best, chosen
    before = _cost(plain, model, batch, loss_fn)
    made = Checkpointing(recompute(model, offload=offload, ends=ends))
    try:
        made.before, made.after = before, _cost(less, model, batch, loss_fn)
    except BaseException:
        made.remove()
        raise
    return made


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _by_layer(estimate: Estimate, model: nn.Module, name: str) -> list[int]:
    """Bytes of activations that each layer of the nn.Sequential `name` has made."""
    prefix = f"{name}." if name else ""
    found = dict.fromkeys(model.get_submodule(name)._modules, 0)
    for module, size in estimate.activations.items():
        layer = module.removeprefix(prefix).partition(".")[0]
        if module.startswith(prefix) and layer in found:
            found[layer] += size
    return list(found.values())


def best_ends(made: Sequence[int]) -> tuple[int, ...]:
    """Where segments of layers end that keep the fewest bytes.

    What is kept are the inputs of all segments, and the activations of the one that
    runs again. For each limit of the latter the cheapest inputs are found by dynamic
    programming.

    Args:
        made: bytes of activations that each layer makes; the last bytes before a layer
            are taken for those of its input. The first input is the batch's.
    """
    n = len(made)
    inputs = [0]
    for size in made[:-1]:
        inputs.append(size or inputs[-1])
    until = [0, *itertools.accumulate(made)]
    sums = {until[b] - until[a] for a in range(n) for b in range(a + 1, n + 1)}
    limits = sorted(size for size in sums if size >= max(made))
    best: tuple[float, tuple[int, ...]] = (math.inf, (n,))
    for limit in limits[:: max(1, len(limits) // _MOST_LIMITS)]:
        kept = [0.0] + [math.inf] * n
        begin = [0] * (n + 1)
        for end in range(1, n + 1):
            for first in range(end):
                if until[end] - until[first] <= limit:
                    bytes_kept = kept[first] + inputs[first]
                    if bytes_kept < kept[end]:
                        kept[end], begin[end] = bytes_kept, first
        if kept[n] + limit < best[0]:
            ends, at = [], n
            while at:
                ends.append(at)
                at = begin[at]
            best = kept[n] + limit, tuple(reversed(ends))
    return best[1]


def _cost(estimate: Estimate, model: nn.Module, batch: Any, loss_fn: Any) -> Cost:
    seconds = None
    if estimate.fits:
        seconds = _seconds(model, batch, loss_fn)
    return Cost(estimate.allocated, seconds)


def _seconds(model: nn.Module, batch: Any, loss_fn: Any) -> float | None:
    """Of forward and backward on the model's device; None: no memory for it."""
    device = _device(model)
    batch = tree_map(lambda x: x.to(device) if hasattr(x, "to") else x, batch)
    snapshot = Snapshot(model)
    model.train()
    times = []
    try:
        for _ in range(1 + _RUNS):
            began = time.perf_counter()
            forward_and_loss(model, batch, loss_fn, {}).backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
    except torch.OutOfMemoryError:
        return None
    finally:
        snapshot.restore()
    return min(times[1:])
