"""What a run uses while it runs: GPUs, this machine, and the run's processes."""

from trainfast.monitor.system_monitor import SystemMonitor

__all__ = ["SystemMonitor"]
