"""Keys of graphs in a cache."""

import os
import subprocess
import sys

import numpy as np
import pytest

from trainfast.graph_cache import Writer
from trainfast.graph_cache.keys import key_maker, stable, stored


def test_keys_by_place_hold_the_place():
    one, other = key_maker(None, None), key_maker(None, "v2")
    assert one(0, None)[:8] == b"\1" + bytes(7)
    assert one(258, None)[:8] == b"\3\1" + bytes(6)
    assert one(0, None)[8:] != other(0, None)[8:] and len(one(0, None)) == 16
    assert one(0, None) != key_maker(None, None, "salt")(0, None)


def test_different_keys_have_different_bytes():
    values = ["", "1", b"1", 1, -1, 2**70, (), ("1",), (("1",),), ("1", ""), ("", "1")]
    values += [(1, 2), (12,), "s1:1", ("a", "b"), ("ab",), (b"a", "b")]
    assert len({stable(value) for value in values}) == len(values)
    assert stable(np.int64(5)) == stable(5)
    made = [key_maker(lambda v: v, t)(0, v) for v in ("a", "b") for t in (None, "b", 1)]
    assert len(set(made)) == 6


def test_keys_are_the_same_in_every_process():
    assert key_maker(str, ("v", 1))(0, "a").hex() == "11c1c3086773d69e6ed00064814aeb55"


KEYS_IN_LITTLE_MEMORY = """
import sys
from trainfast.graph_cache.keys import stored

def peak():
    with open("/proc/self/status") as lines:
        return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM:"))

before = peak()
keys = stored(sys.argv[1])
print(len(keys), peak() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
@pytest.mark.parametrize("floats", [2, 16_000])  # small graphs, and large ones
def test_stored_keys_are_read_without_their_graphs(tmp_path, floats):
    wanted = [i.to_bytes(16, "little") for i in range(1, 1001)]
    with Writer(tmp_path / "cache", durable=False) as writer:
        for i, key in enumerate(wanted):
            writer.append({"x": np.full(floats, i, np.float32)}, key)
    assert stored(str(tmp_path / "cache")) == b"".join(wanted)
    command = [sys.executable, "-c", KEYS_IN_LITTLE_MEMORY, tmp_path / "cache"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    size, kilobytes = map(int, done.stdout.split())
    assert size == 16 * 1000
    assert kilobytes < 20_000  # the large graphs take 64 MB
