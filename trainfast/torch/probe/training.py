"""Switches of what a training step computes."""

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

import torch

from trainfast.torch.data.batches import tensors
from trainfast.torch.probe.loop import Loop, Switch

_LEAST_OPTIMIZER_SHARE = 0.06


class _OptimizerSwitch(Switch):
    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        return bool(loop.optimizers) and share("optimizer") >= _LEAST_OPTIMIZER_SHARE


class NoOptimizerStep(_OptimizerSwitch):
    """No optimizer steps: a bound for every cure of the optimizer.

    A closure runs once, as it holds the forward and the backward pass. A step of LBFGS
    runs it many times: such a step is the training, and no bound.
    """

    name = "no optimizer step"

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        many = any(isinstance(o, torch.optim.LBFGS) for o in loop.optimizers)
        return super().possible(loop, share) and not many

    def step(self, loop: Loop, original: Any, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()


class FusedOptimizer(_OptimizerSwitch):
    """torch's fused implementation of the same optimizer."""

    name = "fused optimizer"

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        groups = self._groups(loop)
        return super().possible(loop, share) and bool(groups)

    def _groups(self, loop: Loop) -> list[dict[str, Any]]:
        return [
            group
            for optimizer in loop.optimizers
            for group in optimizer.param_groups
            if type(optimizer).__module__.startswith("torch.optim")
            and "fused" in group
            and not group["fused"]
            and all(p.is_floating_point() for p in group["params"])
        ]

    def enter(self, loop: Loop) -> None:
        self.before = [(g, g["fused"], g.get("foreach")) for g in self._groups(loop)]
        for optimizer in loop.optimizers:
            for param, state in optimizer.state.items():
                step = state.get("step") if isinstance(state, dict) else None
                if torch.is_tensor(step):
                    state["step"] = step.to(param.device, torch.float32)
        for group, _, _ in self.before:
            group["fused"], group["foreach"] = True, None

    def leave(self, loop: Loop) -> None:
        for group, fused, foreach in self.before:
            group["fused"], group["foreach"] = fused, foreach


class TrainfastOptimizer(_OptimizerSwitch):
    """trainfast.AdamW or Adam in place of each Adam-like optimizer."""

    name = "trainfast optimizer"

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        adams = [o for o in loop.optimizers if "adam" in type(o).__name__.lower()]
        ours = any(type(o).__module__.startswith("trainfast") for o in adams)
        return super().possible(loop, share) and bool(adams) and not ours

    def enter(self, loop: Loop) -> None:
        from trainfast.torch.optim import AdamW

        self.ours = {}
        for optimizer in loop.optimizers:
            if "adam" in type(optimizer).__name__.lower():
                groups = [
                    {"params": g["params"], "lr": float(g.get("lr", 1e-3))}
                    for g in optimizer.param_groups
                ]
                self.ours[id(optimizer)] = AdamW(groups)

    def leave(self, loop: Loop) -> None:
        self.ours = {}

    def step(self, loop: Loop, original: Any, args: Any, kwargs: Any) -> Any:
        ours = self.ours.get(id(args[0]))
        if ours is None:
            return original(*args, **kwargs)
        return ours.step(*args[1:], **kwargs)


class NeededGradients(Switch):
    """Each backward pass for the parameters alone that step next, as in a GAN."""

    name = "needed gradients"

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        return len(loop.optimizers) > 1 and len(self._targets(loop)) > 1

    def _targets(self, loop: Loop) -> list[torch.optim.Optimizer]:
        """The optimizer that each backward pass of an iteration is for."""
        ends = [i for i, o in enumerate(loop.order) if o is loop.optimizers[0]]
        if len(ends) < 2:
            return []
        cycle = list(loop.order)[ends[-2] + 1 : ends[-1] + 1]
        targets: list[torch.optim.Optimizer] = []
        waiting = 0
        for optimizer in cycle:
            if optimizer is None:
                waiting += 1
            else:
                targets += [optimizer] * waiting
                waiting = 0
        return targets

    def enter(self, loop: Loop) -> None:
        params = {
            id(optimizer): [
                p
                for g in optimizer.param_groups
                for p in g["params"]
                if p.requires_grad
            ]
            for optimizer in loop.optimizers
        }
        self.inputs = [params[id(target)] for target in self._targets(loop)]
        self.at = 0

    def backward(self, loop: Loop, original: Any, args: Any, kwargs: Any) -> None:
        if self.at < len(self.inputs):
            kwargs = {**kwargs, "inputs": self.inputs[self.at]}
        self.at += 1
        original(*args, **kwargs)

    def step(self, loop: Loop, original: Any, args: Any, kwargs: Any) -> Any:
        if args[0] is loop.optimizers[0]:
            self.at = 0
        return original(*args, **kwargs)


class NoAttentionWeights(Switch):
    """nn.MultiheadAttention without the weights, so that it can take a fused kernel."""

    name = "attention"

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        model = loop.model
        return model is not None and any(
            isinstance(m, torch.nn.MultiheadAttention) for m in model.modules()
        )

    def enter(self, loop: Loop) -> None:
        self.before = torch.nn.MultiheadAttention.forward
        torchs = self.before

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if len(args) <= 4:
                kwargs["need_weights"] = False
            return torchs(module, *args, **kwargs)

        torch.nn.MultiheadAttention.forward = forward  # type: ignore

    def leave(self, loop: Loop) -> None:
        torch.nn.MultiheadAttention.forward = self.before  # type: ignore


class TrimmedPadding(Switch):
    """Batches cut to the longest sequence that they hold."""

    name = "padding"

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        kept = [(_length(batch), _columns(batch)) for batch in loop.batches]
        return any(0 < length < 0.9 * columns for length, columns in kept)

    def next_batch(self, loop: Loop, iterator: Any, original: Any) -> Any:
        batch = original(iterator)
        length, columns = _length(batch), _columns(batch)
        return _trim(batch, length, columns) if 0 < length < columns else batch


def _ids(batch: Any) -> list[torch.Tensor]:
    """Tensors of a row a sequence that hold token ids or a mask."""
    return [t for t in tensors(batch) if t.dim() == 2 and not t.is_floating_point()]


def _columns(batch: Any) -> int:
    return max((t.shape[1] for t in _ids(batch)), default=0)


def _length(batch: Any) -> int:
    """Columns up to the last one that differs between rows, or from its neighbour."""
    columns, longest = _columns(batch), 0
    for t in _ids(batch):
        if t.shape[1] == columns and t.shape[0] > 1:
            pad = t[0, -1]
            used = (t != pad).any(0).nonzero()
            longest = max(longest, int(used[-1]) + 1 if len(used) else 0)
    return longest


def _trim(batch: Any, length: int, columns: int) -> Any:
    if isinstance(batch, torch.Tensor):
        wide = batch.dim() >= 2 and batch.shape[1] == columns
        return (
            batch[:, :length].contiguous() if wide else batch
        )  # a script may call view()
    if isinstance(batch, MutableMapping):
        trimmed = copy.copy(batch)
        for key in batch:
            trimmed[key] = _trim(batch[key], length, columns)
        return trimmed
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_trim(x, length, columns) for x in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_trim(x, length, columns) for x in batch)
    return batch


