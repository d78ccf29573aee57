"""Fast kernels for existing training scripts: fused AdamW and attention.

Importing trainfast loads neither torch nor CUDA and patches nothing. The adapters for
torch are in `trainfast.torch`, the cache of graphs in `trainfast.graph_cache`, both
loaded when first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from trainfast._core import backends as _backends
from trainfast._core import use_backend
from trainfast._core import version as __version__
from trainfast.adamw import AdamW, adamw_step
from trainfast.amp import LossScaler
from trainfast.attention import AttentionGradients, attention, attention_backward
from trainfast.patching import PatchReport, is_patched, patch, unpatch
from trainfast.stats import reset_stats, stats

if TYPE_CHECKING:  # __getattr__ loads them
    from trainfast import graph_cache
    from trainfast import torch as torch

# Without "torch": `from trainfast import *` must not rebind the user's name.
__all__ = [
    "AdamW",
    "AttentionGradients",
    "LossScaler",
    "PatchReport",
    "__version__",
    "adamw_step",
    "attention",
    "attention_backward",
    "backends",
    "graph_cache",
    "is_patched",
    "patch",
    "reset_stats",
    "stats",
    "unpatch",
    "use_backend",
]


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
    if name in ("graph_cache", "torch"):
        return import_module(f"trainfast.{name}")
    raise AttributeError(f"module 'trainfast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "graph_cache", "torch"})
