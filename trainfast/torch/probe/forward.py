"""Switches of how the model computes: its precision, its layout, compiled or not."""

import copy
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

from trainfast.torch.probe.loop import Loop, Switch, clock


class Float32(Switch):
    """float32 in place of float64, for the model, its optimizer and its batches."""

    name = "dtype"
    by_name = True

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


class Autocast(Switch):
    """torch.autocast to a half precision around the model's forward.

    float16 is timed without a GradScaler, so what the model learns there is worthless.
    """

    by_name = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.name = str(dtype).removeprefix("torch.")

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        if loop.model is None:
            return False
        kind = next(loop.model.parameters()).device.type
        if torch.is_autocast_enabled(kind):
            return False
        if self.dtype == torch.float16 and kind == "cpu":
            return False
        return all(p.dtype == torch.float32 for p in loop.model.parameters())

    def enter(self, loop: Loop) -> None:
        assert loop.model is not None
        device = next(loop.model.parameters()).device.type

        def before(module: Any, args: Any) -> None:
            self.autocast = torch.autocast(device, dtype=self.dtype)
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


class ChannelsLast(Switch):
    """Images and the weights of 2-D convolutions with their channels innermost."""

    name = "channels-last"
    warm = 2

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        if loop.model is None:
            return False
        weights = [
            m.weight
            for m in loop.model.modules()
            if isinstance(m, torch.nn.Conv2d) and m.weight.shape[1:].numel() > 1
        ]
        return any(not _is_channels_last(weight) for weight in weights)

    def enter(self, loop: Loop) -> None:
        assert loop.model is not None
        self.before = [
            (tensor, tensor.stride())
            for tensor in _images(loop)
            if not _is_channels_last(tensor)
        ]
        for tensor, _ in self.before:
            tensor.data = tensor.data.to(memory_format=torch.channels_last)
        self.hook = loop.model.register_forward_pre_hook(
            lambda module, args, kwargs: (_to_last(args), _to_last(kwargs)),
            with_kwargs=True,
        )

    def leave(self, loop: Loop) -> None:
        self.hook.remove()
        for tensor, stride in self.before:
            again = torch.empty_strided(
                tensor.shape, stride, dtype=tensor.dtype, device=tensor.device
            )
            tensor.data = again.copy_(tensor.data)
        self.before.clear()


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """By strides: a tensor of one channel is contiguous in both layouts, but a
    convolution with it computes in the layout that its strides show."""
    last = torch.empty_like(tensor, device="meta", memory_format=torch.channels_last)
    return tensor.stride() == last.stride()


def _images(loop: Loop) -> Iterator[torch.Tensor]:
    """The model's 4-D parameters, and what optimizers keep for them."""
    assert loop.model is not None
    for param in loop.model.parameters():
        if param.dim() != 4:
            continue
        yield param
        for optimizer in loop.optimizers:
            for value in optimizer.state.get(param, {}).values():
                if torch.is_tensor(value) and value.shape == param.shape:
                    yield value


def _to_last(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        if values.dim() != 4:
            return values
        return values.contiguous(memory_format=torch.channels_last)
    if isinstance(values, MutableMapping):
        moved = copy.copy(values)
        for key in values:
            moved[key] = _to_last(values[key])
        return moved
    return tuple(map(_to_last, values)) if isinstance(values, tuple) else values


class Compiled(Switch):
    """torch.compile of the model's forward; `loop.once` gets the compiler's seconds."""

    name = "compile"
    by_name = True
    warm = 3

    def __init__(self) -> None:
        self.model: torch.nn.Module | None = None
        self.compiled: Any = None
        self.entered: float | None = None

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        return loop.model is not None and not hasattr(loop.model, "_orig_mod")

    def enter(self, loop: Loop) -> None:
        assert loop.model is not None
        if self.model is not loop.model:
            self.model = loop.model
            self.compiled = torch.compile(loop.model.forward)
            self.entered = clock()
        self.own = vars(loop.model).get("forward")
        loop.model.forward = self.compiled

    def step(self, loop: Loop, original: Any, args: Any, kwargs: Any) -> Any:
        if self.entered is not None:
            loop.once[self.name] = clock() - self.entered
            self.entered = None
        return original(*args, **kwargs)

    def leave(self, loop: Loop) -> None:
        assert self.model is not None
        if self.own is None:
            vars(self.model).pop("forward", None)
        else:
            self.model.forward = self.own
