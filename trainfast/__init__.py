"""Fast kernels for existing training scripts: AdamW, attention, loss scaling, graphs.

The names at this level take torch's place: `trainfast.AdamW` is torch.optim.AdamW on
trainfast's kernel. `trainfast.numpy` has the kernels for NumPy and other arrays, and
`trainfast.graph_cache` the cache of graphs. Importing trainfast loads neither torch nor
CUDA and patches nothing: each of torch's names is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

try:
    from trainfast._core import backends as _backends
except ModuleNotFoundError as error:
    if error.name != "trainfast._core":
        raise
    raise ImportError(
        f"{__path__[0]} is a source folder without the compiled module; leave the "
        "folder if trainfast is installed, or run `make build` there",
        name=error.name,
    ) from error

from trainfast import adapters as _adapters
from trainfast._core import use_backend
from trainfast._core import version as __version__
from trainfast.config import load_config
from trainfast.patching import PatchReport, is_patched, patch, unpatch
from trainfast.stats import reset_stats, stats

if TYPE_CHECKING:  # __getattr__ loads them
    from trainfast import diagnose as diagnose
    from trainfast import graph_cache as graph_cache
    from trainfast import numpy as numpy
    from trainfast import torch as torch
    from trainfast.log import EpochReport as EpochReport
    from trainfast.log import Logger as Logger
    from trainfast.log import progress as progress
    from trainfast.memory.advice import oom_advice as oom_advice
    from trainfast.memory.advice import oom_help as oom_help
    from trainfast.memory.batch_size import scale_lr as scale_lr
    from trainfast.metrics.targets import targets as targets
    from trainfast.metrics.trajectory import trajectory_metrics as trajectory_metrics
    from trainfast.monitor import SystemMonitor as SystemMonitor
    from trainfast.parallel import parallel_map as parallel_map
    from trainfast.tools.env import env as env
    from trainfast.tools.selftest import selftest as selftest
    from trainfast.torch import Accumulator as Accumulator
    from trainfast.torch import Adam as Adam
    from trainfast.torch import AdamW as AdamW
    from trainfast.torch import CheckpointEvery as CheckpointEvery
    from trainfast.torch import GradScaler as GradScaler
    from trainfast.torch import LeakTracker as LeakTracker
    from trainfast.torch import LeakWarning as LeakWarning
    from trainfast.torch import MemoryMonitor as MemoryMonitor
    from trainfast.torch import Muon as Muon
    from trainfast.torch import Profiler as Profiler
    from trainfast.torch import SkipAwareScheduler as SkipAwareScheduler
    from trainfast.torch import accelerate as accelerate
    from trainfast.torch import auto_micro_batch as auto_micro_batch
    from trainfast.torch import benchmark_dataloader as benchmark_dataloader
    from trainfast.torch import clip_grad_norm_ as clip_grad_norm_
    from trainfast.torch import clip_grad_value_ as clip_grad_value_
    from trainfast.torch import enable_checkpointing as enable_checkpointing
    from trainfast.torch import estimate_memory as estimate_memory
    from trainfast.torch import find_batch_size as find_batch_size
    from trainfast.torch import find_max_batch_size as find_max_batch_size
    from trainfast.torch import find_workers as find_workers
    from trainfast.torch import huggingface as huggingface
    from trainfast.torch import lightning as lightning
    from trainfast.torch import loader_kwargs as loader_kwargs
    from trainfast.torch import print_gpu_memory as print_gpu_memory
    from trainfast.torch import profile_memory_usage as profile_memory_usage
    from trainfast.torch import resume as resume
    from trainfast.torch import save_checkpoint as save_checkpoint
    from trainfast.torch import scaled_dot_product_attention as _sdpa
    from trainfast.torch.attention.functional import attention as attention
    from trainfast.torch.trajectory_metrics import (
        TrajectoryMetrics as TrajectoryMetrics,
    )

    scaled_dot_product_attention = _sdpa

# `from trainfast import *` imports these: it must not load torch, nor rebind the names
# torch and numpy.
__all__ = [
    "EpochReport",
    "Logger",
    "PatchReport",
    "SystemMonitor",
    "__version__",
    "backends",
    "diagnose",
    "env",
    "graph_cache",
    "is_patched",
    "load_config",
    "oom_advice",
    "oom_help",
    "parallel_map",
    "patch",
    "progress",
    "reset_stats",
    "scale_lr",
    "selftest",
    "stats",
    "targets",
    "trajectory_metrics",
    "unpatch",
    "use_backend",
]

_PACKAGES = ("diagnose", "graph_cache", "numpy", "torch")
_FRAMEWORKS = {  # the package that the module of this name is for
    "accelerate": "accelerate",
    "huggingface": "transformers",
    "lightning": "lightning",
}
_TOOLS = ("env", "selftest")
_OTHERS = {
    "EpochReport": "trainfast.log",
    "Logger": "trainfast.log",
    "SystemMonitor": "trainfast.monitor",
    "oom_advice": "trainfast.memory.advice",
    "oom_help": "trainfast.memory.advice",
    "parallel_map": "trainfast.parallel",
    "progress": "trainfast.log",
    "scale_lr": "trainfast.memory.batch_size",
    "targets": "trainfast.metrics",
    "trajectory_metrics": "trainfast.metrics",
}
# Classes that derive from a framework's: the module, and the package that it needs.
_DERIVED = {
    "TrajectoryMetrics": ("trainfast.torch.trajectory_metrics", "torchmetrics"),
}
_TORCHS = (
    *("Accumulator", "Adam", "AdamW", "GradScaler", "SkipAwareScheduler", "attention"),
    *("clip_grad_norm_", "clip_grad_value_", "scaled_dot_product_attention"),
    *("CheckpointEvery", "resume", "save_checkpoint"),
    *("benchmark_dataloader", "find_workers", "loader_kwargs"),
    *("auto_micro_batch", "enable_checkpointing", "estimate_memory"),
    *("find_batch_size", "find_max_batch_size", "profile_memory_usage"),
    *("print_gpu_memory", "LeakTracker", "LeakWarning", "MemoryMonitor", "Profiler"),
    "Muon",
)
_NUMPYS = ("AttentionGradients", "LossScaler", "adamw_step", "attention_backward")


_adapters.register("pyg", "trainfast.torch.pyg.cache_adapter")
_adapters.register("bench", "trainfast.torch.bench")
_adapters.register("torch", "trainfast.torch.graphs.device")


def backends() -> list[dict[str, object]]:
    """What can compute here, best first.

    One dict a backend: `name`, `usable`, `reason` (why it cannot run here, else None)
    and `in_use`. Opens the CUDA library, so it is not for a process that forks later.
    """
    return [
        {"name": name, "usable": reason is None, "reason": reason, "in_use": in_use}
        for name, reason, in_use in _backends()
    ]


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return import_module(f"trainfast.{name}")
    if name in _FRAMEWORKS:
        return import_module(f"trainfast.torch.{name}")
    if name in _TOOLS:
        return getattr(import_module(f"trainfast.tools.{name}"), name)
    if name in _OTHERS:
        return getattr(import_module(_OTHERS[name]), name)
    if name in _DERIVED:
        return getattr(import_module(_DERIVED[name][0]), name)
    if name in _TORCHS:
        return _of_torch(name)
    error = f"module 'trainfast' has no attribute {name!r}"
    if name in _NUMPYS:
        error += f"; for NumPy and other arrays there is trainfast.numpy.{name}"
    raise AttributeError(error)


def _of_torch(name: str) -> object:
    try:
        found: object = getattr(import_module("trainfast.torch"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        without = getattr(import_module("trainfast.numpy"), name, None)
        raise ImportError(
            f"trainfast.{name} takes the place of torch's; install torch"
            + (f", or use trainfast.numpy.{name}, which needs none" if without else ""),
            name="torch",
        ) from error
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    from importlib.util import find_spec

    names = {*globals(), *_OTHERS, *_PACKAGES, *_TOOLS, *_TORCHS}
    if find_spec("torch") is None:  # help() would stop at the ImportErrors
        return sorted(names - {"torch", *_TORCHS})
    frameworks = {ours for ours, theirs in _FRAMEWORKS.items() if find_spec(theirs)}
    derived = {ours for ours, (_, theirs) in _DERIVED.items() if find_spec(theirs)}
    return sorted(names | frameworks | derived)
