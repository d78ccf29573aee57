"""Runs a command that may write anywhere and changes nothing, without namespaces.

    python -m trainfast.probe.redirect.supervisor STAGE COMMAND...

For containers (Linux 5.9 on x86-64, without privileges): the kernel reports each of the
command's system calls on a path to this process (seccomp_unotify(2)), which answers
them by a view of the files whose changes lie in STAGE. The exit status is that of the
command, or CANNOT before it starts.
"""

import ctypes
import errno
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from trainfast.probe.redirect import filter
from trainfast.probe.redirect.calls import REFUSED, Caller, Calls, Descriptor, Result
from trainfast.probe.redirect.files import Files
from trainfast.probe.sandbox import CANNOT, end_with_parent

_RECEIVE, _SEND, _ADD_DESCRIPTOR = 0xC0502100, 0xC0182101, 0x40182103
_CALL = struct.Struct("=QIIiIQ6Q")  # struct seccomp_notif
_DO_IT = 1  # SECCOMP_USER_NOTIF_FLAG_CONTINUE
_COLLECT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER


def run(stage: str, command: list[str]) -> int:
    """Runs the command under supervision and returns its exit status, or CANNOT."""
    end_with_parent()
    ctypes.CDLL(None).prctl(_COLLECT_ORPHANS, 1, 0, 0, 0)
    stage = os.path.realpath(stage)
    for name in ("files", "tmp"):
        os.mkdir(f"{stage}/{name}")
    calls = Calls(Files(stage))
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [
            *(sys.executable, filter.__file__, str(theirs.fileno())),
            *(json.dumps(calls.numbers()), json.dumps(REFUSED), *command),
        ],
        pass_fds=[*_inherited(), theirs.fileno()],
        env=os.environ | {"TMPDIR": f"{stage}/tmp"},
    )
    theirs.close()
    _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if not descriptors:
        process.wait()
        return CANNOT
    _answer_until_end(descriptors[0], os.pidfd_open(process.pid), calls)
    status = process.wait()
    _end_all()
    return status if status >= 0 else 128 - status


def _inherited() -> list[int]:
    """Descriptors beyond the standard ones that are to reach the command."""
    found = [int(name) for name in os.listdir("/proc/self/fd")]
    return [number for number in found if number > 2 and _is_inheritable(number)]


def _is_inheritable(descriptor: int) -> bool:
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False


def _answer_until_end(listener: int, end: int, calls: Calls) -> None:
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(end, select.POLLIN)
    while True:
        ready = {item for item, event in poll.poll() if event & select.POLLIN}
        if listener in ready:
            _answer(listener, calls)
        elif end in ready:
            return


def _answer(listener: int, calls: Calls) -> None:
    """Receives one system call and sends its result."""
    report = bytearray(_CALL.size)
    try:
        fcntl.ioctl(listener, _RECEIVE, report)
    except OSError:  # the caller was killed meanwhile
        return
    identity, thread, _, number, _, _, *arguments = _CALL.unpack(report)
    result: Result = 0
    error = 0
    try:
        result = calls.answer(number, Caller(thread, tuple(arguments)))
    except OSError as problem:
        error = problem.errno or errno.EIO
    except Exception:
        traceback.print_exc()
        error = errno.EIO
    if isinstance(result, Descriptor):
        error = _give(listener, identity, result)
        if error == 0:
            return
        result = 0
    flags = _DO_IT if result is None else 0
    reply = struct.pack("=QqiI", identity, result or 0, -error, flags)
    with suppress(OSError):  # the caller was killed meanwhile
        fcntl.ioctl(listener, _SEND, reply)


def _give(listener: int, identity: int, descriptor: Descriptor) -> int:
    """Ends a call with a new descriptor of the caller; returns an error's number."""
    flags = os.O_CLOEXEC if descriptor.close_on_exec else 0
    add = struct.pack("=QIIII", identity, 2, descriptor.number, 0, flags)
    try:
        fcntl.ioctl(listener, _ADD_DESCRIPTOR, add)
    except OSError as problem:
        return problem.errno or errno.EIO
    finally:
        os.close(descriptor.number)
    return 0


def _end_all() -> None:
    """Kills what the command has left running, orphans of orphans too."""
    while True:
        text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        if not text:
            return
        for process in text.split():
            os.kill(int(process), signal.SIGKILL)
            os.waitpid(int(process), 0)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
