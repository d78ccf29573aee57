"""`trainfast run --leaks`: a tracker for a whole script."""

import atexit
import os
import sys

from trainfast.torch.leaks.tracker import LeakTracker
from trainfast.torch.leaks.verdict import Leak


def start() -> None:
    """Watches until the process ends: a line on stderr for each leak, and one at the
    end."""
    tracker = LeakTracker(on_leak=_print).start()
    atexit.register(_end, tracker, os.getpid())


def _print(leak: Leak) -> None:
    print(f"trainfast: memory grows: {leak}", file=sys.stderr, flush=True)


def _end(tracker: LeakTracker, process: int) -> None:
    if os.getpid() != process:  # a worker's end
        return
    tracker.stop()
    found = f"{len(tracker.leaks)} found" if tracker.leaks else "none found"
    print(f"trainfast: leaks in {tracker.steps} steps: {found}", file=sys.stderr)
