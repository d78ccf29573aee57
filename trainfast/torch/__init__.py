"""Adapters for torch: the same names, arguments and state as torch's own.

Each name is loaded when it is first used, so that a future torch that breaks one
capability leaves the others alone.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import trainfast.torch.private  # noqa: F401  (first: refuses a torch that is too old)

if TYPE_CHECKING:  # __getattr__ loads them
    from trainfast.numpy import knn, knn_graph, radius, radius_graph
    from trainfast.torch import accelerate as accelerate
    from trainfast.torch import flash_attn as flash_attn
    from trainfast.torch import huggingface as huggingface
    from trainfast.torch import lightning as lightning
    from trainfast.torch import pyg as pyg
    from trainfast.torch.amp import Accumulator, GradScaler, SkipAwareScheduler
    from trainfast.torch.attention import attention, scaled_dot_product_attention
    from trainfast.torch.checkpoints import CheckpointEvery, resume, save_checkpoint
    from trainfast.torch.data import benchmark_dataloader, find_workers, loader_kwargs
    from trainfast.torch.leaks import LeakTracker, LeakWarning, MemoryMonitor
    from trainfast.torch.memory import (
        auto_micro_batch,
        enable_checkpointing,
        estimate_memory,
        find_batch_size,
        find_max_batch_size,
        print_gpu_memory,
        profile_memory_usage,
    )
    from trainfast.torch.optim import (
        Adam,
        AdamW,
        Muon,
        clip_grad_norm_,
        clip_grad_value_,
        get_total_norm,
    )
    from trainfast.torch.profiler import Profiler

_PACKAGES = {
    "amp": ("Accumulator", "GradScaler", "SkipAwareScheduler"),
    "attention": ("attention", "scaled_dot_product_attention"),
    "checkpoints": ("CheckpointEvery", "resume", "save_checkpoint"),
    "data": ("benchmark_dataloader", "find_workers", "loader_kwargs"),
    "leaks": ("LeakTracker", "LeakWarning", "MemoryMonitor"),
    "memory": (
        *("auto_micro_batch", "enable_checkpointing", "estimate_memory"),
        *("find_batch_size", "find_max_batch_size", "profile_memory_usage"),
        "print_gpu_memory",
    ),
    "optim": (
        *("Adam", "AdamW", "Muon"),
        *("clip_grad_norm_", "clip_grad_value_", "get_total_norm"),
    ),
    "profiler": ("Profiler",),
}
_HOMES = {name: package for package, names in _PACKAGES.items() for name in names}
_NEIGHBOURS = ("knn", "knn_graph", "radius", "radius_graph")  # the same for all arrays
_MODULES = (
    "accelerate",
    "amp",
    "data",
    "flash_attn",
    "graphs",
    "huggingface",
    "lightning",
    "memory",
    "optim",
    "pyg",
)

__all__ = [
    "Accumulator",
    "Adam",
    "AdamW",
    "CheckpointEvery",
    "GradScaler",
    "LeakTracker",
    "LeakWarning",
    "MemoryMonitor",
    "Muon",
    "Profiler",
    "SkipAwareScheduler",
    "attention",
    "auto_micro_batch",
    "benchmark_dataloader",
    "clip_grad_norm_",
    "clip_grad_value_",
    "enable_checkpointing",
    "estimate_memory",
    "find_batch_size",
    "find_max_batch_size",
    "find_workers",
    "flash_attn",
    "get_total_norm",
    "huggingface",
    "knn",
    "knn_graph",
    "loader_kwargs",
    "print_gpu_memory",
    "profile_memory_usage",
    "radius",
    "radius_graph",
    "resume",
    "save_checkpoint",
    "scaled_dot_product_attention",
]


class _Face(ModuleType):
    """`trainfast.torch.attention` is the function, also once Python's import has bound
    the package of this name, which holds the function, here."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "attention" and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face


def __getattr__(name: str) -> object:
    if name in _NEIGHBOURS:
        return getattr(import_module("trainfast.numpy.neighbours"), name)
    if name in _HOMES:
        found = getattr(import_module(f"trainfast.torch.{_HOMES[name]}"), name)
        globals()[name] = found
        return found
    if name in _MODULES:
        return import_module(f"trainfast.torch.{name}")
    raise AttributeError(f"module 'trainfast.torch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES, *_NEIGHBOURS})
