"""Modules that keep their inputs only, and run again in the backward pass."""

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Recomputed:
    """The modules of a model that run again; `undo()` makes them as they were.

    Attributes:
        how: "blocks", or the name of the model's own switch.
        modules: their names; of a model with a switch of its own none are known.
        sequential: whether it is one nn.Sequential, which runs again in segments.
    """

    def __init__(self, how: str, modules: list[str], undo: Callable[[], None]) -> None:
        self.how, self.modules, self.undo = how, modules, undo
        self.sequential = False


def is_recomputed(model: Any) -> bool:
    """Whether blocks of the model run again, by `recompute`."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return any(hasattr(module, "_recomputed") for module in modules)


def recompute(
    model: nn.Module, *, offload: bool = False, ends: Sequence[int] = ()
) -> Recomputed:
    """Keeps only the inputs of a model's repeated blocks for the backward pass.

    Args:
        model: it is changed in place.
        offload: move the inputs to the host meanwhile.
        ends: where each segment of a plain nn.Sequential ends; without them segments
            are of about the square root of its length.

    Raises:
        ValueError: the model has no blocks to choose, or they run again already.
    """
    if not offload:
        own = _own_switch(model)
        if own is not None:
            return own
    if is_recomputed(model):
        raise ValueError("`model` is checkpointed already; call remove() first")
    blocks, sequentials = _blocks(model), {}
    if not blocks:
        blocks = sequentials = _sequentials(model)
    if not blocks:
        raise ValueError(
            "`model` has neither repeated blocks nor an nn.Sequential; call "
            "torch.utils.checkpoint.checkpoint in its forward() instead"
        )
    classes = {name: type(block) for name, block in blocks.items()}
    kind: Any = _checkpointed_class
    if sequentials:
        kind = partial(_segmented_class, ends=tuple(ends))
    for block in blocks.values():
        block.__class__ = kind(type(block), offload)

    def undo() -> None:
        for name, block in blocks.items():
            block.__class__ = classes[name]

    made = Recomputed("blocks", list(blocks), undo)
    made.sequential = bool(sequentials)
    return made


def _own_switch(model: nn.Module) -> Recomputed | None:
    """The switch of transformers' or timm's models."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is not None and getattr(model, "supports_gradient_checkpointing", False):
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        disable: Any = model.gradient_checkpointing_disable
        return Recomputed("gradient_checkpointing_enable", [], disable)
    switch: Any = getattr(model, "set_grad_checkpointing", None)
    if switch is None:
        return None
    switch(True)
    return Recomputed("set_grad_checkpointing", [], partial(switch, False))


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


@contextlib.contextmanager
def _statistics_kept(norms: list[Any]) -> Iterator[None]:
    """Running statistics have counted the batch in the forward pass."""
    kept = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    try:
        for norm, _, number in kept:
            norm.momentum = 0.0
            norm.num_batches_tracked = None if number is None else number.clone()
        yield
    finally:
        for norm, momentum, number in kept:
            norm.momentum, norm.num_batches_tracked = momentum, number


def _again(module: nn.Module) -> dict[str, Any]:
    """What `checkpoint` needs so that running the module again changes nothing."""
    norms = [
        norm
        for norm in module.modules()
        if norm.training and getattr(norm, "track_running_stats", False)
    ]  # BatchNorm, SyncBatchNorm, InstanceNorm
    if not norms or torch.compiler.is_compiling():
        return {}
    contexts = lambda: (contextlib.nullcontext(), _statistics_kept(norms))  # noqa: E731
    return {"context_fn": contexts}


def _new(of: type[nn.Module]) -> nn.Module:
    return of.__new__(of)


def _class(of: type[nn.Module], forward: Any) -> type[nn.Module]:
    """A subclass with this forward(). A copy of its objects is one of them; a pickle
    holds an object of `of`, since this class has no name by which it could be found."""

    def deep_copy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        new = memo[id(self)] = _new(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return (_new, (of,), *object.__reduce_ex__(self, protocol)[2:])

    methods = {"forward": forward, "__deepcopy__": deep_copy, "__reduce_ex__": reduce}
    names = {**methods, "__module__": of.__module__, "_recomputed": True}
    return type(of.__name__, (of,), names)


@cache
def _checkpointed_class(of: type[nn.Module], offload: bool) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = partial(of.forward, self)
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        with _saving(offload):
            options = {"use_reentrant": False, **_again(self), **kwargs}
            return checkpoint(run, *args, **options)

    return _class(of, forward)


@cache
def _segmented_class(
    of: type[nn.Module], offload: bool, ends: tuple[int, ...]
) -> type[nn.Module]:
    def forward(self: nn.Sequential, x: Any) -> Any:
        if not torch.is_grad_enabled():
            return of.forward(self, x)
        layers = list(self)
        length = max(1, round(len(layers) ** 0.5))
        cuts = ends or (*range(length, len(layers), length), len(layers))
        for begin, end in pairwise((0, *cuts)):
            segment = nn.Sequential(*layers[begin:end])
            with _saving(offload):
                x = checkpoint(segment, x, use_reentrant=False, **_again(segment))
        return x

    return _class(of, forward)
