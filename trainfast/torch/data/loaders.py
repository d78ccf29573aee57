"""Arguments of torch's DataLoader."""

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainfast.machine import usable_cores

_MOST_WORKERS = 4  # to start from; `find_workers` measures


def loader_kwargs(num_workers: int | None = None, **options: Any) -> dict[str, Any]:
    """Arguments for torch's DataLoader that it accepts together.

    torch raises for `prefetch_factor` and `persistent_workers` without workers: these
    are left out then. Memory is pinned where there is a GPU.

    Args:
        num_workers: None: half of the cores that this process may use, at most 4, as a
            start; `find_workers` measures how many are right.
        options: further arguments of DataLoader, such as batch_size=32; they take
            precedence.

    Raises:
        ValueError: num_workers is no number of workers.
    """
    if num_workers is None:
        num_workers = max(1, min(_MOST_WORKERS, usable_cores() // 2))
    if type(num_workers) is not int or num_workers < 0:
        raise ValueError(f"num_workers must be 0 or more, got {num_workers!r}")
    found: dict[str, Any] = {"num_workers": num_workers}
    if torch.cuda.is_available():
        found["pin_memory"] = True
    if num_workers:
        found |= {"persistent_workers": True, "prefetch_factor": 2}
        return found | options
    needs_workers = ("persistent_workers", "prefetch_factor")
    return found | {k: v for k, v in options.items() if k not in needs_workers}


def like(loader: Any, workers: int, batches: Any = None, **options: Any) -> Any:
    """A plain DataLoader of the same data with another number of workers.

    Args:
        loader: a DataLoader.
        workers: how many; they stay alive between epochs.
        batches: lists of indices in place of the loader's own; not for an
            IterableDataset.
        options: further arguments.
    """
    options["collate_fn"] = loader.collate_fn
    if isinstance(loader.dataset, IterableDataset):
        options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif batches is not None or loader.batch_sampler is not None:
        options["batch_sampler"] = batches or loader.batch_sampler
    else:
        options |= {"batch_size": None, "sampler": loader.sampler}
    if workers:
        options |= {
            "persistent_workers": True,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    return DataLoader(
        loader.dataset,
        num_workers=workers,
        generator=loader.generator,
        pin_memory=loader.pin_memory,
        **options,
    )
