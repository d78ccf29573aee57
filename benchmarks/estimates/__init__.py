"""Memory estimates beside the truth: a profiler, the kernel's high-water mark, papers."""
