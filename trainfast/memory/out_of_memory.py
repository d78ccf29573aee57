"""What torch says when memory runs out, as numbers and a cause."""

import re
from dataclasses import dataclass

NEED, FRAGMENTATION, OTHERS, HOST, SHARED = CAUSES = (
    *("need", "fragmentation", "other processes", "host memory", "shared memory"),
)
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB|TiB)"
# The parts of torch's message by version: (2.1 and later, before).
_PARTS = {
    "requested": (rf"[Tt]ried to allocate {_SIZE}",),
    "capacity": (rf"total capac?i?ty of {_SIZE}", rf"{_SIZE} total capacity"),
    "free": (rf"of which {_SIZE} is free", rf"{_SIZE} free"),
    "allocated": (
        rf"{_SIZE} is allocated by PyTorch",
        rf"{_SIZE} already allocated",
    ),
    "unallocated": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
    "reserved": (rf"{_SIZE} reserved in total by PyTorch",),
    "own": (rf"this process has {_SIZE} memory in use",),
    "allowed": (rf"{_SIZE} allowed",),
}
_ON_GPU = r"CUDA out of memory\.[^\n]*"
_SIGNS = (
    (NEED, r"(?:CUBLAS|CUDNN|CUSOLVER)_STATUS_ALLOC_FAILED|CUDA error: out of memory"),
    (HOST, r"DefaultCPUAllocator: (?:can't|not enough)[^\n]*|Cannot allocate memory"),
    (SHARED, r"Bus error[^\n]*shared memory|insufficient shared memory[^\n]*"),
    (SHARED, r"unable to (?:open|allocate) shared memory[^\n]*|No space left[^\n]*shm"),
    (HOST, r"killed by signal: Killed|exit(?:ed)?(?: with)? (?:code|status) 137"),
    (HOST, r"oom-kill|Out of memory: Killed process|^Killed$|\bMemoryError\b"),
)
_SHARE_OF_OTHERS = 0.1  # of the card, before other processes are the cause


@dataclass
class OutOfMemory:
    """One failure; sizes in bytes, None where the message does not say.

    Attributes:
        cause: one of `CAUSES`.
        line: the message.
        requested: what did not fit.
        capacity, free: of the GPU.
        allocated: in tensors of this process.
        unallocated: held by torch's allocator for this process without a tensor.
        others: in use by other processes.
        allowed: the limit set by `set_per_process_memory_fraction`.
    """

    cause: str
    line: str
    requested: int | None = None
    capacity: int | None = None
    free: int | None = None
    allocated: int | None = None
    unallocated: int | None = None
    others: int | None = None
    allowed: int | None = None


def parse(text: str) -> OutOfMemory | None:
    """The last failure in a log or an error's message; None where there is none."""
    found = [(m.start(), NEED, m[0]) for m in re.finditer(_ON_GPU, text)]
    for cause, sign in _SIGNS:
        matches = re.finditer(sign, text, re.MULTILINE)
        found += [(m.start(), cause, m[0]) for m in matches]
    if not found:
        return None
    # A message of torch on the GPU says more than the signs around it.
    _, cause, line = max(found, key=lambda f: (f[0], len(f[2])))
    if line.startswith("CUDA out of memory."):
        return _on_gpu(line)
    return OutOfMemory(cause, line, requested=_size(_PARTS["requested"], line))


def _on_gpu(line: str) -> OutOfMemory:
    sizes = {name: _size(patterns, line) for name, patterns in _PARTS.items()}
    reserved, allocated = sizes["reserved"], sizes["allocated"]
    unallocated = sizes["unallocated"]
    if unallocated is None and reserved is not None and allocated is not None:
        unallocated = reserved - allocated
    failure = OutOfMemory(
        *(NEED, line, sizes["requested"], sizes["capacity"], sizes["free"]),
        *(allocated, unallocated, _others(line, sizes), sizes["allowed"]),
    )
    failure.cause = _cause(failure)
    return failure


def _others(line: str, sizes: dict[str, int | None]) -> int | None:
    """What other processes use: those that the message lists, without this one."""
    listed = re.findall(rf"Process \d+ has {_SIZE} memory in use", line)
    used = [_bytes(*one) for one in listed]
    if not used:
        return None
    if sizes["own"] is None and sizes["allocated"] is not None:
        # This process is listed like the others; it has the tensors and a context.
        held = sizes["allocated"] + (sizes["unallocated"] or 0)
        used.remove(min(used, key=lambda size: abs(size - held)))
    return sum(used)


def _cause(failure: OutOfMemory) -> str:
    requested, unallocated = failure.requested or 0, failure.unallocated or 0
    others, capacity = failure.others or 0, failure.capacity or 0
    if others > requested and others > _SHARE_OF_OTHERS * capacity:
        return OTHERS
    return FRAGMENTATION if unallocated >= requested > 0 else NEED


def _size(patterns: tuple[str, ...], line: str) -> int | None:
    for pattern in patterns:
        found = re.search(pattern, line)
        if found:
            return _bytes(found[1], found[2])
    return None


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])
