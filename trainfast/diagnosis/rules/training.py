"""Rules about a configuration's data loading, batch size and data."""

import re

from trainfast.diagnosis.rules.rule import Case, Rule

_LOADER = "torch/utils/data/dataloader.py"
# The guide's batch sizes (row 2.1): GPU, then the image's side, then (from, to).
_BATCHES: dict[str, dict[int, tuple[int, int]]] = {
    "4090": {512: (16, 24), 224: (32, 48)},
    "3090": {512: (12, 16), 224: (24, 32)},
    "3080": {512: (6, 8), 224: (16, 24)},
    "T4": {512: (8, 12), 224: (16, 32)},
    "V100": {512: (12, 16)},
    "A100": {512: (32, 48)},
}
_FAR = 2  # how far beyond the guide's range a batch size must be


def _too_many_workers(case: Case) -> str | None:
    workers, cores = case.settings.number("workers"), case.machine.usable_cores
    if workers is not None and workers > cores:
        return f"{case.settings.find('workers')} on {cores} usable cores"
    return None


def _no_workers(case: Case) -> str | None:
    settings, cores = case.settings, case.machine.usable_cores
    cache = settings.find("cache")
    cached = cache is not None and cache.switch is not False
    if not case.gpu or cached or cores < 2 or settings.number("workers") != 0:
        return None
    return f"{settings.find('workers')} with {cores} usable cores and no cache"


def _loader_raises(case: Case) -> str | None:
    settings = case.settings
    if settings.number("workers") != 0:
        return None
    wrong = [
        str(settings.find(name))
        for name, set_ in (
            ("persistent_workers", settings.on("persistent_workers") is True),
            ("prefetch_factor", settings.number("prefetch_factor") is not None),
        )
        if set_
    ]
    if not wrong:
        return None
    return f"{settings.find('workers')} with {' and '.join(wrong)} is a ValueError"


def _workers_restart(case: Case) -> str | None:
    settings = case.settings
    if settings.on("persistent_workers") is False and settings.number("workers"):
        return f"{settings.find('persistent_workers')}: workers restart each epoch"
    return None


def _unpinned(case: Case) -> str | None:
    if case.gpu and case.settings.on("pin_memory") is False:
        return f"{case.settings.find('pin_memory')}: copies to the GPU wait"
    return None


def _far_batch(case: Case) -> str | None:
    settings, gpu = case.settings, case.gpu
    batch, size = settings.number("batch_size"), settings.number("image_size")
    model = re.search(rf"\b({'|'.join(_BATCHES)})\b", gpu.name if gpu else "")
    rows = _BATCHES[model[1]] if model else {}
    if not batch or size not in rows:
        return None
    low, high = rows[size]
    if low / _FAR <= batch <= high * _FAR:
        return None
    asked = settings.find("batch_size")
    return f"{asked}; the guide has {low} to {high} for {size} x {size} on this GPU"


def _large_data(case: Case) -> str | None:
    data, limit = case.settings.dataset(), case.settings.find("limit")
    if not (data and limit and limit.number):
        return None
    path, size = data
    if size > 1.1 * limit.number:
        return f"{path.name} has {size} bytes, and {limit}"
    return None


RULES = (
    Rule(
        "workers-exceed-cores",
        _too_many_workers,
        "use at most as many workers as usable cores; the guide has 2 for 4 cores and "
        "4 to 6 for 8",
        "1.8 2.13 2.14",
        f"{_LOADER}, the warning of DataLoader",
    ),
    Rule(
        "workers-zero",
        _no_workers,
        "load in workers (2 for 4 cores, 4 to 6 for 8), or from a cache, with which 0 "
        "is right",
        "0.15 2.13 2.14",
        "PyTorch Performance Tuning Guide, asynchronous data loading",
    ),
    Rule(
        "workers-options",
        _loader_raises,
        "leave it out, or set num_workers to 1 or more",
        "2.7",
        _LOADER,
    ),
    Rule(
        "workers-restart",
        _workers_restart,
        "set persistent_workers: true",
        "1.8 2.13",
        f"{_LOADER}, persistent_workers",
    ),
    Rule(
        "pin-memory-off",
        _unpinned,
        "set pin_memory: true, and copy with non_blocking=True",
        "0.14 1.10 2.13 3.6",
        "PyTorch Performance Tuning Guide, asynchronous data loading",
    ),
    Rule(
        "batch-far-from-guide",
        _far_batch,
        "measure before you keep it; the guide's range is a start and depends on the "
        "model",
        "1.20 2.1 2.16",
        "the table of docs/guides/kaggle.md",
    ),
    Rule(
        "data-larger-than-stated",
        _large_data,
        "check that the script applies the limit: an epoch over all data takes longer "
        "in proportion",
        "1.14 1.17",
        "the file's size",
    ),
)
