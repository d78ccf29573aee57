"""The versions of torch that are supported, and torch's private names.

A private name that a version of torch lacks has a public one in its place here, or it
takes away what needs it and nothing else: attention then runs in torch's own operations
and trainfast.stats() gives the name as the reason.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

OLDEST = (2, 6)
_R = TypeVar("_R")


def _require_supported() -> None:
    """Raises ImportError where torch is too old; pre-releases count as the release."""
    major, minor = str(torch.__version__).split(".")[:2]
    if (int(major), int(minor)) < OLDEST:
        raise ImportError(
            f"torch must be at least {OLDEST[0]}.{OLDEST[1]}, got {torch.__version__}; "
            "upgrade torch, or use trainfast with NumPy arrays alone"
        )


_require_supported()

# torch 2.7 gave its Adam the argument, and the param groups of both the entry.
ADAM_DECOUPLES = (
    "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters
)

_missing: list[str] = []


def _find(path: str) -> Any:
    """torch's private object of this dotted name, or None."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _needed(path: str) -> Any:
    """The same for what attention cannot do without."""
    found = _find(path)
    if found is None:
        _missing.append(path)
    return found


def _always(*_: object) -> bool:
    return True


# A compiled function breaks its graph at what this decorates, and goes on.
disable_dynamo: Callable[[Any], Any]
disable_dynamo = _find("_disable_dynamo") or torch.compiler.disable
increment_version: Callable[[Any], None]
increment_version = _find("_C._increment_version") or (
    torch.autograd.graph.increment_version
)

cuda_stream: Callable[[int], int]
cuda_stream = _find("_C._cuda_getCurrentRawStream") or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)

_n_function_modes: Callable[[], int] = _find("_C._len_torch_function_stack") or int


def outside_modes(function: Callable[..., _R], *args: Any, **kwargs: Any) -> _R:
    """Calls a function of the core, which reads attributes of each tensor.

    Every read would go through a TorchFunctionMode that is active, as the one of
    torch.set_default_device() is: 7 us in torch 2.6.
    """
    if not _n_function_modes():
        return function(*args, **kwargs)
    with torch._C.DisableTorchFunction():
        return function(*args, **kwargs)


def _is_exporting_in_2_6() -> bool:
    """What torch.compiler.is_exporting() says in later versions.

    Only torch.export without `strict` sets torch's flag for compilers; with `strict` it
    traces by torch.compile's tracer, which knows what it is tracing for.
    """
    if getattr(torch.compiler, "_is_compiling_flag", False):
        return True
    tracing = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        return bool(tracing.InstructionTranslator.current_tx().export)  # type: ignore
    except AttributeError:  # nothing is traced
        return False


is_exporting: Callable[[], bool]
is_exporting = _find("compiler.is_exporting") or _is_exporting_in_2_6

# ---- Attention -----------------------------------------------------------------------

storage_uses = _find("_C._storage_Use_Count")  # without: no memory is kept

# Without one of these two every call is routed by torch's public functions.
is_any_autocast_enabled = _find("_C._is_any_autocast_enabled") or _always
is_tracing = _find("_C._is_tracing") or _always

FakeTensor = _needed("_subclasses.fake_tensor.FakeTensor")
FunctionalTensor = _needed("_subclasses.functional_tensor.FunctionalTensor")
is_batched = _needed("_C._functorch.is_batchedtensor")
is_batched_by_grad = _needed("_C._functorch.is_legacy_batchedtensor")
n_dispatch_modes = _needed("_C._len_torch_dispatch_stack")
transform_level = _needed("_C._functorch.maybe_current_level")
_needed("autograd.forward_ad._current_level")  # an int that changes

# Why the kernels take no call: torch's own operations compute then.
ATTENTION_REFUSAL: str | None = None
if _missing:
    ATTENTION_REFUSAL = f"torch {torch.__version__} has no {', '.join(_missing)}"
    n_dispatch_modes = transform_level = _always
