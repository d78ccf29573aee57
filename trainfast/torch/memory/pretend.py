"""Lets a script believe that it has a GPU, so that it takes the path for one."""

import types
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainfast.memory.gpus import Gpu


class _Nothing:
    """A stream or an event: every method does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 0.0

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *_: Any) -> None: ...


def pretend_gpu(gpu: Gpu) -> None:
    """Replaces what scripts ask torch.cuda about, for the rest of the process.

    The tensors stay on the CPU: see `trainfast.torch.memory.redirect`.
    """
    capability = divmod(gpu.capability, 10)
    properties = types.SimpleNamespace(
        name=gpu.name,
        total_memory=gpu.memory,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=40,
    )
    answers = {
        "is_available": True,
        "is_initialized": True,
        "is_current_stream_capturing": False,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": gpu.name,
        "get_device_capability": capability,
        "get_device_properties": properties,
        "mem_get_info": (gpu.memory, gpu.memory),
        "memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "memory_stats": {},
        "is_bf16_supported": gpu.capability >= 80,
        "current_stream": _Nothing(),
        "Stream": _Nothing,
        "Event": _Nothing,
    }
    nothing = (
        *("init", "synchronize", "empty_cache", "set_device", "ipc_collect"),
        *("manual_seed", "manual_seed_all", "seed", "seed_all"),
        *("reset_peak_memory_stats", "set_per_process_memory_fraction"),
    )
    for name, answer in answers.items():
        is_class = isinstance(answer, type)
        setattr(torch.cuda, name, answer if is_class else _always(answer))
    for name in nothing:
        setattr(torch.cuda, name, _always(None))
    # With one GPU it calls its module, once it has checked where the parameters are.
    torch.nn.DataParallel.forward = (  # type: ignore[method-assign]
        lambda self, *inputs, **named: self.module(*inputs, **named)
    )
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    _leave_unpinned()


def _always(answer: Any) -> Any:
    return lambda *_, **__: answer


def _leave_unpinned() -> None:
    """Makes loaders without the thread that pins memory: it would look for the GPU."""
    usual = DataLoader.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        usual(self, *args, **{**kwargs, "pin_memory": False})

    init.__wrapped__ = usual  # type: ignore[attr-defined]
    DataLoader.__init__ = init  # type: ignore[method-assign]