class DoubledBatch(Switch):
    """Each batch twice in one: what of a step does not grow with the batch?

    Without a loader, the arguments of the model take the batch's place.
    """

    name = "batch"
    by_name = True

    def __init__(self) -> None:
        self.hook: Any = None

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        if loop.loader is None:
            return loop.model is not None and len(loop.optimizers) == 1
        try:
            return bool(loop.batches) and _twice(loop.batches[0]) is not None
        except Exception:
            return False

    def enter(self, loop: Loop) -> None:
        self.given = [_twice(batch) for batch in loop.batches]
        self.next = 0
        if loop.loader is None:
            assert loop.model is not None
            self.hook = loop.model.register_forward_pre_hook(
                _twice_the_arguments, with_kwargs=True
            )

    def leave(self, loop: Loop) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.hook = None

    def next_batch(self, loop: Loop, iterator: Any, original: Any) -> Any:
        self.next = (self.next + 1) % len(self.given)
        return copy.deepcopy(self.given[self.next])


def _twice(batch: Any) -> Any:
    if hasattr(batch, "to_data_list"):
        return type(batch).from_data_list(batch.to_data_list() * 2)
    leaves = [t for t in tensors(batch) if t.dim()]
    if not leaves:
        return None
    rows = leaves[0].shape[0]
    return _double(batch, rows)


def _twice_the_arguments(model: Any, args: Any, kwargs: Any) -> Any:
    """The arguments of a call in training with each sample twice. Raises ValueError
    where they are no batch, such as the one graph of a whole data set."""
    if not (model.training and torch.is_grad_enabled()):
        return None
    doubled = _twice((args, kwargs))
    rows = {t.shape[0] for t in tensors((args, kwargs)) if t.dim()}
    twice = {t.shape[0] for t in tensors(doubled) if t.dim()}
    if len(rows) != 1 or twice != {2 * row for row in rows}:
        raise ValueError("the model's arguments are no batch of one length")
    return doubled


def _double(batch: Any, rows: int) -> Any:
    if isinstance(batch, torch.Tensor):
        whole = batch.dim() and batch.shape[0] == rows
        return torch.cat([batch, batch]) if whole else batch
    if isinstance(batch, MutableMapping):
        doubled = copy.copy(batch)
        for key in batch:
            doubled[key] = _double(batch[key], rows)
        return doubled
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_double(x, rows) for x in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_double(x, rows) for x in batch)
    return batch
