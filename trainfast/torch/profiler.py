"""`Profiler`: a trace of a few steps, every so many steps."""

import atexit
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from trainfast.report import attributes, one_line
from trainfast.torch.ranks import rank

_WARM_UP = 1
_ACTIVE = 5
_ENDS = (".json.gz", ".txt")  # of the trace's and the table's file


class Profiler:
    """Profiles 5 steps of every interval with torch.profiler.

        profiler = trainfast.Profiler(interval=1000, dir="./profiles")
        for batch in loader:
            ...
            profiler.step()

    Steps 1001 to 1005 are written as "step-1000.json.gz", which Perfetto and Chrome's
    tracing page show, and "step-1000.txt", a table of the operations that took longest.
    Between the profiled steps a call of `step` does nothing.

    Args:
        interval: steps from one profile to the next, at least 7; 0: off.
        dir: where to write; it is made when it is needed.
        keep: how many profiles stay; None: all.

    Where several ranks train, rank 0 profiles. What cannot be written is a warning.

    Raises:
        ValueError: the interval or `keep` is out of range.
    """

    def __init__(
        self,
        interval: int = 1000,
        dir: str | os.PathLike[str] = "./profiles",
        keep: int | None = 10,
    ) -> None:
        if interval and interval <= _WARM_UP + _ACTIVE:
            raise ValueError(
                f"`interval` must be 0 or above {_WARM_UP + _ACTIVE}, got {interval}"
            )
        if keep is not None and keep < 1:
            raise ValueError(f"`keep` must be at least 1, got {keep}; None keeps all")
        self.interval = interval
        self.dir = Path(dir)
        self.keep = keep
        self.steps = 0
        self.written: list[Path] = []  # traces, the oldest first
        self._profile: Any = None
        self._first = 0

    def __repr__(self) -> str:
        return one_line(self, **attributes(self, "interval dir keep steps"))

    def step(self) -> None:
        """One step has ended."""
        if not self.interval:
            return
        self.steps += 1
        if self._profile is not None:
            self._profile.step()
            if self.steps == self._first + _WARM_UP + _ACTIVE:
                self.close()
        elif self.steps % self.interval == self.interval - _WARM_UP and rank() == 0:
            self._start()

    def close(self) -> None:
        """Ends a profile that is under way; its trace is written as far as it is."""
        if self._profile is not None:
            atexit.unregister(self.close)
            self._profile.stop()
            self._profile = None

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._first = self.steps
        try:
            self._profile = profile(
                activities=activities,
                schedule=schedule(wait=0, warmup=_WARM_UP, active=_ACTIVE, repeat=1),
                on_trace_ready=self._write,
            )
            self._profile.start()
            atexit.register(self.close)  # torch crashes where it is under way then
        except RuntimeError as error:  # another profiler runs
            self._profile = None
            _warn(f"step {self.steps} is not profiled: {error}")

    def _write(self, found: Any) -> None:
        step = self._first + _WARM_UP
        by = f"self_{'cuda' if torch.cuda.is_available() else 'cpu'}_time_total"
        trace, table = (self.dir / f"step-{step}{end}" for end in _ENDS)
        part = self.dir / f".{trace.name}"  # a trace is whole or not there
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            found.export_chrome_trace(str(part))
            part.replace(trace)
            table.write_text(found.key_averages().table(by, row_limit=30))
        except (OSError, RuntimeError) as error:
            part.unlink(missing_ok=True)
            _warn(f"the profile of step {step} cannot be written: {error}")
            return
        self.written.append(trace)
        while self.keep is not None and len(self.written) > self.keep:
            oldest = self.written.pop(0)
            for end in _ENDS:
                name = oldest.name.removesuffix(_ENDS[0]) + end
                oldest.with_name(name).unlink(missing_ok=True)


def _warn(text: str) -> None:
    warnings.warn(f"trainfast.Profiler: {text}", RuntimeWarning, stacklevel=4)
