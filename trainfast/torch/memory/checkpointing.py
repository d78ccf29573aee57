"""Activation checkpointing for models that do not offer it."""

import contextlib
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainfast.report import one_line


class Checkpointing:
    """What `enable_checkpointing` did; `remove()` undoes it.

    Attributes:
        how: "blocks", or the name of the model's own switch.
        modules: the names of the modules that are run again in the backward pass.
    """

    def __init__(self, how: str, modules: list[str], undo: Callable[[], None]) -> None:
        self.how, self.modules = how, modules
        self._undo: Callable[[], None] | None = undo

    def remove(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None

    def __repr__(self) -> str:
        return one_line(self, how=self.how, modules=len(self.modules) or None)


def enable_checkpointing(model: nn.Module, *, offload: bool = False) -> Checkpointing:
    """Keeps only the inputs of a model's repeated blocks for the backward pass.

    Each block runs again when its gradients are needed, with the same random numbers,
    so gradients are the same bits. Activations fall to about those of a single block,
    and a step takes about a third longer.

    A model's own switch is used where it has one (transformers, timm). Else the blocks
    are the modules of one class that stand in one nn.ModuleList or nn.Sequential and
    hold most parameters, as in nn.TransformerEncoder; a plain nn.Sequential of other
    layers is cut into segments of about the square root of its length.

    Args:
        model: it is changed in place. Its state_dict keeps its keys; a copy or a pickle
            of the model is without checkpointing.
        offload: also move the blocks' inputs to the host until they are needed. Not
            for models with a switch of their own.

    Raises:
        ValueError: the model has no blocks to choose, or is checkpointed already.
    """
    if not offload:
        own = _own_switch(model)
        if own is not None:
            return own
    if any(hasattr(module, "_checkpointed") for module in model.modules()):
        raise ValueError("`model` is checkpointed already; call remove() first")
    blocks = _blocks(model)
    kind = _checkpointed_class
    if not blocks:
        blocks = _sequentials(model)
        kind = _segmented_class
    if not blocks:
        raise ValueError(
            "`model` has neither repeated blocks nor an nn.Sequential; call "
            "torch.utils.checkpoint.checkpoint in its forward() instead"
        )
    classes = {name: type(block) for name, block in blocks.items()}
    for block in blocks.values():
        block.__class__ = kind(type(block), offload)  # type: ignore[arg-type]

    def undo() -> None:
        for name, block in blocks.items():
            block.__class__ = classes[name]

    return Checkpointing("blocks", list(blocks), undo)


def _own_switch(model: nn.Module) -> Checkpointing | None:
    """The switch of transformers' or timm's models."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is not None and getattr(model, "supports_gradient_checkpointing", False):
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        disable: Any = model.gradient_checkpointing_disable
        return Checkpointing("gradient_checkpointing_enable", [], disable)
    switch: Any = getattr(model, "set_grad_checkpointing", None)
    if switch is None:
        return None
    switch(True)
    return Checkpointing("set_grad_checkpointing", [], partial(switch, False))


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The largest group of modules of one class in one container."""
    best: dict[str, nn.Module] = {}
    most = 0
    for outer, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        groups: defaultdict[type, dict[str, nn.Module]] = defaultdict(dict)
        for name, child in container.named_children():
            if next(child.children(), None) is not None:  # not a single layer
                groups[type(child)][f"{outer}.{name}".lstrip(".")] = child
        for group in groups.values():
            size = sum(
                p.numel() for child in group.values() for p in child.parameters()
            )
            if len(group) > 1 and size > most:
                best, most = group, size
    return best


def _sequentials(model: nn.Module) -> dict[str, nn.Module]:
    """The longest nn.Sequential, where it has segments."""
    found = {n: m for n, m in model.named_modules() if type(m) is nn.Sequential}
    name = max(found, key=lambda name: len(found[name]), default=None)
    if name is None or len(found[name]) < 3:
        return {}
    return {name: found[name]}


def _saving(offload: bool) -> Any:
    if not offload:
        return contextlib.nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


def _new(of: type[nn.Module]) -> nn.Module:
    return of.__new__(of)


def _class(of: type[nn.Module], forward: Any) -> type[nn.Module]:
    """A subclass with this forward(); its objects are pickled as those of `of`."""

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return (_new, (of,), *object.__reduce_ex__(self, protocol)[2:])

    names = {"forward": forward, "__reduce_ex__": reduce, "_checkpointed": True}
    return type(of.__name__, (of,), {**names, "__module__": of.__module__})


@cache
def _checkpointed_class(of: type[nn.Module], offload: bool) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = partial(of.forward, self)
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        with _saving(offload):
            return checkpoint(run, *args, use_reentrant=False, **kwargs)

    return _class(of, forward)


@cache
def _segmented_class(of: type[nn.Module], offload: bool) -> type[nn.Module]:
    def forward(self: nn.Sequential, x: Any) -> Any:
        if not torch.is_grad_enabled():
            return of.forward(self, x)
        layers = list(self)
        length = max(1, round(len(layers) ** 0.5))
        for begin in range(0, len(layers), length):
            segment = nn.Sequential(*layers[begin : begin + length])
            with _saving(offload):
                x = checkpoint(segment, x, use_reentrant=False)
        return x

    return _class(of, forward)
