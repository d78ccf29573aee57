"""Waiting for a cache's lock ends with Ctrl-C, and opening a cache reads no more than
it needs."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.graph_cache.core_calls import one_field, write
from trainfast import _core

LOCKS = Path("/proc/locks")
IO = Path("/proc/self/io")
SCHEMA = one_field("int64")

# A process that gets ready, waits for a line, calls, and calls again after the next.
CHILD = """
import signal, sys
import numpy as np
from trainfast import _core
from trainfast import graph_cache as gc
from trainfast.graph_cache.schema import Count, Field, Schema

path, source = sys.argv[1:]
schema = Schema((Count("nodes"),), (Field("x", 0, "int64", (-1,), 0),))
signal.signal(signal.SIGUSR1, lambda *_: print("handled", flush=True))

def writer():
    made = _core.GraphWriter(path, schema.encode(), schema.keys)
    made.append({"x": np.arange(3)})
    return made

%s
for _ in range(2):
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        call()
        print("done", flush=True)
        break
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""
CALLS = {
    "begin": "call = lambda: _core.graph_build_begin(path)",
    "end": "call = lambda: _core.graph_build_end(path, None)",
    "adopt": "call = lambda: _core.graph_adopt(path)",
    "schema": "call = lambda: _core.graph_schema(path)",
    "open a writer": "call = writer",
    "close a writer": "call = writer().close",
    "repair": "call = lambda: _core.graph_repair(source, path, print)",
}


class Waiting:
    """A child that calls, and this process, which holds the lock that it waits for."""

    def __init__(self, path, source, call):
        command = [sys.executable, "-c", CHILD % call, str(path), str(source)]
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.expect("ready")
        self.lock = open(path / "lock")  # noqa: SIM115
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.go_on()
        self.until_it_waits()

    def expect(self, line):
        assert self.child.stdout.readline() == line + "\n"

    def go_on(self):
        self.child.stdin.write("\n")
        self.child.stdin.flush()

    def until_it_waits(self):
        entry = f" {self.child.pid} "
        until = time.monotonic() + 60
        while time.monotonic() < until:
            lines = LOCKS.read_text().splitlines()
            if any("->" in line and entry in line for line in lines):
                return
            time.sleep(0.01)
        raise AssertionError("the child must wait for the lock")

    def signal(self, number):
        self.child.send_signal(number)

    def release(self):
        fcntl.flock(self.lock, fcntl.LOCK_UN)

    def rest(self):
        return self.child.communicate(timeout=60)[0].split()

    def end(self):
        self.lock.close()
        self.child.kill()
        self.child.communicate()


@pytest.fixture
def waiting(tmp_path):
    if not LOCKS.exists():
        pytest.skip("needs /proc/locks")
    write(tmp_path / "source", SCHEMA, [{"x": np.arange(3)}])
    started = []

    def start(call):
        target = tmp_path / "c"
        if call == CALLS["repair"]:  # its target is a new cache
            _core.graph_build_begin(str(target))
            _core.graph_build_end(str(target), None)
        else:
            write(target, SCHEMA, [{"x": np.arange(3)}])
        started.append(Waiting(target, tmp_path / "source", call))
        return started[-1]

    yield start
    for one in started:
        one.end()


def read_within(pipe, seconds):
    """A line of a pipe, or an error: nobody waits for ever."""
    import select

    ready, _, _ = select.select([pipe], [], [], seconds)
    assert ready, "the wait must have ended"
    return pipe.readline().strip()


@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_ends_the_wait_and_the_call_can_be_made_again(waiting, name):
    one = waiting(CALLS[name])
    one.signal(signal.SIGINT)
    assert read_within(one.child.stdout, 20) == "interrupted"
    one.release()
    one.go_on()
    assert [word for word in one.rest() if word in ("ready", "done")][-1] == "done"


def test_signal_whose_handler_returns_does_not_end_the_wait(waiting):
    one = waiting(CALLS["begin"])
    one.signal(signal.SIGUSR1)
    assert read_within(one.child.stdout, 20) == "handled"
    one.until_it_waits()
    one.release()
    assert one.rest() == ["done"]


def test_ctrl_c_ends_the_end_of_a_with_statement(waiting):
    """And the graphs are there for the next writer."""
    call = """
def call():
    with gc.Writer(path) as writer:
        writer.append({"x": np.arange(3)})
        writer.commit()
        if not hasattr(gc, "waited"):
            gc.waited = True
            print("open", flush=True)
            sys.stdin.readline()
"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Waiting, "until_it_waits", lambda self: None)
        patch.setattr(fcntl, "flock", lambda *_: None)
        one = waiting(call)
    one.expect("open")
    fcntl.flock(one.lock, fcntl.LOCK_EX)
    one.go_on()
    one.until_it_waits()
    one.signal(signal.SIGINT)
    assert read_within(one.child.stdout, 20) == "interrupted"
    one.release()
    one.go_on()
    assert one.rest()[-1] == "done"
    path = Path(one.lock.name).parent
    assert len(_core.GraphCache(str(path))) == 3


# ---- What opening reads --------------------------------------------------------------


def bytes_read():
    (line,) = [line for line in IO.read_text().splitlines() if "rchar" in line]
    return int(line.split()[1])


@pytest.mark.skipif(not IO.exists(), reason="needs /proc/self/io")
@pytest.mark.parametrize("alive", [True, False])
def test_cache_being_written_is_refused_without_reading_its_graphs(tmp_path, alive):
    path = tmp_path / "c"
    write(path, SCHEMA, [{"x": np.arange(3)}] * 2)
    writer = _core.GraphWriter(str(path), SCHEMA.encode(), SCHEMA.keys)
    for i in range(8):
        writer.append({"x": np.arange(1 << 17) + i})
        writer.commit()
    if not alive:
        writer.abandon()
    (left,) = path.glob("open-*")
    assert left.stat().st_size > 1 << 21
    said = {
        True: "which is being written: 2 graphs are sealed; wait until it is closed",
        False: "without closing it: 2 graphs are sealed; what was committed is safe",
    }
    before = bytes_read()
    with pytest.raises(OSError, match=said[alive]):
        _core.GraphCache(str(path))
    assert bytes_read() - before < 1 << 16


@pytest.mark.skipif(not IO.exists(), reason="needs /proc/self/io")
def test_sealed_segment_of_a_dead_writer_is_not_read_either(tmp_path):
    path = tmp_path / "c"
    write(path, SCHEMA, [{"x": np.arange(2)}] * 20_000)
    manifest = path / "manifest"
    manifest.unlink()
    (segment,) = path.glob("segment-*")
    other = tmp_path / "other"
    write(other, SCHEMA, [{"x": np.arange(2)}])
    os.rename(segment, other / segment.name)
    before = bytes_read()
    with pytest.raises(OSError, match="without closing it: 1 graphs are sealed"):
        _core.GraphCache(str(other))
    assert bytes_read() - before < 1 << 16
