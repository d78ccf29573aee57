"""The memory that this process holds, for tests of leaks."""

import os

import pytest

needs_honest_free = pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="it keeps what is freed"
)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
