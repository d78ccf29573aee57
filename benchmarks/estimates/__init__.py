"""Memory estimates beside the truth: a profiler and the kernel's high-water mark."""
