"""Why training is slow: a machine and a configuration, or a loop in a notebook.

`check()` runs nothing. A loop that runs is measured:

    from trainfast import diagnose

    for batch in diagnose.watch(loader, model=model, optimizer=optimizer):
        with diagnose.step():
            ...  # forward, backward, optimizer.step()

The loop runs as always, but now and then with one thing changed: a batch from memory in
place of the loader's, no optimizer step, another setting of torch. After some seconds
the report is printed, everything is as it was before, and the loop goes on. What it has
trained until then is worthless. For a script: `trainfast diagnose --probe script.py`,
which also tries what needs a process of its own.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from trainfast.diagnosis.report import check

if TYPE_CHECKING:
    import torch

    from trainfast.probe.report import Diagnosis
    from trainfast.torch.probe.watch import Watch

__all__ = ["check", "report", "step", "watch"]

_watch: "Watch | None" = None  # of the loop that runs


def watch(
    loader: Iterable[Any],
    *,
    model: "torch.nn.Module | None" = None,
    optimizer: "torch.optim.Optimizer | None" = None,
    seconds: float = 20.0,
) -> Iterator[Any]:
    """The loader's batches, one epoch; the same loader goes on in the next epoch.

    Args:
        loader: a DataLoader, or anything that gives batches.
        model: tries its memory layout and what attention computes, too.
        optimizer: tries torch's fused and trainfast's implementation, too.
        seconds: how long to measure before the report.
    """
    from trainfast.torch.probe.watch import Watch

    global _watch
    if _watch is None or _watch.loader is not loader:
        if _watch is not None and _watch.report is None:
            _watch.give_up()
        file = sys._getframe(1).f_code.co_filename
        _watch = Watch(loader, model, optimizer, seconds, file)
    return _watch.batches()


def step() -> AbstractContextManager[None]:
    """Marks what one batch is trained with.

    Raises:
        RuntimeError: no loop over `watch()` has begun.
    """
    if _watch is None:
        raise RuntimeError("step() is for a loop over diagnose.watch(loader)")
    return _watch.step()


def report() -> "Diagnosis":
    """The report of the last loop.

    Called while the measurement still runs, it ends the measurement and reports what
    was measured, if that is at least three rounds.

    Raises:
        RuntimeError: no loop was watched, or not for long enough.
    """
    if _watch is None:
        raise RuntimeError("no loop was watched; iterate over diagnose.watch(loader)")
    if _watch.report is None:
        if missing := _watch.missing():
            raise RuntimeError(f"too early for a report: {missing}; train for longer")
        _watch.conclude()
    assert _watch.report is not None
    return _watch.report
