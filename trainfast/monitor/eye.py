"""Looks at the GPUs, the machine and a tree of processes."""

import contextlib
import os
import shutil
import time
from typing import Any

from trainfast.machine import available_memory, descendants, usable_cores
from trainfast.monitor.nvml import Nvml
from trainfast.monitor.sample import Gpu, Host, Sample, Tree

_SHARED = "/dev/shm"
_SHARE_OF_TIME = 0.002  # for asking how many pages are shared


class Eye:
    """Looks; keeps what differences between two looks need.

    Args:
        pid: the root of the tree; None: no tree.
        gpus: whether to ask for GPUs.
    """

    def __init__(self, pid: int | None = None, gpus: bool = True) -> None:
        try:
            import psutil
        except ImportError:
            raise ImportError(
                "watching a run needs psutil: pip install psutil"
            ) from None
        self._psutil: Any = psutil
        self.pid = pid
        self.nvml = Nvml() if gpus else None
        self._processes: dict[int, Any] = {}  # their last CPU times are in them
        self._shares: dict[int, tuple[float, float]] = {}  # ratio, when it is due again
        psutil.cpu_percent()  # the first one is meaningless
        if pid is not None:
            self._tree(pid)

    def look(self) -> Sample:
        gpus: tuple[Gpu, ...] = self.nvml.gpus() if self.nvml is not None else ()
        tree = None if self.pid is None else self._tree(self.pid)
        return Sample(time.time(), self._host(), gpus, tree)

    def _host(self) -> Host:
        shared = shutil.disk_usage(_SHARED) if os.path.isdir(_SHARED) else None
        return Host(
            usable_cores(),
            self._psutil.cpu_percent(),
            available_memory(),
            shared.used if shared else None,
            shared.total if shared else None,
            shutil.disk_usage(".").free,
        )

    def _tree(self, pid: int) -> Tree | None:
        psutil = self._psutil
        try:
            root = self._known(pid)
        except psutil.Error:
            return None  # it has ended
        members = [root]
        for child in descendants(pid):
            with contextlib.suppress(psutil.Error):  # ended meanwhile
                members.append(self._known(child))
        memory = threads = 0
        cpu = 0.0
        for process in members:
            try:
                memory += self._memory(process)
                threads += process.num_threads()
                cpu += process.cpu_percent()
            except psutil.Error:
                continue  # ended meanwhile, or another user's
        self._processes = {p.pid: p for p in members}
        self._shares = {p: s for p, s in self._shares.items() if p in self._processes}
        try:
            name = root.name()
        except psutil.Error:
            return None
        return Tree(pid, name, memory, len(members), threads, cpu)

    def _known(self, pid: int) -> Any:
        known = self._processes.get(pid)
        if known is not None and known.is_running():
            return known
        return self._psutil.Process(pid)

    def _memory(self, process: Any) -> int:
        """Bytes, of shared pages its share. The kernel walks all pages for the share,
        so that is asked for rarely where it takes long."""
        resident = int(process.memory_info().rss)
        ratio, due = self._shares.get(process.pid, (1.0, 0.0))
        began = time.monotonic()
        if began >= due:
            try:
                ratio = process.memory_full_info().pss / max(1, resident)
            except (AttributeError, self._psutil.AccessDenied):
                ratio = 1.0  # this system does not tell, or not of this process
            now = time.monotonic()
            self._shares[process.pid] = ratio, now + (now - began) / _SHARE_OF_TIME
        return int(resident * ratio)
