"""Which objects hold a run's memory, and what grows with every step."""

from trainfast.torch.leaks.memory_monitor import MemoryMonitor
from trainfast.torch.leaks.tracker import LeakTracker, LeakWarning

__all__ = ["LeakTracker", "LeakWarning", "MemoryMonitor"]
