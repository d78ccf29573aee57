"""This process's threads, Python's and others, for tests that count them."""

import os
import time


def native_threads():
    """Their numbers."""
    return set(os.listdir("/proc/self/task"))


def end(threads):
    """Whether these end. The system lists a thread until a moment after it is joined;
    the limit is for those that never end."""
    limit = time.monotonic() + 60
    while threads & native_threads() and time.monotonic() < limit:
        time.sleep(0.001)
    return not threads & native_threads()
