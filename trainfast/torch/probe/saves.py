"""A switch under which checkpoints are not written."""

import os
from collections.abc import Callable
from typing import Any

from trainfast.torch.probe.loop import Loop, Switch

_LEAST_SHARE = 0.1  # of the time
_MOST_STEPS = 10  # from one checkpoint to the next: a block holds some


class NoSaves(Switch):
    """Leaves out the checkpoints that would replace a file.

    The stopwatch knows what writing takes. The steps after it can be slower, too: by
    9 % in benchmarks/planted/best_checkpoint.py.
    """

    name = "save"  # as the event: in place of which this is reported

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        often = _MOST_STEPS * loop.counts["save"] >= loop.steps
        return often and share("save") >= _LEAST_SHARE

    def enter(self, loop: Loop) -> None:
        self.left_out = 0

    def used(self) -> bool:
        return self.left_out > 0

    def save(self, loop: Loop, original: Any, args: Any, kwargs: Any) -> Any:
        path = kwargs.get("f", args[1] if len(args) > 1 else None)
        if isinstance(path, str | os.PathLike) and os.path.isfile(path):
            self.left_out += 1
            return None
        return super().save(loop, original, args, kwargs)
