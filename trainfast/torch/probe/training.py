"""Switches of what a training step computes."""

import copy
import os
from collections.abc import Callable, MutableMapping
from typing import Any

import torch

from trainfast.torch.probe.hooks import tensors
from trainfast.torch.probe.loop import Loop
from trainfast.torch.probe.switch import Switch

_LEAST_OPTIMIZER_SHARE = 0.06


class _OptimizerSwitch(Switch):
    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        return bool(loop.optimizers) and share("optimizer") >= _LEAST_OPTIMIZER_SHARE


class NoOptimizerStep(_OptimizerSwitch):
    """No optimizer steps: a bound for every cure of the optimizer."""

    name = "no optimizer step"

    def step(self, loop: Loop, original: Any, args: Any, kwargs: Any) -> Any:
        return None


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
        return len(self._targets(loop)) > 1 and len(loop.optimizers) > 1

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


class Setting(Switch):
    """A setting of torch that costs time, with the value that does not."""

    def __init__(
        self,
        name: str,
        read: Callable[[], Any],
        write: Callable[[Any], Any],
        wanted: Callable[[Any], Any],
    ) -> None:
        self.name = name
        self.read = read
        self.write = write
        self.wanted = wanted

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        return self.read() != self.wanted(self.read())

    def enter(self, loop: Loop) -> None:
        self.before = self.read()
        self.write(self.wanted(self.before))

    def leave(self, loop: Loop) -> None:
        self.write(self.before)


def settings() -> list[Setting]:
    cores = len(os.sched_getaffinity(0))
    return [
        Setting(
            "anomaly",
            torch.is_anomaly_enabled,
            torch.autograd.set_detect_anomaly,
            lambda now: False,
        ),
        Setting(
            "threads",
            torch.get_num_threads,
            torch.set_num_threads,
            lambda now: max(now, cores),
        ),
        Setting(
            "deterministic",
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
            lambda now: False,
        ),
    ]


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
        return batch[:, :length] if wide else batch
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


class Float32(Switch):
    """float32 in place of float64, for the model, its optimizer and its batches."""

    name = "dtype"
    alone = True

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        params = [
            p for o in loop.optimizers for g in o.param_groups for p in g["params"]
        ]
        return any(p.dtype == torch.float64 for p in params)

    def enter(self, loop: Loop) -> None:
        self.double, self.default = torch.Tensor.double, torch.get_default_dtype()
        torch.Tensor.double = torch.Tensor.float  # type: ignore[method-assign]
        self._convert(loop, torch.float32)
        self.hooks = []
        if loop.model is not None:  # for data that comes from no loader
            cast = loop.model.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
            self.hooks = [cast]

    def leave(self, loop: Loop) -> None:
        torch.Tensor.double = self.double  # type: ignore[method-assign]
        for hook in self.hooks:
            hook.remove()
        self._convert(loop, torch.float64)
        torch.set_default_dtype(self.default)

    def _convert(self, loop: Loop, dtype: torch.dtype) -> None:
        torch.set_default_dtype(dtype)
        buffers = list(loop.model.buffers()) if loop.model is not None else []
        params = [
            p for o in loop.optimizers for g in o.param_groups for p in g["params"]
        ]
        for tensor in (*params, *buffers):
            if tensor.is_floating_point():
                tensor.grad = None
                tensor.data = tensor.data.to(dtype)
        for optimizer in loop.optimizers:
            for state in optimizer.state.values():
                for key, value in state.items():
                    if (
                        torch.is_tensor(value)
                        and value.is_floating_point()
                        and value.dim()
                    ):
                        state[key] = value.to(dtype)

    def next_batch(self, loop: Loop, iterator: Any, original: Any) -> Any:
        return _cast(original(iterator))


def _cast_inputs(module: Any, args: Any, kwargs: Any) -> Any:
    return _cast(args), _cast(kwargs)


def _cast(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.float() if batch.dtype == torch.float64 else batch
    if hasattr(batch, "to_dict") and hasattr(batch, "apply"):  # a PyG batch
        return batch.apply(_cast)
    if isinstance(batch, MutableMapping):
        cast = copy.copy(batch)
        for key in batch:
            cast[key] = _cast(batch[key])
        return cast
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_cast, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(_cast, batch))
    return batch


class DoubledBatch(Switch):
    """Each batch twice in one: what of a step does not grow with the batch?"""

    name = "batch"
    alone = True

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        try:
            return bool(loop.batches) and _twice(loop.batches[0]) is not None
        except Exception:
            return False

    def enter(self, loop: Loop) -> None:
        self.given = [_twice(batch) for batch in loop.batches]
        self.next = 0

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


class Bfloat16(Switch):
    """torch.autocast to bfloat16 around the model's forward."""

    name = "bfloat16"
    alone = True

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        if loop.model is None or torch.is_autocast_enabled("cpu"):
            return False
        return all(p.dtype == torch.float32 for p in loop.model.parameters())

    def enter(self, loop: Loop) -> None:
        assert loop.model is not None
        device = next(loop.model.parameters()).device.type

        def before(module: Any, args: Any) -> None:
            self.autocast = torch.autocast(device, dtype=torch.bfloat16)
            self.autocast.__enter__()

        def after(module: Any, args: Any, out: Any) -> None:
            self.autocast.__exit__(None, None, None)

        self.hooks = [
            loop.model.register_forward_pre_hook(before),
            loop.model.register_forward_hook(after, always_call=True),
        ]

    def leave(self, loop: Loop) -> None:
        for hook in self.hooks:
            hook.remove()
