"""What was measured, as the plain data that gains and findings are made of."""

import mmap
import os
import statistics
from typing import Any

import torch

from trainfast.torch.probe.loop import Loop, clock
from trainfast.torch.probe.schedule import Schedule, page_faults

_PAGES = 1024

# Packages whose optimizers are not the script's own.
_KNOWN = ("torch", "trainfast", "apex", "bitsandbytes", "deepspeed", "transformers")


def measured(
    loop: Loop, schedule: Schedule, runs: list[tuple[int, int, bool]]
) -> dict[str, Any]:
    """Blocks, events and facts; `runs` are first step, last step, ended by itself."""
    return {
        "blocks": schedule.blocks,
        "shares": schedule.shares,
        "failed": schedule.failed,
        "step_seconds": schedule.step_seconds,
        "fault_seconds": statistics.median(schedule.faults or [0]) * _fault_seconds(),
        "block_steps": getattr(schedule, "steps", 0),
        "events": loop.events,
        "runs": runs,
        "steps": loop.steps,
        "steps_under": loop.steps_under,
        "once": loop.once,
        "own_seconds": statistics.median([own for own, _ in loop.own] or [0]),
        "whole_seconds": statistics.median([whole for _, whole in loop.own] or [0]),
        "lines": {phase: sorted(lines) for phase, lines in loop.lines.items()},
        "work": sorted(loop.work),
        "stack": loop.stack,
        **_facts(loop),
    }


def _fault_seconds() -> float:
    """What a page fault takes: much more in a virtual machine than outside of one."""
    memory = mmap.mmap(-1, _PAGES * mmap.PAGESIZE)
    then, start = page_faults(), clock()
    for page in range(_PAGES):
        memory[page * mmap.PAGESIZE] = 1
    return (clock() - start) / max(1, page_faults() - then)


def _facts(loop: Loop) -> dict[str, Any]:
    """What the report says of the loop."""
    found: dict[str, Any] = {}
    if loop.optimizers:
        optimizer = loop.optimizers[0]
        params = [p for g in optimizer.param_groups for p in g["params"]]
        found["optimizer"] = type(optimizer).__name__
        found["tensors"] = len(params)
        found["parameters"] = sum(p.numel() for p in params)
        found["device"] = str(params[0].device) if params else "cpu"
        found["dtype"] = str(params[0].dtype).removeprefix("torch.") if params else ""
    if loop.loader is not None:
        found["workers"] = loop.loader.num_workers
        found["period"] = loop.period()
        found["dataset"] = _place_of(loop.loader.dataset)
        found["batch_size"] = loop.loader.batch_size
        place = getattr(loop.loader, "_probe_place", None)
        if place is not None:
            found["loader"] = place
    found["idle_gpus"] = _idle_gpus(found.get("device", "cpu"), loop.model)
    found["threads"] = torch.get_num_threads()
    found["dense_embeddings"] = _dense_embeddings(loop)
    found["own_optimizer"] = any(
        type(optimizer).__module__.partition(".")[0] not in _KNOWN
        for optimizer in loop.optimizers
    )
    return found


def _idle_gpus(device: str, model: torch.nn.Module | None) -> int:
    """GPUs of which a script that trains on one of them, in one process, uses none."""
    distributed = "WORLD_SIZE" in os.environ or isinstance(model, torch.nn.DataParallel)
    if not device.startswith("cuda") or distributed:
        return 0
    used = {p.device for p in model.parameters()} if model is not None else {device}
    return max(0, torch.cuda.device_count() - len(used))


def _dense_embeddings(loop: Loop) -> float:
    """The share of the parameters that lie in embeddings with dense gradients."""
    if loop.model is None:
        return 0.0
    total = sum(p.numel() for p in loop.model.parameters())
    embeddings = sum(
        m.weight.numel()
        for m in loop.model.modules()
        if isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag) and not m.sparse
    )
    return embeddings / max(1, total)


def _place_of(dataset: Any) -> dict[str, Any]:
    """The class of a data set, and where its __getitem__ or __iter__ is written."""
    while hasattr(dataset, "dataset"):  # a Subset, or another wrapper
        dataset = dataset.dataset
    found = {"name": type(dataset).__name__}
    for method in ("__getitem__", "get", "__iter__"):
        code = getattr(getattr(type(dataset), method, None), "__code__", None)
        if code is not None:
            found |= {"file": code.co_filename, "line": code.co_firstlineno}
            break
    return found
