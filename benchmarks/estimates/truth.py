"""What a training step really takes, by measures that are not our own."""

import gc
import json
import os
import subprocess
import sys
from typing import Any

import torch

from benchmarks.estimates.models import MODELS, enlarged


def steps(
    model: Any,
    batch: Any,
    options: dict[str, Any],
    device: str = "cpu",
    *,
    count: int = 2,
) -> None:
    """Steps as a plain loop writes them; the batch may be on the CPU."""
    loss_fn, step = options.get("loss_fn"), options.get("step")
    name, kwargs = options.get("optimizer", ("adamw", {}))
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer = kinds[name](model.parameters(), lr=1e-3, **kwargs)
    out = loss = None
    for _ in range(count):
        own = _copied(batch, device)
        half = options.get("amp") == "bf16"
        with torch.autocast(device, torch.bfloat16, enabled=half):
            if step is not None:
                loss = step(model, own)
            elif isinstance(own, dict):
                out = model(**own)
                loss = out.loss
            elif isinstance(own, tuple):
                out = model(own[0])
                loss = loss_fn(out, own[1])
            else:
                out = model(own)
                loss = loss_fn(out, own)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del out, loss


def _copied(batch: Any, device: str) -> Any:
    if isinstance(batch, dict):
        return {key: _copied(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_copied(value, device) for value in batch)
    return batch.clone().to(device)


def profiled_peak(name: str) -> int:
    """Bytes in tensors at once: what was there before, and torch.profiler's events."""
    torch.manual_seed(0)
    model, batch, options = MODELS[name]()
    before = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in [*model.parameters(), *model.buffers()]
    }
    gc.collect()
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        steps(model, batch, options)
    level = peak = 0
    events = [
        e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"
    ]
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return sum(before.values()) + peak


def high_water(name: str) -> int:
    """The kernel's high-water mark of this process, in bytes."""
    torch.manual_seed(0)
    steps(*MODELS[name]())
    return mark()


def on_gpu(name: str, times: int) -> dict[str, int]:
    """What torch's allocator counts at most, and what the process has on the GPU
    besides, in bytes. The batch has this many times as many samples."""
    torch.manual_seed(0)
    model, batch, options = MODELS[name]()
    steps(model.to("cuda"), enlarged(batch, times), options, "cuda")
    torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def mark() -> int:
    """The most bytes that were resident in this process so far."""
    with open(f"/proc/{os.getpid()}/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def in_child(module: str, part: str, *words: str) -> Any:
    """What `python -m module --part part words` prints as JSON, in a fresh process."""
    command = [sys.executable, "-m", module, "--part", part, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])
